"""Corpora, tokenizers, packing and prompts: tensors in, tensors out."""
