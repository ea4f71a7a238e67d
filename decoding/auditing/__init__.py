"""Audits: whether any code that claims lossless decoding has plain decoding's distribution."""
