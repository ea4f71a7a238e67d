"""Runs of a recurrent drafter as one call: the network's own bits."""

import pytest
import torch

from decoding.loading import for_inference
from models import few_queries, fused_run, redrafter
from tests.support import tiny

pytestmark = pytest.mark.skipif(
    few_queries.bfloat16_loops() is None, reason="needs numba, and vectors without AMX"
)


def network(vocabulary=64, inference=True, **given):
    """A drafter with random numbers, and its target's embeddings."""
    target = tiny.causal_lm(vocabulary, hidden=64, layers=3, scale=1.0)
    found = redrafter.from_target(target, None, [0, 2], width=96, **given)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            shape = parameter.shape
            parameter.copy_(
                torch.randn(shape, generator=draw) / shape[-1] ** 0.5 + (len(shape) < 2)
            )
    found = found.bfloat16()
    if inference:
        for_inference(found)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 4), (2, 20)])
def test_it_has_the_networks_own_bits(shape):
    drafter, draw = network(), torch.Generator().manual_seed(0)
    fused = fused_run.fused(drafter)
    states = torch.randn(*shape, 128, generator=draw).bfloat16()
    state = fused.combined(states)
    assert torch.equal(state, drafter.combined(states))
    for _ in range(2):
        embedded = torch.randn(*shape, 64, generator=draw).bfloat16()
        logits, after = fused(embedded, state)
        last, expected = drafter(embedded, state)
        assert torch.equal(after, expected)
        assert torch.equal(logits, drafter.logits(last, None))
        state = after


@torch.inference_mode()
@pytest.mark.parametrize("of", ["hidden_norm", "embedding_norm", "norm"])
def test_another_norm_is_seen(of):
    """Negative control."""
    drafter, states = network(), torch.randn(2, 1, 1, 64).bfloat16()
    getattr(drafter, of).weight.mul_(2)
    found = fused_run.fused(network())(*states)
    last, after = drafter(*states)
    assert not torch.equal(found[0], drafter.logits(last, None))
    assert torch.equal(found[1], after) == (of == "norm")


def test_where_there_are_no_loops():
    assert fused_run.fused(network()) is not None
    assert fused_run.fused(network(inference=False)) is None
    assert fused_run.fused(network(draft_ids=torch.arange(40))) is None  # padded
    drafter = tiny.redrafter(tiny.causal_lm(64, hidden=64, layers=3))
    for_inference(drafter)
    assert fused_run.fused(drafter) is None  # float64
