"""Image-to-video conditioning: turns a sample's given frames into inputs of the transformer.

`kind.py` determines which frames a model takes, `given.py` reads them, `inputs.py` and `image_encoder.py` turn them
into the inputs that `diffusers.WanImageToVideoPipeline` passes to the transformer, and `cached.py` stores the result.
"""
