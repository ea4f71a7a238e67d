"""The check that an export has, where it is served, the acceptance of the run's last validation.

A wrong position, layer, norm or mask id leaves every text right and accuracy in training high, but
acceptance falls from 3 tokens a pass to 1.04. So programs that do not know the trainer (stock
transformers with the export's own code; vLLM) decode the validation's prompts greedily, and
acceptance at each position is compared.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from decoding.bench.engine import Theirs, Way
from decoding.collectors.teachers import end_ids
from decoding.engine.params import SamplingParams, accepted_counts
from decoding.external.vllm_engine import ON_CPU, Vllm, interpreter, speculative_config
from decoding.fetch import fetch
from decoding.loading import load_tokenizer, parade_config
from recipes.settings import Acceptance
from recipes.stored import measured_with
from terminal.progress import Work, track
from trainers.publishing import stock_transformers
from trainers.publishing.bundle import check_bundle
from trainers.runs.callbacks import validation_prompts
from trainers.runs.curve import latest

ERRORS = 3  # standard errors that are still chance: of 8 positions one in 50 runs exceeds them


def verify(
    run: Path, programs: Sequence[str], python: str | None = None, trust_remote_code: bool = False
) -> None:
    """Compare an export's acceptance in other programs with its run's last validation.

    `programs` are 'transformers' or 'vllm'. Without `trust_remote_code`, an export with other code
    than this version's is refused.
    """
    (target, settings), export = measured_with(run / "config.yaml"), run / "export"
    expected = _validated(run)
    entry = parade_config(str(export))
    if "transformers" in programs and not trust_remote_code:
        check_bundle(export, entry["method"])
    prompts = validation_prompts(settings, load_tokenizer(str(export)))
    given = (export, str(fetch(target or entry["target"])), prompts, settings)
    for program in programs:
        if program == "vllm":
            way = _in_vllm(*given, len(expected), python)
        else:
            way = _in_transformers(*given, len(expected))
        print(f"{program}: {_compare(way, expected, program)}")


def _validated(run: Path) -> list[float]:
    """Return the share of the last validation's passes that accepted at least 1, 2, ... tokens."""
    metrics = latest(run / "metrics.csv")
    named = ((re.fullmatch(r"accepted_(\d+)_t0", name), x.value) for name, x in metrics.items())
    found = {int(match[1]): x for match, x in named if match}
    if not found:
        raise ValueError(
            f"{run} has no acceptance by position to compare with: its validations must decode "
            "prompts at temperature 0 (acceptance.prompts, acceptance.temperatures)"
        )
    return [found[i] for i in sorted(found)]


def _compare(way: Way, expected: Sequence[float], program: str) -> str:
    """Return acceptance by position as a line; ValueError if it differs from the validation's."""
    shares = []
    for i, wanted in enumerate(expected):
        share, error = way.at(i)
        # If all drafts agree, a bootstrap finds no error; Laplace's estimate of p has one.
        count = sum(way.drafts)
        p = (share * count + 1) / (count + 2)
        error = max(error, (p * (1 - p) / count) ** 0.5)
        # The validation has an error of its own, about as large.
        if abs(share - wanted) > ERRORS * 2**0.5 * error:
            raise ValueError(
                f"acceptance at position {i + 1} is {share:.3f} ± {error:.3f} in {program}, and "
                f"was {wanted:.3f} in the run's last validation: the export is not what was "
                "trained, or is not run as it was (positions, mask id, separator, norms, dtype)"
            )
        shares.append(f"{share:.3f}")
    return f"accepts what the last validation accepted, by position {' '.join(shares)}"


def _in_transformers(
    export: Path, target: str, prompts: list[list[int]], a: Acceptance, positions: int
) -> Way:
    """Count the tokens that stock transformers accepts with the export's code (custom_generate)."""
    most = a.max_new_tokens
    job = {
        "target": target,
        "export": str(export.resolve()),
        "prompts": prompts,
        # Beyond the answer's end, so that its last pass is seen whole.
        "max_new_tokens": most + positions,
        "eos": end_ids(target, load_tokenizer(target)),
        "dtype": a.dtype,
        "threads": torch.get_num_threads(),
    }
    # -P and cwd keep this folder and the script's off the path: they would shadow its imports.
    with Work(f"{len(prompts)} prompts in stock transformers"):
        done = subprocess.run(
            [sys.executable, "-P", str(Path(stock_transformers.__file__).resolve())],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            cwd=export,
        )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"transformers cannot decode with {export}: {why}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    way = Way("transformers")
    for emitted in found["emitted"]:
        before = accumulate(emitted, initial=0)
        passes = [n for n, done in zip(emitted, before) if done < most]
        way.add(*accepted_counts(passes, positions))
    return way


def _in_vllm(
    export: Path,
    target: str,
    prompts: list[list[int]],
    a: Acceptance,
    positions: int,
    python: str | None,
) -> Way:
    """Count the tokens that vLLM accepts, greedily."""
    params = SamplingParams(max_new_tokens=a.max_new_tokens, temperature=0)
    settings = speculative_config(export, positions)
    context = max(map(len, prompts)) + a.max_new_tokens + 2 * positions
    options = {"dtype": a.dtype, "max_model_len": context, "max_num_seqs": 1}
    eos = end_ids(target, load_tokenizer(target))
    with Vllm(
        target,
        interpreter(python),
        torch.get_num_threads(),
        speculative_config=settings,
        **({} if torch.cuda.is_available() else ON_CPU),
        **options,
    ) as engine:
        way = Theirs("vllm", params=params, engine=engine, eos=eos)
        for prompt in track(
            prompts, "verification", unit="prompts"
        ):  # one by one, so that the errors are those over prompts
            way.decode([prompt], [0])
    return way
