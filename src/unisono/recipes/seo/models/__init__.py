"""Language models and tokenizers: loading, LoRA, pooling, packing and text generation."""
