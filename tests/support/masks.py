"""Layouts of tokens, and attention matrices drawn by hand."""

import torch

from models.masks import Layout


def layout(document, index, block):
    return Layout(*(torch.tensor([list(x)]) for x in (document, index, block)))


def drawn(picture):
    """A matrix of 'x' (sees) and '.' (does not)."""
    rows = [line.split() for line in picture.strip().splitlines()]
    return torch.tensor([[c == "x" for c in row] for row in rows])
