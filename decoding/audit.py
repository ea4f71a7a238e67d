"""`python -m decoding.audit module:function`: is a program's decoding lossless?

A program decodes a prompt with a tiny random model whose every answer can be enumerated, so plain
decoding's distribution is known exactly, and the program's is compared with it. It takes the
parameters that it names:

- `model` (a transformers causal LM) or `path` (the folder of one), and `prompt`, token ids;
- its randomness, one of: `randomness`, with `categorical(probs) -> index` and `accept(prob) ->
  bool`, whose every outcome is then walked: the audit is exact; `generator`, a torch.Generator;
  `seed`; or `seeds`, a list, for a program that answers the prompt once for each of them;
- `max_new_tokens` and `temperature`.

It returns token ids, the answer's alone or the prompt's and the answer's (with `seeds` a list of
them). Programs of other projects are in `decoding.auditing.peers`. Before its verdict the audit
shows that it finds wrong rules with the same effort (`decoding.auditing.controls`).
"""

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from decoding.auditing.controls import RIGHT, WRONG
from decoding.auditing.reference import (
    PROMPT,
    TARGET,
    VOCABULARY,
    exact_distribution,
    index_of,
    save,
    tiny_model,
)
from decoding.auditing.statistics import (
    POWER,
    Verdict,
    chi_square,
    enumerate_answers,
    total_variation,
)
from decoding.commands.cli import main, parse, quiet
from decoding.commands.options import NEEDED, Options, option
from decoding.commands.progress import track
from decoding.engine.randomness import derived_seed

RANDOMNESS = ("randomness", "generator", "seed", "seeds")
SAME = 1e-5  # total variation up to which an enumerated distribution is plain decoding's (float32)


@dataclass(frozen=True, kw_only=True)
class Audit(Options):
    """Compare the distribution of a program's answers with plain decoding's, over a tiny model."""

    EXAMPLE: ClassVar[str] = "program=decoding.auditing.peers:assisted_generation"

    program: str = option(NEEDED, "module:function; 'program=' may be left out")
    samples: int = option(
        4000, "answers that are drawn, where they cannot be enumerated", least=100
    )
    temperature: float = option(1.0, "of the sampling, above 0", least=1e-3)
    max_new_tokens: int | None = option(
        None, "tokens of an answer; null: 2 where they are enumerated, 3 where drawn", least=1
    )
    controls: bool = option(True, "show first that wrong rules are found")
    seed: int = option(0, "of all that is drawn")


@dataclass(frozen=True)
class Finding:
    """What an audit found of one program.

    Attributes:
        distance: Total variation from plain decoding: exact, or of the sample.
        verdict: The test's, where answers were drawn.
    """

    distance: float
    verdict: Verdict | None = None

    @property
    def lossless(self) -> bool:
        """Whether the program passes."""
        return self.verdict.right if self.verdict else self.distance <= SAME

    def __str__(self) -> str:
        if self.verdict is None:
            return f"total variation {self.distance:.2g} from plain decoding, by enumeration"
        v = self.verdict
        return (
            f"{v.samples} answers, total variation {v.distance:.3f} (a right program's sample: "
            f"{v.expected:.3f}), p = {v.p:.2g}; a distance of {v.found:.3f} is found with "
            f"probability {POWER}"
        )


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`; the first may be the program alone."""
    quiet()
    if argv and ":" in argv[0] and "=" not in argv[0]:
        argv = [f"program={argv[0]}", *argv[1:]]
    audit = parse(argv, Audit, "decoding.audit")
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
    found = measure(program, audit, show=True)
    print(f"{audit.program}: {found}")
    if not found.lossless:
        raise ValueError(f"{audit.program} does not have plain decoding's distribution")
    print(f"{audit.program} has plain decoding's distribution, as far as this audit can see")


def find(name: str) -> Callable:
    """The function that a name module:function stands for.

    Raises:
        ValueError: There is none, or it has no randomness that an audit knows.
    """
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
    """The one of RANDOMNESS that a program takes.

    Raises:
        ValueError: It takes none of them, or neither a model nor a path, or no prompt.
    """
    names = inspect.signature(program).parameters
    for needed in (RANDOMNESS, ("model", "path"), ("prompt",)):
        if not {*needed} & {*names}:
            raise ValueError(
                f"a program must have a parameter {' or '.join(needed)}; this one has {[*names]} "
                "(python -m decoding.audit --help)"
            )
    return next(name for name in RANDOMNESS if name in names)


def drawn(control: Callable) -> Callable:
    """A control, which takes its randomness, as a program that takes a seed."""

    def program(model, prompt, *, seed, max_new_tokens, temperature):
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        return control(model, prompt, randomness=Coins(seed), **options)

    return program


class Coins:
    """Randomness for the controls, drawn with a torch.Generator."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def categorical(self, probs) -> int:
        """An index drawn with these probabilities."""
        return int(torch.multinomial(probs, 1, generator=self.generator))

    def accept(self, prob) -> bool:
        """True with this probability."""
        return bool(torch.rand((), generator=self.generator, dtype=torch.double) < prob)


def measure(program: Callable, audit: Audit, show: bool = False) -> Finding:
    """The distance of a program's answers from plain decoding.

    Args:
        program: See the module.
        audit: The command's options.
        show: Whether to show progress.

    Raises:
        ValueError: The program returns something else than answers, or fails.
    """
    kind = randomness_of(program)
    new = audit.max_new_tokens or (2 if kind == "randomness" else 3)
    model = tiny_model(TARGET)
    exact = exact_distribution(model, PROMPT, new, audit.temperature)
    named = inspect.signature(program).parameters
    options = {"max_new_tokens": new, "temperature": audit.temperature}
    options = {name: value for name, value in options.items() if name in named}
    with tempfile.TemporaryDirectory() as folder:
        where = {"model": model} if "model" in named else {"path": save(model, Path(folder))}

        def ask(randomness):
            try:
                return program(prompt=[*PROMPT], **where, **{kind: randomness}, **options)
            except ValueError:
                raise
            except Exception as error:
                what = str(error).strip().partition("\n")[0]
                raise ValueError(f"the program fails: {type(error).__name__}: {what}") from error

        if kind == "randomness":
            found = enumerate_answers(lambda r: tokens(ask(r), new), len(exact))
            return Finding(total_variation(found, exact))
        seeds = [derived_seed(audit.seed, i) % 2**31 for i in range(audit.samples)]
        if kind == "seeds":
            answers = ask(seeds)
        elif kind == "generator":
            each = track(seeds, "audit") if show else seeds
            answers = [ask(torch.Generator().manual_seed(seed)) for seed in each]
        else:
            answers = [ask(seed) for seed in (track(seeds, "audit") if show else seeds)]
        if len(answers) != len(seeds):
            raise ValueError(f"the program gives {len(answers)} answers for {len(seeds)} seeds")
        verdict = chi_square([index_of(tokens(a, new)) for a in answers], exact)
        return Finding(verdict.distance, verdict)


def tokens(answer, new: int) -> list[int]:
    """The `new` token ids of an answer, from what a program returned.

    Raises:
        ValueError: It is no list of that many tokens of the tiny model.
    """
    ids = torch.as_tensor(answer).flatten().tolist()
    if len(ids) > new and tuple(ids[: len(PROMPT)]) == PROMPT:
        ids = ids[len(PROMPT) :]
    if len(ids) < new or any(not 0 <= t < VOCABULARY for t in ids):
        raise ValueError(
            f"the program returns {ids}, and not {new} token ids from 0 to {VOCABULARY - 1}"
        )
    return [int(t) for t in ids[:new]]


if __name__ == "__main__":
    main(run)
