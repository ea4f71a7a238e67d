"""Which sources have scores, which answers are correct, and what is refused early."""

import copy
from types import SimpleNamespace

import pytest

from data.text.tokenizer import train_tokenizer
from decoding.bench import scores
from decoding.bench.options import ScoreOptions
from decoding.bench.rows import Row
from decoding.bench.scores import scorer
from decoding.engine.detokenize import text_after
from decoding.engine.params import Result, Stats
from tests.support.files import write_jsonl

ROWS = {
    "humaneval": {"task_id": "1", "prompt": "def f():\n", "entry_point": "f",
                  "test": "def check(f):\n    assert f() == 1\n"},
    "mbpp": {"task_id": 1, "text": "Add.", "code": "", "test_list": ["assert g(1) == 2"]},
    "gsm8k": {"id": 1, "question": "1 + 1?", "answer": "#### 2"},
    "math500": {"unique_id": "1", "problem": "1 + 1?", "answer": "2"},
    "prompts": {"id": 1, "turns": ["1 + 1?"]},
}  # fmt: skip
RIGHT = {
    "humaneval": "    return 1\n", "mbpp": "def g(x): return x + 1", "gsm8k": "It is 2.",
    "math500": "\\boxed{2}",
}  # fmt: skip


def options(source, **given):
    return ScoreOptions(model="x", source=source, **given)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_and_a_wrong_answer(name, tmp_path):
    code = name in ("humaneval", "mbpp")
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS[name]])
    judge = scorer(options(source, execute="unsafe" if code else None))
    assert judge.metric == ("pass@1" if code else "accuracy")
    answer = RIGHT[name]
    wrong = answer.replace("2" if not code else "1", "3")
    assert judge.right("1", answer, raw=True) is True
    assert judge.right("1", wrong, raw=True) is False


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("    return 1\n", True),
        ("    return 1\n\nassert False\n", True),  # cut off with what leaves the function
        ("    return 2\n", False),
        ("    import sys\n    sys.exit(0)\n", False),
        ("    while True:\n        pass\n", False),
        ("return 1\n", False),
    ],
)
def test_a_program_is_right_if_it_passes_its_tests(body, right, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS["humaneval"]])
    judge = scorer(options(source, execute="unsafe", wall_seconds=1))
    assert judge.right("1", body, raw=True) is right


TOKENIZER = train_tokenizer(["def f():\n    return 1\n"], 300)


def test_a_continuation_keeps_its_first_space():
    prompt, answer = (TOKENIZER(text)["input_ids"] for text in ("def f():\n", "    return 1"))
    assert text_after(TOKENIZER, prompt, [*answer, TOKENIZER.eos_token_id]) == "    return 1"


@pytest.mark.parametrize(("chat", "right"), [(None, [True, False]), (False, [False, True])])
def test_a_block_of_code_is_an_answer_in_a_chat_only(chat, right, tmp_path):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS["humaneval"]])
    judge = scorer(options(source, execute="unsafe", chat=chat))
    answers = [
        "Sure:\n```python\ndef f():\n    return 1\n```\nDone.",
        "    return 1\nand goes on",
    ]
    ids = [tokenizer(text)["input_ids"] for text in answers]
    results = [Result(text, i, "eos", Stats()) for text, i in zip(answers, ids)]
    row = Row("plain", SimpleNamespace(tokenizer=tokenizer), results=results)
    asked = [{"id": "1", "prompt_ids": tokenizer("def f():\n")["input_ids"]}] * 2
    assert judge(row, asked) == right


def test_a_program_is_run_once(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS["humaneval"]])
    judge = scorer(options(source, execute="unsafe"))
    assert judge.right("1", RIGHT["humaneval"], raw=True)
    monkeypatch.setattr(scores, "execute", lambda *given: pytest.fail("ran again"))
    assert judge.right("1", RIGHT["humaneval"], raw=True)
    with pytest.raises(pytest.fail.Exception):  # another program
        judge.right("1", "    return 2\n", raw=True)


def test_sources_without_scores(tmp_path):
    assert scorer(options("stdlib")) is None
    assert scorer(options(write_jsonl(tmp_path / "x.jsonl", [ROWS["prompts"]]))) is None


def test_code_without_leave_is_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scores, "execute", lambda *given: pytest.fail("ran"))
    assert scorer(options(write_jsonl(tmp_path / "x.jsonl", [ROWS["humaneval"]]))) is None
    assert "execute=sandbox" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gsm8k", "prompts", "stdlib"])
def test_leave_to_run_what_is_no_program_is_refused(name, tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS[name]]) if name in ROWS else name
    with pytest.raises(ValueError, match=r"execute=unsafe.*no tests"):
        scorer(options(source, execute="unsafe"))


def test_problems_with_the_same_id_are_refused(tmp_path):
    source = write_jsonl(tmp_path / "x.jsonl", [ROWS["gsm8k"], ROWS["gsm8k"]])
    with pytest.raises(ValueError, match="same id"):
        scorer(options(source))


def test_an_unknown_subset_is_refused(tmp_path):
    row = {**ROWS["gsm8k"], "category": "sums"}
    source = write_jsonl(tmp_path / "x.jsonl", [row])
    assert scorer(options(source, subset="sums")) is not None
    with pytest.raises(ValueError, match=r"subset='tales'.*\['sums'\]"):
        scorer(options(source, subset="tales"))
