"""Draft trees: the most probable prefixes, their mask, and outputs that they must not change."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.drafting import tree
from decoding.drafting.prompt_lookup import Lookup
from decoding.drafting.ranked_tree import RankedTree
from decoding.engine.params import SamplingParams
from models import masks
from tests.support.masks import drawn, layout
from tests.support.results import ids
from tests.support.texts import (
    PROMPTS,
    SEEDS,
    deer,
    drafter_of_target,
    oracle,
    plain_texts,
    random_drafter,
    target,
)
from tests.support.trees import assert_likeliest

logits = st.lists(st.floats(-4, 4), min_size=3, max_size=3)


def test_logits_of_some_tokens_give_the_trees_of_all():
    """A drafter of few tokens: the others' logits are -inf, or are not there."""
    z = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([7, 2, 8, 0, 4])
    every = z.new_full((2, 3, 9), -torch.inf).index_copy(-1, ids, z)
    found, expected = tree.draft_trees(z, 6, ids=ids), tree.draft_trees(every, 6)
    assert [row[:4] for row in found.rows] == [row[:4] for row in expected.rows]
    assert tree.draft_trees(z, 6).rows != expected.rows  # negative control


@settings(max_examples=50, deadline=None)
@given(st.lists(logits, min_size=1, max_size=3), st.integers(1, 20))
def test_the_nodes_are_the_likeliest_prefixes(marginals, nodes):
    p = torch.tensor(marginals, dtype=torch.float64).softmax(-1)
    found = tree.draft_trees(p.log()[None], nodes).rows[0]
    k = len(p)
    weights = [
        math.prod(p[i, t].item() for i, t in enumerate(prefix))
        for depth in range(1, k + 1)
        for prefix in product(range(3), repeat=depth)
    ]
    best = sorted(weights, reverse=True)[:nodes]
    assert len(found.token) == min(nodes, len(weights))
    prefixes = set()
    for node, path in enumerate(found.path):
        at = [i for i in range(node + 1) if path >> i & 1]
        assert [found.depth[i] for i in at] == list(range(1, len(at) + 1))
        prefixes.add(tuple(found.token[i] for i in at))
        for parent, child in zip([tree.ROOT, *at], at):
            assert found.child[parent, found.token[child]] == child
    assert len(prefixes) == len(found.token)
    ours = sorted(math.prod(p[i, t].item() for i, t in enumerate(x)) for x in prefixes)
    assert ours == pytest.approx(best[::-1])


class Table:
    """A drafter whose distribution over some tokens depends on all that was drafted before.

    `read` maps the tokens of a path to the prefix whose distribution it has.
    """

    def __init__(self, seed, read=lambda path: path, tokens=3, spread=2):
        self.seed, self.read, self.tokens, self.spread = seed, read, tokens, spread
        self.logits, self.paths, self.runs = {}, [], 0

    def after(self, path):
        if path not in self.logits:
            draw = torch.Generator().manual_seed(
                sum((self.tokens + 1) ** i * (t + 1) for i, t in enumerate(path)) + 1000 * self.seed
            )
            drawn = torch.randn(self.tokens, generator=draw, dtype=torch.float64)
            self.logits[path] = self.spread * drawn
        return self.logits[path]

    def expand(self, depth, tokens, parents):
        self.runs += 1
        if tokens is None:
            return self.after(())[None, None]
        before = [self.paths[parent] if parent >= 0 else () for parent in parents[0].tolist()]
        paths = [(*path, token) for path, token in zip(before, tokens[0].tolist())]
        assert {*map(len, paths)} == {depth}
        self.paths += paths
        return torch.stack([self.after(self.read(path)) for path in paths])[None]

    def chance(self, prefix):
        prefix = tuple(prefix)
        p = [self.after(prefix[:i]).softmax(-1)[t].item() for i, t in enumerate(prefix)]
        return math.prod(p)


@pytest.mark.parametrize("nodes", [1, 4, 9, 20, 63])
@pytest.mark.parametrize("seed", range(3))
def test_a_grown_tree_has_the_likeliest_prefixes(seed, nodes):
    table = Table(seed)
    found = tree.grow_trees(table.expand, 4, nodes).rows[0]
    assert_likeliest(found, table.chance, 4, nodes)
    assert len(table.paths) <= tree.MAX_NODES


def test_a_grown_tree_by_another_path_is_another_tree():
    """Negative control: distributions after the last token alone."""
    found = [tree.grow_trees(Table(0, read).expand, 4, 20).rows[0] for read in (tuple, last_token)]
    assert found[0] != found[1]


@pytest.mark.parametrize("least", [0.04, 0.1])
def test_a_tree_has_only_nodes_of_the_least_probability(least):
    """But for the first one; in a batch on average, as each node is one of every tree."""
    z = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z *= torch.tensor([1.0, 3.0, 6.0])[:, None, None]
    fewer, every = tree.draft_trees(z, 30, least=least).rows, tree.draft_trees(z, 30).rows
    reached = [chances(z[i], every[i]) for i in range(3)]
    counts = [sum(p >= least for p in row) for row in reached]
    mean = sum(sum(row) >= 3 * least for row in zip(*reached))
    assert min(counts) <= mean < max(counts) < 30
    assert fewer == [row.first(mean) for row in every]
    (alone,) = tree.draft_trees(z[:1], 30, least=least).rows
    assert alone == every[0].first(counts[0])
    # Grown at each depth, it is the same tree.
    grown = tree.grow_trees(
        lambda depth, *_: z[1:2, depth, None].expand(1, 30, 9), 4, 30, least=least
    )
    assert [row[:4] for row in grown.rows] == [every[1].first(counts[1])[:4]]


@pytest.mark.parametrize("ragged", [True, False])
def test_the_first_nodes_need_no_probability(ragged):
    z = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z *= torch.tensor([1.0, 3.0, 6.0])[:, None, None]
    every = tree.draft_trees(z, 30).rows

    def grown(least):
        given = {"least": least, "fewest": 7, "ragged": ragged}
        return tree.grow_trees(lambda i, *_: z[:, i, None].expand(3, 30, 9), 4, 30, **given).rows

    assert [row[:4] for row in grown(0.9)] == [row.first(7)[:4] for row in every]
    assert max(len(row.token) for row in grown(0.05)) > 7


def test_ragged_trees_are_those_of_each_sequence_alone():
    z = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    z *= torch.tensor([1.0, 3.0, 6.0])[:, None, None]
    trees = tree.draft_trees(z, 30, least=0.1, ragged=True)
    alone = [tree.draft_trees(z[i : i + 1], 30, least=0.1) for i in range(3)]
    assert trees.rows == [own.rows[0] for own in alone]
    sizes = trees.sizes.tolist()
    assert len({*sizes}) > 1
    for i, (size, own) in enumerate(zip(sizes, alone)):
        assert all(torch.equal(x[i, :size], y[0]) for x, y in zip(trees[1:], own[1:]))
        assert trees.padding()[i].tolist() == [n > size for n in range(max(sizes) + 1)]
        before = trees.before()[i]
        assert not before[: size + 1, size:].any()  # no token has padding before it
        assert torch.equal(before[: size + 1, :size], own.before()[0])
    assert alone[0].padding() is None


def test_a_tree_may_have_no_node():
    """Where nothing is probable enough, while others of the batch have some."""
    rankings = [lambda path: ([1, 2], [-1.2, -1.6]), lambda path: ([3], [-0.1])]
    trees = tree.trees_of(rankings, 4, 0.5, torch.device("cpu"), fewest=0, ragged=True)
    assert trees.sizes.tolist() == [0, 4]
    none = tree.trees_of(rankings, 4, 0.95, torch.device("cpu"), fewest=0, ragged=True)
    assert none.token.shape == (2, 0)
    assert none.padding() is None


def chances(z, found):
    """The probabilities of a tree's nodes, under the product of marginals."""
    p = z.softmax(-1)
    known = {tree.ROOT: 1.0}
    for (parent, token), node in found.child.items():
        known[node] = known[parent] * p[found.depth[node] - 1, token].item()
    return [known[node] for node in range(len(found.token))]


def last_token(path):
    return path[-1:]


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.25])
def test_a_tree_grows_deeper_only_where_that_pays(cost):
    """Sure and unsure drafters, whose probabilities are right: tokens a second of all depths."""

    def rate(depth, least_gain=0.0):
        tokens = time = 0.0
        for seed in range(40):
            table = Table(seed, tokens=8, spread=1 + seed % 4 * 2)
            found = tree.grow_trees(table.expand, depth, 6, least_gain=least_gain).rows[0]
            paths = {tree.ROOT: ()}
            for (parent, token), node in found.child.items():
                paths[node] = (*paths[parent], token)
            tokens += sum(map(table.chance, paths.values()))
            time += 1 + cost * (table.runs - 1)
        return tokens / time

    fastest = max(map(rate, range(1, 9)))
    grown = [rate(8, factor * cost * fastest) for factor in (1 / 8, 1, 8)]
    assert grown[1] > fastest
    assert grown[1] == max(grown)  # Negative controls: the gain of cheaper and of dearer runs.


def test_grown_trees_of_a_batch_are_those_alone():
    """Rows expand different nodes, so that some are padding; bigrams and a lookup rank too."""
    z = torch.tensor([[[4.0, 1, 0], [3.0, 2, 0], [0, 1, 2]], [[0.3, 0.2, 0.1]] * 3])
    after = [{0: 0.5, 2: 1.5}, {1: 1.0}, {}]
    scores = tree.BigramScores(after.__getitem__, [0.0, 0.7, 0.7])
    lookups = [Lookup([0, 1, 0, 1, 0]), Lookup([2, 2, 1])]

    def grown(rows):
        z_of = z[rows]

        def expand(depth, tokens, parents):
            count = 1 if tokens is None else tokens.shape[1]
            return z_of[:, depth, None].expand(-1, count, -1)

        return tree.grow_trees(expand, 3, 6, 1.5, scores, [lookups[row] for row in rows])

    both = grown([0, 1]).rows
    assert both == [grown([0]).rows[0], grown([1]).rows[0]]
    # Without conditionals they are the trees of marginals.
    assert both == tree.draft_trees(z, 6, 1.5, scores, lookups).rows


def test_a_walk_by_hand():
    depths = [([5, 6], [-0.1, -2.0]), ([7, 8], [-0.5, -0.9])]
    drafted = tree.best_first(tree.child_ranking(depths, None), 4)
    assert drafted.token == [5, 7, 8, 6]
    assert tree.walk(drafted, [5, 8, 0, 3, 0]) == [0, 2]
    assert tree.walk(drafted, [9, 7, 7, 7, 7]) == []
    assert tree.walk(drafted, [6, 7, 7, 7, 7]) == [3]


def test_the_mask_of_a_tree():
    """Two clean tokens; nodes 0 and 3 are children of the root, 1 and 2 of 0, 4 of 2."""
    paths = [0b1, 0b11, 0b101, 0b1000, 0b10101]
    positions = [2, 3, 3, 2, 4]
    drawing = drawn("""
        x . . . . . .
        x x . . . . .
        x x x . . . .
        x x x x . . .
        x x x . x . .
        x x . . . x .
        x x x . x . x
    """)
    batch = layout([0] * 7, [0, 1, *positions], [-1, -1, *paths])
    assert torch.equal(masks.dense(masks.tree, batch)[0, 0], drawing)
    before = tree.Trees([], *(torch.tensor([x]) for x in (paths, positions, paths))).before()
    assert torch.equal(before[0, 0], torch.zeros(5, dtype=torch.long))
    assert torch.equal(before[0, 1:].bool(), drawing[2:, 2:])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 7, 63])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_tree_gives_the_text_of_plain_decoding(nodes, temperature):
    model = target(eos_token_id=4)
    params = SamplingParams(18, temperature, verify="tree", repetition_penalty=1.2)
    expected = plain_texts(params, eos_token_id=4)
    for sampler in (deer(model, random_drafter(), 3), deer(model, drafter_of_target(model), 5)):
        sampler.tree.nodes = {1: nodes}
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == expected


def test_a_tree_accepts_at_least_the_block_that_it_holds():
    model, params = target(), SamplingParams(24, 1.0, verify="tree")
    expected = plain_texts(params)
    block, wide = (oracle(model, 6, PROMPTS, expected) for _ in range(2))
    wide.tree.nodes = {1: 40}
    chain = block.generate(PROMPTS, SamplingParams(24, 1.0), seeds=SEEDS)
    found = wide.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) == ids(chain) == expected
    passes = [sum(r.stats.target_passes for r in results) for results in (found, chain)]
    assert passes[0] < passes[1]


def test_ranking_with_the_noise_takes_fewer_passes():
    """Drafted from the target's own distribution, a tree ranked with the noise accepts more."""
    model = target()
    params = SamplingParams(60, 1.0, verify="tree")
    passes = []
    for rank_noise in (True, False):
        sampler = deer(model, drafter_of_target(model), 3, nodes=6, rank_noise=rank_noise)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        passes.append(sum(r.stats.target_passes for r in found))
    assert passes[0] < 0.9 * passes[1]


def everything_before(q, k):
    return masks.causal(q, k)


def without_the_path(q, k):
    return masks.causal(q, k) & ((k.block < 0) | (q.block == k.block))


@pytest.mark.parametrize("wrong", [everything_before, without_the_path])
def test_a_wrong_mask_changes_the_text(monkeypatch, wrong):
    model, params = target(), SamplingParams(24, 1.0, verify="tree")
    expected = plain_texts(params)
    right = oracle(model, 5, PROMPTS, expected)
    assert ids(right.generate(PROMPTS, params, seeds=SEEDS)) == expected
    monkeypatch.setattr(RankedTree, "predicate", staticmethod(wrong))
    assert ids(right.generate(PROMPTS, params, seeds=SEEDS)) != expected


def test_without_compaction_the_text_changes(monkeypatch):
    model, params = target(), SamplingParams(24, 1.0, verify="tree")
    expected = plain_texts(params)
    sampler = deer(model, drafter_of_target(model), 5)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected
    monkeypatch.setattr("decoding.engine.cache.RaggedCache.move", lambda *_: None)
    assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) != expected


@pytest.mark.parametrize("nodes", [0, 64])
def test_a_budget_that_is_not_allowed(nodes):
    with pytest.raises(ValueError, match=rf"nodes={nodes} is not allowed: .* 1 to 63"):
        deer(target(), random_drafter(), 3, nodes=nodes)
