"""Logits that predict the next token (Dream): text by a plain implementation, and drafts of it."""

import pytest

from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import chain_graph
from tests.support.denoising import PROMPTS, SEEDS, L, V, denoise, network, reference, spiffy
from tests.support.results import ids

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
RULES = [{}, {"tokens_per_step": 2}, {"threshold": 0.5}]


def expected(model, rule, shifted):
    rule = {{"tokens_per_step": "S"}.get(key, key): value for key, value in rule.items()}
    return [reference(model, p, NEW, "bidirectional", shifted=shifted, **rule) for p in PROMPTS]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_greedy_text_is_that_of_a_plain_implementation(rule, shifted):
    """A batch of ragged prompts, whose blocks begin and end in different passes, and alone."""
    model = network(scale=1.5)
    sampler = denoise(model, "bidirectional", shifted=shifted, **rule)
    found = ids(sampler.generate(PROMPTS, GREEDY))
    assert found == expected(model, rule, shifted)
    assert [ids(sampler.generate([p], GREEDY))[0] for p in PROMPTS] == found
    assert found != expected(model, rule, not shifted)  # negative control


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", [*RULES, {"order": "random"}], ids=str)
def test_drafts_change_no_token(rule, temperature):
    model, S = network(scale=1.5), rule.get("tokens_per_step", 1)
    graph = chain_graph(L, None if "threshold" in rule else S, 3)
    params = SamplingParams(max_new_tokens=NEW, temperature=temperature, top_k=8)
    rule = rule | {"shifted": True}
    plain = denoise(model, "bidirectional", **rule).generate(PROMPTS, params, seeds=SEEDS)
    drafted = spiffy(model, "bidirectional", graph, **rule)
    found = drafted.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) == ids(plain)
    passes = [sum(r.stats.target_passes for r in results) for results in (found, plain)]
    assert passes[0] <= passes[1]


def test_a_block_causal_model_has_no_token_before_its_block():
    with pytest.raises(ValueError, match=r"shifted=true .*bidirectional") as error:
        denoise(network(), "block_causal", shifted=True)
    assert "\n" not in str(error.value)


def test_a_chain_needs_no_calibration():
    assert chain_graph(L, 1, 2).nodes == (((1, 1),), ((1, 1), (2, 1)))
    assert chain_graph(8, 2, 9).nodes[-1] == tuple((i, 1) for i in range(1, 7))
    assert chain_graph(L, None, 9).tokens_per_step is None
    with pytest.raises(ValueError, match="chain:0"):
        chain_graph(V, 1, 0)
