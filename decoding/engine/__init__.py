"""The decode loop: sampler, parameters, cache, randomness, warping and verification."""
