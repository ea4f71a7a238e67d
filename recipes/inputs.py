"""Inputs of a recipe, built first at lab scale and required elsewhere, and what follows its run."""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from models.options import looks_local
from recipes.command import call
from recipes.compose import build as builder
from recipes.compose import compose, names, run_folder

READ_ANSWERS = ("data.rows.documents.answers", "data.corpora.answers.frequent_tokens")


def check_first(name: str, command: str) -> None:
    """Check a command line before the rest of the command's module is imported.

    It is what `recipes.options.check_first` is for commands without recipes; `command` is that of
    `compose`. Inputs of a new run must be there, or be made by the run.
    """

    def check(argv: list[str]) -> None:
        config = compose(argv, command)
        if not config.build_inputs and not run_folder(config).exists():
            prepare_inputs(config.needs, build=False)

    if name == "__main__":
        call(check)


def prepare_inputs(needs: Sequence[DictConfig], build: bool) -> None:
    """Check that every input in `needs` (path and command) exists; with `build`, run its command.

    A `check` is called before the command, which may take hours, and raises ValueError for what the
    run could not train with. Inputs that can be Hub ids are left to the code that loads them.
    """
    for need in needs:
        if {*need} - {"check"} != {"path", "command"}:
            raise ValueError(f"needs={needs} is not allowed: each has a path and a command")
        if Path(need.path).exists() or not looks_local(need.path):
            continue
        words = _words(need)
        command = shlex.join(words)
        if (made := _made_by(words)) and made.resolve() != Path(need.path).resolve().parent:
            raise ValueError(
                f"{need.path} is missing, and its command makes another folder, {made}: give a "
                f"path that is there, or leave the key out and run: {command}"
            )
        if not build:
            raise ValueError(f"{need.path} is missing. It is made by: {command}")
        if "check" in need:
            builder(need.check)
        print(f"{need.path} is missing, so it is built first: {command}", flush=True)
        if subprocess.run([sys.executable, *words[1:]]).returncode:
            shared = any(word.startswith("minutes=") for word in words)
            share = " (its minutes are a share of the run's: more for the run are more for it)"
            raise ValueError(f"could not build {need.path} with: {command}{share * shared}")


def check_collections(config: DictConfig) -> None:
    """Raise ValueError for a collection of answers that is neither there nor made by `needs`.

    The inputs that are built first may take hours.
    """
    from data.corpora.answers import read_manifest  # which imports torch

    made = {Path(need.path).parent for need in config.needs}
    for source in _collections(OmegaConf.to_container(config, resolve=True)):
        if Path(source) not in made and not Path(source, "manifest.json").is_file():
            read_manifest(source)  # which says why not


def follow_up(then: Sequence[DictConfig], folder: Path) -> None:
    """Run the commands of `then` (path and command) on a run's export, those not done yet.

    A path is that of the file, in the run's folder, that a command has made when it is done: one
    older than the export's weights is of an earlier export.
    """
    export = folder / "export"
    for step in then:
        if {*step} != {"path", "command"}:
            raise ValueError(f"then={then} is not allowed: each has a path and a command")
        made, weights = folder / step.path, export.glob("*.safetensors")  # one file, or shards
        if made.exists() and made.stat().st_mtime >= max(f.stat().st_mtime for f in weights):
            continue
        words = [*_words(step), f"model={export}"]
        command = shlex.join(words)
        print(f"next: {command}", flush=True)
        if subprocess.run([sys.executable, *words[1:]]).returncode:
            raise ValueError(
                f"the run is exported to {export}, and this failed: {command}\n"
                "The command of the run, given again, goes on there"
            )


@contextmanager
def named_commands(needs: Sequence[DictConfig]) -> Iterator[None]:
    """Add to the error of an input that does not fit the command that makes another one."""
    from data.corpora.answers import UnfitCollection  # which imports torch

    try:
        yield
    except UnfitCollection as error:
        source = Path(error.source).resolve()
        need = next((n for n in needs if Path(n.path).resolve().parent == source), None)
        if need is None:
            raise
        words = [word for word in _words(need) if not word.startswith("name=")] + ["name=again"]
        raise ValueError(
            f"{error}, with: {shlex.join(words)}, and give {_made_by(words)} in place of it"
        ) from None


def _collections(node: Any) -> Iterator[str]:
    """Return the folders of answers that parts of a config read."""
    if isinstance(node, dict) and node.get("_target_") in READ_ANSWERS and node.get("source"):
        sources = node["source"]
        yield from sources if isinstance(sources, list) else [sources]
    elif isinstance(node, dict | list):
        for part in node.values() if isinstance(node, dict) else node:
            yield from _collections(part)


def _words(need: DictConfig) -> list[str]:
    """Return the words of a command, with all keys filled in."""
    # Split before keys are filled in: a folder's name may have spaces.
    words = OmegaConf.to_container(need, resolve=False)["command"].split()  # type: ignore[index]
    return [*OmegaConf.create(words, parent=need._get_root())]


def _made_by(words: list[str]) -> Path | None:
    """Return the folder that a recipe's command writes; None for a command of another kind."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if given.get("recipe") not in names("recipe"):
        return None
    return Path(given.get("runs", "runs"), given["recipe"], given.get("name", ""))
