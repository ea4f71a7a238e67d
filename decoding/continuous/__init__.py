"""Decoding of continuous tokens: couplings of densities, denoising chains, the state of images."""
