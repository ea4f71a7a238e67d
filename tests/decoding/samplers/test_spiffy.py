"""Spiffy's output is denoise's, token for token, for any draft graph."""

import json
import random

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.masked.block_evaluators import WholeTexts
from decoding.masked.draft_graph import DraftGraph, graph_of, read_graph
from decoding.samplers.spiffy import SpiffySampler
from tests.support.denoising import KINDS, PAPER, PROMPTS, SEEDS, L, V, denoise, network, spiffy
from tests.support.results import ids, passes

NEW = 12
CHAIN = graph_of(L, 1, [[(i, 1) for i in range(1, n + 1)] for n in range(1, L + 1)])
WRONG = graph_of(L, 1, [[(4, 9)], [(4, 9), (3, 8)], [(4, 9), (2, 7)]])
NOTHING = graph_of(L, 1, [])


def random_graph(seed, S=1, size=8):
    """A random valid graph: each node is a step from another one."""
    draw, nodes = random.Random(seed), [()]
    while len(nodes) <= size:
        parent = draw.choice(nodes)
        free = [i for i in range(1, L + 1) if i not in dict(parent)]
        if len(free) >= S:
            step = [(i, draw.choice((1, 1, 1, 2, 3))) for i in draw.sample(free, S)]
            node = tuple(sorted([*parent, *step]))
            nodes += [] if node in nodes else [node]
    return graph_of(L, S, nodes[1:])


GRAPHS = [CHAIN, PAPER, WRONG, NOTHING, *map(random_graph, range(3))]


def cases():
    """Every graph under one rate and kind, and every rate and kind under one graph."""
    for graph in GRAPHS:
        yield graph, {}
    for rule in ({"tokens_per_step": 2}, {"tokens_per_step": 4}, {"order": "random"}):
        yield random_graph(7, min(2, rule.get("tokens_per_step", 1))), rule
    for threshold in (0.3, 0.7, 0.9):
        yield graph_of(L, None, PAPER.nodes), {"threshold": threshold}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("attention", KINDS)
def test_the_text_is_that_of_denoise(attention, temperature):
    model = network().float()
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature)
    for graph, rule in cases():
        expected = denoise(model, attention, **rule).generate(PROMPTS, params, seeds=SEEDS)
        sampler = spiffy(model, attention, graph, **rule)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == ids(expected), (graph, rule)
        assert passes(found) <= passes(expected)
        one = sampler.generate(PROMPTS[2:3], params, seeds=SEEDS[2:3])
        assert ids(one) == ids(expected)[2:3]


class Careless(SpiffySampler):
    """Wrong: takes the first draft for the next state, without looking whether it is."""

    def draft_states(self, batch, params):
        self.drafted = super().draft_states(batch, params)
        return self.drafted

    def verify(self, batch, states, logits, params):
        if states.shape[1] > 1:
            batch.state.block = states[:, 1]
        super().verify(batch, states, logits, params)


@pytest.mark.parametrize("attention", KINDS)
def test_accepting_without_looking_fails_the_same_test(attention):
    model, params = network(), SamplingParams(max_new_tokens=NEW, temperature=0)
    expected = ids(denoise(model, attention).generate(PROMPTS, params))
    wrong = denoise(model, attention, Careless, graph=CHAIN)
    assert ids(wrong.generate(PROMPTS, params)) != expected


def test_it_drafts_in_one_way_only():
    params = SamplingParams(draft="ngram")
    with pytest.raises(ValueError, match=r"draft='ngram' .*one way only"):
        spiffy(network(), "block_causal", PAPER).generate(PROMPTS, params)


class Hasty(SpiffySampler):
    """Wrong: begins the next block without looking whether the one before ended as drafted."""

    def begin_next(self, batch, rows, logits, params):
        begun = (batch.state.block == self.mask_id).all(1) & (batch.state.step == 0)
        super().begin_next(batch, rows | begun, logits, params)


@pytest.mark.parametrize("attention", KINDS)
def test_the_next_block_after_another_end_fails_the_same_test(attention):
    model, params = network(), SamplingParams(max_new_tokens=NEW, temperature=0)
    expected = ids(denoise(model, attention).generate(PROMPTS, params))
    assert ids(spiffy(model, attention, PAPER).generate(PROMPTS, params)) == expected
    assert ids(denoise(model, attention, Hasty, graph=PAPER).generate(PROMPTS, params)) != expected


class StepBlind(SpiffySampler):
    """Wrong: the noise of a drafted state is that of the step at which the pass began."""

    def cycle(self, batch, params):
        self.step = batch.state.step
        return super().cycle(batch, params)

    def judge(self, batch, logits, params, ahead=0):
        now, batch.state.step = batch.state.step, self.step
        judged = super().judge(batch, logits, params)
        batch.state.step = now
        return judged


def test_the_noise_of_another_step_fails_the_same_test():
    model, params = network(scale=1.5), SamplingParams(max_new_tokens=NEW)
    expected = ids(denoise(model, "block_causal").generate(PROMPTS, params, seeds=SEEDS))
    right = spiffy(model, "block_causal", PAPER)
    assert ids(right.generate(PROMPTS, params, seeds=SEEDS)) == expected
    wrong = denoise(model, "block_causal", StepBlind, graph=PAPER)
    assert ids(wrong.generate(PROMPTS, params, seeds=SEEDS)) != expected


def first_pass(sampler, prompt, states):
    """Logits [M, L, V] of states of the block after a prompt of whole blocks."""
    rows, params = sampler.start(prompt)
    params = SamplingParams(max_new_tokens=2 * L, temperature=0)
    with torch.inference_mode():
        sampler.begin(rows, params)
        return rows.networks["target"].ask(rows, torch.tensor([states]))[0]


STATES = [[V, V, V, V], [5, V, V, V], [5, V, 2, V], [5, 9, 2, V]]


@pytest.mark.parametrize("attention", KINDS)
def test_drafts_have_the_logits_of_states_alone(attention):
    model, prompt = network(scale=1.0, layers=3), [2, 7, 1, 8]
    together, alone = spiffy(model, attention, PAPER), denoise(model, attention)
    found = first_pass(together, prompt, STATES)
    expected = torch.cat([first_pass(alone, prompt, [state]) for state in STATES])
    assert (found - expected).abs().max() < 1e-12
    # Negative control: attention of the other kind, in the same places.
    other = denoise(model, next(kind for kind in KINDS if kind != attention))
    assert (found[1:] - first_pass(other, prompt, STATES[1:])).abs().amax((1, 2)).min() > 1e-3


class Uncached(SpiffySampler):
    """Runs whole texts with block-causal attention too."""

    def network(self, batch):
        return WholeTexts(self.target, self.attention, self.block_size, self.mask_id)


def test_a_cached_block_is_the_block_in_its_final_state():
    """The keys of a finished block come from a pass over it, not from its last masked state."""
    model, params = network().float(), SamplingParams(max_new_tokens=5 * L, temperature=0)
    cached = spiffy(model, "block_causal", CHAIN).generate(PROMPTS, params)
    whole = denoise(model, "block_causal", Uncached, graph=CHAIN).generate(PROMPTS, params)
    assert ids(cached) == ids(whole)
    assert [r.stats.emitted for r in cached] == [r.stats.emitted for r in whole]


@pytest.mark.parametrize("rule", [{}, {"order": "random"}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_looks_at_nothing_is_guessed_at_once(temperature, rule):
    """Its logits do not depend on the state, so all drafts are right, noise included.

    The first block takes the pass that ranks and one more, which verifies the three masks that are
    left and evaluates the next block's first state, and so on.
    """
    model = network()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, seed=1)
    for attention in KINDS:
        (result,) = spiffy(model, attention, CHAIN, **rule).generate([[1] * L], params)
        assert result.stats.emitted == [0, 4, 4, 4]
        alone = spiffy(model, attention, CHAIN, next_block=False, **rule)
        assert alone.generate([[1] * L], params)[0].stats.emitted == [0, 4] * 3
    assert passes(denoise(model, "block_causal").generate([[1] * L], params)) == NEW


def test_guidance_is_speculated_on_in_texts():
    model, params = network(), SamplingParams(max_new_tokens=8, temperature=0)
    expected = ids(denoise(model, "block_causal", guidance=0.5).generate(PROMPTS, params))
    sampler = spiffy(model, "block_causal", PAPER, guidance=0.5)
    assert ids(sampler.generate(PROMPTS, params)) == expected


class TestGraph:
    def test_parents_of_figure_2(self):
        assert PAPER.nodes[3:] == (((1, 1), (3, 1)), ((1, 1), (2, 1), (3, 1)))
        assert PAPER.parents == [[0], [0], [1, 2], [1], [3, 4]]
        assert PAPER.levels == [1, 1, 2, 2, 3]

    def test_a_threshold_leads_from_any_smaller_state(self):
        graph = graph_of(L, None, PAPER.nodes)
        assert graph.parents[4] == [0, 1, 2, 3, 4]
        assert graph.levels == [1] * 5

    @pytest.mark.parametrize("graph", GRAPHS)
    def test_json_keeps_it(self, graph, tmp_path):
        file = tmp_path / "graph.json"
        file.write_text(json.dumps(graph.to_dict()))
        assert read_graph(str(file)) == read_graph(graph.to_dict()) == graph

    MISTAKES = [
        ({"nodes": (((1, 1), (2, 1)),)}, r"node 1 .*c11 c21.* no parent"),
        ({"nodes": (((1, 1),),) * 1025}, "over 1024 nodes"),
        ({"tokens_per_step": 2}, r"node 1 .*tokens_per_step=2"),
        ({"nodes": (((1, 1), (1, 2)),)}, r"node 1 .*c11 c12.* each position"),
        ({"nodes": (((5, 1),),)}, r"node 1 .*c51.* 1\.\.4"),
        ({"nodes": (((1, 0),),)}, r"node 1 .*c10.* 1\.\.4"),
    ]

    @pytest.mark.parametrize(("values", "named"), MISTAKES)
    def test_a_mistake_is_one_line(self, values, named):
        good = {"block_size": L, "tokens_per_step": 1, "nodes": (((1, 1),),)}
        assert DraftGraph(**good).levels == [1]
        with pytest.raises(ValueError, match=named) as error:
            DraftGraph(**{**good, **values})
        assert "\n" not in str(error.value)

    def test_files_that_are_no_graph(self, tmp_path):
        (tmp_path / "x.json").write_text("{}")
        with pytest.raises(ValueError, match="tokens_per_step"):
            read_graph(str(tmp_path / "x.json"))
        with pytest.raises(ValueError, match=r"y\.json"):
            read_graph(str(tmp_path / "y.json"))


MISTAKES = [
    ({"graph": graph_of(8, 1, [[(1, 1)]])}, r"block_size=8.* block_size=4"),
    ({"graph": graph_of(L, 1, [[(1, V + 1)]])}, rf"rank {V + 1}.* {V} "),
]


@pytest.mark.parametrize(("options", "named"), MISTAKES)
def test_a_mistake_is_one_line(options, named):
    with pytest.raises(ValueError, match=named) as error:
        spiffy(network(), "bidirectional", **{"graph": PAPER, **options})
    assert "\n" not in str(error.value)
