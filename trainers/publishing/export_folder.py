"""The folder of an export, which stock transformers loads: written, and checked before that."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from data.files import atomic_folder
from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import CONFIGS, KEPT, load_tokenizer, parade_config, sampler_of
from trainers.base import BaseModule
from trainers.lora import to_export
from trainers.publishing.bundle import write_bundle
from trainers.publishing.card import model_card

# Rows longer than any tokenizer's padding of the vocabulary (multiples of 512 are usual).
PADDING = 1024


def is_export(folder: Path) -> bool:
    """Whether a run has written its export there: whole weights, an adapter, or a reference."""
    return any((folder / name).is_file() for name in ("config.json", KEPT))


def write_export(
    module: BaseModule, export: Path, metrics: dict, folder: Path, merge: bool = True
) -> None:
    """Write weights, config, tokenizer and model card; reload and compare; then put in place.

    metrics: the last of each, for the card. folder: the run's, whose config and provenance go
    along. merge: adapters become part of the weights; else the export is the adapter alone, and
    loads its base by itself. A module without weights of its own (`exports_weights`) exports the
    `parade` entry, and no copy of its network.
    Errors: a vocabulary smaller than the tokenizer's; a reloaded model with other logits.
    """
    network, tokenizer = to_export(module.network, merge), module.tokenizer
    if tokenizer is not None and network.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the network knows {network.config.vocab_size} tokens, its tokenizer "
            f"{len(tokenizer)}: an export of it could not be used"
        )
    if module.target is not None and tokenizer is not None:
        _check_vocabulary(network.config.vocab_size, module.target.config.vocab_size)
    with atomic_folder(export) as temporary:
        write = _write_weights if module.exports_weights else _write_reference
        write(module, network, temporary)
        card = model_card(module.export_config(), metrics, folder)
        for name, text in {"README.md": card, **module.export_files()}.items():
            (temporary / name).write_text(text)
        for name in ("config.yaml", "provenance.json"):
            shutil.copy(folder / name, temporary / f"parade_{name}")
        if module.exports_weights:
            _check_reload(module, network, temporary)


def _write_weights(module: BaseModule, network: PreTrainedModel, folder: Path) -> None:
    """The network and its tokenizer, as stock transformers loads them."""
    tokenizer = module.tokenizer
    network.config.parade = module.export_config()
    if tokenizer is not None:
        network.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id
        )
        tokenizer.save_pretrained(folder)
    network.save_pretrained(folder)
    if hasattr(network, "peft_config"):
        entry = {"parade": network.config.parade}
        (folder / KEPT).write_text(json.dumps(entry, indent=2))
    elif tokenizer is not None and "target" in network.config.parade:
        # What travels needs torch and transformers only.
        write_bundle(folder, network.config.parade["method"])


def _write_reference(module: BaseModule, network: PreTrainedModel, folder: Path) -> None:
    """The entry alone: it names where the network is, and a sampler can be made of the two."""
    entry = {"parade": module.export_config()}
    (folder / CONFIGS[0]).write_text(json.dumps(entry, indent=2))
    sampler_of(parade_config(str(folder)), network, module.tokenizer)


def _check_vocabulary(drafter: int, target: int) -> None:
    if abs(drafter - target) > PADDING:
        raise ValueError(
            f"the drafter has {drafter} tokens, the target {target}: more than padding explains"
        )


# A compiled network rounds otherwise than the plain one that every user of the export runs.
@torch.compiler.set_stance("force_eager")
def _check_reload(module: BaseModule, network: PreTrainedModel, folder: Path) -> None:
    """The folder, loaded by stock transformers, gives the written network's logits bit for bit."""
    network = network.eval()
    if module.tokenizer is None:
        _check_same_outputs(network, folder)
        return
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=network.dtype).to(network.device)
    if fingerprint(load_tokenizer(str(folder))) != fingerprint(module.tokenizer):
        raise ValueError(
            "transformers loads another tokenizer from the export than the trainer's: it chooses "
            f"the class by the model's type, {network.config.model_type!r}, and that changes it"
        )
    ids = torch.arange(1, 9, device=network.device)[None] % network.config.vocab_size
    with torch.inference_mode():
        difference = (network(ids).logits - again.eval()(ids).logits).abs().max().item()
    sampler, prompt = module.sampler(), ids[0].tolist()
    if module.target is not None and sampler is not None:
        sampler.drafter = network
        drafted = first_draft(sampler, prompt)
        sampler.drafter = again
        difference = max(difference, (drafted - first_draft(sampler, prompt)).abs().max().item())
    if difference:
        raise ValueError(f"the export's logits differ from the trainer's by {difference:.2e}")


def _check_same_outputs(network: PreTrainedModel, folder: Path) -> None:
    """The same of a model of no language: by its own class, on the inputs that it names itself."""
    weights = network.state_dict()
    again = type(network).from_pretrained(folder, dtype=network.dtype).to(network.device).eval()
    inputs = {name: x.to(network.device) for name, x in network.dummy_inputs.items()}
    with torch.inference_mode():
        difference = (network(**inputs) - again(**inputs)).abs().max().item()
    if any(not torch.equal(weights[name], x) for name, x in again.state_dict().items()):
        raise ValueError("the export's weights are not the trainer's")
    if difference:
        raise ValueError(f"the export's outputs differ from the trainer's by {difference:.2e}")


def first_draft(sampler: Sampler, prompt: list[int]) -> Tensor:
    """A drafter's logits [k, V] of the first block behind a prompt, by the sampler's own pass."""
    rows, params = sampler.start(prompt)
    with torch.inference_mode():
        sampler.begin(rows, params)
        logits = sampler.draft_pass(rows, sampler.block_size, params)[0]
    return torch.where(logits.isfinite(), logits, 0)
