"""Scores of a bench's answers: the share that is correct by the benchmark's own rule."""

from dataclasses import dataclass, field

from data.corpora.benchmarks import Problem, is_benchmark, metric, program, read_benchmark, score
from data.text.prompts import asks_in_chat
from decoding.bench.options import ScoreOptions
from decoding.bench.rows import Row
from decoding.bench.sandbox import check, execute
from decoding.engine.detokenize import text_after


@dataclass
class Scorer:
    """Judges the answers to a benchmark's problems.

    Attributes:
        metric: The name of the mean, 'pass@1' or 'accuracy'.
        problems: By their ids.
        known: Whether each program run so far passed; samplers mostly write the same programs.
    """

    metric: str
    problems: dict[str, Problem]
    options: ScoreOptions
    known: dict[str, bool] = field(default_factory=dict)

    def __call__(self, row: Row, prompts: list[dict]) -> list[bool]:
        """Return for each answer of a row if it is correct; prompts have `id` and `prompt_ids`."""
        tokenizer = row.sampler.tokenizer
        raw = not asks_in_chat(tokenizer, self.options.chat)
        pairs = zip(prompts, row.results)
        texts = [text_after(tokenizer, p["prompt_ids"], r.token_ids) for p, r in pairs]
        return [self.right(p["id"], text, raw) for p, text in zip(prompts, texts)]

    def right(self, id: str, text: str, raw: bool) -> bool:
        """Return whether a problem's answer is correct."""
        problem = self.problems[id]
        if (code := program(problem, text, raw)) is None:
            return bool(score(problem, text))
        if code not in self.known:
            self.known[code] = execute(code, self.options).outcome == "passed"
        return self.known[code]


def scorer(options: ScoreOptions) -> Scorer | None:
    """Return the scorer of a bench's source, or None; programs are scored only with `execute`."""
    known = is_benchmark(options.source)
    problems = read_benchmark(options.source, subset=options.subset) if known else []
    if any(problem.suffix is not None for problem in problems):
        raise ValueError(
            f"{options.source!r} has problems of infilling, which no continuation answers: "
            f"python -m decoding.bench.infill model=... source={options.source}"
        )
    names = {metric(problem) for problem in problems}
    if options.execute and "pass@1" not in names:
        raise ValueError(
            f"execute={options.execute}, but source={options.source!r} has no tests that could be "
            "run. Give HumanEval or MBPP with its tests, or leave it out."
        )
    name = names.pop() if len(names) == 1 else None
    if name is None or (name == "pass@1" and not check(options)):
        return None
    by_id = {problem.id: problem for problem in problems}
    if len(by_id) < len(problems):
        raise ValueError(f"source={options.source!r} has several problems with the same id.")
    return Scorer(name, by_id, options)
