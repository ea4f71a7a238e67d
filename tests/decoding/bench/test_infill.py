import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpora.benchmarks import Problem
from data.text.prompts import heldout_prompts
from data.text.tokenizer import train_tokenizer
from decoding.bench.infill import (
    InfillBench,
    filling,
    hide,
    measure,
    report,
    rouge,
    summary,
    ways,
)
from decoding.bench.judge import Judge
from decoding.bench.scores import scorer
from decoding.bench.text import Bench
from decoding.engine.params import Result, Stats
from decoding.loading import load, load_tokenizer
from decoding.samplers.asarm import AsarmSampler
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("forked")


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
        nodes=(4,),
        batch_size=2,
        dtype="float32",
        out=str(tmp_path_factory.mktemp("bench")),
    )


@pytest.mark.filterwarnings("ignore:block_size=")
def test_the_table(bench, capsys):
    report(bench, measure(bench), Path(bench.out))
    assert "Welch's t-test" in capsys.readouterr().out
    lines = list(csv.DictReader((Path(bench.out) / "infill.csv").open()))
    names = [(line["draft"], line["k"]) for line in lines]
    assert names[0] == ("sequential", "")
    assert len(names) == len(set(names)) == 9
    assert ("assd_fused, trees of 4", "3") in names
    assert lines[0]["calls"] == "9.00 ± 0.00"
    assert lines[0]["p (entropy)"] == ""
    assert all(float(line["calls / sequential"]) <= 1 for line in lines)


@pytest.mark.filterwarnings("ignore:block_size=")
def test_samplers_that_differ_by_a_knob(bench, tmp_path):
    knobs = ("tolerance=0", "tolerance=0.5")
    two = dataclasses.replace(bench, knobs=knobs, block_sizes=(3,), nodes=(), out=str(tmp_path))
    with pytest.raises(ValueError, match="lossy=true"):
        measure(two)
    report(two, measure(dataclasses.replace(two, lossy=True)), tmp_path)
    lines = list(csv.DictReader((tmp_path / "infill.csv").open()))
    drafts = ["assd", "assd_ngram", "assd_fused"]
    lossy = [f"{d} (lossy: tolerance=0.5)" for d in drafts]
    assert [line["draft"] for line in lines] == ["sequential", *drafts, "sequential", *lossy]
    assert [line["knob"] for line in lines] == [knobs[0]] * 4 + [knobs[1]] * 4
    assert all(float(line["ms a pass"]) > 0 for line in lines)


def test_the_cache_is_a_knob(bench):
    first = load(bench.model)
    kept, whole = (ways(bench, first, f"cache={c}")[0].sampler for c in ("true", "false"))
    assert (kept.cache, whole.cache) == (True, False)
    assert kept.target is whole.target is first.target


def test_hidden_positions_follow_the_seed(bench):
    windows = [list(range(12))] * 2
    hidden = hide(bench, windows, None)
    assert [ids.count(None) for ids in hidden] == [9, 9]
    assert hidden == hide(bench, windows, None)
    assert hidden[0] != hidden[1]


def test_a_hidden_middle(bench):
    middle = dataclasses.replace(bench, hide="middle", hidden=0.5)
    hidden = hide(middle, [list(range(8)), list(range(5)), [7]], None)
    assert hidden == [[0, 1, None, None, None, None, 6, 7], [0, None, None, 3, 4], [None]]
    with pytest.raises(
        ValueError,
        match=r"unknown hide 'sides'.* Choose from \['lines', 'middle', 'random', 'suffix'\]",
    ):
        dataclasses.replace(bench, hide="sides")


def test_a_hidden_suffix_leaves_the_prefix(bench):
    """Table 9: 128 of 512 tokens are the prompt, so three quarters are hidden."""
    suffix = dataclasses.replace(bench, hide="suffix", hidden=0.75)
    assert hide(suffix, [list(range(8)), [5, 6]], None) == [[0, 1] + [None] * 6, [None, None]]


@pytest.mark.filterwarnings("ignore:block_size=")
def test_packed_windows_and_a_choice_of_ways(bench, tmp_path):
    """Lines of 3 words are too short for windows of 12 tokens; packed they are not."""
    source = tmp_path / "lines.jsonl"
    rows = [{"id": f"a{i}", "text": f"return value for {i}"} for i in range(400)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = dataclasses.replace(
        bench, source=str(source), packed=True, drafts=("sequential",), block_sizes=(3,), trials=2
    )
    rows = measure(few)
    assert [(row.name, row.nodes) for row in rows] == [("sequential", None), ("assd_fused", 4)]
    assert [len(row.calls) for row in rows] == [6, 6]
    assert len({*rows[0].perplexity}) == 6  # a trial draws anew
    line = summary(rows[1])
    assert line["calls / sequential"] == pytest.approx(sum(rows[1].calls) / 54, abs=1e-3)
    assert line["calls / sequential ±"] > 0
    assert summary(rows[0])["calls / sequential ±"] == 0
    with pytest.raises(ValueError, match="packed windows"):
        measure(dataclasses.replace(few, samples=10**6))
    with pytest.raises(ValueError, match=r"draft 'asd'.*'assd'"):
        measure(dataclasses.replace(few, drafts=("asd",)))


def infilling(name, line):
    return {
        "task_id": name,
        "prompt": "def f(x):\n",
        "suffix": "\n    return value\n",
        "canonical_solution": line,
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        "entry_point": "f",
    }


@pytest.fixture
def problems(tmp_path):
    rows = [infilling("right", "    value = x"), infilling("wrong", "    value = 2")]
    file = tmp_path / "infilling.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_single_lines_of_programs(bench, problems, monkeypatch, capsys, tmp_path):
    """Table 2: holes of the solutions' lengths, every trial a program with its tests."""
    asked = []

    def knows_all(self, prompts, params, **options):
        asked.extend(prompts)
        whole = [re.sub("<hole.*>", x, p) for p, x in zip(prompts, SOLUTIONS)]
        stats = Stats(emitted=[9], target_passes=1)
        return [Result(text, [], "length", stats) for text in whole]

    monkeypatch.setattr(AsarmSampler, "generate", knows_all)
    code = dataclasses.replace(
        bench, source=problems, samples=2, trials=2, drafts=("sequential",), nodes=(),
        judge=None, execute="unsafe", out=str(tmp_path),
    )  # fmt: skip
    rows = measure(code)
    assert rows[0].passed == [True, False] * 2
    sizes = [len(load_tokenizer(bench.model)(x)["input_ids"]) for x in SOLUTIONS]
    assert asked[0] == f"def f(x):\n<hole:{sizes[0]}>\n    return value\n"
    report(code, rows, tmp_path)
    line = next(csv.DictReader((tmp_path / "infill.csv").open()))
    assert line["pass@1, %"].startswith("50.00 ± ")
    assert "perplexity" not in line
    assert "problems of infilling.jsonl" in " ".join(capsys.readouterr().out.split())
    unrun = measure(dataclasses.replace(code, execute=None))
    assert unrun[0].passed == []
    assert "execute=sandbox" in capsys.readouterr().out


SOLUTIONS = ["    value = x", "    value = 2"]


def test_what_was_filled_in_keeps_its_spaces():
    tokenizer = tiny.tokenizer(4)
    problem = Problem(id="1", benchmark="humaneval_infilling", turns=("a ",), suffix=" b")
    result = Result("a   c b", [2], "length", Stats())
    assert filling(problem, result, tokenizer) == "  c"
    assert filling(problem, dataclasses.replace(result, text="a c  b"), tokenizer) == "c "
    # A tokenizer that does not keep the given text: the tokens alone.
    assert filling(problem, dataclasses.replace(result, text="ac b"), tokenizer) == "c"


def test_the_bench_of_continuations_refuses_problems_of_infilling(problems):
    with pytest.raises(ValueError, match=r"decoding\.bench\.infill"):
        scorer(Bench(model="x", source=problems))


def test_programs_are_for_problems_of_infilling(bench, problems):
    with pytest.raises(ValueError, match="'suffix'"):
        measure(dataclasses.replace(bench, execute="unsafe"))
    with pytest.raises(ValueError, match=r"2 problems.*samples=3"):
        measure(dataclasses.replace(bench, source=problems, samples=3))


def test_hidden_lines(bench):
    """Infill 1/5 and 3/5 of Table 3, a sentence a line."""
    tokenizer = train_tokenizer(["ab\n c"], 259)
    ids = tokenizer("ab\nab\n ab\nab\nab\n")["input_ids"]
    for share, left in [(0.2, "ab\nab\n|ab\nab\n"), (0.6, "ab\n|ab\n")]:
        lines = dataclasses.replace(bench, hide="lines", hidden=share)
        [hidden] = hide(lines, [ids], tokenizer)
        first, last = hidden.index(None), len(hidden) - hidden[::-1].index(None)
        assert set(hidden[first:last]) == {None}
        assert left == "|".join(map(tokenizer.decode, (hidden[:first], hidden[last:])))


@pytest.mark.filterwarnings("ignore:block_size=")
def test_a_middle_is_compared_with_the_original(bench, monkeypatch):
    middle = dataclasses.replace(bench, hide="middle", block_sizes=(3,))
    rows = measure(middle)
    line = summary(rows[0])
    assert [line[f"ROUGE-{x}"].count("±") for x in (1, 2, "L")] == [1, 1, 1]
    assert all(max(scores) < 100 for row in rows for scores in row.rouge)

    tokenizer = load_tokenizer(bench.model)
    found = heldout_prompts(bench.source, tokenizer, bench.samples, bench.length)
    windows = {(*w["prompt_ids"][:1], *w["prompt_ids"][10:]): w["prompt_ids"] for w in found}

    def knows_all(self, prompts, params, **options):
        there = [windows[p[0], *p[10:]] for p in prompts]
        stats = Stats(emitted=[9], target_passes=1)
        return [Result(tokenizer.decode(w), w[1:10], "length", stats) for w in there]

    monkeypatch.setattr(AsarmSampler, "generate", knows_all)
    assert {scores for row in measure(middle) for scores in row.rouge} == {(100.0,) * 3}


def test_other_texts_than_it_can_fill_are_refused(bench):
    with pytest.raises(ValueError, match="subset='x'"):
        measure(dataclasses.replace(bench, subset="x"))
    with pytest.raises(ValueError, match="'test'"):
        measure(dataclasses.replace(bench, split="test"))


def test_rouge_by_hand():
    """Of 'a b c d' and 'a x b c': three words, one pair of two in common, 'a b c' in order."""
    assert rouge("a b c d", "A  x b, c!") == pytest.approx((75, 100 / 3, 75))
    assert rouge("", "a b") == (0, 0, 0)


def test_metrics_by_hand():
    model = tiny.causal_lm(4, scale=0.0)
    judge = Judge(model, tiny.tokenizer(4))
    assert judge.perplexity("abcd") == pytest.approx(4)
    assert math.isnan(judge.perplexity("a"))
    texts = ("abcd", "aabb", "aaaa")
    assert [judge.entropy(text) for text in texts] == pytest.approx([2, 1, 0], abs=1e-12)
    short = tiny.causal_lm(4)
    short.config.max_position_embeddings = 8
    judge = Judge(short, tiny.tokenizer(4))
    assert judge.perplexity("abcdabcd" + "a" * 20) == judge.perplexity("abcdabcd")


@pytest.mark.slow
def test_a_model_that_fills_no_holes_is_refused(lab):
    model = f"model={lab.runs / 'ar_target' / 'export'}"
    command = [sys.executable, "-m", "decoding.bench.infill", model, f"judge={model[6:]}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "does not fill holes" in done.stderr
