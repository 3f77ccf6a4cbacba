"""The tiny Wan: small real models, a drawn dataset and a classifier; nothing is downloaded."""
