"""The sweep writes a line for every combination, and a plot."""

import csv

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.bench.jacobi_sweep import run
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
