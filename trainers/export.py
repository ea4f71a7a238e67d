"""Exports: a folder that stock transformers loads, checked before it is called done.

`python -m trainers.export run=runs/RECIPE [push=org/name]` pushes a run's export to the Hub.
"""

import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from decoding.cli import main, parse
from decoding.load import load_tokenizer, parade_config
from decoding.samplers.base import Sampler
from trainers.base import BaseModule

# Rows longer than any tokenizer's padding of the vocabulary (multiples of 512 are usual).
PADDING = 1024


@dataclass(frozen=True)
class Export:
    """Push the export of a finished run to the Hub (HF_TOKEN and HF_ENDPOINT are honoured).

    run: the run's folder. push: 'org/name'. private: of a repository that is new.
    """

    run: str
    push: str | None = None
    private: bool = False


def run(argv: list[str]) -> None:
    """The command."""
    e = parse(argv, Export, "trainers.export")
    folder = Path(e.run) / "export"
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{e.run!r} holds no export: a finished run of python -m trainers.fit writes one"
        )
    print(f"{folder}: {parade_config(str(folder))}")
    if e.push is None:
        return
    try:
        api = HfApi()
        api.create_repo(e.push, private=e.private, exist_ok=True)
        api.upload_folder(repo_id=e.push, folder_path=folder, commit_message="Export by parade")
    except Exception as error:  # the client has many; a user needs one line
        raise ValueError(f"could not push to {e.push!r}: {error}") from error
    print(f"pushed to {e.push}")


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
        card = model_card(module.export_config(), metrics, folder)
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


def _check_reload(module: BaseModule, folder: Path) -> None:
    """The folder, loaded by stock transformers, gives the trainer's logits, bit for bit."""
    network = module.network.eval()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=network.dtype).to(network.device)
    load_tokenizer(str(folder))
    ids = torch.arange(1, 9, device=network.device)[None] % network.config.vocab_size
    with torch.inference_mode():
        difference = (network(ids).logits - again.eval()(ids).logits).abs().max().item()
    sampler = module.sampler()
    if sampler is not None:
        prompt = ids[0].tolist()
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


def model_card(config: dict, metrics: dict, folder: Path) -> str:
    """The README.md of an export."""
    story = json.loads((folder / "provenance.json").read_text())
    table = "\n".join(f"| {name} | {value} |" for name, value in sorted(metrics.items()))
    target = config.get("target")
    base = f"base_model: {target}\n" if target else ""
    versions = ", ".join(f"{k} {v}" for k, v in story["packages"].items())
    serve = "python -m decoding.generate model=<this folder> prompt='def fib(n):'"
    return f"""---
library_name: transformers
license: apache-2.0
{base}tags: [parade, speculative-decoding]
---
# A parade model: {config["method"]}

{f"A drafter for `{target}`: decoding with it is lossless." if target else "A causal LM."}

```
{serve}
```

Made by `{story["command"]}` (commit {story["git_commit"]}); the resolved configuration is in
`parade_config.yaml`. Versions: {versions}.

Measured at the last validation of the run (acceptance length: tokens emitted per target pass, the
bonus or correction token included):

| metric | value |
|---|---|
{table}
"""


if __name__ == "__main__":
    main(run)
