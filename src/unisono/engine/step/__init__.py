"""One optimizer step: gradient accumulation, normalisation, clipping, the update and the moving average."""
