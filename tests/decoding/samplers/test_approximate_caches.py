"""Fast-dLLM's caches: their text against a plain implementation, lossless as drafts, composed."""

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.masked.block_evaluators import FrozenTexts
from decoding.masked.draft_graph import chain_graph, graph_of
from decoding.samplers.denoise import CACHES
from decoding.samplers.spiffy import CacheDraftedSampler
from tests.support.denoising import L, V, cache_drafted, denoise, network, reference, spiffy

PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [11, 10, 2]]
SEEDS = [5, 71, 3, 900]
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0, lossy=True)
RULES = [{}, {"tokens_per_step": 2}, {"threshold": 0.5}]
PAPER = graph_of(
    L, 1, [[(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 1), (3, 1)], [(1, 1), (2, 1), (3, 1)]]
)


def ids(results):
    return [r.token_ids for r in results]


def passes(results):
    return sum(r.stats.target_passes for r in results)


def expected(model, rule, cache, shifted=False):
    rule = {{"tokens_per_step": "S"}.get(key, key): value for key, value in rule.items()}
    options = {"cache": cache, "shifted": shifted, **rule}
    return [reference(model, p, NEW, "bidirectional", **options) for p in PROMPTS]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("cache", [None, *CACHES])
def test_greedy_text_is_that_of_a_plain_implementation(cache, rule, shifted):
    """A batch of ragged prompts, whose blocks begin and end in different passes, and alone."""
    model = network(scale=1.5)
    sampler = denoise(model, "bidirectional", cache=cache, shifted=shifted, **rule)
    found = ids(sampler.generate(PROMPTS, GREEDY))
    assert found == expected(model, rule, cache, shifted)
    assert [ids(sampler.generate([p], GREEDY))[0] for p in PROMPTS] == found


def test_the_caches_and_the_shift_are_no_empty_words():
    """The texts that the test above tells apart are different ones."""
    model = network(scale=1.5)
    texts = [expected(model, {}, c, s) for c in (None, *CACHES) for s in (False, True)]
    assert all(a != b for n, a in enumerate(texts) for b in texts[:n])


class Forgetful(FrozenTexts):
    """Wrong: what the first pass cached is never renewed."""

    def ask(self, batch, states):
        begun = batch.state.cached > 0
        batch.state.cached = batch.state.start.where(begun, batch.state.cached)
        return super().ask(batch, states)


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_cache_that_is_not_renewed_fails_the_same_test(cache, monkeypatch):
    model = network(scale=1.5)
    monkeypatch.setattr("decoding.samplers.denoise.FrozenTexts", Forgetful)
    wrong = denoise(model, "bidirectional", cache=cache)
    assert ids(wrong.generate(PROMPTS, GREEDY)) != expected(model, {}, cache)


@pytest.mark.parametrize("cache", list(CACHES))
def test_a_cache_runs_for_those_only_who_allow_it(cache):
    for sampler in (
        denoise(network(), "bidirectional", cache=cache),
        spiffy(network(), "bidirectional", PAPER, cache=cache),
    ):
        with pytest.raises(ValueError, match=rf"cache={cache} is lossy.*lossy=true") as error:
            sampler.generate([[1, 2]], SamplingParams(max_new_tokens=L))
        assert "\n" not in str(error.value)
        (result,) = sampler.generate([[1, 2]], SamplingParams(max_new_tokens=L, lossy=True))
        assert result.stats.lossy == f"cache={cache}"
    drafted = cache_drafted(network(), cache)
    (result,) = drafted.generate([[1, 2]], SamplingParams(max_new_tokens=L))
    assert result.stats.lossy == ""


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", [*RULES, {"order": "random"}], ids=str)
@pytest.mark.parametrize("cache", list(CACHES))
def test_a_cache_that_only_drafts_changes_no_token(cache, rule, temperature, shifted):
    """Keyed noise is a function of the seed, so equal tokens are an equal distribution."""
    model = network(scale=1.5).float()
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature)
    rule = {**rule, "shifted": shifted}
    exact = denoise(model, "bidirectional", **rule).generate(PROMPTS, params, seeds=SEEDS)
    for steps in (1, 3):
        sampler = cache_drafted(model, cache, draft_steps=steps, **rule)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == ids(exact)
        assert passes(found) <= passes(exact)
        assert max(r.stats.drafter_passes for r in found) > 0
        assert ids(sampler.generate(PROMPTS[2:3], params, seeds=SEEDS[2:3])) == ids(exact)[2:3]


class Unverified(CacheDraftedSampler):
    """Wrong: takes the last draft for the next state, without looking whether it is."""

    def verify(self, batch, states, logits, params):
        batch.state.block = states[:, -1]
        super().verify(batch, states, logits, params)


class NoiseOfNow(CacheDraftedSampler):
    """Not wrong but blind: all drafts are made with the present step's noise."""

    def drafts(self, batch, params):
        judge, self.judge = self.judge, lambda b, logits, p, ahead=0: judge(b, logits, p)
        try:
            return super().drafts(batch, params)
        finally:
            del self.judge


@pytest.mark.parametrize("cache", list(CACHES))
def test_drafts_that_are_not_verified_fail_the_same_test(cache):
    model, params = network(scale=1.5), SamplingParams(max_new_tokens=NEW)
    exact = ids(denoise(model, "bidirectional").generate(PROMPTS, params, seeds=SEEDS))
    wrong = cache_drafted(model, cache, cls=Unverified)
    assert ids(wrong.generate(PROMPTS, params, seeds=SEEDS)) != exact
    blind = cache_drafted(model, cache, cls=NoiseOfNow).generate(PROMPTS, params, seeds=SEEDS)
    assert ids(blind) == exact  # any drafts are lossless
    seeing = cache_drafted(model, cache).generate(PROMPTS, params, seeds=SEEDS)
    assert passes(seeing) < passes(blind)


@pytest.mark.parametrize("cache", list(CACHES))
def test_where_nothing_depends_on_other_tokens_every_draft_is_accepted(cache):
    model = network()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    sampler = cache_drafted(model, cache, draft_steps=L)
    (result,) = sampler.generate([[1] * L], SamplingParams(max_new_tokens=NEW, seed=1))
    assert result.stats.emitted == [4] * 3
    assert result.stats.drafter_passes == 3 * (L - 1)  # a full block needs no draft


def options(*names):
    every = {"threshold": {"threshold": 0.6}, "shifted": {"shifted": True},
             "random": {"order": "random"}, "two": {"tokens_per_step": 2}}  # fmt: skip
    return {key: value for name in names for key, value in every[name].items()}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "names",
    [(), ("threshold",), ("two",), ("random",), ("shifted",), ("threshold", "shifted")],
    ids=str,
)
@pytest.mark.parametrize("cache", list(CACHES))
def test_options_compose(cache, names, temperature):
    """Graph, cache, rate, shift and noise in one sampler: each changes what it says, no more.

    A graph only saves passes of whatever network it drafts for, the one with frozen tokens too:
    nothing outside a copy depends on the copy, so appended drafts are exact for *that* network.
    """
    rule = options(*names)
    model, S = network(scale=1.5), rule.get("tokens_per_step", 1)
    graph = chain_graph(L, None if "threshold" in rule else S, 3)
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, lossy=True, top_k=8)
    alone = denoise(model, "bidirectional", cache=cache, **rule)
    alone = alone.generate(PROMPTS, params, seeds=SEEDS)
    both = spiffy(model, "bidirectional", graph, cache=cache, **rule)
    both = both.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(both) == ids(alone)
    assert passes(both) <= passes(alone)
    exact = denoise(model, "bidirectional", **rule).generate(PROMPTS, params, seeds=SEEDS)
    drafted = cache_drafted(model, cache, **rule).generate(PROMPTS, params, seeds=SEEDS)
    assert ids(drafted) == ids(exact) != ids(both)


def test_guidance_is_verified_although_the_cache_drafts_without_it():
    model, params = network(), SamplingParams(max_new_tokens=8, temperature=0)
    guided = ids(denoise(model, "bidirectional", guidance=0.7).generate(PROMPTS, params))
    sampler = cache_drafted(model, "dual", guidance=0.7)
    assert ids(sampler.generate(PROMPTS, params)) == guided
    assert guided != ids(denoise(model, "bidirectional").generate(PROMPTS, params))


MISTAKES = [
    (denoise, {"cache": "magic"}, r"cache 'magic'.*\['prefix', 'dual'\]"),
    (denoise, {"cache": "dual", "guidance": 0.5}, r"cache=dual .*guidance=0\.5"),
    (denoise, {"cache": "dual", "attention": "block_causal"}, r"cache=dual .*bidirectional"),
    (denoise, {"shifted": True, "attention": "block_causal"}, r"shifted=true .*bidirectional"),
    (spiffy, {"cache": "dual", "pass_": "batched"}, r"cache=dual .*pass=batched"),
    (cache_drafted, {"draft_cache": "magic"}, r"draft_cache 'magic'.*\['prefix', 'dual'\]"),
    (cache_drafted, {"draft_steps": 0}, r"draft_steps=0 .*at least 1"),
    (cache_drafted, {"attention": "block_causal"}, r"draft_cache=dual .*bidirectional"),
]


@pytest.mark.parametrize(("make", "given", "named"), MISTAKES)
def test_a_mistake_is_one_line(make, given, named):
    first = {spiffy: {"graph": PAPER}, cache_drafted: {"draft_cache": "dual"}}.get(make, {})
    with pytest.raises(ValueError, match=named) as error:
        make(network(), **{"attention": "bidirectional", **first, **given})
    assert "\n" not in str(error.value)


def test_a_chain_needs_no_calibration():
    assert chain_graph(L, 1, 2).nodes == (((1, 1),), ((1, 1), (2, 1)))
    assert chain_graph(8, 2, 9).nodes[-1] == tuple((i, 1) for i in range(1, 7))
    assert chain_graph(L, None, 9).tokens_per_step is None
    model, params = network(), SamplingParams(max_new_tokens=NEW, temperature=0)
    exact = denoise(model, "bidirectional").generate(PROMPTS, params)
    found = spiffy(model, "bidirectional", chain_graph(L, 1, 3)).generate(PROMPTS, params)
    assert ids(found) == ids(exact)
    with pytest.raises(ValueError, match="chain:0"):
        chain_graph(V, 1, 0)
