"""Ridge regression: how new drafters fit what they read to what they should have."""

from collections.abc import Iterable

import torch
from torch import Tensor

RIDGE = 0.01  # share of each input's own square


def ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the matrix W [Y, X] for which W x is nearest to y, over pairs of x [n, X], y [n, Y].

    The penalty on the weights of an input is a share of the input's own square (`RIDGE`).
    """
    gram = products = torch.zeros(())
    for x, y in pairs:
        gram, products = gram + x.T @ x, products + x.T @ y
    gram = gram + RIDGE * gram.diagonal().diag()
    return torch.linalg.solve(gram, products).T
