"""Continuous tokens in decoding: couplings of densities, denoising chains, the state of images."""
