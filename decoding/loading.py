"""From an exported folder or a Hub id to the sampler that serves it."""

import importlib
import json
import pkgutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.text.tokenizer import fingerprint
from decoding import samplers
from decoding.commands.cli import convert, split, unknown
from decoding.engine.sampler import Sampler
from models import causal

# Where a kept adapter's export has its `parade` entry: beside a config.json, transformers would
# look for the weights of the adapter's base in the same folder.
KEPT = "parade_export.json"
CONFIGS = ("config.json", KEPT, "adapter_config.json")  # the first that is there


def load(
    path: str,
    *,
    target: str | None = None,
    sampler: Iterable[str] = (),
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Sampler:
    """The lossless sampler of an export: `decoding.load('runs/deer_stage2/export')`.

    path: a folder or Hub id; an ordinary causal LM gives plain decoding.
    target: used instead of the one that the export names.
    sampler: another method, or other knobs, than the export names: ('method=jacobi', 'blocks=4').
    Errors: a missing or damaged folder, a target whose tokenizer is not the drafter's.
    """
    config = sampling_config(path, sampler)
    method = _module(config["method"])
    if hasattr(method, "read_artefacts"):
        config |= method.read_artefacts(causal.files_of(path), config)
    if hasattr(method, "load"):  # its models are no language models
        name = target or ("target" in config and _beside(path, config["target"])) or None
        return method.load(path, config, target=name, dtype=dtype, device=device)
    name = (target or _beside(path, config["target"])) if "target" in config else None
    if name and "tokenizer_fingerprint" not in config:  # no drafter's weights: a draft graph
        path, name = name, None
    if name is None:
        network = causal.load(path, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
        return sampler_of(config, network, load_tokenizer(path, trust_remote_code))
    network = load_drafter(config, path, dtype, trust_remote_code=trust_remote_code).to(device)
    model = causal.load(name, dtype=dtype, trust_remote_code=trust_remote_code).to(device)
    target_tokenizer = load_tokenizer(name, trust_remote_code)
    check_tokenizers(target_tokenizer, config["tokenizer_fingerprint"], name, path)
    return sampler_of(config, model, target_tokenizer, network)


def sampler_of(
    config: dict,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None = None,
) -> Sampler:
    """The sampler of an export's `parade` entry: `decoding.samplers.<method>.from_export`."""
    return _module(config["method"]).from_export(target, tokenizer, drafter, config)


def load_drafter(config: dict, path: str, dtype: str | torch.dtype, **options) -> PreTrainedModel:
    """The drafter's network of an export: by its sampler's `load_drafter`, or as a causal LM.

    Args:
        config: The `parade` entry.
        path: The export's folder or Hub id.
        dtype: Of the weights; 'auto' takes the checkpoint's own.
        options: Further ones of `models.causal.load`.
    """
    own = getattr(_module(config["method"]), "load_drafter", causal.load)
    return own(path, dtype=dtype, **options)


def loads_drafter(config: dict) -> bool:
    """Whether a drafter is of a class of its sampler's own, and not a causal LM."""
    return hasattr(_module(config["method"]), "load_drafter")


def artefacts() -> list[str]:
    """Names of the files beside the weights that the samplers read (`ARTEFACTS` of a module)."""
    found = {f for name in methods() for f in getattr(_module(name), "ARTEFACTS", ())}
    return sorted(found)


def methods() -> list[str]:
    """The names of the samplers' modules."""
    return [m.name for m in pkgutil.iter_modules(samplers.__path__)]


def _module(method: str):
    if method not in methods():
        raise unknown("method", method, methods())
    return importlib.import_module(f"decoding.samplers.{method}")


def sampling_config(path: str, sampler: Iterable[str] = ()) -> dict:
    """The `parade` entry of an export with other knobs 'key=value' (see `load`).

    A method's knobs are the `KNOBS` of its module: {name: type}.
    """
    given, config = dict(split(pair) for pair in sampler), parade_config(path)
    config["method"] = given.pop("method", config["method"])
    types = getattr(_module(config["method"]), "KNOBS", {})
    for key, text in given.items():
        if key not in types:
            raise unknown(f"knob of {config['method']}", key, types)
        config[key] = convert(key, text, types[key])
    return config


def parade_config(path: str) -> dict:
    """The `parade` entry of an export; plain decoding where there is none.

    Errors: no model there, a damaged file, an adapter where peft is not installed.
    """
    if causal.looks_local(path):
        file = next((f for f in (Path(path) / name for name in CONFIGS) if f.is_file()), None)
        if file is None:
            raise ValueError(
                f"no model at {path!r}: there is no {Path(path) / CONFIGS[0]}. Give an exported "
                "folder (python -m trainers.fit recipe=deer_stage2 writes one) or a Hub id"
            )
    else:
        try:
            file = _download(path)
        except Exception as error:
            raise ValueError(f"cannot reach {path!r} on the Hub: {error}") from error
    if file.name != CONFIGS[0] and find_spec("peft") is None:
        raise ValueError(
            f"{path!r} is an adapter beside its base model, which needs peft: pip install peft, or "
            "export it with lora.merge=true"
        )
    try:
        return json.loads(file.read_text()).get("parade", {"method": "plain"})
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _download(path: str) -> Path:
    """The first of CONFIGS that a repository has."""
    for name in CONFIGS[:-1]:
        try:
            return Path(hf_hub_download(path, name))
        except EntryNotFoundError:
            continue
    return Path(hf_hub_download(path, CONFIGS[-1]))


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"cannot load a tokenizer from {path!r}: {reason}") from error


def check_tokenizers(
    target: PreTrainedTokenizerBase, drafter_fingerprint: str, target_name: str, drafter_name: str
) -> None:
    """Drafter and target must mean the same by a token id (padding rows may differ)."""
    if fingerprint(target) != drafter_fingerprint:
        raise ValueError(
            f"the drafter {drafter_name!r} and the target {target_name!r} have different "
            f"tokenizers (fingerprints {drafter_fingerprint} and {fingerprint(target)}): "
            "a drafter serves only targets with its own tokenizer"
        )


def check_one_tokenizer(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    """Models side by side must mean the same by a token id. tokenizers: by the model's name."""
    first, *others = tokenizers
    for other in others:
        if fingerprint(tokenizers[other]) != fingerprint(tokenizers[first]):
            raise ValueError(
                f"{other!r} and {first!r} have different tokenizers (fingerprints "
                f"{fingerprint(tokenizers[other])} and {fingerprint(tokenizers[first])}): "
                "only models of one tokenizer can be compared token for token"
            )


def _beside(path: str, target: str) -> str:
    """A relative target folder is looked for from here, then beside the export."""
    if causal.looks_local(target) and not Path(target).exists():
        beside = Path(path) / target
        if beside.exists():
            return str(beside)
    return target
