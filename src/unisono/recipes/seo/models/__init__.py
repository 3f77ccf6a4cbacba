"""Language models and tokenizers: loading, LoRA, pooling, packing, text generation."""
