"""pass@1 of known completions: a stub that writes them replaces the sampler."""

import copy
import csv
import json

import pytest

from data.corpora.benchmarks import program, within_function
from data.text.tokenizer import train_tokenizer
from decoding.bench import pass_at_1
from decoding.bench.pass_at_1 import STOP, read_problems, run
from decoding.bench.scores import continuation
from decoding.engine.params import Chunk, Result, Stats
from tests.support import tiny
from tests.support.files import write_jsonl

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
    """Answers with the completion in the prompt's comment, or as `answer` does in a chat."""

    continues = True
    tokenizer = TOKENIZER
    stop = STOP

    def generate(self, prompts, params, *, seeds):
        assert params.stop == self.stop
        assert len(seeds) == len(prompts)
        names = [TOKENIZER.decode(ids).partition("\n")[0][2:] for ids in prompts]
        ids = [TOKENIZER(COMPLETIONS[name])["input_ids"] for name in names]
        return [Result("", i, "eos", Stats(emitted=[2] * len(i))) for i in ids]

    def stream(self, prompts, params, *, seeds, at_once, text):
        assert at_once in (4, 8)
        assert not text
        found = self.generate(prompts, params, seeds=seeds)
        for n in reversed(range(len(found))):  # in the order in which they happen to end
            yield Chunk(n, "", [], found[n])


def row(name):
    return {"task_id": name, "prompt": f"# {name}\n{PROMPT}", "test": TEST, "entry_point": "add"}


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    write_jsonl(file, map(row, COMPLETIONS))
    return file


def arguments(problems, *others):
    out = f"out={problems.parent}/out"
    return [f"problems={problems}", "execute=unsafe", "wall_seconds=1", out, *others]


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
    assert outcomes["leaves early"] == "failed"
    assert [line[k] for k in ("passed", "failed", "timed out")] == ["2", "3", "1"]
    assert float(line["pass@1"]) == pytest.approx(1 / 3, abs=1e-4)
    assert float(line["standard error"]) == pytest.approx((2 / 9 / 6) ** 0.5, abs=1e-4)
    assert line["tokens per forward"] == "2.0"


class Chatting(Scripted):
    """Answers in a chat template with a whole function in a block of code."""

    stop = ()

    def __init__(self):
        self.tokenizer = copy.deepcopy(TOKENIZER)
        self.tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}"
        )

    def generate(self, prompts, params, *, seeds):
        asked = [self.tokenizer.decode(ids) for ids in prompts]
        assert all(text.startswith("[Complete this") and text.endswith("]>") for text in asked)
        names = [text.partition("# ")[2].partition("\n")[0] for text in asked]
        texts = [f"Sure:\n```python\n{PROMPT}{COMPLETIONS[name]}```\nDone." for name in names]
        ids = [self.tokenizer(text)["input_ids"] for text in texts]
        return [Result("", i, "eos", Stats(emitted=[2] * len(i))) for i in ids]


def test_a_chat_model_is_asked_in_its_template(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Chatting())
    run(arguments(problems, "model=chatting"))
    rows, _ = results(problems)
    passed = {r["task_id"] for r in rows if r["outcome"] == "passed"}
    # What follows a raw completion is cut off; a block of code is taken as it is.
    assert passed == {"right"}
    assert rows[0]["completion"].startswith("Sure:")
    monkeypatch.setattr(Chatting, "generate", Scripted.generate)
    monkeypatch.setattr(Chatting, "stop", STOP)
    run(arguments(problems, "model=chatting", "chat=false"))
    assert [r["task_id"] for r in results(problems)[0] if r["outcome"] == "passed"] == PASSING


def test_a_chat_without_a_template_is_refused(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Scripted())
    with pytest.raises(ValueError, match=r"chat=true.*template"):
        run(arguments(problems, "model=scripted", "chat=true"))


def test_mbpp_is_read(tmp_path, monkeypatch):
    class Writer(Scripted):
        stop = ()

        def generate(self, prompts, params, *, seeds):
            assert params.stop == ()
            ids = [TOKENIZER(f"def g(x): return x + {n}")["input_ids"] for n in (1, 2)]
            return [Result("", i, "eos", Stats(emitted=[1] * len(i))) for i in ids]

    row = {"text": "Add one.", "code": "", "test_list": ["assert g(1) == 2"]}
    file = tmp_path / "mbpp.jsonl"
    write_jsonl(file, [{**row, "task_id": n} for n in (1, 2)])
    monkeypatch.setattr(pass_at_1, "load", lambda model, **options: Writer())
    run(arguments(file, "model=writer"))
    assert [r["outcome"] for r in results(file)[0]] == ["passed", "failed"]


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
        (json.dumps({**row("right"), "test": None}), "no tests to run.*'test'"),
        (f"{json.dumps(row('x'))}\n{json.dumps({**row('right'), 'test': None})}", "line 2.*'test'"),
        (json.dumps({"text": "no problem"}), r"line 1.*\['text'\].*'entry_point'"),
        (json.dumps({"turns": ["Write."]}), "no tests to run.*'entry_point'"),
        (json.dumps({**row("right"), "entry_point": "f(); g"}), r"entry_point='f\(\); g'"),
        ("\n", "no problem"),
        (b"\x1f\x8b\x08", "unpack it first"),
    ],
)
def test_bad_problem_files(text, message, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as raised:
        read_problems(str(file))
    assert "\n" not in str(raised.value)


def test_no_code_is_run_unless_the_user_says_so(problems, monkeypatch):
    monkeypatch.setattr(pass_at_1, "execute", lambda *given: pytest.fail("ran"))
    for word in ([], ["execute=null"]):
        with pytest.raises(ValueError, match=r"programs that a model wrote.*give execute=sandbox"):
            run(["model=x", f"problems={problems}", *word])
    with pytest.raises(ValueError, match=r"/no/where\.jsonl.* no benchmark file"):
        run(["model=x", "problems=/no/where.jsonl", "execute=unsafe"])


def test_the_program_is_prompt_completion_and_tests(problems):
    problem = read_problems(str(problems))[0]
    found = program(problem, COMPLETIONS["right"], raw=True)
    assert found == f"# right\n{PROMPT}    return a + b\n\n{TEST}\ncheck(add)\n"
