"""Image-to-video conditioning: turns the given frames of a sample into inputs of the transformer.

`kind.py` says which frames a model takes, `given.py` reads them, `inputs.py` and `image_encoder.py` turn them into what
`diffusers.WanImageToVideoPipeline` passes to the transformer, and `cached.py` stores the result.
"""
