"""What training a Wan video model needs, whatever the objective: data, text, latents, weights in and out."""
