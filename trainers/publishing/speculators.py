"""The entry of the package `speculators` in a drafter's config.json, which vLLM reads too.

It names the target and how to draft, so `vllm serve <drafter>` needs no --speculative-config.
"""

import shutil
from pathlib import Path

from data.files import atomic_folder, read_json, refuse_links
from decoding.loading import load_drafter, loads_drafter, parade_config, target_of
from models.causal import files_of
from trainers.publishing.bundle import BUNDLE, write_bundle

ENTRY = "speculators_config"


def write_speculators(export: Path, dry_run: bool = False) -> None:
    """Add the entry to an export, which is replaced; with `dry_run` check only that it fits."""
    refuse_links(export, sorted(export.rglob("*")))  # its files are copied
    config = parade_config(str(export))
    network = load_drafter(config, str(export), "auto") if loads_drafter(config) else None
    if network is None or not hasattr(network, "add_speculators"):
        raise ValueError(
            f"format=speculators does not fit {str(export)!r}: the package has no type for what "
            f"method={config['method']} decodes with"
        )
    target = target_of(str(export), config)
    assert target is not None  # it is a drafter
    known = read_json(files_of(target)("config.json"))
    network.add_speculators(config["target"], known.get("architectures") or [])
    if dry_run:
        return
    with atomic_folder(export) as temporary:
        shutil.copytree(export, temporary, dirs_exist_ok=True)
        network.save_pretrained(temporary)
        # An older one does not know the entry's keys.
        shutil.rmtree(temporary / BUNDLE, ignore_errors=True)
        write_bundle(temporary, config["method"])
    print(f"{export / 'config.json'} has the entry of speculators: vllm serve {export}")


def name_target(config: dict, target: str) -> None:
    """Name another target in the entry of a config.json, if it has one, in place."""
    if ENTRY in config:
        config[ENTRY]["verifier"]["name_or_path"] = target
