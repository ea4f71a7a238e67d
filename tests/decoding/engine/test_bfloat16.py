"""In bfloat16 logits have the same bits in a batch or alone, in a wide pass or token by token."""

from types import SimpleNamespace

import pytest
import torch

from decoding.engine import cache
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.loading import for_inference
from decoding.masked.block_evaluators import CachedBlocks
from decoding.masked.draft_graph import graph_of
from decoding.samplers.deer import DeerSampler
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from decoding.samplers.spiffy import SpiffySampler
from models import few_queries
from models.attention import GROUPED, switch_attention
from models.masks import causal
from models.packed import packs
from tests.support import tiny
from tests.support.results import ids

V = 40
LENGTHS = [150, 3, 1, 41, 24]  # of two heads a head of keys, so one is longer than loops take
WIDTHS = [1, 2, 9]  # of the passes after the prefill
PACKED = pytest.mark.skipif(
    not packs() and few_queries.bfloat16_loops() is None,
    reason="products of rows are only known to be alike where weights are packed",
)


def logits(model, rows, by_row=None, right=True):
    """Logits [rows, all passes' tokens, V] of passes after a prefill that is padded on one side."""
    network = CachedNetwork(model, causal, 192)
    network.by_row = network.by_row if by_row is None else by_row
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (len(LENGTHS), 180), generator=draw)[rows]
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

    def wrong(*of):
        return [s._replace(keys=(slice(s.keys[0].stop - 1),)) for s in spans(*of)]

    spans = cache._spans
    monkeypatch.setattr(cache, "_spans", wrong)
    model = network(torch.float64)
    wrong, right = (logits(model, [0, 3, 4], by_row=way) for way in (True, False))
    assert (wrong - right).abs().max() > 1e-3


@PACKED
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_a_row_has_the_bits_that_it_has_alone(loops, right, monkeypatch):
    if not loops:
        monkeypatch.setattr(few_queries, "loops", lambda: None)
    model = network()
    for_inference(model)
    together = logits(model, [*range(5)], right=right)
    for b in range(5):
        assert torch.equal(logits(model, [b], right=right)[0], together[b])


@PACKED
def test_rounding_of_rows_that_are_computed_together_is_seen(monkeypatch):
    """Negative control: the fused kernel over rows as wide as the longest rounds in another way."""
    monkeypatch.setattr(few_queries, "loops", lambda: None)
    model = network()
    together = logits(model, [*range(5)], by_row=False)
    alone = [logits(model, [b], by_row=False)[0] for b in range(5)]
    assert not torch.equal(torch.stack(alone), together)


def after_prefill(model, widths):
    """Logits [13, V] after a prompt of 24 tokens, by passes of these widths."""
    network = CachedNetwork(model, causal, 64)
    tokens = torch.randint(V, (1, 37), generator=torch.Generator().manual_seed(0))
    positions, found = torch.arange(37)[None], []
    with torch.inference_mode():
        for part in torch.arange(37).split([24, *widths]):
            out = network(tokens[:, part], positions[:, part], keep=len(part))
            found.append(out.logits[0])
    return torch.cat(found[1:])


@PACKED
@pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
def test_a_wide_pass_has_the_bits_of_narrow_ones():
    model = network()
    for_inference(model)
    narrow = after_prefill(model, [1] * 13)
    for widths in ([13], [2, 9, 2], [5, 8]):
        assert torch.equal(after_prefill(model, widths), narrow)


@PACKED
def test_rounding_of_a_wide_pass_is_seen(monkeypatch):
    """Negative control: the fused kernel rounds a wide pass in another way."""
    monkeypatch.setattr(few_queries, "loops", lambda: None)
    model = network(layers=6)
    assert not torch.equal(after_prefill(model, [13]), after_prefill(model, [1] * 13))


def samplers():
    target, drafter = network(), network(seed=1)
    for model in (target, drafter):
        for_inference(model)
    tokens = {"mask_id": V - 1, "sep_id": V - 2, "block_size": 4}
    return {
        "plain": PlainSampler(target, tiny.tokenizer(V)),
        "deer": DeerSampler(target, tiny.tokenizer(V), drafter, **tokens),
        "ragged": DeerSampler(target, tiny.tokenizer(V), drafter, least=0.1, **tokens),
        "jacobi": JacobiSampler(target, tiny.tokenizer(V), block_size=4),
    }


@PACKED
@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("plain", "coupled"),
        ("deer", "coupled"),
        ("deer", "rejection"),
        ("deer", "block"),
        ("deer", "tree"),
        ("ragged", "tree"),
        ("jacobi", "coupled"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_has_the_text_that_it_has_alone(name, verify, temperature):
    sampler = samplers()[name]
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(V - 2, (n,), generator=draw).tolist() for n in LENGTHS]
    params = [
        SamplingParams(max_new_tokens=n, temperature=temperature, verify=verify, ignore_eos=True)
        for n in (12, 30, 21, 8, 17)
    ]
    seeds = [*range(5)]
    together = sampler.generate(prompts, params, seeds=seeds, at_once=3)
    for result, *of in zip(together, prompts, params, seeds):
        prompt, own, seed = of
        (alone,) = sampler.generate([prompt], own, seeds=[seed])
        assert alone.token_ids == result.token_ids


@PACKED
@pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
@pytest.mark.parametrize(
    ("name", "verify"),
    [("deer", "coupled"), ("deer", "tree"), ("ragged", "tree"), ("jacobi", "coupled")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_leave_the_text_of_plain_decoding(name, verify, temperature):
    made = samplers()
    params = SamplingParams(
        max_new_tokens=40, temperature=temperature, verify=verify, ignore_eos=True
    )
    prompts, seeds = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8] * 30], [7, 8, 9]
    drafted, plain = (made[n].generate(prompts, params, seeds=seeds) for n in (name, "plain"))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


def states_of_a_block(model, count, begins, by_row=True):
    """Logits of `count` states of the blocks of two texts, and of the next one if it begins."""
    evaluator = CachedBlocks(model, 8, V - 1, 256)
    evaluator.by_row = by_row
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (2, 80), generator=draw)
    states = torch.randint(V, (2, 12, 8), generator=draw)
    state = SimpleNamespace(start=torch.tensor([72, 40]), cached=torch.tensor([64, 0]))
    ended = tokens[:, 72:80] if begins else None
    with torch.inference_mode():
        return evaluator.ask(SimpleNamespace(state=state, tokens=tokens), states[:, :count], ended)


@PACKED
@pytest.mark.parametrize("loops", [True, False])
def test_a_state_of_a_block_has_the_bits_that_it_has_alone(loops, monkeypatch):
    """So that Spiffy's drafts change no text of a masked diffusion LM."""
    if not loops:
        monkeypatch.setattr(few_queries, "loops", lambda: None)
    model = network()
    for_inference(model)
    alone = states_of_a_block(model, 1, begins=False)
    for begins in (False, True):
        found = states_of_a_block(model, 12, begins)
        assert found.shape[1] == 12 + begins
        assert torch.equal(found[:, :1], alone)


@PACKED
@pytest.mark.skipif(few_queries.loops() is None, reason="needs numba")
def test_rounding_of_states_that_are_computed_together_is_seen(monkeypatch):
    """Negative control: loops of few queries take one state, and the fused kernel takes twelve."""
    monkeypatch.setattr(few_queries, "_multiplied", lambda size: None)
    model = network(layers=6)
    alone, together = (states_of_a_block(model, n, False, by_row=False) for n in (1, 12))
    assert not torch.equal(together[:, :1], alone)


@PACKED
@pytest.mark.parametrize("loops", [True, False])
def test_drafts_change_no_text_of_a_masked_diffusion_lm(loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(few_queries, "loops", lambda: None)
    model, params = network(layers=4), SamplingParams(max_new_tokens=48, temperature=0)
    for_inference(model)
    given = {"mask_id": V - 1, "attention": "block_causal", "block_size": 16}
    nodes = [[(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 2)], [(1, 1), (2, 1), (3, 1)], [(3, 1)]]
    drafted = SpiffySampler(model, tiny.tokenizer(V), graph=graph_of(16, 1, nodes), **given)
    prompts = [[3, 1, 4], [*range(1, 30)], [5] * 16]
    expected = ids(DenoiseSampler(model, tiny.tokenizer(V), **given).generate(prompts, params))
    results = drafted.generate(prompts, params)
    assert ids(results) == expected
    assert all(r.stats.target_passes < 60 for r in results)  # drafts were accepted
    assert ids(drafted.generate(prompts[1:2], params)) == expected[1:2]
