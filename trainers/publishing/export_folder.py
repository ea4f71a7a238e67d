"""The folder of an export, which stock transformers loads; it appears only after its check."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import yaml
from transformers import GenerationConfig, PreTrainedModel

from data.files import atomic_folder, atomic_write, read_json
from decoding.loading import parade_config, sampler_of
from models.options import CONFIGS, KEPT
from terminal.progress import Work
from trainers.base import BaseModule
from trainers.lora import to_export
from trainers.publishing.bundle import write_bundle
from trainers.publishing.card import model_card
from trainers.publishing.export_check import check_tokenizer
from trainers.publishing.private import public, read_public
from trainers.publishing.speculators import name_target

GENERATION = "generation_config.json"


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an export: whole weights, an adapter, or a reference."""
    if (folder / KEPT).is_file():
        return True
    config = folder / "config.json"
    if not config.is_file():
        return False
    # A reference is the `parade` entry alone.
    return any(folder.glob("*.safetensors")) or [*read_json(config)] == ["parade"]


def check_exportable(module: BaseModule) -> None:
    """Raise ValueError before the training for what the export's checks would refuse after it."""
    module.check_vocabulary(module.network)
    if module.tokenizer is None or not module.exports_weights:
        return
    with TemporaryDirectory() as folder:
        module.network.config.save_pretrained(folder)
        module.tokenizer.save_pretrained(folder)
        check_tokenizer(module.tokenizer, Path(folder), module.network.config.model_type)


def write_export(
    module: BaseModule, export: Path, folder: Path, step: int, merge: bool = True
) -> None:
    """Write weights, config, tokenizer and model card, reload and compare them, then rename.

    A module without `exports_weights` exports the `parade` entry alone. A failed check leaves
    `export` unchanged. `folder` is the run's, and `step` the weights'; what is private is removed
    from the copies of its settings and provenance. With `merge` adapters become part of the
    weights; else they alone are exported.
    """
    network = to_export(module.network, merge)
    module.check_vocabulary(network)
    with atomic_folder(export) as temporary, Work(f"export to {export}, and its check"):
        write = _write_weights if module.exports_weights else _write_reference
        write(module, network, temporary)
        card = model_card(module.export_config(), folder, step)
        for name, content in {"README.md": card, **module.export_files()}.items():
            content = content if isinstance(content, bytes) else content.encode()
            (temporary / name).write_bytes(content)
        settings = read_public(folder / "config.yaml")
        (temporary / "parade_config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        story = public(read_json(folder / "provenance.json"))
        (temporary / "parade_provenance.json").write_text(json.dumps(story, indent=1))
        if module.exports_weights:
            # A compiled network rounds otherwise than the plain one that every user runs.
            with torch.compiler.set_stance("force_eager"):
                module.check_export(temporary, network.eval())


def _write_weights(module: BaseModule, network: PreTrainedModel, folder: Path) -> None:
    """Write the network and its tokenizer, as stock transformers loads them."""
    tokenizer = module.tokenizer
    network.config.parade = module.export_config()
    sampling = None
    if tokenizer is not None:
        ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
        if "target" not in network.config.parade:  # it decodes by itself, as what it was made of
            sampling = _generation_config(network, ends)
        network.generation_config = GenerationConfig(**ends)
        tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)
    if sampling is not None and (folder / GENERATION).is_file():
        # save_pretrained refuses files that many models have, such as a top_p without do_sample.
        sampling.to_json_file(folder / GENERATION)
    if hasattr(network, "peft_config"):
        entry = {"parade": network.config.parade}
        (folder / KEPT).write_text(json.dumps(entry, indent=2))
    elif tokenizer is not None and "target" in network.config.parade:
        # The bundle needs torch, transformers and pydantic only.
        write_bundle(folder, network.config.parade["method"])


def _generation_config(network: PreTrainedModel, ends: dict) -> GenerationConfig | None:
    """Return the generation_config.json that a network was loaded with; None where it had none."""
    found = getattr(network, "generation_config", None)
    if found is None or found._from_model_config:
        return None
    named = {key: value for key, value in found.to_dict().items() if value is not None}
    return GenerationConfig.from_dict(ends | named)


def _write_reference(module: BaseModule, network: PreTrainedModel, folder: Path) -> None:
    """Write the `parade` entry alone, which names the network; check that a sampler takes it."""
    entry = {"parade": module.export_config()}
    (folder / CONFIGS[0]).write_text(json.dumps(entry, indent=2))
    sampler_of(parade_config(str(folder)), network, module.tokenizer)


def write_entry(export: Path, entry: dict) -> None:
    """Replace the `parade` entry of a drafter's export; its other files stay."""
    file = next(export / name for name in CONFIGS if (export / name).is_file())
    config = read_json(file) | {"parade": entry}
    name_target(config, entry["target"])
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
