"""Replayed traces take decoding's passes, and the optimum is the one that brute force finds."""

import random
from collections import Counter
from itertools import combinations

import pytest
import torch

from decoding.calibration.draft_graphs import (
    OBJECTIVES,
    Tracer,
    candidates_of,
    chains_of,
    closed,
    fewest_passes,
    optimum,
    passes,
    value,
)
from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import graph_of
from tests.support.denoising import KINDS, L, V, denoise, network, spiffy

PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [11, 10, 2]]
SEEDS = [5, 71, 3, 900]


def traces(model, attention, params, lookahead=L, **rule):
    tracer = denoise(model, attention, Tracer, width=3, **rule)
    found = tracer.trace(PROMPTS, params, SEEDS)
    return [chains_of(t, lookahead) for t in found.flatten(0, 1) if int(t[0, 0]) != -2]


def random_blocks(seed, count=12, length=6, S=1):
    """Blocks of random chains: what is decided at each state, mostly the first ranks."""
    draw, blocks = random.Random(seed), []
    for _ in range(count):
        chains = []
        for s in range(length):
            free, formula, chain = list(range(1, length - s + 1)), [], []
            for _ in range(min(3, length - s - 1)):
                for _ in range(min(S, len(free))):
                    position = free.pop(min(len(free) - 1, draw.choice((0, 0, 0, 1, 2))))
                    formula.append((position, draw.choice((1, 1, 1, 2))))
                chain.append(tuple(sorted(formula)))
            chains.append(tuple(chain))
        blocks.append(chains)
    return blocks


@pytest.mark.parametrize("rule", [{}, {"tokens_per_step": 2}, {"threshold": 0.6}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("attention", KINDS)
def test_replayed_passes_are_those_of_decoding(attention, temperature, rule):
    model = network(scale=1.5).float()
    params = SamplingParams(max_new_tokens=12, temperature=temperature)
    blocks = traces(model, attention, params, **rule)
    S = None if "threshold" in rule else rule.get("tokens_per_step", 1)
    nodes = [*candidates_of(blocks, S, top=2).counts]
    assert nodes or rule
    for graph in (graph_of(L, S, nodes), graph_of(L, S, [])):
        done = spiffy(model, attention, graph, **rule)
        found = [
            done.generate([p], params, seeds=[x])[0].stats.target_passes
            for p, x in zip(PROMPTS, SEEDS)
        ]
        assert sum(found) == passes(graph.nodes, blocks)


def test_a_trace_by_hand():
    """Positions 0, 2 and 1 are decided at steps 0, 1 and 2; position 3 was given."""
    trace = torch.full((9, 4), 0, dtype=torch.int16)
    trace[0] = torch.tensor([0, 2, 1, -1])
    trace[2] = torch.tensor([0, 2, 1, 0])  # ranks after one step
    trace[6] = torch.tensor([0, 1, 3, 0])
    assert chains_of(trace, 4) == [((((1, 3),)),), ()]
    trace[6, 2] = 0  # not among the ranked tokens
    assert chains_of(trace, 4) == [(), ()]


def test_passes_by_hand():
    chain = (((1, 1),), ((1, 1), (2, 1)))
    block = [chain, chain[:1], ()]
    assert passes([], [block]) == 4
    assert passes([chain[0]], [block]) == 3
    assert passes(chain, [block]) == 2
    assert passes(chain[1:], [block]) == 4  # nothing leads there


def brute_force(objective, size, candidates):
    """The greatest value over every graph of at most `size` connected nodes."""
    best = 0
    for n in range(size + 1):
        for nodes in combinations(candidates.counts, n):
            if closed([*nodes], candidates):
                best = max(best, value(objective, nodes, candidates))
    return best


@pytest.mark.parametrize("S", [1, 2, None])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_optimum_is_that_of_brute_force(objective, S):
    for seed in range(3):
        candidates = candidates_of(random_blocks(seed, S=S or 1), S, top=4)
        assert len(candidates.counts) <= 12
        for size in (1, 3, 5):
            found = optimum(objective, size, candidates)
            assert found.value == brute_force(objective, size, candidates)
            assert found.proved
            assert found.bound == pytest.approx(found.value)
            assert len(found.nodes) <= size
            assert closed(found.nodes, candidates)


def test_the_objectives_by_hand():
    """c11 three times, c11 c21 twice after it and once after c21, c21 once."""
    a, b, ab = ((1, 1),), ((2, 1),), ((1, 1), (2, 1))
    blocks = [[(a, ab), (a, ab)], [(a,)], [(b, ab)]]
    candidates = candidates_of(blocks, 1, top=3)
    assert candidates.counts == {a: 3, b: 1, ab: 3}
    found = {o: value(o, [a, b, ab], candidates) for o in OBJECTIVES}
    assert found == {"degree0": 7, "degree1": 11, "total": 11, "replay": 7}
    assert value("replay", [a, ab], candidates) == 5
    for objective in OBJECTIVES:
        assert {*optimum(objective, 2, candidates).nodes} == {a, ab}
    three = (((1, 1), (2, 1), (3, 1)),)
    longer = candidates_of([[(a, ab, *three)], [(b,)]], 1, top=3)
    assert value("total", [a, b, ab, *three], longer) == 1 + 1 + 3 + 4


@pytest.mark.parametrize("S", [1, None])
def test_exchanging_nodes_never_makes_more_passes(S):
    for seed in range(4):
        blocks = random_blocks(seed)
        candidates = candidates_of(blocks, S, top=4)
        graphs = [optimum(o, 3, candidates).nodes for o in OBJECTIVES]
        best = fewest_passes(graphs, 3, candidates, blocks)
        assert closed(best, candidates)
        assert len(best) <= 3
        assert passes(best, blocks) <= min(passes(g, blocks) for g in graphs)
        # On these small cases it is the best of all.
        every = [n for n in combinations(candidates.counts, 3) if closed([*n], candidates)]
        assert passes(best, blocks) == min(passes(n, blocks) for n in every)


def test_candidates_are_the_most_frequent_that_can_be_reached():
    a, b, ab, bc = ((1, 1),), ((2, 1),), ((1, 1), (2, 1)), ((2, 1), (3, 1))
    blocks = [[(a, ab)] * 3, [(b, bc)] * 2]
    assert candidates_of(blocks, 1, top=1).counts == {a: 3, ab: 3}
    assert candidates_of(blocks, 1, top=2).counts == {a: 3, b: 2, ab: 3, bc: 2}
    assert candidates_of(blocks, 1, top=1).chains == Counter({(a, ab): 3})
    assert candidates_of([[(a, ((4, 1), (5, 1)))]], 1, top=2).counts == {a: 1}


def test_degree1_of_the_papers_size_is_solved_and_proved():
    blocks = random_blocks(1, count=60, length=12)
    found = optimum("degree1", 10, candidates_of(blocks, 1, top=10))
    assert found.proved
    assert len(found.nodes) == 10


def test_a_solver_without_time_says_so(monkeypatch):
    monkeypatch.setattr("decoding.calibration.draft_graphs.SECONDS", 0.0)
    found = optimum("total", 6, candidates_of(random_blocks(0, 60, 12), 1, top=8))
    assert found.value <= found.bound + 1e-6
    assert found.proved == (found.bound < found.value + 1 - 1e-6)


def test_an_unknown_objective():
    with pytest.raises(ValueError, match=r"'degree2'.*'degree1'"):
        optimum("degree2", 3, candidates_of([], 1, 3))


def test_nothing_to_learn_from_makes_an_empty_graph():
    for objective in OBJECTIVES:
        assert optimum(objective, 3, candidates_of([], 1, 3)).nodes == []


def test_blocks_after_an_end_token_are_absent():
    tracer = denoise(network(), "bidirectional", Tracer, width=2)
    params = SamplingParams(max_new_tokens=12, temperature=0)
    whole = tracer.trace(PROMPTS[:1], params, [0])
    answer = tracer.generate(PROMPTS[:1], params)[0].token_ids
    tracer.eos = frozenset({answer[1]})
    cut = tracer.trace(PROMPTS[:1], params, [0])
    assert torch.equal(cut[0, 0], whole[0, 0])
    assert (cut[0, 1:] == -2).all()
    assert V not in answer
