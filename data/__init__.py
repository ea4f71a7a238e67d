"""Data: corpora, tokenizers, packed rows, prompts and training noise. No networks."""
