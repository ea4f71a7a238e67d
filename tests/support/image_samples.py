"""Sets of images, drawn with torch's own randomness, and whether two have one distribution."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from decoding.bench.image_metrics import permutation_test
from decoding.continuous.image_state import ImageParams
from decoding.samplers.cspd import CspdSampler
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


def check_same(sampler, plain, seed=2, **params):
    """Check that a sampler's images have the distribution of plain ones; the share accepted."""
    ours, results = drawn(sampler, seed, **params)
    joint, least = p_values(ours, plain)
    assert joint > 0.01
    assert least > 1e-4
    return torch.stack([r.accepted for r in results]).double().mean()


def check_other(samples, plain):
    """Check that a set of images is told apart from plain ones."""
    joint, least = p_values(samples, plain)
    assert joint == pytest.approx(1 / 200)
    assert least < 1e-6


def check_alone(sampler, params, sizes):
    """Check that every image of a ragged batch is the same as alone, so many `at_once`.

    Returns:
        The results of the batches, one after another.
    """
    labels, seeds = [0, 1, 2, 0, 1, 2, 0, 1], list(range(11, 19))
    alone = [sampler.generate([z], params, seeds=[s])[0] for z, s in zip(labels, seeds)]
    found = []
    for size in sizes:
        together = sampler.generate(labels, params, seeds=seeds, at_once=size)
        for label, one, result in zip(labels, alone, together, strict=True):
            torch.testing.assert_close(one.patches, result.patches, rtol=0, atol=1e-9)
            assert one.stats.emitted == result.stats.emitted
            assert torch.equal(one.accepted, result.accepted)
            assert one.label == result.label == label
        found += together
    return found


def check_always_accepted(target, labels, params):
    """Check that a drafter that is the target is always accepted, in images of nine tokens."""
    for result in CspdSampler(target, target, gamma=2).generate(labels, params):
        assert result.stats.emitted == [3, 3, 3]
        assert result.accepted.sum() == 6
        assert result.stats.target_passes == 3
