"""Trees that are drawn: exact output distributions by enumeration, and wrong rules that fail."""

import math
from itertools import product

import pytest
import torch

from decoding.bench import drawn_trees
from decoding.bench.drawn_trees import RULES, DrawnTree
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from tests.support import texts, tiny
from tests.support.exact import CASES, deer, distance, first_cycle
from tests.support.samplers import dflash, head_of

EXACT = 1e-12  # total variation; what is left is rounding in float64
WRONG = 1e-3


BY_CHANCE = {"verify": "rejection"}  # which draws trees here


def drawing(sampler, nodes, rule="traversal", cls=DrawnTree):
    sampler.chain = cls(sampler.block_size, nodes, rule)
    return sampler


SAMPLED = {name: case for name, case in CASES.items() if name != "greedy"}
SAMPLED["eos inside a block"] = CASES["eos inside a block"] | {"vocabulary": 2, "eos": 1}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SAMPLED)
def test_the_plain_distribution(name, rule):
    """Trees of four nodes, and two paths; at least one of the siblings has children."""
    case = dict(SAMPLED[name])
    eos, k = case.pop("eos", None), min(case.pop("k"), 2)
    nodes = 4 if rule == "traversal" else 2 * k
    sampler = drawing(deer(case.pop("vocabulary"), k, eos), nodes, rule)
    params = SamplingParams(max_new_tokens=case.pop("new"), **BY_CHANCE, **case)
    assert distance(sampler, params, {eos} - {None}) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: deer(3, 2, attention="causal"),
        lambda: deer(3, 2, markov=head_of(5)),
        lambda: deer(3, 2, drafter_vocabulary=7),
        lambda: dflash(tiny.causal_lm(3), 2),
    ],
    ids=["PARD's layout", "Markov head", "padded vocabulary", "DFlash"],
)
def test_other_drafters(sampler, rule):
    params = SamplingParams(max_new_tokens=2, **BY_CHANCE)
    assert distance(drawing(sampler(), 4, rule), params) <= EXACT


def test_a_drafter_with_a_tail_is_refused():
    sampler = dflash(tiny.causal_lm(3), 2, layout="dspark", tail=1)
    with pytest.raises(ValueError, match=r"drawn=\[traversal\] .* token by token"):
        drawn_trees.drawing(sampler, "traversal")


def test_siblings_run_out_of_tokens():
    """q has two tokens and the root three children: the third is no draw, and never accepted."""
    sampler = drawing(deer(3, 1), 3)
    params = SamplingParams(max_new_tokens=2, top_k=2, **BY_CHANCE)
    assert distance(sampler, params) <= EXACT


class Shaped(DrawnTree):
    """Paths of two tokens under `traversal` too: with two, root and both its children have some."""

    paths = 2

    def draw(self, sampler, batch, params):
        with pytest.MonkeyPatch.context() as patch:
            shape = drawn_trees.chains(self.paths, 2)
            patch.setattr(drawn_trees, "equally_likely", lambda *_: shape)
            return super().draw(sampler, batch, params)


class OnePath(Shaped):
    paths = 1


class SharesADraw(Shaped):
    """Wrong: the children of both nodes of the first depth are one draw, as with shared noise."""

    def draw(self, sampler, batch, params):
        drawn = super().draw(sampler, batch, params)
        drawn.trees.token[:, 3] = drawn.trees.token[:, 1]
        return drawn


class KeepsWhatItLikes(Shaped):
    """Wrong: a node is in the tree or not for the token that was drawn for it."""

    def draw(self, sampler, batch, params):
        drawn = super().draw(sampler, batch, params)
        drawn.q[:, 1] *= (drawn.trees.token[:, 1] == 0)[:, None]  # without q it is no draw
        return drawn


class ShapedByAnother(Shaped):
    """Right: whether a node has a child depends on the token of a sibling that is looked at later.

    A prefix is accepted with its weight, whatever is below it, so this tells nothing.
    """

    def draw(self, sampler, batch, params):
        drawn = super().draw(sampler, batch, params)
        drawn.q[:, 1] *= (drawn.trees.token[:, 2] == 0)[:, None]
        return drawn


def distance_of(cls, rule="traversal"):
    params = SamplingParams(max_new_tokens=2, **BY_CHANCE)
    return distance(drawing(deer(3, 2), 4, rule, cls), params)


@pytest.mark.parametrize("cls", [Shaped, ShapedByAnother])
def test_any_shape_has_the_plain_distribution(cls):
    assert distance_of(cls) <= EXACT


@pytest.mark.parametrize("wrong", [SharesADraw, KeepsWhatItLikes])
def test_wrong_draws_fail_the_same_test(wrong):
    assert distance_of(wrong) > WRONG


RIGHT = drawn_trees.after_rejection


def target_for_residual(p, q, weight):
    """Wrong: the correction is drawn from p, and not from the residual."""
    return p, RIGHT(p, q, weight)[1]


def residual_without_weight(p, q, weight):
    """Wrong: (p - q)+, as if the prefix were surely accepted."""
    return RIGHT(p, q, torch.ones_like(weight))[0], RIGHT(p, q, weight)[1]


def weight_as_before(p, q, weight):
    """Wrong: a prefix is accepted as if none of its children had been rejected."""
    return RIGHT(p, q, weight)[0], weight


def keeps_the_sibling(q, token):
    """Wrong: q has the rejected sibling still, which the next one was not drawn from."""
    return q


def root_first(parents):
    """Wrong: a prefix is accepted or rejected before those that it begins."""
    return [*range(1, len(parents) + 1), 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("after_rejection", target_for_residual),
        ("after_rejection", residual_without_weight),
        ("after_rejection", weight_as_before),
        ("without", keeps_the_sibling),
        ("leaves_first", root_first),
    ],
)
def test_a_wrong_traversal_fails_the_same_test(monkeypatch, part, wrong):
    def broken(*given):
        with monkeypatch.context() as patch:  # what is drawn is drawn as it should be
            patch.setattr(drawn_trees, part, wrong)
            return drawn_trees.traversal(*given)

    monkeypatch.setitem(RULES, "traversal", broken)
    assert distance_of(Shaped) > WRONG


def one_path(a, b, exponent):
    """Wrong: the selected path is verified as if it had been the only one."""
    return torch.ones_like(a)


def by_number(p, q):
    return torch.arange(p.shape[1]).expand(len(p), -1)


def largest_gap_last(p, q):
    return (q - p).argsort(descending=True, stable=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [by_number, largest_gap_last])
def test_paths_may_be_selected_in_any_order(monkeypatch, order):
    monkeypatch.setattr(drawn_trees, "by_ratio", order)
    assert distance_of(DrawnTree, "multipath") <= EXACT


def test_a_wrong_multipath_fails_the_same_test(monkeypatch):
    monkeypatch.setattr(drawn_trees, "difference", one_path)
    assert distance_of(DrawnTree, "multipath") > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_one_path_is_block_verification(rule):
    """The same number of expected tokens, and a second path adds to it."""
    gains = []
    for seed in range(3):
        sampler = deer(3, 2, seed=10 * seed)
        chain = first_cycle(sampler, "block")
        one = drawing(sampler, 2, rule, OnePath)
        assert first_cycle(one, "rejection") == pytest.approx(chain, abs=1e-12)
        gains.append(first_cycle(drawing(sampler, 4, rule, Shaped), "rejection") - chain)
    assert min(gains) > 0


@pytest.mark.parametrize("accept", [0.3, 0.8])
def test_the_shape_holds_most_accepted_nodes(accept):
    """Of all trees of five nodes with up to three siblings a node, two deep or three."""
    for depth in (2, 3):
        chances = [
            math.prod(accept * (1 - accept) ** rank for rank in path)
            for length in range(1, depth + 1)
            for path in product(range(3), repeat=length)
        ]
        shape = drawn_trees.equally_likely(5, depth, 3, accept)
        ranks = [
            [shape.token[i] for i in range(node + 1) if path >> i & 1]
            for node, path in enumerate(shape.path)
        ]
        found = [math.prod(accept * (1 - accept) ** rank for rank in path) for path in ranks]
        assert sorted(found) == pytest.approx(sorted(chances)[-5:])


def test_siblings_differ():
    sampler = drawing(texts.deer(texts.target(), texts.random_drafter(), 4), 12)
    params = SamplingParams(max_new_tokens=5, **BY_CHANCE)
    batch = sampler.new_batch([[3, 1, 4]] * 3, params, KeyedRandomness([1, 2, 3]), 40)
    with torch.inference_mode():
        sampler.begin(batch, params)
        drawn = sampler.chain.draw(sampler, batch, params)
    for tokens, parents in zip(drawn.trees.token.tolist(), drawn.parent.tolist()):
        assert len({*zip(parents, tokens)}) == 12
    assert len({*map(tuple, drawn.trees.token.tolist())}) == 3


def test_at_temperature_0_they_are_coupled():
    model = texts.target()
    sampler = texts.deer(model, texts.drafter_of_target(model), 3)
    emitted = []
    for rule in (None, *RULES):
        way = sampler if rule is None else drawn_trees.drawing(sampler, rule)
        found = way.generate(texts.PROMPTS, SamplingParams(20, 0.0))
        emitted.append([(r.token_ids, r.stats.emitted) for r in found])
    assert emitted[0] == emitted[1] == emitted[2]
