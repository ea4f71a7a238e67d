"""Audits that compare the distribution of code that claims to be lossless with plain decoding's."""
