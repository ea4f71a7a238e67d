"""Figures of the text bench by hand: rates, speed-ups and their standard errors."""

import random
from statistics import stdev
from types import SimpleNamespace

import pytest
import torch

from decoding.bench.rows import median_error, on_screen, ratio_error
from decoding.bench.text_report import TextRow, conclusion, summary
from decoding.engine.params import Result, SamplingParams, Stats


def row(lengths, seconds, plain=None, batch=1, passes=None):
    passes = passes or lengths
    results = [
        Result("", [7] * n, "eos", Stats(emitted=[1] * k, target_passes=k))
        for n, k in zip(lengths, passes)
    ]
    params = SamplingParams(temperature=1.0)
    target = torch.nn.Linear(1, 1)
    target.dtype = torch.float32
    sampler = SimpleNamespace(target=target)
    return TextRow("x", sampler, params, batch, plain, results, seconds, "same distribution")


def test_the_speed_up_is_of_tokens_a_second():
    plain = row([10, 10, 10], [1.0, 1.0, 1.0])
    # As fast as plain: one token costs what it costs there, however long the answers are.
    assert row([5, 10, 20], [0.5, 1.0, 2.0], plain).speedups == [1, 1, 1]
    found = row([20, 10, 5], [1.0, 0.5, 1.0], plain)
    assert found.speedups == [2, 2, 0.5]
    line = summary(found)
    assert line["speed-up"] == 2
    assert line["tokens/s"] == round(35 / 2.5, 1)
    assert summary(plain)["speed-up"] == 1
    # Seconds over seconds would call the same sampler 1, 2 and 1 times as fast.
    assert [b / a for a, b in zip(found.seconds, plain.seconds)] != found.speedups


def test_batches_are_rated_together():
    lengths = [10, 2, 6, 4, 1, 1, 3, 9, 7]  # eight of them for two places, and one is left
    plain = row(lengths, [2.0, 3.0], batch=2)
    assert row(lengths, [1.0, 1.0], plain, batch=2).speedups == [2, 3]


def test_the_acceptance_length_is_of_all_tokens():
    line = summary(row([8, 2], [1.0, 1.0], passes=[2, 2]))
    assert line["acceptance length"] == 2.5
    assert line["acceptance length ±"] > 0


def test_standard_errors_shrink_with_prompts():
    draw = random.Random(0)
    values = [draw.gauss(2, 0.5) for _ in range(400)]
    lengths = [draw.randrange(20, 40) for _ in range(400)]
    # Of the median of normal draws: 1.2533 standard deviations over the root of their number.
    assert median_error(values) == pytest.approx(1.2533 * stdev(values) / 20, rel=0.2)
    assert median_error(values[:16]) > 2 * median_error(values)
    assert ratio_error(lengths, [10] * 400) == pytest.approx(stdev(lengths) / 10 / 20, rel=0.1)
    assert ratio_error([2 * n for n in lengths], lengths) == 0  # the same of each prompt
    assert median_error([1.5] * 9) == 0


def test_one_prompt_has_no_standard_error():
    assert median_error([1.0]) == ratio_error([3], [2]) == ""
    shown = on_screen(summary(row([3], [1.0], passes=[2])))
    assert shown["acceptance length"] == 1.5
    line = {"x": 1.25, "x ±": 0.125, "temperature": 0}
    assert on_screen(line) == {"x": "1.25 ± 0.12", "T": 0}


def test_scores_are_a_share_with_its_error():
    found = row([3] * 4, [1.0] * 4)
    assert "pass@1" not in summary(found)
    found.metric, found.scores = "pass@1", [True, False, False, False]
    line = summary(found)
    assert line["pass@1"] == 0.25
    assert line["pass@1 ±"] == pytest.approx((0.25 * 0.75 / 4) ** 0.5, abs=1e-4)


def test_the_conclusion_in_words():
    plain = row([10, 10], [1.0, 1.0])
    drawn = row([10, 10], [0.5, 0.4], plain)
    assert conclusion(drawn) == "x at T=1: the distribution of plain decoding, 2.2 times as fast"
    drawn.guarantee = "same text"
    assert conclusion(drawn) == "x at T=1: the same text as plain decoding, 2.2 times as fast"
    drawn.results[1] = Result("", [8], "eos", drawn.results[1].stats)
    assert "the same text as plain decoding in 1/2 prompts, " in conclusion(drawn)
    slow = row([10, 10], [1.5, 1.25], plain)
    assert conclusion(slow).endswith("0.7 times as fast: plain decoding is faster")
