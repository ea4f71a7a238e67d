"""Replayed traces take decoding's passes, and the optimum is the one that brute force finds."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from decoding.calibration.draft_graphs import (
    OBJECTIVES,
    TracedBlock,
    Tracer,
    accepted,
    blocks_of,
    candidates_of,
    chains_of,
    closed,
    fewest_passes,
    optimum,
    passes,
)
from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import graph_of
from tests.support.denoising import KINDS, PROMPTS, SEEDS, L, V, denoise, network, spiffy


def traces(model, attention, params, lookahead=L, **rule):
    tracer = denoise(model, attention, Tracer, width=3, **rule)
    found = tracer.trace(PROMPTS, params, SEEDS)
    return [block for answer in found for block in blocks_of(answer, lookahead)]


def alone(chains):
    """A block of which nothing but its chains is known."""
    return TracedBlock(chains, [0] * len(chains), [False] * len(chains), False)


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
        blocks.append(alone(chains))
    return blocks


@pytest.mark.slow
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
    saved = 0
    for graph in (graph_of(L, S, nodes), graph_of(L, S, [])):
        replayed = []
        for next_block in (False, True):
            done = spiffy(model, attention, graph, next_block=next_block, **rule)
            found = [
                done.generate([p], params, seeds=[x])[0].stats.target_passes
                for p, x in zip(PROMPTS, SEEDS)
            ]
            replayed.append(passes(graph.nodes, blocks, graph.reach if next_block else 0))
            assert sum(found) == replayed[-1]
        saved += replayed[0] - replayed[1]
    assert saved > 0 or rule == {"tokens_per_step": 2}  # two at once are never guessed here


def test_a_trace_by_hand():
    """Positions 0, 2 and 1 are decided at steps 0, 1 and 2; position 3 was given."""
    trace = torch.full((9, 4), 0, dtype=torch.int16)
    trace[0] = torch.tensor([0, 2, 1, -1])
    trace[2] = torch.tensor([0, 2, 1, 0])  # ranks after one step
    trace[6] = torch.tensor([0, 1, 3, 0])
    assert chains_of(trace, 4) == [((((1, 3),)),), ()]
    trace[6, 2] = 0  # not among the ranked tokens
    assert chains_of(trace, 4) == [(), ()]


def test_blocks_by_hand():
    """The trace above twice, then a block that was not decoded: two blocks, the first followed."""
    trace = torch.full((9, 4), 0, dtype=torch.int16)
    trace[0] = torch.tensor([0, 2, 1, -1])
    trace[2], trace[3] = torch.tensor([0, 2, 1, 0]), torch.tensor([0, 1, 0, 0])
    trace[6], trace[7] = torch.tensor([0, 1, 3, 0]), torch.tensor([0, 1, 0, 0])
    first, second = blocks_of(torch.stack([trace, trace, torch.full_like(trace, -2)]), 4)
    assert (first.followed, second.followed) == (True, False)
    assert first.left == [2, 1]
    assert first.certain == [False, True]  # position 2 ended as the third most probable token


def test_the_next_blocks_first_pass_by_hand():
    one = TracedBlock([(), ()], [2, 1], [False, True], followed=True)  # three passes alone
    wrong, last = replace(one, certain=[True, False]), replace(one, followed=False)
    full = TracedBlock([], [], [], followed=True)  # a step fills it: no pass is saved
    assert passes([], [one, one, last]) == 9
    assert passes([], [one, one, last], reach=1) == 7
    assert passes([], [one, one, last], reach=0) == 9
    assert passes([], [wrong, wrong, last], reach=2) == 9
    assert passes([], [one, full, last], reach=1) == 7
    chained = replace(one, chains=[(((1, 1),),), ()], certain=[True, False])
    assert passes([((1, 1),)], [chained, last], reach=2) == 4
    assert passes([((1, 1),)], [chained, last], reach=1) == 5


def test_passes_by_hand():
    chain = (((1, 1),), ((1, 1), (2, 1)))
    block = alone([chain, chain[:1], ()])
    assert passes([], [block]) == 4
    assert passes([chain[0]], [block]) == 3
    assert passes(chain, [block]) == 2
    assert passes(chain[1:], [block]) == 4  # nothing leads there


def value(objective, nodes, candidates):
    """The value of an objective for a graph's nodes, as the paper has it."""
    inside, count, total = {*nodes}, candidates.counts, {}
    if objective == "replay":
        return sum(n * accepted(inside, chain) for chain, n in candidates.chains.items())
    for q in sorted(inside, key=len):
        of_parents = {"degree0": {}, "degree1": count, "total": total}[objective]
        parents = [p for p in candidates.parents[q] if p in inside]
        total[q] = count[q] + sum(of_parents.get(p, 0) for p in parents)
    return sum(total.values())


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
    blocks = [alone([(a, ab), (a, ab)]), alone([(a,)]), alone([(b, ab)])]
    candidates = candidates_of(blocks, 1, top=3)
    assert candidates.counts == {a: 3, b: 1, ab: 3}
    found = {o: value(o, [a, b, ab], candidates) for o in OBJECTIVES}
    assert found == {"degree0": 7, "degree1": 11, "total": 11, "replay": 7}
    assert value("replay", [a, ab], candidates) == 5
    for objective in OBJECTIVES:
        assert {*optimum(objective, 2, candidates).nodes} == {a, ab}
    three = (((1, 1), (2, 1), (3, 1)),)
    longer = candidates_of([alone([(a, ab, *three)]), alone([(b,)])], 1, top=3)
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
    blocks = [alone([(a, ab)] * 3), alone([(b, bc)] * 2)]
    assert candidates_of(blocks, 1, top=1).counts == {a: 3, ab: 3}
    assert candidates_of(blocks, 1, top=2).counts == {a: 3, b: 2, ab: 3, bc: 2}
    assert candidates_of(blocks, 1, top=1).chains == Counter({(a, ab): 3})
    assert candidates_of([alone([(a, ((4, 1), (5, 1)))])], 1, top=2).counts == {a: 1}


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
