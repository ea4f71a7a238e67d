"""Masked diffusion LMs in decoding: unmasking rules, evaluation of block states, draft graphs."""
