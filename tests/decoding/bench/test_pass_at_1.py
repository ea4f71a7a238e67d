"""pass@1 of known completions: a stub that writes them replaces the sampler."""

import csv
import json

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.bench import pass_at_1
from decoding.bench.pass_at_1 import (
    STOP,
    Problem,
    continuation,
    read_problems,
    run,
    within_function,
)
from decoding.engine.params import Result, Stats
from tests.support import tiny

TOKENIZER = train_tokenizer(["def add(a, b):\n    return a + b\n"], 300)
PROMPT = "def add(a, b):\n"
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
COMPLETIONS = {
    "right": "    return a + b\n",
    "right, and goes on": "    return a + b\n\nassert False\n",
    "wrong": "    return a - b\n",
    "leaves early": "    import sys\n    sys.exit(0)\n",
    "never ends": "    while True:\n        pass\n",
    "leaves at once": "return a + b\n",
}
PASSING = ["right", "right, and goes on"]


class Scripted:
    """Answers with the completion in the prompt's comment."""

    continues = True
    tokenizer = TOKENIZER

    def generate(self, prompts, params, *, seeds):
        assert params.stop == STOP
        assert len(seeds) == len(prompts)
        names = [TOKENIZER.decode(ids).partition("\n")[0][2:] for ids in prompts]
        ids = [TOKENIZER(COMPLETIONS[name])["input_ids"] for name in names]
        return [Result("", i, "eos", Stats(emitted=[2] * len(i))) for i in ids]


def row(name):
    return {"task_id": name, "prompt": f"# {name}\n{PROMPT}", "test": TEST, "entry_point": "add"}


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(json.dumps(row(name)) for name in COMPLETIONS) + "\n")
    return file


def arguments(problems, *others):
    return [f"problems={problems}", "execute=true", "cpu_seconds=1", f"out={problems.parent}/out",
            *others]  # fmt: skip


def results(problems):
    lines = (problems.parent / "out" / "pass_at_1.jsonl").read_text().splitlines()
    table = csv.DictReader((problems.parent / "out" / "pass_at_1.csv").open())
    return [json.loads(line) for line in lines], list(table)


def test_outcomes_share_and_error(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Scripted())
    run(arguments(problems, "model=scripted", "batch_size=4"))
    rows, (line,) = results(problems)
    assert [r["task_id"] for r in rows] == list(COMPLETIONS)
    outcomes = {r["task_id"]: r["outcome"] for r in rows}
    assert [name for name, x in outcomes.items() if x == "passed"] == PASSING
    assert outcomes["never ends"] == "timed out"
    assert "SystemExit" in next(r["error"] for r in rows if r["task_id"] == "leaves early")
    assert [line[k] for k in ("passed", "failed", "timed out")] == ["2", "3", "1"]
    assert float(line["pass@1"]) == pytest.approx(1 / 3, abs=1e-4)
    assert float(line["standard error"]) == pytest.approx((2 / 9 / 6) ** 0.5, abs=1e-4)
    assert line["tokens per forward"] == "2.0"


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_model_that_does_not_load_leaves_earlier_results(problems, monkeypatch, wrong):
    """Also if it is the second: the first is not run before both are loaded."""
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Scripted())
    run(arguments(problems, "model=scripted"))
    before, runs = (problems.parent / "out" / "pass_at_1.jsonl").read_bytes(), []

    def load(model, **options):
        if model == "TYPO":
            raise ValueError("no model at TYPO")
        return Scripted()

    monkeypatch.setattr(pass_at_1, "load", load)
    monkeypatch.setattr(pass_at_1, "execute", lambda *a: runs.append(a))
    names = ["scripted", "TYPO"] if wrong else ["TYPO", "scripted"]
    with pytest.raises(ValueError, match="TYPO"):
        run(arguments(problems, f"model={names[0]}", f"also=[{names[1]}]"))
    assert (problems.parent / "out" / "pass_at_1.jsonl").read_bytes() == before
    assert not runs


def test_a_run_that_is_stopped_leaves_earlier_results(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Scripted())
    run(arguments(problems, "model=scripted"))
    before = (problems.parent / "out" / "pass_at_1.jsonl").read_bytes()

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(pass_at_1, "execute", stop)
    with pytest.raises(KeyboardInterrupt):
        run(arguments(problems, "model=scripted"))
    assert (problems.parent / "out" / "pass_at_1.jsonl").read_bytes() == before


def test_models_of_any_method_side_by_side(problems, tmp_path):
    for seed in (0, 1):
        tiny.causal_lm(len(TOKENIZER), seed=seed).save_pretrained(tmp_path / f"model{seed}")
        TOKENIZER.save_pretrained(tmp_path / f"model{seed}")
    models = [str(tmp_path / f"model{seed}") for seed in (0, 1)]
    given = [f"model={models[0]}", f"also={models[1]}", "max_new_tokens=8"]
    run(arguments(problems, *given))
    plain, table = results(problems)
    assert [line["model"] for line in table] == models
    assert [line["passed"] for line in table] == ["0", "0"]
    run(arguments(problems, *given, "sampler=[method=jacobi_mr,block_size=4]"))
    assert results(problems)[0] == plain


@pytest.mark.parametrize(
    ("prompt", "text", "kept"),
    [
        (PROMPT, "    return 1\nprint(2)\n", "    return 1\n"),
        (PROMPT, "\n    x = 1\n\n    return x\n\n\n# end\n", "\n    x = 1\n\n    return x\n\n\n"),
        (PROMPT, "    return 1", "    return 1"),
        (PROMPT, "x = 1\n", ""),
        (PROMPT, "", ""),
        (PROMPT + "    return", " 1\n    # more\né = 1\n", " 1\n    # more\n"),
    ],
)
def test_a_completion_is_cut_where_it_leaves_the_function(prompt, text, kept):
    assert within_function(prompt, text) == kept
    stopped = text[: min((at for s in STOP if (at := text.find(s)) >= 0), default=None)]
    # Decoding that stops early loses nothing that is kept but the last line's end.
    assert within_function(prompt, stopped) in (kept, kept.removesuffix("\n"))


def test_a_continuation_keeps_its_first_space():
    prompt, answer = (TOKENIZER(text)["input_ids"] for text in ("def f():\n", "    return 1"))
    assert continuation(TOKENIZER, prompt, [*answer, TOKENIZER.eos_token_id]) == "    return 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 is not a JSON object"),
        (json.dumps({**row("right"), "test": None}), r"line 1: no text in \['test'\]"),
        (json.dumps({"text": "MBPP's"}), r"no text in \['task_id', 'prompt', 'test'"),
        (json.dumps({**row("right"), "entry_point": "f(); g"}), "is no function's name"),
        ("\n", "holds no problem"),
        (b"\x1f\x8b\x08", "unpack it first"),
    ],
)
def test_bad_problem_files(text, message, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_problems(file)


def test_no_code_is_run_unless_the_user_says_so(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "execute", lambda *given: pytest.fail("ran"))
    for word in ([], ["execute=false"]):
        with pytest.raises(ValueError, match=r"programs that a model wrote.*give execute=true"):
            run(["model=x", f"problems={problems}", *word])
    with pytest.raises(ValueError, match="is no file"):
        run(["model=x", "problems=/no/where.jsonl", "execute=true"])


def test_the_program_is_prompt_completion_and_tests():
    problem = Problem(**row("right"))
    program = problem.program(COMPLETIONS["right"])
    assert program == f"# right\n{PROMPT}    return a + b\n\n{TEST}\ncheck(add)\n"
