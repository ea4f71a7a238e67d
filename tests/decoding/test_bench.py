import csv
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.bench import Bench, explain_divergence, margin, measure, report, summary


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory):
    return Bench(
        model=str(lab.runs / "deer_stage2" / "export"),
        also=(str(lab.runs / "deer_stage1" / "export"),),
        source=str(lab.corpus),
        prompts=3,
        prompt_length=8,
        max_new_tokens=12,
        dtype="float32",
        out=str(tmp_path_factory.mktemp("bench")),
    )


def test_table_csv_and_picture(bench, capsys):
    rows, prompts = measure(bench)
    report(bench, rows, prompts)
    shown = capsys.readouterr().out
    assert "acceptance length" in shown
    assert "first difference" not in shown
    lines = list(csv.DictReader((Path(bench.out) / "bench.csv").open()))
    names = {(line["sampler"], line["temperature"]) for line in lines}
    assert {("plain", "0.0"), ("transformers generate", "1.0"), ("deer", "0.0")} <= names
    assert {("deer, block", "1.0"), ("deer (deer_stage1), coupled", "1.0")} <= names
    same = [line for line in lines if line["sampler"] in ("deer", "deer, coupled")]
    assert all(line["identical to plain"] == "3/3" for line in same)
    assert (Path(bench.out) / "accepted.png").stat().st_size > 5000
    plain = next(r for r in rows if r.name == "plain")
    assert summary(plain, plain)["target passes"] == 3 * 12


def test_a_difference_is_reported(bench, capsys):
    rows, prompts = measure(bench)
    plain, other = rows[0], rows[2]
    other.results[1].token_ids[4] += 1
    explain_divergence(other, plain, prompts, bench.seed)
    assert "prompt 1 at token 4" in capsys.readouterr().out
    assert margin(plain, prompts[1] + plain.results[1].token_ids[:4], bench.seed + 1) > 0
    assert summary(other, plain)["identical to plain"] == "2/3"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model=/no/where", "no model at '/no/where'"),
        ("modle=x", "Did you mean 'model'"),
        ("prompts=many", "not of type int"),
        ("max_new_tokens=0", "max_new_tokens=0 is not allowed"),
    ],
)
def test_a_mistake_is_one_line_without_traceback(lab, argument, message):
    model = f"model={lab.runs / 'deer_stage2' / 'export'}"
    arguments = [argument] if argument.startswith("mod") else [model, argument]
    done = subprocess.run(
        [sys.executable, "-m", "decoding.bench", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
