"""Scores of a bench's answers: the share that is right, by the benchmark's own rule."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from data.corpora.benchmarks import (
    Problem,
    is_benchmark,
    metric,
    program,
    read_benchmark,
    score,
)
from data.text.prompts import asks_in_chat
from decoding.bench.options import UNASKED, ScoreOptions
from decoding.bench.sandbox import Limits, check, execute
from decoding.bench.text_report import Row


@dataclass
class Scorer:
    """Judges the answers to a benchmark's problems.

    Attributes:
        metric: The name of the mean, 'pass@1' or 'accuracy'.
        problems: By their ids.
        chat: As the user says whether problems are asked in the chat template.
        limits: What a program may use.
        known: Whether each program that was run passed: samplers mostly write the same ones.
    """

    metric: str
    problems: dict[str, Problem]
    chat: bool | None
    limits: Limits
    known: dict[str, bool] = field(default_factory=dict)

    def __call__(self, row: Row, prompts: list[dict]) -> list[bool]:
        """Whether each answer is right.

        Args:
            row: The answers, one for each prompt.
            prompts: With their `id` and `prompt_ids`.
        """
        tokenizer = row.sampler.tokenizer
        raw = not asks_in_chat(tokenizer, self.chat)
        texts = [
            continuation(tokenizer, prompt["prompt_ids"], result.token_ids)
            for prompt, result in zip(prompts, row.results)
        ]
        return [self.right(p["id"], text, raw) for p, text in zip(prompts, texts)]

    def right(self, id: str, text: str, raw: bool) -> bool:
        """Whether the text that answers a problem is right."""
        problem = self.problems[id]
        if (code := program(problem, text, raw)) is None:
            return bool(score(problem, text))
        if code not in self.known:
            self.known[code] = execute(code, self.limits).outcome == "passed"
        return self.known[code]


def scorer(options: ScoreOptions) -> Scorer | None:
    """The scorer of a bench's source, or None where that has no scores.

    Args:
        options: Of the bench. Programs are only run with `execute`; a line says so without it.

    Raises:
        ValueError: `execute` without programs, problems that share an id, or limits in which no
            program can run.
    """
    known = is_benchmark(options.source)
    problems = read_benchmark(options.source, subset=options.subset) if known else []
    refuse_infilling(options.source, problems)
    names = {metric(problem) for problem in problems}
    if options.execute and "pass@1" not in names:
        raise ValueError(
            f"execute=true, but source={options.source!r} has no tests that could be run. Give "
            "HumanEval or MBPP with its tests, or leave it out."
        )
    if len(names) != 1 or names == {None}:
        return None
    if names == {"pass@1"}:
        if not options.execute:
            print(f"no pass@1 in the table: {UNASKED}")
            return None
        check(options.limits)
    by_id = {problem.id: problem for problem in problems}
    if len(by_id) < len(problems):
        raise ValueError(f"source={options.source!r} has several problems with the same id.")
    return Scorer(*names, by_id, options.chat, options.limits)


def refuse_infilling(source: str, problems: list[Problem]) -> None:
    """Raise ValueError for problems whose answer stands between two texts."""
    if any(problem.suffix is not None for problem in problems):
        raise ValueError(
            f"{source!r} has problems of infilling, which no continuation of a prompt answers: "
            f"python -m decoding.bench.infill model=... source={source}"
        )


def continuation(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int]) -> str:
    """The text of an answer's tokens after a prompt.

    They are decoded together with the prompt: alone, some tokenizers strip the first space.
    """
    before, whole = (
        tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + answer)
    )
    return whole[len(before) :]
