"""Continuous batching: nobody's text depends on when a request came, or on who else is there."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from decoding.any_subset.infilling import InfillState
from decoding.engine import cache
from decoding.engine.batch import State
from decoding.engine.cache import CachedNetwork, RaggedCache
from decoding.engine.grouping import PASS_COSTS
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.running import Running
from decoding.samplers.asarm import AsarmSampler
from decoding.samplers.deer import DeerSampler
from decoding.samplers.dflash import DFlashSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from tests.support import subsets, tiny
from tests.support.arrivals import texts_of
from tests.support.denoising import PAPER, denoise, spiffy
from tests.support.denoising import network as dllm
from tests.support.lossless import PROMPTS

V = 12
_ = None
HOLES = [
    [3, _, _, _, 7, _, _, _],
    [2, 7, 1, 8, _, _, _, _, _, _, _, _, _],
    [_, 5, 0, 5, 0, 5],
    [_, 4, _, 4, _, 4, _, 4, _, 4],
    [11, _, _],
    [6, 6, 6, 0, 9, _, _, _, _, _, 1],
]
SEEDS = [5, 71, 3, 900, 12, -8]


def deer(**form):
    tokens = {"mask_id": V, "sep_id": V + 1, **form}
    model, drafter = tiny.causal_lm(V), tiny.causal_lm(V + 2, seed=1, scale=3.0)
    return DeerSampler(model, tiny.tokenizer(V), drafter, block_size=3, **tokens)


def dflash():
    model = tiny.causal_lm(V, layers=3)
    return DFlashSampler(model, tiny.tokenizer(V), tiny.dflash(model), block_size=3, mask_id=V - 1)


def ordinary(cls, **options):
    return cls(tiny.causal_lm(V), tiny.tokenizer(V), **options)


def infill(draft, model=None, **options):
    if model is None:
        model = subsets.network(V).float()
        with torch.no_grad():
            for layer in model.model.layers:  # what a token is depends on the others
                layer.self_attn.o_proj.weight.mul_(6)
    options = {"mask_id": V, "draft": draft, "block_size": 4} | options
    return AsarmSampler(model, tiny.tokenizer(V), **options)


def drafts(attention):
    return spiffy(dllm(), attention, PAPER)


SAMPLERS = {
    "plain": (lambda: ordinary(PlainSampler), {"verify": "rejection"}),
    "deer, rejection": (deer, {"verify": "rejection"}),
    "deer, block": (deer, {"verify": "block"}),
    "deer, coupled": (deer, {"verify": "coupled"}),
    "deer, tree": (deer, {"verify": "tree"}),
    "deer, tree at T=0": (deer, {"verify": "tree", "temperature": 0.0}),
    "deer, penalty": (deer, {"verify": "rejection", "repetition_penalty": 1.3}),
    "deer, bidirectional": (lambda: deer(attention="bidirectional"), {"verify": "rejection"}),
    "dflash, rejection": (dflash, {"verify": "rejection"}),
    "dflash, tree": (dflash, {"verify": "tree"}),
    "jacobi": (lambda: ordinary(JacobiSampler, block_size=4), {}),
    "jacobi by blocks": (lambda: ordinary(JacobiSampler, block_size=4, running=False), {}),
    "jacobi_mr": (lambda: ordinary(JacobiMRSampler, block_size=4, blocks=2, pool_size=2), {}),
    "denoise": (lambda: denoise(dllm(), "block_causal"), {}),
    "denoise, bidirectional": (lambda: denoise(dllm(), "bidirectional"), {}),
    "spiffy": (lambda: drafts("block_causal"), {}),
    "spiffy, batched": (lambda: drafts("bidirectional"), {}),
    "infilling": (lambda: infill("sequential"), {"verify": "rejection"}),
    "assd, rejection": (lambda: infill("assd"), {"verify": "rejection"}),
    "assd, block": (lambda: infill("assd"), {"verify": "block"}),
    "assd, coupled": (lambda: infill("assd"), {"verify": "coupled"}),
    "assd at T=0": (lambda: infill("assd"), {"temperature": 0.0}),
    "assd, penalty": (
        lambda: infill("assd", cache=False),
        {"verify": "rejection", "repetition_penalty": 1.3, "top_p": 0.9},
    ),
    "assd, tolerance": (
        lambda: infill("assd", tolerance=0.3),
        {"verify": "rejection", "lossy": True},
    ),
    "assd of XLNet": (lambda: infill("assd", subsets.xlnet(V)), {"verify": "rejection"}),
    "assd_ngram, rejection": (lambda: infill("assd_ngram"), {"verify": "rejection"}),
    "assd_ngram, coupled": (lambda: infill("assd_ngram"), {"verify": "coupled"}),
    "assd_fused, rejection": (lambda: infill("assd_fused"), {"verify": "rejection"}),
    "assd_fused, block": (lambda: infill("assd_fused"), {"verify": "block"}),
    "assd_fused, coupled": (lambda: infill("assd_fused", cache=False), {"verify": "coupled"}),
    "assd_fused, tree": (lambda: infill("assd_fused"), {"verify": "tree"}),
    "assd_fused of XLNet, tree": (
        lambda: infill("assd_fused", subsets.xlnet(V)),
        {"verify": "tree"},
    ),
}
BUILT = {}


def prompts_of(sampler):
    return PROMPTS if sampler.continues else HOLES


def built(name):
    """(sampler, parameters, [the text of each request alone])."""
    if name not in BUILT:
        make, options = SAMPLERS[name]
        sampler, params = (
            make(),
            SamplingParams(**{"max_new_tokens": 12, "temperature": 1.0} | options),
        )
        prompts = prompts_of(sampler)
        alone = [sampler.generate([p], params, seeds=[s])[0] for p, s in zip(prompts, SEEDS)]
        BUILT[name] = sampler, params, [r.token_ids for r in alone]
    return BUILT[name]


def run(sampler, params, events, prefill_tokens=None):
    """Texts by request: they come and are cancelled between cycles."""
    return texts_of(sampler, params, prompts_of(sampler), SEEDS, events, prefill_tokens)


EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 5)), min_size=1, max_size=12)
STAGGERED = [(2, -1), (1, -1), (0, -1), (1, 0), (1, -1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@given(events=EVENTS, prefill_tokens=st.none() | st.integers(1, 9))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_text_is_what_it_is_alone(name, events, prefill_tokens):
    sampler, params, alone = built(name)
    found = run(sampler, params, events, prefill_tokens)
    assert {n: alone[n] for n in found} == found
    assert {*range(len(PROMPTS))} - {*found} <= {n for _, n in events}


def wrong_offset(monkeypatch):
    """Draws are counted from when the batch began."""

    def join(self, fresh):
        right(self, fresh)
        self.offset = torch.cat([self.offset[: -len(fresh.offset)], fresh.offset])
        self._ahead = self._numbers(slice(None), self._ahead.shape[-1])

    right = KeyedRandomness.join
    monkeypatch.setattr(KeyedRandomness, "join", join)


def wrong_cache_rows(monkeypatch):
    """The new rows' keys and values are those of another."""

    def join(self, fresh, count, new):
        right(self, fresh, count, new)
        for memory in self._memory.values():
            memory[:, count : count + new] = memory[:, :1]

    right = RaggedCache.join
    monkeypatch.setattr(RaggedCache, "join", join)


def wrong_state_order(monkeypatch):
    """What a method keeps of the new rows comes first."""

    def join(self, fresh):
        kept = fresh.__class__(**vars(fresh))
        right(kept, self)
        vars(self).update(vars(kept))

    right = State.join
    monkeypatch.setattr(State, "join", join)


def kept_rows(monkeypatch):
    """A row that takes the place of one that has left keeps that one's keys and values."""
    monkeypatch.setattr(RaggedCache, "select", lambda self, rows: None)


def fewest_drafts(monkeypatch):
    """A pass verifies as many drafts as the request that has the fewest."""

    def cycle(self, batch, params):
        draft, q = batch.state.draft, batch.state.q
        fewest = int((draft != self.mask_id).sum(1).min())
        draft[:, fewest:] = self.mask_id
        q[:, fewest:] = one_hot(draft[:, fewest:], self.vocabulary).to(q.dtype)
        return right(self, batch, params)

    right = AsarmSampler.cycle
    monkeypatch.setattr(AsarmSampler, "cycle", cycle)


def drafts_of_another(monkeypatch):
    """Those who join verify the drafts of one who is there."""

    def join(self, fresh):
        if isinstance(fresh, InfillState):
            fresh.draft = self.draft[:1].expand_as(fresh.draft)
        right(self, fresh)

    right = State.join
    monkeypatch.setattr(State, "join", join)


def padding_is_seen(monkeypatch):
    """Who has no drafts is conditioned on the others' number of them."""

    def target_logits(self, batch, draft, A, ahead, params, trees=None):
        return right(self, batch, draft.where(draft != self.mask_id, 0), A, ahead, params, trees)

    right = AsarmSampler.target_logits
    monkeypatch.setattr(AsarmSampler, "target_logits", target_logits)


def no_draw_where_none_drafts(monkeypatch):
    """The next drafts cost a draw only where somebody drafts."""

    def draft_next(self, batch, logits, accepted, noise, params):
        if (logits.argmax(-1) == self.mask_id).all():
            batch.state.q = logits.softmax(-1)
            batch.state.draft = logits.argmax(-1)
        else:
            right(self, batch, logits, accepted, noise, params)

    right = AsarmSampler.draft_next
    monkeypatch.setattr(AsarmSampler, "draft_next", draft_next)


def whole_prompts_are_known(monkeypatch):
    """Those who join are believed to have keys and values of all of their tokens."""

    def join(self, fresh):
        if isinstance(fresh, InfillState):
            fresh.cached = fresh.cached + 1
        right(self, fresh)

    right = State.join
    monkeypatch.setattr(State, "join", join)


def pieces_at_the_wrong_place(monkeypatch):
    """Each further pass over a prompt begins one slot too early."""

    def call(self, tokens, positions, keep, **options):
        late = keep == 1 and positions.min() > 0
        return right(self, tokens, positions - int(late), keep, **options)

    right = CachedNetwork.__call__
    monkeypatch.setattr(CachedNetwork, "__call__", call)


def pieces_of_states_lost(monkeypatch):
    """Of the target's states that a drafter reads, only those of the last pass arrive."""

    def prefill(self, batch, name, network):
        states, chunk = right(self, batch, name, network), batch.chunk
        return tuple(s[:, -chunk:].repeat(1, 9, 1)[:, : s.shape[1]] for s in states)

    right = DFlashSampler.prefill
    monkeypatch.setattr(DFlashSampler, "prefill", prefill)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("deer, rejection", pieces_at_the_wrong_place),
        ("jacobi", pieces_at_the_wrong_place),
        ("dflash, rejection", pieces_of_states_lost),
    ],
)
def test_a_prompt_in_wrong_pieces_fails_the_same_test(monkeypatch, name, wrong):
    sampler, params, alone = built(name)
    one_by_one = [(1, -1)] * len(PROMPTS)
    assert all(alone[n] == ids for n, ids in run(sampler, params, one_by_one, 2).items())
    wrong(monkeypatch)
    assert any(alone[n] != ids for n, ids in run(sampler, params, one_by_one, 2).items())


@pytest.mark.parametrize(
    ("most", "tokens"),
    [(None, [42]), (7, [3, 3, 4, 7]), (2, [1, 1, 2, 1, 2, 2, 2, 2, 2, 1]), (16, [12, 14])],
)
def test_passes_that_prefill(monkeypatch, most, tokens):
    """They have at most so many tokens, and after each of them those who are there go on."""
    sampler, params, _ = built("plain")
    running = Running(sampler, params, sampler.capacity(PROMPTS, params), most)
    seen, call = [], CachedNetwork.__call__

    def counted(self, tokens, *args, **options):
        seen.append(tokens.numel())
        return call(self, tokens, *args, **options)

    monkeypatch.setattr(CachedNetwork, "__call__", counted)
    between = lambda: seen.append("between")  # noqa: E731
    running.admit([*range(len(PROMPTS))], PROMPTS, SEEDS, between=between)
    assert seen == [x for n in tokens for x in (n, "between")]


@pytest.mark.parametrize("name", ["plain", "deer, coupled", "dflash, rejection", "infilling"])
def test_prompts_of_other_lengths_are_prefilled_apart(monkeypatch, name):
    """A pass of its own for each length: the texts are the same, and fewer tokens are computed."""
    sampler, params, alone = built(name)
    tokens, call = [], CachedNetwork.__call__

    def counted(self, given, *args, **options):
        tokens.append(given.numel())
        return call(self, given, *args, **options)

    monkeypatch.setattr(CachedNetwork, "__call__", counted)

    def found():
        tokens.clear()
        everybody = run(sampler, params, [(len(PROMPTS), -1)])
        return everybody, sum(tokens)

    together, padded = found()
    monkeypatch.setitem(PASS_COSTS, "cpu", 0)
    apart, needed = found()
    assert together == apart == dict(enumerate(alone))
    assert needed < padded or name == "infilling"  # its passes are counted elsewhere


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("deer, rejection", wrong_offset),
        ("plain", wrong_cache_rows),
        ("deer, rejection", wrong_state_order),
        ("deer, coupled", kept_rows),
        ("assd, rejection", fewest_drafts),
        ("assd, rejection", padding_is_seen),
        ("assd, rejection", no_draw_where_none_drafts),
        ("assd, block", wrong_offset),
        ("assd_fused, rejection", wrong_offset),
        ("assd_fused, rejection", drafts_of_another),
        ("infilling", wrong_cache_rows),
        ("assd_fused, tree", kept_rows),
        ("infilling", whole_prompts_are_known),
        ("assd of XLNet", wrong_cache_rows),
    ],
)
def test_a_wrong_join_fails_the_same_test(monkeypatch, name, wrong):
    sampler, params, alone = built(name)
    assert all(alone[n] == ids for n, ids in run(sampler, params, STAGGERED).items())
    wrong(monkeypatch)
    assert any(alone[n] != ids for n, ids in run(sampler, params, STAGGERED).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_caches_grow_with_their_texts(monkeypatch, name):
    """Slot by slot, a few at a time, while requests come and go."""
    sampler, params, alone = built(name)
    grown, resized = [], RaggedCache._resized

    def watched(self, memory, rows):
        grown.append(self._room)
        return resized(self, memory, rows)

    monkeypatch.setattr(cache, "STEP", 3)
    monkeypatch.setattr(RaggedCache, "_resized", watched)
    assert all(alone[n] == ids for n, ids in run(sampler, params, STAGGERED, 2).items())
    assert (len({*grown}) > 2) == (name not in ("denoise, bidirectional", "spiffy, batched"))


@pytest.mark.parametrize("name", ["plain", "deer, tree"])
def test_a_cache_that_forgets_as_it_grows_fails_the_same_test(monkeypatch, name):
    sampler, params, alone = built(name)
    monkeypatch.setattr(cache, "STEP", 3)

    def forgets(self, memory, rows):
        depth, _, heads, _, size = memory.shape
        return memory.new_zeros(depth, rows, heads, self._room, size)

    monkeypatch.setattr(RaggedCache, "_resized", forgets)
    assert any(alone[n] != ids for n, ids in run(sampler, params, STAGGERED).items())


def test_memory_is_that_of_the_text():
    """A server's requests may have the model's whole context, and seldom do."""
    sampler, params, _ = built("plain")
    running = Running(sampler, params, capacity=100_000)
    running.admit([0], [PROMPTS[2]], [1])
    running.step()
    sizes = [m.shape[3] for m in running.batch.networks["target"].cache._memory.values()]
    assert {*sizes} == {cache.STEP}


@pytest.mark.parametrize("kept", [(True, True), (False, True), (True, False)])
def test_those_who_come_together_have_room_at_once(monkeypatch, kept):
    """The first pass that prefills makes memory for the others; without, each join does."""
    sampler, params, _ = built("plain")
    monkeypatch.setitem(PASS_COSTS, "cpu", 0)  # a pass for each length
    monkeypatch.setattr(cache, "STEP", 2)
    grown, resized, begin = [], RaggedCache._resized, type(sampler).begin

    def watched(self, memory, rows):
        grown.append(rows)
        return resized(self, memory, rows)

    def forgetful(self, batch, params):
        batch.expected = tuple(n if known else 0 for n, known in zip(batch.expected, kept))
        return begin(self, batch, params)

    monkeypatch.setattr(RaggedCache, "_resized", watched)
    monkeypatch.setattr(type(sampler), "begin", forgetful)
    running = Running(sampler, params, sampler.capacity(PROMPTS, params))
    running.admit([*range(len(PROMPTS))], PROMPTS, [*range(len(PROMPTS))])
    assert bool(grown) != all(kept)  # negative controls: rows or slots are forgotten


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_call_with_fewer_at_once(at_once):
    sampler, params, alone = built("deer, rejection")
    results = sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=at_once)
    assert [r.token_ids for r in results] == alone
    batches = []
    streamed = {n: [] for n in range(len(PROMPTS))}
    for chunk in sampler.stream(PROMPTS, params, seeds=SEEDS, at_once=at_once):
        streamed[chunk.request] += chunk.token_ids
        batches.append(chunk.request)
    assert [*streamed.values()] == alone


def test_requests_of_different_lengths():
    """Each is the start of what it is with more tokens."""
    sampler, params, alone = built("deer, rejection")
    most = [3, 12, 1, 7, 5, 9]
    own = [replace(params, max_new_tokens=n) for n in most]
    for at_once in (None, 2):
        results = sampler.generate(PROMPTS, own, seeds=SEEDS, at_once=at_once)
        assert [r.token_ids for r in results] == [ids[:n] for ids, n in zip(alone, most)]
    with pytest.raises(ValueError, match="5 parameters were given for 6 prompts"):
        sampler.generate(PROMPTS, own[:5])
    with pytest.raises(ValueError, match="cannot be decoded in one call"):
        sampler.generate(PROMPTS[:2], [params, replace(params, temperature=0.5)])


def cycles(sampler, calls):
    """Rows of each cycle of these calls of `generate`, (prompts, parameters, options); texts."""
    rows, cycle = [], sampler.cycle

    def counting(batch, given):
        rows.append(len(batch.requests))
        return cycle(batch, given)

    sampler.cycle = counting
    try:
        found = [r.token_ids for p, params, o in calls for r in sampler.generate(p, params, **o)]
    finally:
        del sampler.cycle
    return rows, found


def test_nobody_waits_for_the_slowest():
    """Where a request ends early its place is taken at once: fewer cycles than whole batches."""
    model = tiny.causal_lm(V, eos_token_id=3)
    sampler = PlainSampler(model, tiny.tokenizer(V))
    prompts = [[n % V] for n in range(24)]
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2)
    waited, _ = cycles(sampler, [(prompts[i : i + 4], params, {}) for i in range(0, 24, 4)])
    joined, texts = cycles(sampler, [(prompts, params, {"at_once": 4})])
    assert len(joined) < 0.8 * len(waited)
    assert max(joined) == 4
    assert max(map(len, texts)) > 2 * min(map(len, texts))


def test_the_longest_come_first():
    """So one that comes last does not run alone after the others."""
    sampler = ordinary(PlainSampler)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    own = [replace(params, max_new_tokens=n) for n in (3, 3, 3, 3, 3, 18)]
    rows, texts = cycles(sampler, [(PROMPTS, own, {"seeds": SEEDS, "at_once": 2})])
    assert len(rows) == 18
    assert [len(ids) for ids in texts] == [3, 3, 3, 3, 3, 18]


def test_what_a_request_cost_is_counted_from_when_it_came():
    sampler, params, _ = built("deer, coupled")
    results = sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=2)
    for result in results:
        stats = result.stats
        assert stats.target_passes == stats.drafter_passes == len(stats.emitted)
        assert min(stats.target_s, stats.drafter_s, stats.sampler_s) >= 0


def test_passes_that_prefill_others_are_not_counted():
    """Of those who are there when another one comes."""
    sampler, params, _ = built("deer, coupled")
    own = [replace(params, max_new_tokens=n) for n in (12, 2, 3, 12, 1, 4)]
    for result in sampler.generate(PROMPTS, own, seeds=SEEDS, at_once=2):
        assert result.stats.target_passes == len(result.stats.emitted)


@pytest.mark.parametrize("name", [n for n in SAMPLERS if n.startswith(("assd", "infill"))])
def test_infilling_costs_what_it_does_alone(name):
    """The passes and drafts of a request are its own, beside whomever it is decoded."""
    sampler, params, _ = built(name)
    alone = [sampler.generate([p], params, seeds=[s])[0].stats for p, s in zip(HOLES, SEEDS)]
    for result, stats in zip(sampler.generate(HOLES, params, seeds=SEEDS, at_once=2), alone):
        assert result.stats.target_passes == len(result.stats.emitted)
        assert (result.stats.emitted, result.stats.drafted) == (stats.emitted, stats.drafted)


def test_memory_of_those_that_left_is_given_back():
    """By `trim` alone, and those that stay go on as they would have."""
    sampler, params, alone = built("deer, rejection")
    running = Running(sampler, params, sampler.capacity(PROMPTS, params))
    running.admit([*range(6)], PROMPTS, SEEDS)
    running.step(text=False)
    running.leave([0, 2, 3])
    assert running.rows == 6
    running.trim()
    assert running.rows == 3
    found = {}
    while running:
        chunks = running.step(text=False)
        found |= {c.request: c.result.token_ids for c in chunks if c.result is not None}
    assert found == {n: alone[n] for n in (1, 4, 5)}


def test_no_place_at_all():
    sampler, params, _ = built("plain")
    with pytest.raises(ValueError, match="at_once=0 is not allowed"):
        sampler.generate(PROMPTS, params, at_once=0)
