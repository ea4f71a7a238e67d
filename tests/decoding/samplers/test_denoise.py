"""Masked diffusion decoding against a plain implementation, its distribution, and mistakes."""

import math
import re
from collections import Counter

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.masked.unmasking import Unmasking, judge, next_state, position_order
from decoding.samplers.denoise import DenoiseSampler
from tests.support import tiny
from tests.support.denoising import KINDS, PROMPTS, L, V, denoise, network, reference
from tests.support.results import ids

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
RULES = [
    {},
    {"tokens_per_step": 2},
    {"tokens_per_step": 4},
    {"threshold": 0.5},
    {"threshold": 0.9},
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("attention", KINDS)
def test_greedy_is_the_public_samplers_rule(attention, rule):
    model = network()
    options = {"S": rule.get("tokens_per_step", 1), "threshold": rule.get("threshold")}
    expected = [reference(model, p, 12, attention, **options) for p in PROMPTS]
    assert len({tuple(x) for x in expected}) == len(PROMPTS)
    sampler = denoise(model, attention, **rule)
    assert ids(sampler.generate(PROMPTS, GREEDY)) == expected
    assert [ids(sampler.generate([p], GREEDY))[0] for p in PROMPTS] == expected


class LeftToRight(DenoiseSampler):
    """Wrong: decides the leftmost masked tokens."""

    def judge(self, batch, logits, params, ahead=0):
        scores, confidence = super().judge(batch, logits, params)
        return scores, -torch.arange(confidence.shape[1]).expand_as(confidence).double()


@pytest.mark.parametrize("attention", KINDS)
def test_another_order_fails_the_same_test(attention):
    model = network()
    expected = [reference(model, p, 12, attention) for p in PROMPTS]
    wrong = denoise(model, attention, LeftToRight)
    assert ids(wrong.generate(PROMPTS, GREEDY)) != expected


@pytest.mark.parametrize("attention", KINDS)
def test_guidance(attention):
    model = network()
    expected = [reference(model, p, 8, attention, guidance=0.7) for p in PROMPTS]
    params = SamplingParams(max_new_tokens=8, temperature=0)
    sampler = denoise(model, attention, guidance=0.7)
    assert ids(sampler.generate(PROMPTS, params)) == expected
    assert ids(denoise(model, attention).generate(PROMPTS, params)) != expected


@pytest.mark.parametrize("rule", [{}, {"order": "random"}, {"threshold": 0.6}], ids=str)
@pytest.mark.parametrize("attention", KINDS)
def test_a_row_depends_on_its_own_seed_only(attention, rule):
    sampler = denoise(network(), attention, **rule)
    params = SamplingParams(max_new_tokens=8, temperature=0.8, top_k=6)
    together = ids(sampler.generate(PROMPTS, params, seeds=[4, 5, 6, 7]))
    alone = [
        ids(sampler.generate([p], params, seeds=[s]))[0] for p, s in zip(PROMPTS, (4, 5, 6, 7))
    ]
    assert together == alone
    assert together != ids(sampler.generate(PROMPTS, params, seeds=[8, 9, 10, 11]))


def distribution(model, prompt, order):
    """{answer: probability} of one block of two tokens, one decided a step, at temperature 1."""
    found = Counter()

    def probs(state):
        text = torch.tensor([[*prompt, *state]])
        seen = torch.ones(1, 1, len(text[0]), len(text[0]), dtype=torch.bool)
        with torch.no_grad():
            logits = model(text, attention_mask=seen).logits[0, len(prompt) :]
        return logits.softmax(-1), logits[:, :V].softmax(-1)

    whole, first = probs([V, V])
    for a in range(V):
        for b in range(V):
            weight = float(first[0, a] * first[1, b])
            if order == "random":
                shares = (0.5, 0.5)
            else:
                shares = (1.0, 0.0) if whole[0, a] > whole[1, b] else (0.0, 1.0)
            if shares[0]:
                _, second = probs([a, V])
                for c in range(V):
                    found[a, c] += shares[0] * weight * float(second[1, c])
            if shares[1]:
                _, second = probs([V, b])
                for c in range(V):
                    found[c, b] += shares[1] * weight * float(second[0, c])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("order", ["confidence", "random"])
def test_keyed_noise_has_the_distribution_of_independent_draws(order):
    """Chi-square against the distribution that is summed over all outcomes of both steps."""
    model, n = network(scale=1.0), 3000
    sampler = denoise(model, "bidirectional", block_size=2, order=order)
    params = SamplingParams(max_new_tokens=2)
    found = Counter(
        tuple(r.token_ids) for r in sampler.generate([[3, 1]] * n, params, seeds=list(range(n)))
    )

    def chi_square(expected):
        big = {x: n * p for x, p in expected.items() if n * p >= 5}
        rest = n - sum(big.values())
        seen = sum(found[x] for x in big)
        terms = [(found[x] - e) ** 2 / e for x, e in big.items()]
        return (sum(terms) + (n - seen - rest) ** 2 / rest - len(terms)) / math.sqrt(2 * len(terms))

    assert sum(distribution(model, [3, 1], order).values()) == pytest.approx(1)
    assert abs(chi_square(distribution(model, [3, 1], order))) < 4
    other = {"confidence": "random", "random": "confidence"}[order]
    assert chi_square(distribution(model, [3, 1], other)) > 10


def test_a_step_by_hand():
    state = torch.tensor([[V, 3, V, V]])
    scores = torch.full((1, 4, V + 1), -9.0)
    for position, token in enumerate((5, 6, 7, 8)):
        scores[0, position, token] = 1
    confidence = torch.tensor([[0.6, 0.99, 0.9, 0.7]])
    steps = {
        Unmasking(): [V, 3, 7, V],
        Unmasking(2): [V, 3, 7, 8],
        Unmasking(4): [5, 3, 7, 8],
        Unmasking(threshold=0.65): [V, 3, 7, 8],
        Unmasking(threshold=0.95): [V, 3, 7, V],
    }
    for rule, expected in steps.items():
        assert next_state(state, scores, confidence, V, rule).tolist() == [expected]
    assert position_order(confidence, state == V).tolist() == [[2, 3, 0, 1]]


def test_the_mask_is_never_chosen_and_counts_in_the_confidence():
    logits = torch.tensor([[[math.log(2.0), 0.0, math.log(5.0)]]])
    scores, confidence = judge(logits, None, 2, Unmasking(), GREEDY)
    assert scores.argmax(-1).tolist() == [[0]]
    assert confidence.item() == pytest.approx(2 / 8)


def test_noise_of_two_steps_and_positions_is_never_the_same():
    keys = [position * L + step for position in range(50) for step in range(L)]
    assert len({*keys}) == len(keys)
    noise = KeyedRandomness([0]).gumbel(torch.tensor([keys[:8]]), 3)
    assert len({*noise[0, :, 0].tolist()}) == 8


@pytest.mark.parametrize("attention", KINDS)
def test_an_answer_ends_with_its_first_end_token(attention):
    model = network()
    whole = ids(denoise(model, attention).generate(PROMPTS, GREEDY))
    sampler = denoise(model, attention)
    sampler.eos = frozenset({whole[0][5]})
    for answer, result in zip(whole, sampler.generate(PROMPTS, GREEDY)):
        n = answer.index(whole[0][5]) + 1 if whole[0][5] in answer else len(answer)
        assert result.token_ids == answer[:n]
        assert result.finish_reason == ("eos" if whole[0][5] in answer else "length")
        blocks = -(-n // L)
        assert result.stats.target_passes <= (blocks + 1) * L
    assert ids(sampler.generate(PROMPTS, SamplingParams(12, 0, ignore_eos=True))) == whole


@pytest.mark.parametrize("attention", KINDS)
def test_one_pass_a_step(attention):
    (result,) = denoise(network(), attention, tokens_per_step=2).generate([[1] * L], GREEDY)
    assert result.stats.target_passes == 6
    assert result.stats.emitted == [0, 4] * 3
    assert result.stats.acceptance_length == 2


def test_a_length_that_blocks_do_not_divide_is_rounded_and_said():
    sampler = denoise(network(), "bidirectional")
    with pytest.warns(UserWarning, match="max_new_tokens=10 .*block_size=4.* 12 "):
        (result,) = sampler.generate([[1, 2]], SamplingParams(10, 0))
    assert result.token_ids == reference(sampler.target, [1, 2], 12, "bidirectional")[:10]


MISTAKES = [
    ({"attention": "causal"}, r"attention='causal'"),
    ({"mask_id": 99}, r"mask_id=99 .*0 to 12"),
    ({"threshold": 0.9, "order": "random"}, r"threshold=0\.9 .*order=random"),
]


@pytest.mark.parametrize(("options", "named"), MISTAKES)
def test_a_mistake_is_one_line(options, named):
    with pytest.raises(ValueError, match=named) as error:
        denoise(network(), **{"attention": "bidirectional", **options})
    assert "\n" not in str(error.value)


REQUESTS = [
    ([1], {"repetition_penalty": 1.2}, r"repetition_penalty=1\.2"),
    ([1], {"verify": "rejection"}, r"verify='rejection' .*\['coupled'\]"),
    ([1], {"block_size": 8}, r"block_size=8 .*block_size=4"),
    ([1, V], {}, rf"mask token \({V}\)"),
    ([1], {"max_new_tokens": 512}, r"context of 512"),
]


@pytest.mark.parametrize(("prompt", "values", "named"), REQUESTS)
def test_a_wrong_request_is_one_line(prompt, values, named):
    with pytest.raises(ValueError, match=named):
        denoise(network(), "bidirectional").generate([prompt], SamplingParams(**values))


def test_text_in_text_out_and_streamed():
    sampler = denoise(network(), "block_causal")
    (result,) = sampler.generate(["abc"], GREEDY)
    assert re.fullmatch("[a-l]{12}", result.text)
    assert "".join(c.text for c in sampler.stream(["abc"], GREEDY)) == result.text


@pytest.mark.parametrize("attention", KINDS)
def test_bfloat16_runs(attention):
    sampler = denoise(network().bfloat16(), attention)
    assert [len(x) for x in ids(sampler.generate(PROMPTS, GREEDY))] == [12] * 4


@pytest.mark.parametrize("kind", list(tiny.CLASSES))
def test_every_class_follows_the_masks(kind):
    model = network(kind=kind)
    for attention in KINDS:
        (result,) = denoise(model, attention).generate([[3, 1, 4]], GREEDY)
        assert result.token_ids == reference(model, [3, 1, 4], 12, attention)
