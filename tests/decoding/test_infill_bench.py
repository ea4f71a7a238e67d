import csv
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.infill_bench import InfillBench, entropy, hide, measure, perplexity, report
from decoding.params import Result, Stats
from tests.support import tiny


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory):
    return InfillBench(
        model=str(lab.fit("asarm_joint")),
        judge=str(lab.runs / "ar_target" / "export"),
        source=str(lab.corpus),
        samples=3,
        length=12,
        hidden=0.75,
        block_sizes=(2, 3),
        batch_size=2,
        dtype="float32",
        out=str(tmp_path_factory.mktemp("bench")),
    )


@pytest.mark.filterwarnings("ignore:block_size=")
def test_the_table(bench, capsys):
    report(bench, measure(bench))
    assert "Welch's t-test" in capsys.readouterr().out
    lines = list(csv.DictReader((Path(bench.out) / "infill.csv").open()))
    names = [(line["draft"], line["k"]) for line in lines]
    assert names[0] == ("sequential", "")
    assert len(names) == len(set(names)) == 7
    assert lines[0]["calls"] == "9.00 ± 0.00"
    assert lines[0]["p (entropy)"] == ""
    assert all(float(line["calls / sequential"]) <= 1 for line in lines)


def test_hidden_places_follow_the_seed(bench):
    windows = [{"prompt_ids": list(range(12))}] * 2
    hidden = hide(bench, windows)
    assert [ids.count(None) for ids in hidden] == [9, 9]
    assert hidden == hide(bench, windows)
    assert hidden[0] != hidden[1]


def test_metrics_by_hand():
    assert entropy([1, 2, 3, 4]) == pytest.approx(2)
    assert entropy([1, 1]) == 0
    model = tiny.causal_lm(4, scale=0.0)
    result = Result("abcd", [], "length", Stats())
    assert perplexity(model, tiny.tokenizer(4), result) == pytest.approx(4)


def test_a_model_that_fills_no_holes_is_refused(lab):
    model = f"model={lab.runs / 'ar_target' / 'export'}"
    command = [sys.executable, "-m", "decoding.infill_bench", model, f"judge={model[6:]}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "does not fill holes" in done.stderr
