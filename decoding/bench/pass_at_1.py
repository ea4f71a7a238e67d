"""`python -m decoding.bench.pass_at_1 model=... problems=HumanEval.jsonl execute=true`.

pass@1: the share of problems whose one answer passes the problem's own tests (arXiv 2107.03374,
section 2.1). Every program's outcome is written to `pass_at_1.jsonl`, the table to `pass_at_1.csv`.
"""

import json
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from data.corpora.sources import read_jsonl
from data.files import atomic_write
from data.text.chat import encode_text
from decoding.bench.options import BenchOptions
from decoding.bench.sandbox import Limits, check, execute
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import DTYPES, NEEDED, option
from decoding.commands.progress import track
from decoding.commands.report import write_table
from decoding.engine.params import Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load

# A line leaves the function where it begins at the left margin; decoding need not go on there.
LEAVES = re.compile(r"^\S", re.MULTILINE)
STOP = tuple(f"\n{c}" for c in string.printable if not c.isspace())


@dataclass(frozen=True, kw_only=True)
class PassAt1(BenchOptions):
    """Complete every problem once with the export's own sampler and run its tests."""

    EXAMPLE: ClassVar[str] = "model=runs/pcllm_round1/export problems=HumanEval.jsonl execute=true"

    problems: str = option(
        NEEDED, "a JSONL of HumanEval's keys: task_id, prompt, test, entry_point"
    )
    execute: bool = option(False, "true runs what the models wrote on this machine; see the docs")
    max_new_tokens: int = option(512, "tokens of a completion, at the most", least=1)
    temperature: float = option(0.0, "of the sampling; 0 is greedy", least=0)
    batch_size: int = option(8, "problems that are completed together", least=1)
    cpu_seconds: float = option(10.0, "of the processor that one program may use")
    wall_seconds: float = option(30.0, "that one program may take")
    memory: int = option(1024, "MiB that one program may use")
    dtype: str = option("auto", "of the weights in memory", choices=DTYPES)
    out: str = option("pass_at_1", "folder of the results")

    def __post_init__(self):
        super().__post_init__()
        if not self.execute:
            raise ValueError(
                "this runs programs that a model wrote, on this machine: read in "
                "docs/tutorials/pcllm.md what guards it, and give execute=true"
            )


@dataclass(frozen=True)
class Problem:
    """A problem of a problem file.

    Attributes:
        task_id: Its name.
        prompt: The head of a function, which the model completes.
        test: A program that defines check(candidate).
        entry_point: The function's name.
    """

    task_id: str
    prompt: str
    test: str
    entry_point: str

    def program(self, completion: str) -> str:
        """The program to run: prompt, completion, test and the call of check."""
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})\n"


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    quiet()
    p = parse(argv, PassAt1, "decoding.bench.pass_at_1")
    limits = Limits(cpu_seconds=p.cpu_seconds, wall_seconds=p.wall_seconds, memory=p.memory)
    problems = read_problems(Path(p.problems))
    check(limits)
    out = Path(p.out)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    # All models load before the first is run: a wrong name must not cost hours or earlier results.
    samplers = {model: loaded(p, model) for model in dict.fromkeys((p.model, *p.also))}
    rows = out / "pass_at_1.jsonl"
    with atomic_write(rows) as temporary, temporary.open("w", encoding="utf-8") as file:
        for model, sampler in samplers.items():
            found, results = judge(p, model, sampler, problems, limits)
            file.writelines(f"{json.dumps({'model': model, **row})}\n" for row in found)
            lines.append({"model": model, **summary(found, results)})
    title = f"{len(problems)} problems of {p.problems}, T = {p.temperature:g}, {p.dtype}"
    write_table(lines, out / "pass_at_1.csv", title, "decoding.bench.pass_at_1")
    print(f"wrote {rows} and {out / 'pass_at_1.csv'}")


def read_problems(file: Path) -> list[Problem]:
    """The problems of a JSONL; ValueError with file and line where one is incomplete."""
    if not file.is_file():
        raise ValueError(f"problems={str(file)!r} is no file: give a JSONL such as HumanEval's")
    names, problems = list(Problem.__dataclass_fields__), []
    for line, row in read_jsonl(file):
        wrong = [name for name in names if not isinstance(row.get(name), str)]
        if wrong:
            raise ValueError(f"{file}, line {line}: no text in {wrong}. Needed: {names}")
        if not row["entry_point"].isidentifier():
            raise ValueError(
                f"{file}, line {line}: entry_point={row['entry_point']!r} is no function's name"
            )
        problems.append(Problem(**{name: row[name] for name in names}))
    if not problems:
        raise ValueError(f"{file} holds no problem")
    return problems


def loaded(p: PassAt1, model: str) -> Sampler:
    """A model's sampler. Raises ValueError for one that does not go on from a prompt."""
    options = {name: getattr(p, name) for name in ("dtype", "device", "trust_remote_code")}
    sampler = load(model, sampler=p.sampler, **options)
    if not sampler.continues:
        raise ValueError(f"{model} fills holes and goes on from no prompt: give causal LMs")
    return sampler


def judge(
    p: PassAt1, model: str, sampler: Sampler, problems: list[Problem], limits: Limits
) -> tuple[list[dict], list[Result]]:
    """Complete every problem with one model, and run the programs.

    Args:
        p: The command's options.
        model: Its name, for the progress.
        sampler: Its sampler.
        problems: The problems.
        limits: Of each program.

    Returns:
        The rows of pass_at_1.jsonl, and the results of decoding.
    """
    params = SamplingParams(max_new_tokens=p.max_new_tokens, temperature=p.temperature, stop=STOP)
    found, results = [], []
    for start in track(range(0, len(problems), p.batch_size), model):
        batch = problems[start : start + p.batch_size]
        prompts = [encode_text(sampler.tokenizer, problem.prompt) for problem in batch]
        seeds = [p.seed + start + i for i in range(len(batch))]
        decoded = sampler.generate(prompts, params, seeds=seeds)
        for problem, ids, result in zip(batch, prompts, decoded):
            text = continuation(sampler.tokenizer, ids, result.token_ids)
            completion = within_function(problem.prompt, text)
            outcome, error = execute(problem.program(completion), limits)
            row = {"task_id": problem.task_id, "outcome": outcome, "error": error}
            found.append({**row, "completion": completion})
        results += decoded
    return found, results


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int]) -> str:
    """The text of an answer's tokens after a prompt.

    They are decoded together with the prompt: alone, some tokenizers strip the first space.
    """
    before, whole = (
        tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + answer)
    )
    return whole[len(before) :]


def within_function(prompt: str, text: str) -> str:
    """A completion up to the first line that leaves the function.

    >>> within_function("def f():\\n", "    return 1\\n\\nprint(f())\\n")
    '    return 1\\n\\n'
    """
    whole = prompt + text
    left = LEAVES.search(whole, len(prompt))
    return whole[len(prompt) : left.start() if left else None]


def summary(found: list[dict], results: list[Result]) -> dict:
    """A line of the table, by column; the standard error is that of independent problems."""
    count = {
        name: sum(row["outcome"] == name for row in found)
        for name in ("passed", "failed", "timed out")
    }
    share = count["passed"] / len(found)
    emitted = [n for result in results for n in result.stats.emitted]
    return {
        **count,
        "pass@1": round(share, 4),
        "standard error": round((share * (1 - share) / len(found)) ** 0.5, 4),
        "tokens per forward": round(sum(emitted) / len(emitted), 2),
    }


if __name__ == "__main__":
    main(run)
