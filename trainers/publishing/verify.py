"""Whether an export accepts, where it is served, what training's last validation accepted.

A wrong position, layer, norm or mask id leaves every text right and accuracy in training high, and
ruins acceptance: 1.04 tokens a pass instead of 3. So the export is decoded greedily by programs
that do not know the trainer (stock transformers with the export's own code; vLLM), over the
validation's own prompts, and its acceptance at each position is compared with the validation's.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from decoding.bench.engine import Way, measure_engine
from decoding.collectors.teachers import end_ids
from decoding.engine.params import SamplingParams, accepted_counts
from decoding.external.vllm_engine import ON_CPU, Vllm, interpreter, speculative_config
from decoding.fetch import fetch
from decoding.loading import load_tokenizer, parade_config
from trainers.publishing import stranger
from trainers.runs.callbacks import validation_prompts
from trainers.runs.curve import latest

PROGRAMS = ("transformers", "vllm")
ERRORS = 3  # standard errors that are still chance: of 8 positions one in 50 runs exceeds them


def verify(run: Path, programs: Sequence[str], python: str | None = None) -> None:
    """Compare an export's acceptance in other programs with that of its run's last validation.

    Args:
        run: The run's folder, with its export.
        programs: Which of PROGRAMS decode with the export.
        python: The interpreter that has vLLM; None: that of `make vllm`, or this one.

    Raises:
        ValueError: The run has not measured acceptance, a program cannot decode with the export,
            or accepts less or more at a position, which the message names.
    """
    config, export = OmegaConf.load(run / "config.yaml"), run / "export"
    expected = validated(run)
    entry = parade_config(str(export))
    tokenizer = load_tokenizer(str(export))
    prompts = validation_prompts(config.acceptance, tokenizer)
    target = str(fetch(config.target or entry["target"]))
    for program in programs:
        if program == "vllm":
            way = in_vllm(export, target, prompts, config, len(expected), python)
        else:
            way = in_transformers(export, target, prompts, config, len(expected))
        print(f"{program}: {compare(way, expected, program)}")


def validated(run: Path) -> list[float]:
    """The share of passes that accepted at least i tokens, i = 1, 2, ..., of the last validation.

    Raises:
        ValueError: The run has not measured it at temperature 0.
    """
    metrics = latest(run / "metrics.csv", sys.maxsize)
    named = ((re.fullmatch(r"accepted_(\d+)_t0", name), x) for name, x in metrics.items())
    found = {int(match[1]): x for match, x in named if match}
    if not found:
        raise ValueError(
            f"{run} has no acceptance by position to compare with: its validations must decode "
            "prompts at temperature 0 (acceptance.prompts, acceptance.temperatures)"
        )
    return [found[i] for i in sorted(found)]


def compare(way: Way, expected: Sequence[float], program: str) -> str:
    """Compare acceptance at each position with what was expected.

    Args:
        way: What a program accepted.
        expected: The validation's share at each position.
        program: Its name, for the message.

    Returns:
        A line that says that they agree, with the shares.

    Raises:
        ValueError: At a position they are more than ERRORS standard errors apart.
    """
    shares = []
    for i, wanted in enumerate(expected):
        share, error = way.at(i)
        # Of few drafts that all did the same a bootstrap knows no error: Laplace's p has one.
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


def in_transformers(
    export: Path, target: str, prompts: list[list[int]], config: DictConfig, positions: int
) -> Way:
    """What stock transformers accepts with the export's own code (custom_generate), greedily.

    Raises:
        ValueError: It cannot decode with the export; its last line says why.
    """
    most = config.acceptance.max_new_tokens
    job = {
        "target": target,
        "export": str(export.resolve()),
        "prompts": prompts,
        # Beyond the answer's end, so that its last pass is seen whole.
        "max_new_tokens": most + positions,
        "dtype": config.acceptance.dtype,
        "threads": torch.get_num_threads(),
    }
    # Without this folder and the script's in the path: nothing stands in for what it imports.
    done = subprocess.run(
        [sys.executable, "-P", str(Path(stranger.__file__).resolve())],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=export,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise ValueError(f"transformers cannot decode with {export}: {why}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    way = Way("transformers", answers=[ids[:most] for ids in found["answers"]])
    for emitted in found["emitted"]:
        before = accumulate(emitted, initial=0)
        passes = [n for n, done in zip(emitted, before) if done < most]
        way.add(*accepted_counts(passes, positions))
    return way


def in_vllm(
    export: Path,
    target: str,
    prompts: list[list[int]],
    config: DictConfig,
    positions: int,
    python: str | None,
) -> Way:
    """What vLLM accepts, greedily.

    Raises:
        ValueError: There is no vLLM, or it does not run the export.
    """
    a = config.acceptance
    params = SamplingParams(max_new_tokens=a.max_new_tokens, temperature=0)
    settings = speculative_config(export, positions)
    context = max(map(len, prompts)) + a.max_new_tokens + 2 * positions
    way = Way("vllm")
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
        for prompt in prompts:  # one by one, so that the errors are those over prompts
            measure_engine(way, engine, [prompt], [0], params, eos)
    return way
