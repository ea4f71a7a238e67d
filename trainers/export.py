"""Exports: a folder that stock transformers loads, checked before it is called done.

`python -m trainers.export run=runs/RECIPE [push=org/name]` pushes a run's export to the Hub.
"""

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from data.tokenizer import fingerprint
from decoding.cli import main, parse
from decoding.load import load_tokenizer, parade_config
from decoding.samplers.base import Sampler
from models.causal import looks_local
from trainers import hub
from trainers.base import BaseModule
from trainers.bundle import write_bundle
from trainers.card import model_card, with_bench

# Rows longer than any tokenizer's padding of the vocabulary (multiples of 512 are usual).
PADDING = 1024


@dataclass(frozen=True)
class Export:
    """Complete the model card of a finished run's export with its bench.csv, and push it.

    run: the run's folder. push: 'org/name' on the Hub (HF_TOKEN and HF_ENDPOINT are honoured).
    private: of a repository that is new. revision: a branch, made if there is none; null: main.
    dry_run: print what would be pushed, and touch nothing.
    """

    run: str
    push: str | None = None
    private: bool | None = None
    revision: str | None = None
    message: str = "Export by parade"
    dry_run: bool = False


def run(argv: list[str]) -> None:
    """The command."""
    e = parse(argv, Export, "trainers.export")
    if e.push is not None:
        hub.check_name(e.push)
    folder = Path(e.run) / "export"
    if not all((folder / name).is_file() for name in ("config.json", "README.md")):
        raise ValueError(
            f"{e.run!r} holds no export: a finished run of python -m trainers.fit writes one"
        )
    config = parade_config(str(folder))
    print(f"{folder}: {config}")
    card = complete_card(folder)
    if not e.dry_run and card != (folder / "README.md").read_text():
        (folder / "README.md").write_text(card)
    if e.push is None:
        return
    files, others = hub.uploads(folder)
    files["README.md"] = len(card.encode())
    would = "would push" if e.dry_run else "pushing"
    print(f"{would} {folder} to {e.push}, revision {e.revision or 'main'}:")
    for name, size in files.items():
        print(f"{size:>16,}  {name}")
    print(f"{len(files)} files, {sum(files.values()):,} bytes")
    if others:
        print(f"left out, no part of an export: {', '.join(others)}")
    target = config.get("target")
    if target and looks_local(target):
        print(f"its target {target} is a folder here: elsewhere it is loaded with target=...")
    if not e.dry_run:
        options = {"revision": e.revision, "message": e.message, "private": e.private}
        print(f"pushed: {hub.push(folder, e.push, **options)}")


def complete_card(folder: Path) -> str:
    """The text of an export's model card, with the results of the bench beside it if there are."""
    card = (folder / "README.md").read_text()
    results = folder.parent / "bench" / "bench.csv"
    if not results.is_file():
        return card
    command = f"python -m decoding.bench model={folder}"
    if results.stat().st_mtime < (folder / "config.json").stat().st_mtime:
        print(f"{results} is older than the export and left out: {command} measures anew")
        return card
    return with_bench(card, results, (results.parent / "command.txt").read_text())


def write_export(module: BaseModule, export: Path, metrics: dict, folder: Path) -> None:
    """Write weights, config, tokenizer and model card; reload and compare; then put in place.

    metrics: the run's last validation. folder: the run's, whose config and provenance go along.
    Errors: a vocabulary smaller than the tokenizer's; a reloaded model with other logits.
    """
    network, tokenizer = module.network, module.tokenizer
    if network.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the network knows {network.config.vocab_size} tokens, its tokenizer "
            f"{len(tokenizer)}: an export of it could not be used"
        )
    if module.target is not None:
        _check_vocabulary(network.config.vocab_size, module.target.config.vocab_size)
    temporary = export.with_name(f".{export.name}.{uuid.uuid4().hex}")
    try:
        network.config.parade = module.export_config()
        network.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id
        )
        network.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if "target" in network.config.parade:
            write_bundle(temporary, network.config.parade["method"])
        card = model_card(module.export_config(), metrics, folder, packed_rows(module))
        (temporary / "README.md").write_text(card)
        for name in ("config.yaml", "provenance.json"):
            shutil.copy(folder / name, temporary / f"parade_{name}")
        _check_reload(module, temporary)
        if export.exists():
            shutil.rmtree(export)
        os.replace(temporary, export)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_vocabulary(drafter: int, target: int) -> None:
    if abs(drafter - target) > PADDING:
        raise ValueError(
            f"the drafter has {drafter} tokens, the target {target}: more than padding explains"
        )


# A compiled network rounds otherwise than the plain one that every user of the export runs.
@torch.compiler.set_stance("force_eager")
def _check_reload(module: BaseModule, folder: Path) -> None:
    """The folder, loaded by stock transformers, gives the trainer's logits, bit for bit."""
    network = module.network.eval()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=network.dtype).to(network.device)
    if fingerprint(load_tokenizer(str(folder))) != fingerprint(module.tokenizer):
        raise ValueError(
            "transformers loads another tokenizer from the export than the trainer's: it chooses "
            f"the class by the model's type, {network.config.model_type!r}, and that changes it"
        )
    ids = torch.arange(1, 9, device=network.device)[None] % network.config.vocab_size
    with torch.inference_mode():
        difference = (network(ids).logits - again.eval()(ids).logits).abs().max().item()
    if module.target is not None:
        sampler, prompt = module.sampler(), ids[0].tolist()
        drafted = first_draft(sampler, prompt)
        sampler.drafter = again
        difference = max(difference, (drafted - first_draft(sampler, prompt)).abs().max().item())
    if difference:
        raise ValueError(f"the export's logits differ from the trainer's by {difference:.2e}")


def first_draft(sampler: Sampler, prompt: list[int]) -> Tensor:
    """A drafter's logits [k, V] of the first block behind a prompt, by the sampler's own pass."""
    rows, params = sampler.start(prompt)
    with torch.inference_mode():
        sampler.begin(rows, params)
        logits = sampler.draft_pass(rows, sampler.block_size, params)[0]
    return torch.where(logits.isfinite(), logits, 0)


def packed_rows(module: BaseModule) -> str | None:
    """The fingerprint of the packed rows that a module was trained on, if it was on such rows."""
    try:
        return module.trainer.train_dataloader.loader.dataset.rows.folder.name
    except (AttributeError, RuntimeError):  # other data, or no trainer
        return None


if __name__ == "__main__":
    main(run)
