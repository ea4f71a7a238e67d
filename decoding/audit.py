"""`python -m decoding.audit module:function`: check that a program's decoding is lossless.

The program decodes a prompt with a tiny random model, all of whose answers can be enumerated, and
its distribution is compared with plain decoding's. docs/how_to/audit.md says what a program takes.
"""

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from data.arguments import Seed, Tokens
from recipes.command import main
from recipes.options import NEEDED, Options, check_first, option, parse
from terminal.progress import track

RANDOMNESS = ("randomness", "generator", "seed", "seeds")


@dataclass(frozen=True, kw_only=True)
class Audit(Options):
    """Compare the distribution of a program's answers with plain decoding's, over a tiny model."""

    EXAMPLE: ClassVar[str] = "program=examples.audit_peers:assisted_generation"

    program: str = option(NEEDED, "module:function; 'program=' may be left out")
    samples: Annotated[int, Field(ge=100)] = option(
        4000, "drawn where answers cannot be enumerated"
    )
    temperature: Annotated[float, Field(ge=1e-3)] = option(1.0, "of the sampling, above 0")
    max_new_tokens: Tokens | None = option(
        None, "null: 2 where answers are enumerated, 3 where drawn"
    )
    controls: bool = option(True, "show first that wrong rules are found")
    seed: Seed = option(0, "of all that is drawn")


def read_options(argv: list[str]) -> Audit:
    """Return the command's options; the first argument may be the program alone."""
    if argv and ":" in argv[0] and "=" not in argv[0]:
        argv = [f"program={argv[0]}", *argv[1:]]
    return parse(argv, Audit, "decoding.audit")


check_first(__name__, read_options)

import torch

from decoding.auditing.controls import RIGHT, WRONG, drawn
from decoding.auditing.reference import (
    PROMPT,
    TARGET,
    VOCABULARY,
    Finding,
    chi_square,
    enumerate_answers,
    exact_distribution,
    index_of,
    tiny_model,
)
from decoding.engine.randomness import derived_seed


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`; the first may be the program alone."""
    audit = read_options(argv)
    program = find(audit.program)
    enumerated = randomness_of(program) == "randomness"
    if audit.controls:
        for name, control in {"the right rule": RIGHT, **WRONG}.items():
            found = measure(drawn(control) if not enumerated else control, audit)
            print(f"control, {name}: {found}")
            if found.lossless != (control is RIGHT):
                raise ValueError(
                    f"this audit cannot tell: the control {name!r} "
                    f"{'passed' if found.lossless else 'failed'}. Raise samples={audit.samples}"
                )
    found = measure(program, audit)
    print(f"{audit.program}: {found}")
    if not found.lossless:
        raise ValueError(f"{audit.program} does not have plain decoding's distribution")
    print(f"{audit.program} has plain decoding's distribution, as far as this audit can see")


def find(name: str) -> Callable:
    """Return the function named `module:function`; raise ValueError if there is none to audit."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own module lies
    try:
        program = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"program={name} cannot be imported: {error}") from None
    randomness_of(program)
    return program


def randomness_of(program: Callable) -> str:
    """Return the one of RANDOMNESS that a program takes; raise ValueError for wrong parameters."""
    names = inspect.signature(program).parameters
    for needed in (RANDOMNESS, ("model", "path"), ("prompt",)):
        if not {*needed} & {*names}:
            raise ValueError(
                f"a program must have a parameter {' or '.join(needed)}; this one has {[*names]} "
                "(python -m decoding.audit --help)"
            )
    return next(name for name in RANDOMNESS if name in names)


def measure(program: Callable, audit: Audit) -> Finding:
    """Measure how far a program's answers are from plain decoding's."""
    kind = randomness_of(program)
    new = audit.max_new_tokens or (2 if kind == "randomness" else 3)
    model = tiny_model(TARGET)
    exact = exact_distribution(model, PROMPT, new, audit.temperature)
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": model, "path": folder, "max_new_tokens": new}
        options["temperature"] = audit.temperature
        named = inspect.signature(program).parameters
        if "path" in named:
            model.save_pretrained(folder)
        options = {name: value for name, value in options.items() if name in named}

        def ask(randomness):
            try:
                return program(prompt=[*PROMPT], **{kind: randomness}, **options)
            except ValueError:
                raise
            except Exception as error:
                what = str(error).strip().partition("\n")[0]
                raise ValueError(f"the program fails: {type(error).__name__}: {what}") from error

        if kind == "randomness":
            found = enumerate_answers(lambda r: tokens(ask(r), new), len(exact))
            return Finding(float((found - exact).abs().sum() / 2))
        seeds = [derived_seed(audit.seed, i) % 2**31 for i in range(audit.samples)]
        if kind == "seeds":
            answers = ask(seeds)
        else:
            made = torch.Generator().manual_seed if kind == "generator" else int
            answers = [ask(made(seed)) for seed in track(seeds, "audit")]
        if len(answers) != len(seeds):
            raise ValueError(f"the program gives {len(answers)} answers for {len(seeds)} seeds")
        return chi_square([index_of(tokens(a, new)) for a in answers], exact)


def tokens(answer, new: int) -> list[int]:
    """Return the `new` token ids of an answer, from what a program returned."""
    ids = [int(t) for t in torch.as_tensor(answer).flatten()]
    if len(ids) > new and tuple(ids[: len(PROMPT)]) == PROMPT:
        ids = ids[len(PROMPT) :]
    if len(ids) < new or any(not 0 <= t < VOCABULARY for t in ids):
        raise ValueError(
            f"the program returns {ids}, and not {new} token ids from 0 to {VOCABULARY - 1}"
        )
    return ids[:new]


if __name__ == "__main__":
    main(run)
