"""The sweep writes a line for every combination, and a plot."""

import csv
from dataclasses import replace

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.bench.jacobi_sweep import Sweep, measure, run
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.lab import write_corpus


def test_every_combination_is_measured(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    model = tmp_path / "model"
    tiny.causal_lm(257).save_pretrained(model)
    train_tokenizer(["ab"], 257).save_pretrained(model)
    arguments = [
        f"model={model}", f"source={corpus}", "prompts=2", "prompt_length=5", "max_new_tokens=6",
        "dtype=float32", f"out={tmp_path / 'sweep'}",
    ]  # fmt: skip
    run([*arguments, "block_sizes=[2,4]", "blocks=[1,3]", "spawn_ratios=[0.0,0.5]"])
    lines = list(csv.DictReader((tmp_path / "sweep" / "sweep.csv").open()))
    assert len(lines) == 8
    assert all(float(line["tokens per forward"]) >= 1 for line in lines)
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 2000
    with pytest.raises(ValueError, match=r"blocks=\[0\] is not allowed"):
        run([*arguments, "blocks=[0]"])


def test_answers_end_at_the_end_token(tmp_path, monkeypatch):
    model, tokenizer = tiny.causal_lm(257), train_tokenizer(["ab"], 257)
    prompts = [tokenizer("ab")["input_ids"]]
    (answer,) = PlainSampler(model, tokenizer).generate(prompts, SamplingParams(8, 0))
    model.generation_config.eos_token_id = answer.token_ids[1]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    sweep = Sweep(model=str(tmp_path), prompts=1, max_new_tokens=8, dtype="float32")
    plain = load(sweep.model, sampler=["method=plain"], dtype="float32")
    lengths, generate = [], JacobiMRSampler.generate

    def watched(*given):
        (result,) = generate(*given)
        lengths.append(len(result.token_ids))
        return [result]

    monkeypatch.setattr(JacobiMRSampler, "generate", watched)
    for ignore in (False, True):
        measure(replace(sweep, ignore_eos=ignore), plain, prompts, 4, 1, 0.5)
    assert lengths == [answer.token_ids.index(answer.token_ids[1]) + 1, 8]
