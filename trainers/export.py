"""`python -m trainers.export run=runs/RECIPE [push=org/name]`: push a run's export to the Hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.files import atomic_folder, atomic_write, read_text, refuse_links
from decoding.bench.options import MEASURED
from decoding.external.vllm_engine import FORMATS as ENGINE_FORMATS
from decoding.external.vllm_engine import speculative_config
from models.options import looks_local
from recipes.command import main
from recipes.options import NEEDED, Options, Verbatim, check_first, option, parse
from recipes.stored import asks_for_code, checked_config

SPECULATORS = "speculators"
PROGRAMS = ("transformers", "vllm")  # that verify= may name
FORMATS = ("transformers", *ENGINE_FORMATS, SPECULATORS)


@dataclass(frozen=True, kw_only=True)
class Export(Options):
    """Complete the model card of a finished run's export with its bench.csv, and push it."""

    EXAMPLE: ClassVar[str] = "run=runs/RECIPE push=org/name dry_run=true"

    run: str = option(NEEDED, "the run's folder")
    checkpoint: str | None = option(
        None, "one of its checkpoints: <run>/export-step-N is made of it first"
    )
    verify: tuple[Literal[*PROGRAMS], ...] = option((), "decode with it in other programs first")
    format: Literal[*FORMATS] | None = option(
        None,
        "refuse an export that is not in it: 'transformers' brings its sampler (custom_generate=), "
        "others are what vLLM serves; 'speculators' adds that package's entry, where it has a type "
        "for the drafter, by which vLLM serves it by its name alone",
    )
    assistant: bool = option(False, "write <run>/assistant too, for transformers' assistant_model=")
    trust_remote_code: bool = option(
        False, "let the run's models bring code of their own, and run it"
    )
    target: str | None = option(
        None, "Hub id of the export's target, if the run read it from a folder"
    )
    python: str | None = option(
        None, "the interpreter that has vllm; null: .venv-vllm's, or this one", needs="verify"
    )
    push: str | None = option(None, "org/name on the Hub (HF_TOKEN and HF_ENDPOINT are honoured)")
    private: bool | None = option(None, "of a repository that is new", needs="push")
    revision: str | None = option(None, "a branch, made if there is none; null: main", needs="push")
    message: Verbatim = option("Export by parade", "of the commit", needs="push")
    dry_run: bool = option(False, "print what would be pushed, and change nothing")

    def check_inputs(self) -> None:
        if not Path(self.run).is_dir():
            raise ValueError(f"run={self.run} is not there: give the folder of a finished run")


def read_options(argv: list[str]) -> Export:
    """Return the command's options."""
    return parse(argv, Export, "trainers.export")


check_first(__name__, read_options)

from decoding.loading import decoding_fingerprint, load_assistant, parade_config
from models.weights import no_larger_than, one_line
from trainers.fit import build_module
from trainers.publishing import hub
from trainers.publishing.bundle import BUNDLE
from trainers.publishing.card import SECTIONS, model_card, with_bench
from trainers.publishing.export_folder import is_export, write_entry, write_export
from trainers.publishing.private import public
from trainers.publishing.speculators import write_speculators
from trainers.publishing.verify import verify
from trainers.runs.checkpoint_files import load_weights, size_of, step_of
from trainers.runs.provenance import chosen_layers


def run(argv: list[str]) -> None:
    """Run the command `python -m trainers.export` with arguments key=value, those of `Export`."""
    e = read_options(argv)
    folder = _checked_export(e)
    if e.format == SPECULATORS:
        write_speculators(folder, e.dry_run)
    elif e.format is not None:
        _check_format(folder, e.format)
    if e.assistant and not e.dry_run:
        write_assistant(folder, Path(e.run) / "assistant")
    if e.verify:
        verify(Path(e.run), e.verify, e.python, e.trust_remote_code)
    config = parade_config(str(folder))
    card = read_text(folder / "README.md")
    if e.target is not None:
        config = _with_target(folder, config, e.target)
        step = None if e.checkpoint is None else step_of(Path(e.checkpoint))
        card = model_card(config, Path(e.run), step)
        if not e.dry_run:
            write_entry(folder, config)
    print(f"{folder}: {config}")
    if e.checkpoint is None:  # the bench has measured the other one
        card = _complete_card(folder, card)
    if not e.dry_run and card != read_text(folder / "README.md"):
        with atomic_write(folder / "README.md") as temporary:
            temporary.write_text(card)
    if e.push is not None:
        _push(e, e.push, folder, card)


def _checked_export(e: Export) -> Path:
    """Return the folder of the run's export, or make it from a checkpoint."""
    if e.push is not None:
        hub.check_name(e.push)
    if e.verify and e.checkpoint is not None:
        raise ValueError(
            f"verify={list(e.verify)} compares the finished run's export with its last validation: "
            "leave checkpoint= out"
        )
    refuse_links(Path(e.run), _small_files(Path(e.run)))
    folder = Path(e.run) / "export"
    if e.checkpoint is not None:
        folder = export_checkpoint(Path(e.run), Path(e.checkpoint), e.trust_remote_code)
    if not (is_export(folder) and (folder / "README.md").is_file()):
        raise ValueError(
            f"{e.run!r} holds no export: a finished run of python -m trainers.fit writes one, "
            "and checkpoint=... makes one of a run that is not finished"
        )
    if e.push is not None and e.target is None:  # before minutes of verification
        target = parade_config(str(folder)).get("target")
        if target and (looks_local(target) or public(target) != target):
            raise ValueError(
                f"{folder} names its target {target!r}, a folder of this machine that nobody else "
                "has: give its Hub id with target=org/name"
            )
    return folder


def _small_files(run: Path) -> Iterator[Path]:
    """Yield what a card is made of: the files of a run, its export and its benches' results."""
    yield from (path for path in run.iterdir() if path.is_file() or path.is_symlink())
    for name in sorted({"export", *(Path(results).parent.as_posix() for results in SECTIONS)}):
        yield run / name
        yield from (run / name).rglob("*")


def _push(e: Export, repo: str, folder: Path, card: str) -> None:
    """List the files to push, and push them unless it is a dry run."""
    files, others = hub.uploads(folder)
    if not (e.dry_run and e.target):  # else the target that is replaced is still there
        hub.check_public(folder, files)
    files["README.md"] = len(card.encode())
    would = "would push" if e.dry_run else "pushing"
    print(f"{would} {folder} to {repo}, revision {e.revision or 'main'}:")
    for name, size in files.items():
        print(f"{size:>16,}  {name}")
    print(f"{len(files)} files, {sum(files.values()):,} bytes")
    if others:
        print(f"left out, no part of an export: {', '.join(others)}")
    if not e.dry_run:
        pushed = hub.push(folder, repo, revision=e.revision, message=e.message, private=e.private)
        print(f"pushed: {pushed}")


def write_assistant(export: Path, to: Path) -> None:
    """Write an export into a folder that `AutoModel` loads for `generate(assistant_model=...)`."""
    assistant, arguments = load_assistant(str(export))
    with atomic_folder(to) as temporary:
        assistant.save_pretrained(temporary)
    told = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    loaded = f"AutoModel.from_pretrained({str(to)!r})"
    print(f"wrote it for transformers: generate(..., assistant_model={loaded}, {told})")


def _with_target(folder: Path, config: dict, target: str) -> dict:
    """Return the `parade` entry of an export with another target."""
    if "target" not in config:
        raise ValueError(f"target={target} is not allowed: {folder} is no drafter")
    if looks_local(target):
        raise ValueError(f"target={target} is not allowed: give a Hub id, org/name")
    return {**config, "target": target}


def _check_format(folder: Path, format: str) -> None:
    """Raise ValueError if another program could not read the export in this format."""
    if format in ENGINE_FORMATS:
        method = speculative_config(folder)["method"]
        if method != ENGINE_FORMATS[format]:
            known = next(name for name, theirs in ENGINE_FORMATS.items() if theirs == method)
            raise ValueError(
                f"format={format} does not fit {str(folder)!r}, which is in format={known}: the "
                "recipe and its layout decide"
            )
    elif not (folder / BUNDLE).is_dir():
        raise ValueError(
            f"format=transformers does not fit {str(folder)!r}: its sampler runs in parade alone, "
            f"so there is no {BUNDLE}/ in it"
        )


def export_checkpoint(run: Path, checkpoint: Path, trust_remote_code: bool = False) -> Path:
    """Make the export `<run>/export-step-N` of one checkpoint, on one process.

    `trust_remote_code` must allow code that config.yaml asks for: the folder may be a stranger's.
    """
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{str(run)!r} is no run: it holds no config.yaml")
    step = step_of(checkpoint)
    config = checked_config(run / "config.yaml")
    if asks_for_code(config) and not trust_remote_code:
        raise ValueError(
            f"{run / 'config.yaml'} asks to run code that a model brings: read it, and allow it "
            "with trust_remote_code=true"
        )
    with one_line("a module", str(run / "config.yaml")), no_larger_than(*size_of(checkpoint)):
        module = build_module(config, chosen_layers(run))
    load_weights(module, checkpoint)
    # Not <run>/export: a run that is not finished must not look as if it were.
    folder = run / f"export-step-{step}"
    with module.averaged():
        write_export(module, folder, run, step, config.lora.merge)
    return folder


def _complete_card(folder: Path, card: str) -> str:
    """Add the tables of the run's benches to a model card, except those of other weights."""
    for results in (folder.parent / name for name in SECTIONS):
        if not results.is_file():
            continue
        command, measured = read_text(results.parent / "command.txt"), results.parent / MEASURED
        if not measured.is_file() or read_text(measured) != decoding_fingerprint(folder):
            print(
                f"{results} is left out, as it was measured before this export changed (trained "
                f"anew, or calibrated): {command} measures again"
            )
        else:
            card = with_bench(card, results, command)
    return card


if __name__ == "__main__":
    main(run)
