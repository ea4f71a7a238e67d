"""Sets of images, drawn with torch's own randomness, and whether two have one distribution."""

import torch
from scipy import stats
from torch import Tensor

from decoding.bench.two_sample import permutation_test
from decoding.continuous.image_state import ImageParams
from tests.support.drawing import TorchRandomness

ROWS = 1500


def drawn(sampler, seed, rows=ROWS, **params):
    """Patches [rows, N, D] of images of three classes, and their results."""
    results = sampler.generate(
        [0, 1, 2] * (rows // 3), ImageParams(**params), randomness=TorchRandomness(seed)
    )
    return torch.stack([r.patches for r in results]), results


def p_values(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Of the joint distribution by permutation; the least KS p of tokens and neighbours' sums."""
    a, b = a.flatten(1), b.flatten(1)
    joint = permutation_test(a, b)[1]
    a, b = (torch.cat([x, x[:, 1:] + x[:, :-1], x[:, 1:] - x[:, :-1]], 1) for x in (a, b))
    return joint, min(stats.ks_2samp(x.numpy(), y.numpy()).pvalue for x, y in zip(a.T, b.T))
