"""`python -m decoding.generate model=runs/deer_stage2/export prompt='def fib(n):'`: one answer.

`chat=true` asks the model through its chat template; without `prompt=`, it is a chat in a terminal.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.files import read_text
from decoding.engine.params import PARAM_NAMES, VERIFY, SamplingParams
from recipes.command import main
from recipes.options import AnswerOptions, Verbatim, check_first, option, parse


@dataclass(frozen=True, kw_only=True)
class Generate(AnswerOptions, SamplingParams):
    """Decode one prompt with an export's own sampler, or chat; the text is printed as it comes."""

    EXAMPLE: ClassVar[str] = "model=runs/deer_stage2/export prompt='def fib(n):' temperature=0.7"

    prompt: Verbatim | None = option(
        None,
        "the text to go on from, for infilling with holes such as <hole:12>; @path reads a file, "
        "- standard input, @@ begins a text with one @; needed without chat=true",
    )
    chat: bool = option(
        False, "ask through the chat template; without prompt=, a chat in the terminal"
    )
    system: Verbatim | None = option(None, "the system's message of a chat")
    stop: tuple[Verbatim, ...] = SamplingParams.stop
    grammar: Verbatim | None = option(
        None,
        "what the answer matches: a JSON schema, /a regular expression/, a Lark grammar; @path",
    )
    verify: Literal[*VERIFY] = option(
        SamplingParams.verify, "how drafts are verified; each lossless"
    )

    def __post_init__(self):
        super().__post_init__()
        SamplingParams.__post_init__(self)
        if self.prompt is None and not self.chat:
            raise ValueError("prompt= is missing: give a text, @file or -, or chat=true for a chat")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt= is empty: give the text to go on from")
        if self.system is not None and not self.chat:
            raise ValueError("system= is of a chat: give chat=true too")

    def check_inputs(self) -> None:
        super().check_inputs()
        for name in ("prompt", "grammar"):
            given = getattr(self, name)
            if given is not None and (file := file_of(given)) and not file.exists():
                read_given(name, given)  # its error


def read_options(argv: list[str]) -> Generate:
    """Return the command's options."""
    return parse(argv, Generate, "decoding.generate")


def file_of(given: str) -> Path | None:
    """Return the file that a text names as @path; None where it is no file."""
    named = given.startswith("@") and not given.startswith("@@")
    return Path(os.path.expanduser(given[1:])) if named else None


def read_given(name: str, given: str) -> str:
    """Return the text of `name=`: as given, of a file (@path), or all of standard input (-)."""
    file = file_of(given)
    if given != "-" and file is None:
        return given.removeprefix("@") if given.startswith("@@") else given
    try:
        if file is None:
            text = sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
        else:
            text = read_text(file)
    except OSError as error:
        reason = f"{error.strerror}; a text that begins with @ is given as {name}='@@...'"
        raise ValueError(f"{name}={given!r} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}={given!r} holds no text in UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"{name}={given!r} holds no text")
    return text


check_first(__name__, read_options)

from decoding.chat import Chat, aside, converse, cost, shown
from decoding.engine.defaults import model_defaults, told
from decoding.engine.sampler import Sampler
from decoding.loading import load
from models import packed


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    g = read_options(argv)
    prompt = None if g.prompt is None else read_given("prompt", g.prompt)
    sampler = load(g.model, **g.loading)
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{g.model!r} makes no text but images: use python -m decoding.images")
    if line := packed.told(sampler.target):
        aside(line)
    values = {name: getattr(g, name) for name in PARAM_NAMES}
    if g.grammar is not None:
        values["grammar"] = read_given("grammar", g.grammar)
    if g.generation_config == "auto":
        given = {argument.partition("=")[0] for argument in argv}
        own = {k: v for k, v in model_defaults(sampler).items() if k not in given}
        if own:
            aside(told(own))
        values |= own
    params = SamplingParams(**values)
    if line := sampler.told(params):
        aside(line)
    if prompt is not None and not g.chat:
        go_on(sampler, prompt, params)
        return
    chat = Chat(sampler, params, g.system)
    if prompt is None:
        converse(chat)
    else:
        chat.ask(prompt)


def go_on(sampler: Sampler, prompt: str, params: SamplingParams) -> None:
    """Print a prompt and its continuation as it comes, and its cost."""
    begun = prompt if sampler.continues else ""
    for chunk in sampler.stream([prompt], params):  # its first step may refuse the parameters
        print(begun + shown(chunk), end="", flush=True)
        begun = ""
    result = chunk.result
    assert result is not None  # of the last chunk
    s, n = result.stats, len(result.token_ids)
    seconds = s.target_s + s.drafter_s + s.sampler_s
    print(f"\n\n{cost(n, seconds, s, result.finish_reason)}")


if __name__ == "__main__":
    main(run)
