"""`python -m decoding.lm_eval model=runs/deer_stage2/export tasks=[gsm8k] limit=50`: lm-eval tasks.

It runs tasks of lm-evaluation-harness, or of a folder, with a sampler (`decoding.harness`). The
table is written to `results.csv`, all of lm-eval's results to `results.json`, and the answers to
`samples.jsonl`.
"""

import difflib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.arguments import Count, Positive, Several, Whole
from decoding.engine.params import VERIFY, SamplingParams
from decoding.report import results, write_table
from recipes.command import main
from recipes.options import (
    NEEDED,
    LoadOptions,
    MeasureOptions,
    Verbatim,
    check_first,
    option,
    parse,
)
from recipes.values import read, split


@dataclass(frozen=True, kw_only=True)
class LmEval(LoadOptions, MeasureOptions):
    """Run tasks of lm-evaluation-harness with an export's own sampler."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export tasks=[gsm8k] chat=true limit=50"

    tasks: Several[str] = option(NEEDED, "names of lm-eval's tasks or groups, or YAML files")
    include_path: str | None = option(None, "a folder with more tasks (YAML)")
    limit: Positive | None = option(None, "documents of each task; below 1 a share of them")
    num_fewshot: Whole | None = option(None, "solved examples before each; null: the task's")
    chat: bool = option(False, "ask through the model's chat template")
    system: Verbatim | None = option(None, "the system's message of a chat")
    gen_kwargs: tuple[str, ...] = option((), "instead of the tasks' own, as [do_sample=true]")
    batch_size: Count = option(8, "requests that are decoded or scored together")
    execute: bool = option(False, "true lets tasks run what the model wrote, without a sandbox")
    verify: Literal[*VERIFY] = option(
        SamplingParams.verify, "how drafts are verified; each lossless"
    )
    out: str = option("lm_eval_results", "folder of the results")

    def __post_init__(self):
        super().__post_init__()
        if self.system is not None and not self.chat:
            raise ValueError("system= is of a chat: give chat=true too")


def read_options(argv: list[str]) -> LmEval:
    """Return the command's options."""
    return parse(argv, LmEval, "decoding.lm_eval")


check_first(__name__, read_options)

from jinja2 import TemplateError

from data.text.prompts import asks_in_chat


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    e = read_options(argv)
    given = {key: read(value) for key, value in map(split, e.gen_kwargs)}
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm_eval")
    from lm_eval import simple_evaluate

    from decoding.harness import ParadeLM

    manager = known_tasks(e)
    lm = ParadeLM(e.model, batch_size=e.batch_size, seed=e.seed, verify=e.verify, **e.loading)
    asks_in_chat(lm.tokenizer, e.chat)
    options: dict[str, Any] = {
        "limit": e.limit,
        "num_fewshot": e.num_fewshot,
        "batch_size": e.batch_size,
    }
    options |= {"gen_kwargs": given or None, "confirm_run_unsafe_code": e.execute}
    options |= {"apply_chat_template": e.chat, "system_instruction": e.system}
    seeds = {"random_seed": e.seed, "fewshot_random_seed": e.seed}
    with results(Path(e.out)) as out:
        try:
            found = simple_evaluate(lm, tasks=[*e.tasks], task_manager=manager, **options, **seeds)
        except (KeyError, AssertionError, TemplateError) as error:  # lm-eval's of a wrong YAML
            raise ValueError(
                f"lm-eval cannot run {list(e.tasks)}: {type(error).__name__}: {error}. Look at the "
                "task's YAML; PARADE_TRACEBACK=1 shows where it happened"
            ) from error
        write(found, out, e)
    if lm.acceptance_length is not None:
        print(f"{lm.acceptance_length:.2f} tokens per target pass in the answers")


def known_tasks(e: LmEval):
    """Return lm-eval's task manager; raise ValueError for a task that neither it nor a file has."""
    from lm_eval.tasks import TaskManager

    if e.include_path is not None and not Path(e.include_path).is_dir():
        raise ValueError(f"include_path={e.include_path!r} is no folder: give one with tasks")
    manager = TaskManager(include_path=e.include_path)
    for task in e.tasks:
        if task in manager.all_tasks or Path(task).is_file():
            continue
        near = difflib.get_close_matches(task, manager.all_tasks, n=3)
        hint = f"Did you mean one of {near}?" if near else "lm-eval ls tasks lists them."
        raise ValueError(
            f"unknown task {task!r}. {hint} include_path= adds a folder of your own tasks"
        )
    return manager


def write(found: dict, out: Path, e: LmEval) -> None:
    """Write results.json and samples.jsonl; write and print the table."""
    from lm_eval.utils import handle_non_serializable

    samples = found.pop("samples", {})
    text = json.dumps(found, indent=2, default=handle_non_serializable)
    (out / "results.json").write_text(text, encoding="utf-8")
    rows = ({"task": task, **row} for task, of in samples.items() for row in of)
    with (out / "samples.jsonl").open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(f"{json.dumps(row, default=handle_non_serializable)}\n")
    write_table(table(found), out / "results.csv", f"{e.model}, {e.dtype}", "decoding.lm_eval")


def table(results: dict) -> list[dict]:
    """Return a line of the table for each task and metric of lm-eval's results."""
    lines = []
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            figures = {"value": value, "standard error": found.get(f"{metric}_stderr,{name}")}
            line = {"task": task, "metric": metric, "filter": name}
            line["few-shot"] = results["n-shot"].get(task, "")
            for title, x in figures.items():  # lm-eval has 'N/A' where there is none
                line[title] = round(x, 4) if isinstance(x, (int, float)) else ""
            lines.append(line)
    return lines


if __name__ == "__main__":
    main(run)
