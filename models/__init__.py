"""Networks and attention masks: transformers models, heads, and mask predicates."""
