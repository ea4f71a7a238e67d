"""Same seed, same filled text, whatever the drafts, the batch or the cache; and users' mistakes."""

import math
import re
from itertools import product

import pytest
import torch

from data.text.tokenizer import train_tokenizer
from decoding.any_subset.infilling import Template
from decoding.any_subset.two_stream_cache import TwoStreamNetwork
from decoding.engine.params import SamplingParams
from decoding.samplers.asarm import DRAFTS, AsarmSampler
from tests.support import subsets, tiny
from tests.support.results import ids

V = 12
_ = None
PROMPTS = [
    [_, _, _, 3, _, _, _, _, 7, _, _],
    [2, 7, 1, _, _, _, _, _, _, _, _, _, _, _],
    [_] * 9,
    [_, 5, 0, 5, 0, 5],
    [4, _, 4, _, 4, _, 4, _, 4, _, 4, _],
]
SEEDS = [5, 71, 3, 900, 12]
# XLNet needs a prompt.
GIVEN = [p for p in PROMPTS if any(p)]
GIVEN_SEEDS = [x for p, x in zip(PROMPTS, SEEDS) if any(p)]
FUSED_TREE = ("assd_fused", "tree")
WARPS = {
    "no warp": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "penalty": {"repetition_penalty": 1.4},
    "all": {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}


def sampler(draft="assd_fused", k=4, model=None, cls=AsarmSampler, **options):
    model = model or subsets.network(V).float()
    options = {"mask_id": V, "draft": draft, "block_size": k, **options}
    return cls(model, tiny.tokenizer(V), **options)


def one_by_one(params, model=None, prompts=PROMPTS, seeds=SEEDS):
    s = sampler("sequential", model=model)
    return [s.generate([p], params, seeds=[x])[0].token_ids for p, x in zip(prompts, seeds)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", WARPS)
def test_coupled_drafts_change_no_token(name, temperature):
    params = SamplingParams(temperature=temperature, **WARPS[name])
    expected = one_by_one(params)
    assert [len(x) for x in expected] == [p.count(_) for p in PROMPTS]
    for draft in DRAFTS:
        assert ids(sampler(draft, 4).generate(PROMPTS, params, seeds=SEEDS)) == expected


class NoiseByCycle(AsarmSampler):
    """Wrong: the noise is keyed by the index in the cycle instead of the position."""

    def order_noise(self, batch, count, params):
        at = torch.arange(count).expand(len(batch.requests), -1)
        return batch.randomness.gumbel(at, self.vocabulary)


@pytest.mark.parametrize(("draft", "rule"), [*((d, "coupled") for d in DRAFTS[1:]), FUSED_TREE])
def test_a_wrong_noise_fails_the_same_test(draft, rule):
    params = SamplingParams(verify=rule)
    wrong = sampler(draft, cls=NoiseByCycle).generate(PROMPTS, params, seeds=SEEDS)
    assert ids(wrong) != one_by_one(SamplingParams())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize(("k", "nodes"), [(1, 3), (3, 1), (3, 12), (4, 30)])
def test_trees_change_no_token(name, temperature, k, nodes):
    warp = dict(temperature=temperature, **WARPS[name])
    s = sampler("assd_fused", k, nodes=nodes)
    found = s.generate(PROMPTS, SamplingParams(verify="tree", **warp), seeds=SEEDS)
    assert ids(found) == one_by_one(SamplingParams(**warp))


def test_a_tree_of_drafts_fills_more_tokens_a_pass_than_one_draft():
    model = subsets.network(V).float()
    with torch.no_grad():
        for layer in model.model.layers:  # what a token is depends on the one before it
            layer.self_attn.o_proj.weight.mul_(6)
    calls = {}
    for rule in ("coupled", "tree"):
        s, params = sampler("assd_fused", 4, model, nodes=24), SamplingParams(verify=rule)
        calls[rule] = len(s.generate([[_] * 80], params, seeds=[5])[0].stats.emitted)
    assert calls["tree"] < 0.8 * calls["coupled"]


class SeesSiblings(AsarmSampler):
    """Wrong: nodes see all nodes of lower depth, whatever their path."""

    def target_logits(self, batch, draft, A, ahead, params, trees=None):
        if trees is not None:
            trees = trees._replace(path=torch.zeros_like(trees.path))
        return super().target_logits(batch, draft, A, ahead, params, trees)


class ForgetsToMove(AsarmSampler):
    """Wrong: the nodes of the path stay where they were in the cache."""

    def begin(self, batch, params):
        super().begin(batch, params)
        batch.networks["target"].keep_path = lambda *args: None


@pytest.mark.parametrize("wrong", [SeesSiblings, ForgetsToMove])
def test_a_wrong_tree_fails_the_same_test(wrong):
    found = sampler(cls=wrong).generate(PROMPTS, SamplingParams(verify="tree"), seeds=SEEDS)
    assert ids(found) != one_by_one(SamplingParams())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "rule"), [*product(DRAFTS, ["coupled", "rejection", "block"]), FUSED_TREE]
)
def test_a_batch_is_row_for_row_a_batch_of_one_with_or_without_a_cache(draft, rule):
    params = SamplingParams(verify=rule, temperature=0.8)
    together = sampler(draft).generate(PROMPTS, params, seeds=SEEDS)
    uncached = sampler(draft, cache=False).generate(PROMPTS, params, seeds=SEEDS)
    alone = [sampler(draft).generate([p], params, seeds=[x])[0] for p, x in zip(PROMPTS, SEEDS)]
    assert ids(together) == ids(alone) == ids(uncached)
    assert [r.stats.emitted for r in together] == [r.stats.emitted for r in alone]
    for r in together:
        assert r.stats.target_passes == len(r.stats.emitted) <= len(r.token_ids)
        assert r.stats.drafter_passes == 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_only_without_a_cache_a_pass_runs_the_whole_text(monkeypatch, draft):
    widths, run = [], TwoStreamNetwork.run

    def recorded(self, tokens, *args, keep):
        widths.append(tokens.shape[1] - keep)  # the content that this pass brings
        return run(self, tokens, *args, keep=keep)

    monkeypatch.setattr(TwoStreamNetwork, "run", recorded)
    prompt = [1] * 20 + [_] * 10
    sampler(draft, cache=False).generate([prompt], SamplingParams(seed=1))
    assert min(widths) >= 20
    widths.clear()
    sampler(draft).generate([prompt], SamplingParams(seed=1))
    assert 20 <= widths[0] <= 20 + 4  # the n-gram drafts come with the prompt
    assert max(widths[1:]) <= 1 + 4


class ForgetsTheCorrection(AsarmSampler):
    """Wrong: believes that the cache holds the content of the target's own token."""

    def cycle(self, batch, params):
        tokens, counts = super().cycle(batch, params)
        batch.state.cached = batch.lengths + counts
        return tokens, counts


def test_a_stale_cache_fails_the_same_test():
    params = SamplingParams()
    wrong = sampler(cls=ForgetsTheCorrection).generate(PROMPTS, params, seeds=SEEDS)
    assert ids(wrong) != one_by_one(params)


@pytest.mark.parametrize(("draft", "rule"), [*product(DRAFTS, ["coupled"]), ("assd_fused", "tree")])
def test_coupled_xlnet_with_or_without_a_cache(draft, rule):
    model, params = subsets.xlnet(V), SamplingParams(verify=rule)
    expected = one_by_one(SamplingParams(), model, GIVEN, GIVEN_SEEDS)
    for cache in (True, False):
        s = sampler(draft, model=model, cache=cache)
        assert ids(s.generate(GIVEN, params, seeds=GIVEN_SEEDS)) == expected


def test_xlnet_at_cache_slots_instead_of_positions_fails_the_same_test(monkeypatch):
    """Negative control: distances between slots of the cache instead of positions in the text."""
    model, params, run = subsets.xlnet(V), SamplingParams(), TwoStreamNetwork.run
    monkeypatch.setattr(
        TwoStreamNetwork,
        "run",
        lambda self, tokens, positions, slots, *a, **k: run(self, tokens, slots, slots, *a, **k),
    )
    found = sampler(model=model).generate(GIVEN, params, seeds=GIVEN_SEEDS)
    assert ids(found) != one_by_one(params, model, GIVEN, GIVEN_SEEDS)


def test_sequential_takes_one_call_a_token_and_a_sure_model_k_plus_one():
    """A network that ignores what it sees is its own perfect drafter."""
    model = subsets.network(V).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    prompt, params = [[1] + [_] * 13], SamplingParams(seed=3)
    emitted = {d: sampler(d, 4, model).generate(prompt, params)[0].stats.emitted for d in DRAFTS}
    assert emitted["sequential"] == [1] * 13
    assert emitted["assd"] == [1, 3] * 3 + [1]
    assert emitted["assd_fused"] == [1, 5, 5, 2]


def test_text_in_text_out():
    (result,) = sampler().generate(["ab<hole:3>c<hole:2>"], SamplingParams(seed=1))
    assert re.fullmatch("ab[a-l]{3}c[a-l]{2}", result.text)
    assert len(result.token_ids) == 5
    assert result.finish_reason == "length"


def streamed(s, prompt, params):
    """The chunks of a text; checks that each shows what is committed by then, and no more."""
    chunks = list(s.stream([prompt], params))
    result, template = chunks[-1].result, Template(s._tokens(prompt))
    assert "".join(c.text for c in chunks) == result.text
    assert [t for c in chunks for t in c.token_ids] == result.token_ids
    for n in range(1, len(chunks) + 1):
        committed = result.token_ids[: sum(result.stats.emitted[:n])]
        holes = [p for p, t in enumerate(template.ids) if t is None]
        open_at = [*holes, len(template.ids)][len(committed)]
        shown = "".join(c.text for c in chunks[:n])
        assert shown == result.text[:open_at]  # a token is a letter here
    return [c.text for c in chunks]


@pytest.mark.parametrize("draft", DRAFTS)
def test_holes_are_shown_as_they_fill(draft):
    params = SamplingParams(seed=1)
    texts = streamed(sampler(draft), "ab<hole:3>c<hole:2><hole:2>de", params)
    assert texts[0].startswith("ab")
    assert texts[-1].endswith("de")
    assert (
        "".join(texts) == sampler(draft).generate(["ab<hole:3>c<hole:2><hole:2>de"], params)[0].text
    )
    assert draft != "sequential" or [len(t) for t in texts] == [3, 1, 2, 1, 1, 1, 3]


def test_text_after_an_open_hole_would_be_seen(monkeypatch):
    """Negative control: given tokens are shown while a hole before them is open."""
    full = Template.filled

    def hasty(self, answer):
        return full(self, [*answer, *[0] * (self.holes - len(answer))])

    monkeypatch.setattr(Template, "filled", hasty)
    with pytest.raises(AssertionError):
        streamed(sampler(), "ab<hole:3>c<hole:2>de", SamplingParams(seed=1))


def test_no_half_character_is_shown_and_rows_do_not_mix():
    tokenizer = train_tokenizer(["ab é漢🙂 "] * 9, 265)
    s = AsarmSampler(
        subsets.network(len(tokenizer)).float(), tokenizer,
        mask_id=len(tokenizer), draft="assd_fused", block_size=3,
    )  # fmt: skip
    prompts, params = ["é<hole:9>漢<hole:4>", "<hole:7>🙂a"], SamplingParams(seed=4)
    texts = [[], []]
    for chunk in s.stream(prompts, params):
        texts[chunk.request].append(chunk.text)
    assert ["".join(t) for t in texts] == [r.text for r in s.generate(prompts, params)]
    assert not any(t.endswith("�") for row in texts for t in row[:-1])
    assert min(map(len, texts)) > 1


def test_a_template_by_hand():
    t = Template([_, 7, _, 8])
    assert (t.order, t.prompt, t.holes) == ([1, 3, 0, 2], [7, 8], 2)
    assert t.filled([5, 6]) == [5, 7, 6, 8]
    assert (t.filled([]), t.filled([5])) == ([], [5, 7])


def test_the_mask_token_is_never_drawn():
    model = subsets.network(V).float()
    with torch.no_grad():
        model.lm_head.weight[V] = 100 * model.lm_head.weight[0]
    for draft in DRAFTS:
        found = sampler(draft, model=model).generate(PROMPTS, SamplingParams(seed=0))
        assert max(t for r in found for t in r.token_ids) < V


@pytest.mark.parametrize("name", ["two-stream", "xlnet"])
def test_the_joint_density_is_the_product_of_single_positions(name):
    model = subsets.network(V) if name == "two-stream" else subsets.xlnet(V)
    tokens = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    given = [[True, False, False, True, False], [False, False, True, False, False]]
    found = sampler("sequential", model=model).log_prob(tokens, given)
    for b in range(2):
        prompt = [(p, t) for p, t in enumerate(tokens[b]) if given[b][p]]
        rest = [(p, t) for p, t in enumerate(tokens[b]) if not given[b][p]]
        expected = 0.0
        for i, (p, t) in enumerate(rest):
            logits = subsets.one_position(model, prompt, rest[:i], p)[:V]
            expected += logits.log_softmax(-1)[t].item()
        assert found[b].item() == pytest.approx(expected, abs=1e-9)


def test_the_joint_density_sums_to_one():
    s = sampler("sequential", model=subsets.network(2), mask_id=2)
    tokens = [[a, 1, b] for a in (0, 1) for b in (0, 1)]
    given = [[False, True, False]] * 4
    assert s.log_prob(tokens, given).exp().sum().item() == pytest.approx(1, abs=1e-9)
    # Another order is another factorisation, of another joint: it also sums to one.
    other = s.log_prob(tokens, given, order=[[1, 2, 0]] * 4)
    assert other.exp().sum().item() == pytest.approx(1, abs=1e-9)
    assert (other - s.log_prob(tokens, given)).abs().max() > 1e-3


BAD = [
    ("abc", {}, "<hole:12>"),
    ([1, 2], {}, "no hole"),
    ("a<hole:0>b", {}, "<hole:0> is not allowed"),
    ("a<hole:600>b", {}, "more than the model's context of 512"),
    ([1, V, _], {}, f"contains the mask token ({V})"),
    ([1, 99, _], {}, "token 99 is outside the model's vocabulary of 13"),
    ("a<hole:2>", {"stop": ("x",)}, "stop="),
    ("a<hole:2>", {"draft": "magic"}, "['sequential', 'assd', 'assd_ngram', 'assd_fused']"),
]


@pytest.mark.parametrize(("prompt", "values", "named"), BAD)
def test_a_mistake_is_one_line(prompt, values, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        sampler().generate([prompt], SamplingParams(**values))
    assert "\n" not in str(error.value)


def test_mistakes_about_orders_and_xlnet():
    s = sampler("sequential")
    with pytest.raises(ValueError, match=re.escape("[0, 1, 1]")):
        s.log_prob([[1, 2, 3]], [[True, False, False]], order=[[0, 1, 1]])
    x = sampler(model=subsets.xlnet(V))
    one_way = subsets.xlnet(V)
    one_way.config.attn_type = "uni"
    with pytest.raises(ValueError, match=r"attn_type='uni'.*attn_type='bi'"):
        sampler(model=one_way).generate([[1, _]])
    with pytest.raises(ValueError, match=r"verify='tree'.*draft='assd'"):
        sampler("assd").generate([[1, _]], SamplingParams(verify="tree"))
    with pytest.raises(ValueError, match="XLNet needs a prompt of at least one token"):
        x.generate([[_, _]], SamplingParams(draft="assd"))
    with pytest.raises(ValueError, match="dtype=float32"):
        sampler(model=subsets.xlnet(V).bfloat16())


def test_blocks_that_cannot_speed_up_are_allowed_with_a_warning():
    params = SamplingParams(draft="assd", block_size=1, seed=0)
    with pytest.warns(UserWarning, match="block_size=1 cannot speed up"):
        (result,) = sampler().generate([[1, _, _]], params)
    assert result.stats.emitted == [1, 1]


def test_samplers_with_one_way_refuse_draft():
    from decoding.samplers.plain import PlainSampler

    plain = PlainSampler(tiny.causal_lm(V).float(), tiny.tokenizer(V))
    with pytest.raises(ValueError, match="drafts in one way only"):
        plain.generate([[1]], SamplingParams(draft="assd"))


@pytest.mark.parametrize("draft", DRAFTS)
def test_bfloat16_runs(draft):
    s = sampler(draft, model=subsets.network(V).bfloat16())
    params = SamplingParams(verify="rejection", top_p=0.9, repetition_penalty=1.2, seed=0)
    for r, p in zip(s.generate(PROMPTS, params), PROMPTS):
        assert len(r.token_ids) == p.count(_)
        assert math.isfinite(r.stats.target_s)
