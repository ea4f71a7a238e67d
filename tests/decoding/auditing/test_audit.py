"""The audit passes right programs, finds wrong ones, and says with which power."""

import sys

import numpy as np
import pytest
import torch
from scipy import stats

from decoding.audit import Audit, measure, run
from decoding.auditing import controls
from decoding.auditing.controls import drawn
from decoding.auditing.reference import (
    ALPHA,
    PROMPT,
    VOCABULARY,
    Enumerator,
    chi_square,
    enumerate_answers,
    exact_distribution,
    index_of,
    tiny_model,
)
from decoding.engine.params import SamplingParams
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

AUDIT = Audit(program="x:y", samples=1500)


def test_the_exact_distribution_is_that_of_the_tests():
    """Against the enumeration token by token that the samplers' own tests use."""
    model = tiny_model(0)
    params = SamplingParams(max_new_tokens=2, temperature=0.7)
    expected = tiny.plain_distribution(model, [*PROMPT], params)
    found = exact_distribution(model, PROMPT, 2, 0.7)
    assert found.sum() == pytest.approx(1, abs=1e-6)
    for answer, p in expected.items():
        assert found[index_of([*answer])] == pytest.approx(p, abs=1e-6)
    assert found.max() < 0.6  # far from one answer
    assert found.min() < 0.1 / len(found)  # and from uniform


def test_an_enumeration_walks_every_path_once():
    def program(r):
        first = r.categorical([0.5, 0.0, 0.5])
        return [first, 1 if first == 0 or r.accept(0.25) else 0]

    found = enumerate_answers(program, 36)
    expected = {index_of([0, 1]): 0.5, index_of([2, 1]): 0.125, index_of([2, 0]): 0.375}
    assert {i: p for i, p in enumerate(found.tolist()) if p} == expected
    sure = Enumerator()
    assert sure.accept(1.0)
    assert not sure.accept(-0.5)
    assert not sure.next_path()


@pytest.mark.parametrize("way", [lambda control: control, drawn], ids=["enumerated", "drawn"])
def test_controls(way):
    assert measure(way(controls.RIGHT), AUDIT).lossless
    for control in controls.WRONG.values():
        found = measure(way(control), AUDIT)
        assert not found.lossless
        assert found.distance > 0.02


def test_the_stated_power_holds():
    """A distribution at the stated distance is found nearly always, the right one hardly ever."""
    exact = torch.full((16,), 1 / 16, dtype=torch.double)
    rng, n = np.random.default_rng(0), 2000
    far = chi_square(rng.integers(0, 16, n).tolist(), exact).found
    assert 0.03 < far < 0.1
    wrong = exact.numpy().copy()
    wrong[:8] += far / 8
    wrong[8:] -= far / 8
    failed = {
        name: sum(chi_square(rng.choice(16, n, p=p).tolist(), exact).p < ALPHA for _ in range(200))
        for name, p in (("right", exact.numpy()), ("wrong", wrong))
    }
    assert failed["wrong"] >= 190
    assert failed["right"] <= 2


def test_rare_answers_are_pooled():
    exact = torch.tensor([0.9, 0.098, 0.001, 0.001], dtype=torch.double)
    answers = [0] * 900 + [1] * 98 + [2] * 2
    verdict = chi_square(answers, exact)
    counts = stats.chisquare([900, 98 + 2], [900, 100])
    assert verdict.p == pytest.approx(counts.pvalue)
    assert verdict.samples == 1000


def ours(model, prompt, *, seed, max_new_tokens, temperature):
    """This project's speculative sampler, by another tiny drafter."""
    drafter = tiny.causal_lm(VOCABULARY + 2, seed=1).float()
    sampler = DeerSampler(
        model,
        tiny.tokenizer(VOCABULARY),
        drafter,
        block_size=2,
        mask_id=VOCABULARY,
        sep_id=VOCABULARY + 1,
    )
    params = SamplingParams(max_new_tokens, temperature, seed=seed, verify="rejection")
    return sampler.generate([prompt], params)[0].token_ids


def many(path, prompt, *, seeds, max_new_tokens):
    """Plain decoding of a model that it loads by itself, all answers in one call."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    sampler = PlainSampler(model, tiny.tokenizer(VOCABULARY))
    params = SamplingParams(max_new_tokens, 1.0, verify="rejection")
    return [
        prompt + r.token_ids for r in sampler.generate([prompt] * len(seeds), params, seeds=seeds)
    ]


def greedy(model, prompt, *, generator, max_new_tokens, temperature):
    """Wrong: the most probable answer, whatever the generator."""
    return model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=max_new_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "right"), [(ours, True), (many, True), (greedy, False)])
def test_programs_of_every_form(program, right):
    found = measure(program, Audit(program="x:y", samples=400))
    assert found.lossless == right
    assert found.samples == 400


MODULE = """
from decoding.auditing.controls import RIGHT as right, WRONG, drawn

wrong = WRONG["typical"]
seeded = drawn(right)


def nothing(model, prompt, *, randomness):
    return [0]


def fails(model, prompt, *, randomness):
    raise KeyError("no such thing")


def without(model, prompt):
    return [0, 1]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "programs_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield "programs_of_a_user"
    sys.modules.pop("programs_of_a_user", None)


def test_the_command(module, capsys):
    run([f"{module}:right"])
    said = capsys.readouterr().out
    assert said.count("control, ") == 4
    assert "has plain decoding's distribution, as far as this audit can see" in said
    with pytest.raises(ValueError, match="wrong does not have plain decoding's distribution"):
        run([f"program={module}:wrong", "controls=false"])
    assert "by enumeration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{}:nothing", r"the program returns \[0\], and not 2 token ids"),
        ("{}:fails", "the program fails: KeyError: 'no such thing'"),
        ("{}:without", "must have a parameter randomness or generator or seed or seeds"),
        ("{}:absent", "cannot be imported"),
        ("no_such_module:f", "cannot be imported"),
        ("{}", "key=value"),
    ],
)
def test_bad_input(module, argument, message):
    with pytest.raises(ValueError, match=message) as error:
        run([argument.format(module), "controls=false"])
    assert "\n" not in str(error.value)


def test_too_few_samples_to_tell(module):
    with pytest.raises(ValueError, match=r"this audit cannot tell.*Raise samples=100"):
        run([f"{module}:seeded", "samples=100", "temperature=0.05"])


def test_probabilities_are_normalised_as_generators_do():
    found = enumerate_answers(lambda r: [r.categorical([1.0, 3.0])], VOCABULARY)
    assert found.tolist()[:2] == [0.25, 0.75]
