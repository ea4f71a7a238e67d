"""In bfloat16 a row of a batch has the bits that it has alone, however long the others are."""

import pytest
import torch

from decoding.engine import cache
from decoding.engine.cache import CachedNetwork
from decoding.loading import for_inference
from models import few_queries
from models.attention import GROUPED, switch_attention
from models.masks import causal
from models.packed import packs
from tests.support import tiny

V = 40
LENGTHS = [70, 3, 1, 41, 24]
WIDTHS = [1, 2, 9]  # of the passes after the prefill


def logits(model, rows, by_row=None, right=True):
    """Logits [rows, all passes' tokens, V] of passes after a prefill that is padded on one side."""
    network = CachedNetwork(model, causal, 128)
    network.by_row = network.by_row if by_row is None else by_row
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (len(LENGTHS), 100), generator=draw)[rows]
    lengths = torch.tensor(LENGTHS)[rows, None]
    steps = torch.arange(int(lengths.max()))
    positions = steps if right else steps - len(steps) + lengths
    positions = positions.expand(len(rows), len(steps))
    padding = (positions < 0) | (positions >= lengths)
    with torch.inference_mode():
        network(
            tokens.gather(1, positions.clamp_min(0)),
            positions.clamp_min(0),
            keep=1,
            padding=padding if padding.any() else None,
        )
        found = []
        for width in WIDTHS:
            at = lengths + torch.arange(width)
            found.append(network(tokens.gather(1, at), at, keep=width).logits)
            lengths = lengths + width
    return torch.cat(found, 1)


def network(dtype=torch.bfloat16, **options):
    model = tiny.causal_lm(V, hidden=64, scale=1.0, **options).to(dtype)
    switch_attention(model, GROUPED)
    return model


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_rows_are_computed_alike_alone_or_not(kind, right):
    model = network(torch.float64, kind=kind)
    expected = logits(model, [*range(5)], right=right)
    found = logits(model, [*range(5)], by_row=True, right=right)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_key_too_few_is_seen(monkeypatch):
    """Negative control."""
    spans = cache._spans
    monkeypatch.setattr(cache, "_spans", lambda *of: [(q, k - 1) for q, k in spans(*of)])
    model = network(torch.float64)
    wrong, right = (logits(model, [0, 3, 4], by_row=way) for way in (True, False))
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.skipif(not packs(), reason="products of rows are only known to be alike where packed")
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_a_row_has_the_bits_that_it_has_alone(loops, right, monkeypatch):
    if not loops:
        monkeypatch.setattr(few_queries, "_loops", lambda: None)
    model = network()
    for_inference(model)
    together = logits(model, [*range(5)], right=right)
    for b in range(5):
        assert torch.equal(logits(model, [b], right=right)[0], together[b])


def test_rounding_of_rows_that_are_computed_together_is_seen():
    """Negative control: attention as wide as the longest row rounds in another way."""
    model = network()
    together = logits(model, [*range(5)], by_row=False)
    alone = [logits(model, [b], by_row=False)[0] for b in range(5)]
    assert not torch.equal(torch.stack(alone), together)
