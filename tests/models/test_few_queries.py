"""Attention of few queries: the definition's result, and the same bits whoever is beside a row."""

import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from models import few_queries
from models.attention import GROUPED, switch_attention
from tests.support import tiny

pytestmark = pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")


def tensors(seed, batch, heads, groups, queries, keys, size):
    """A query, keys and values as slices of a cache, and a mask that leaves every query a key."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, groups * heads, queries, size, generator=draw)
    key, value = torch.randn(2, batch, heads, keys + 3, size, generator=draw).bfloat16()
    hidden = torch.rand(batch, 1, queries, keys, generator=draw) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    return query.bfloat16(), key[:, :, :keys], value[:, :, :keys], mask.bfloat16()


def expected(query, key, value, mask, scale):
    """The definition, in float64."""
    query, key, value, mask = (x.double() for x in (query, key, value, mask))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    return (scores + mask).softmax(-1) @ value


@torch.no_grad()
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 4),
    heads=st.integers(1, 3),
    shape=st.sampled_from([(1, 1), (3, 1), (1, 6), (2, 3), (3, 11)]),
    keys=st.integers(1, 40),
    size=st.sampled_from([8, 64, 80]),
)
def test_it_is_attention(seed, batch, heads, shape, keys, size):
    of = tensors(seed, batch, heads, *shape, keys, size)
    assert few_queries.attends(*of)
    found = few_queries.attend(*of, scale=0.2)
    assert found.dtype == torch.bfloat16
    # The weights and the result are rounded, each to 2^-9 of it.
    tolerance = 2**-8 * of[2].abs().max().item() * 1.5
    assert (found - expected(*of, 0.2)).abs().max() < tolerance


@torch.no_grad()
def test_another_mask_or_scale_is_seen():
    """Negative control."""
    query, key, value, mask = tensors(0, 2, 3, 3, 1, 20, 64)
    right = expected(query, key, value, mask, 0.2)
    for wrong in ((mask.roll(1, -1), 0.2), (mask, 0.3)):
        assert (few_queries.attend(query, key, value, *wrong) - right).abs().max() > 0.1


def test_torch_keeps_its_threads():
    """numba's pool is OpenMP's too: it would leave its own number behind."""
    code = """
import torch
from models import few_queries
torch.set_num_threads(1)
torch.set_grad_enabled(False)
x = torch.ones(2, 1, 4, 8).bfloat16()
assert few_queries.attends(x, x, x, torch.zeros(2, 1, 4, 4).bfloat16())
few_queries.attend(x, x, x, torch.zeros(2, 1, 4, 4).bfloat16(), 1.0)
print(torch.get_num_threads())
"""
    env = {**os.environ, "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


@torch.no_grad()
def test_more_threads_than_there_are_do_no_harm(monkeypatch):
    of = tensors(0, 2, 3, 3, 1, 20, 64)
    found = few_queries.attend(*of, 0.2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert torch.equal(few_queries.attend(*of, 0.2), found)


@torch.no_grad()
def test_a_query_that_may_read_nothing_has_zeros():
    query, key, value, mask = tensors(0, 2, 1, 2, 2, 7, 8)
    mask[0, 0, 1] = -math.inf
    key[0] = value[0] = math.nan  # as slots that were never written may be
    mask[0, 0, 0, 1:], key[0, :, 0], value[0, :, 0] = -math.inf, 1, 1
    found = few_queries.attend(query, key, value, mask, 1.0)
    assert found[0].tolist() == [[[1.0] * 8, [0.0] * 8]] * 2


@torch.no_grad()
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), batch=st.integers(1, 4), keys=st.sampled_from([30, 500]))
def test_a_query_has_the_same_bits_alone(seed, batch, keys):
    """Alone in a pass, and with no key that the mask hides from it, not even between others."""
    of = tensors(seed, batch, 2, 3, 5, keys, 64)
    together = few_queries.attend(*of, scale=0.125)
    for b, q in product(range(batch), range(5)):
        query, key, value, mask = (x[b : b + 1] for x in of)
        read = mask[0, 0, q] == 0
        key, value = (x[:, :, read].contiguous() for x in (key, value))
        alone = few_queries.attend(
            query[:, :, q : q + 1], key, value, mask[:, :, q : q + 1, read], scale=0.125
        )
        assert torch.equal(alone[0, :, 0], together[b, :, q])


@pytest.mark.skipif(few_queries.bfloat16_loops() is None, reason="no loops of products")
@torch.no_grad()
@pytest.mark.parametrize("window", [1, 70, 400])
def test_a_prompt_s_tokens_have_the_bits_of_each_alone(window):
    """Each reads keys from another one on, and a part of them from the first to the last of all."""
    query, key, value, _ = tensors(1, 2, 2, 3, 300, 350, 64)
    assert query.shape[1] * 300 > few_queries.MAX_QUERIES * 2
    far = torch.arange(300)[:, None] + 50 - torch.arange(350)
    mask = torch.zeros(300, 350).masked_fill((far < 0) | (far >= window), -math.inf)
    mask = mask.bfloat16().expand(2, 1, -1, -1)
    assert few_queries.attends(query, key, value, mask)
    found = few_queries.attend(query, key, value, mask, 0.125)
    assert (found - expected(query, key, value, mask, 0.125)).abs().max() < 0.03
    for q in range(0, 300, 23):
        here = slice(max(0, q + 51 - window), q + 51)
        of = key[:1, :, here].contiguous(), value[:1, :, here].contiguous()
        alone = few_queries.attend(query[:1, :, [q]], *of, mask[:1, :, [q], here], 0.125)
        assert torch.equal(alone[0, :, 0], found[0, :, q])


@torch.no_grad()
def test_sums_in_another_order_are_seen():
    """Negative control."""
    query, key, value, mask = tensors(0, 4, 2, 3, 5, 1000, 64)
    right, other = (
        few_queries.attend(query, k, v, m, scale=0.125)
        for k, v, m in ((key, value, mask), (key.flip(2), value.flip(2), mask.flip(3)))
    )
    assert not torch.equal(right, other)
    torch.testing.assert_close(right, other, rtol=0.02, atol=0.02)


def test_what_is_left_to_the_fused_kernel(monkeypatch):
    of = tensors(0, 2, 1, 3, 1, 8, 16)
    assert not few_queries.attends(*of)  # it keeps nothing for a backward
    with torch.no_grad():
        assert few_queries.attends(*of)
        assert not few_queries.attends(*(x.float() for x in of))
        # Of heads that the loops of products do not take either, with any vectors.
        assert not few_queries.attends(*tensors(0, 2, 1, 2, few_queries.MAX_QUERIES, 8, 24))
        transposed = of[1].transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not few_queries.attends(of[0], transposed, *of[2:])
        monkeypatch.setattr(few_queries, "loops", lambda: None)
        assert not few_queries.attends(*of)


def decoded(prompts, *, loops, monkeypatch):
    """Token ids of greedy requests, and how many attention calls were loops."""
    model = tiny.causal_lm(13, layers=2).bfloat16()
    switch_attention(model, GROUPED)
    calls = []

    def counted(*of):
        calls.append(loops and attends(*of))
        return calls[-1]

    attends = few_queries.attends
    with monkeypatch.context() as patch:
        patch.setattr(few_queries, "attends", counted)
        sampler = PlainSampler(model, tiny.tokenizer(13))
        params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
        return [r.token_ids for r in sampler.generate(prompts, params)], sum(calls)


def test_decoding_uses_it_and_a_text_is_the_one_that_a_request_has_alone(monkeypatch):
    prompts = [[1, 2, 3], [4, 5], [6]]
    together, calls = decoded(prompts, loops=True, monkeypatch=monkeypatch)
    assert calls >= 2 * 12
    alone = [decoded([p], loops=True, monkeypatch=monkeypatch)[0][0] for p in prompts]
    assert together == alone
    fused, none = decoded(prompts, loops=False, monkeypatch=monkeypatch)
    assert none == 0
    same = [a == b for ours, theirs in zip(together, fused) for a, b in zip(ours, theirs)]
    assert sum(same) >= len(same) // 2  # bfloat16 rounds differently
