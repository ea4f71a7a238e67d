"""Loading: the sampler of an exported folder or a Hub id, and the checks of its files."""

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.text.tokenizer import fingerprint
from decoding import samplers
from decoding.commands.cli import convert, split, unknown
from decoding.engine.sampler import Sampler
from decoding.entry import check_entry, entry_of, read_config
from models import causal, mar, public
from models.attention import GROUPED, switch_attention
from models.norms import fuse
from models.packed import pack
from models.placement import input_device

# The file with the `parade` entry of an adapter's export: beside a config.json, transformers would
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
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Sampler:
    """The lossless sampler of an export, with its models loaded and ready to decode.

    Args:
        path: An exported folder or a Hub id. An ordinary causal LM gives plain decoding, an
            ordinary XLNet a sampler that fills holes.
        target: Folder or Hub id of a target to use instead of the one that the export names; a
            published drafter (DFlash) names none.
        sampler: Another method or other knobs than the export names, as pairs 'key=value':
            ('method=jacobi', 'blocks=4').
        dtype: Of the weights in memory: 'auto' (the checkpoint's own), 'float32', 'bfloat16', ...
        device: Where the models run: 'cpu', 'cuda', 'cuda:1', ...
        device_map: Spreads a target that is too large for one device over GPUs, host memory and
            disk: 'auto', or limits such as '0:60GiB,cpu:200GiB'
            (`models.placement.loading_options`). A drafter is whole, where the target's inputs are.
        trust_remote_code: Whether code that a Hub repository brings may run.

    Returns:
        A `Sampler`, with `generate` and `stream`. For a model of images it is the sampler of
        `decoding.samplers.sequential`, `mar` or `cspd` instead.

    Raises:
        ValueError: The folder is missing or damaged, the Hub cannot be reached, the method or a
            knob is unknown, the target's tokenizer is not the drafter's, or `device_map` is invalid
            or given for a model of images.
    """
    config = sampling_config(path, sampler)
    method = _module(config["method"])
    if hasattr(method, "read_artefacts"):
        config |= method.read_artefacts(causal.files_of(path), config)
    if hasattr(method, "load"):  # its models are no language models
        if device_map is not None:
            raise ValueError(
                f"device_map={device_map} is not allowed for {path!r}: only language models are "
                "spread over devices, so give device=... alone"
            )
        name = target or ("target" in config and _beside(path, config["target"])) or None
        return method.load(path, config, target=name, dtype=dtype, device=device)
    name = target_of(path, config, target)
    if name and "tokenizer_fingerprint" not in config and not loads_drafter(config):
        # No drafter's weights: a draft graph.
        path, name = name, None
    where = {"dtype": dtype, "device": device, "device_map": device_map}
    if name is None:
        network = causal.load(path, trust_remote_code=trust_remote_code, **where)
        for_inference(network)
        return sampler_of(config, network, load_tokenizer(path, trust_remote_code))
    model = causal.load(name, trust_remote_code=trust_remote_code, **where)
    network = load_drafter(config, path, dtype, trust_remote_code=trust_remote_code)
    network = network.to(input_device(model))
    for_inference(model)
    for_inference(network)
    target_tokenizer = load_tokenizer(name, trust_remote_code)
    if "tokenizer_fingerprint" in config:  # a published drafter says nothing of its tokenizer
        check_tokenizers(target_tokenizer, config["tokenizer_fingerprint"], name, path)
    return sampler_of(config, model, target_tokenizer, network)


def target_of(path: str, config: dict, target: str | None = None) -> str | None:
    """The target of an export.

    Args:
        path: The export's folder or Hub id.
        config: Its `parade` entry.
        target: What the user gives in place of the one that the export names.

    Returns:
        Its folder or Hub id; None for a model that has none.

    Raises:
        ValueError: A drafter names no target, and none is given.
    """
    if "target" in config:
        return target or _beside(path, config["target"])
    if not loads_drafter(config):
        return None
    if target is None:
        raise ValueError(
            f"{path!r} is a drafter that names no target: give target=<the model that it is for>"
        )
    return target


def for_inference(network: PreTrainedModel) -> None:
    """Make a network faster on the CPU; changed in place, no longer to be trained or saved."""
    if input_device(network).type == "cpu":
        switch_attention(network, GROUPED)
        pack(network)
        fuse(network)


def sampler_of(
    config: dict,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None = None,
) -> Sampler:
    """The sampler of an export whose models are loaded: its method module's `from_export`.

    Args:
        config: The `parade` entry, as `sampling_config` returns it.
        target: The target.
        tokenizer: The target's tokenizer.
        drafter: The drafter, of a method that has one.

    Returns:
        The sampler.

    Raises:
        ValueError: The method is unknown, or its module refuses the models or the knobs.
    """
    return _module(config["method"]).from_export(target, tokenizer, drafter, config)


def load_drafter(config: dict, path: str, dtype: str | torch.dtype, **options) -> PreTrainedModel:
    """The drafter's network of an export: by its sampler's `load_drafter`, or as a causal LM.

    Args:
        config: The `parade` entry.
        path: The export's folder or Hub id.
        dtype: Of the weights; 'auto' takes the checkpoint's own.
        options: Further ones of `models.causal.load`.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: The method is unknown, or the weights cannot be loaded.
    """
    own = getattr(_module(config["method"]), "load_drafter", causal.load)
    return own(path, dtype=dtype, **options)


def load_assistant(path: str) -> tuple[PreTrainedModel, dict]:
    """An export as transformers' own `generate(assistant_model=...)` takes it.

    Args:
        path: The export's folder or Hub id.

    Returns:
        The assistant model, and further arguments that `generate` needs.

    Raises:
        ValueError: transformers has no class for its drafter.
    """
    method = _module(parade_config(path)["method"])
    if not hasattr(method, "load_assistant"):
        raise ValueError(
            f"{path!r} cannot be an assistant_model= of transformers, which has no class for a "
            f"drafter of method={method.__name__.rpartition('.')[2]}: its custom_generate decodes "
            "with it"
        )
    return method.load_assistant(path)


def loads_drafter(config: dict) -> bool:
    """Whether a drafter is of a class of its sampler's own, and not a causal LM."""
    return hasattr(_module(config["method"]), "load_drafter")


def is_drafter(config: dict) -> bool:
    """Whether an export decodes with another model, its target, beside it."""
    return "target" in config or loads_drafter(config)


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
    """The `parade` entry of an export, changed by knobs that a user gives.

    Args:
        path: The export's folder or Hub id.
        sampler: Pairs 'key=value': `method`, or a knob among the `KNOBS` ({name: type}) of the
            method's module.

    Returns:
        The entry, with values of the knobs' types.

    Raises:
        ValueError: There is no such method or knob, a value is of a wrong type, or the export
            cannot be read (`parade_config`).
    """
    given, config = dict(split(pair) for pair in sampler), parade_config(path)
    config["method"] = given.pop("method", config["method"])
    types = getattr(_module(config["method"]), "KNOBS", {})
    for key, text in given.items():
        if key not in types:
            raise unknown(f"knob of {config['method']}", key, types)
        config[key] = convert(key, text, types[key])
    check_entry(config, path, getattr(_module(config["method"]), "NEEDED", ()))
    return config


def parade_config(path: str) -> dict:
    """The `parade` entry of an export.

    Args:
        path: The export's folder or Hub id.

    Returns:
        The entry, or for a model that has none that of plain decoding (of XLNet and of published
        drafters, see `decoding.entry.entry_of`). A file in the layout of MAR's program
        (`models.mar.from_checkpoint`) has that of MAR's own sampler.

    Raises:
        ValueError: There is no model, its file is damaged, or it is an adapter and peft is not
            installed.
    """
    if path.endswith(mar.CHECKPOINTS):
        return {"method": "mar"}
    path = causal.local_path(path)
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
            raise ValueError(
                f"cannot reach {path!r} on the Hub, and there is no such folder here: {error}"
            ) from error
    if file.name != CONFIGS[0] and find_spec("peft") is None:
        raise ValueError(
            f"{path!r} is an adapter beside its base model, which needs peft: pip install peft, or "
            "export it with lora.merge=true"
        )
    return entry_of(read_config(file), file)


def _download(path: str) -> Path:
    """The first of CONFIGS that a repository has."""
    for name in CONFIGS[:-1]:
        try:
            return Path(hf_hub_download(path, name))
        except LocalEntryNotFoundError:  # the Hub cannot be reached: no other file could be
            raise
        except EntryNotFoundError:
            continue
    return Path(hf_hub_download(path, CONFIGS[-1]))


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, Hub id or gguf file.

    Args:
        path: The folder, Hub id or gguf file.
        trust_remote_code: Whether code that a Hub repository brings may run.

    Raises:
        ValueError: There is no tokenizer that can be loaded.
    """
    path = causal.local_path(path)
    found = None if trust_remote_code else public.layout_of(path)
    try:
        if found and found[0].tokenizer:
            return getattr(transformers, found[0].tokenizer).from_pretrained(path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = causal.why(error, path)
        raise ValueError(f"cannot load a tokenizer from {path!r}: {reason}") from error


def check_tokenizers(
    target: PreTrainedTokenizerBase, drafter_fingerprint: str, target_name: str, drafter_name: str
) -> None:
    """Check that drafter and target mean the same by a token id (padding rows may differ).

    Args:
        target: The target's tokenizer.
        drafter_fingerprint: `data.text.tokenizer.fingerprint` of the drafter's tokenizer.
        target_name: The target's folder or Hub id, for the error.
        drafter_name: The drafter's.

    Raises:
        ValueError: The fingerprints differ.
    """
    if fingerprint(target) != drafter_fingerprint:
        raise ValueError(
            f"the drafter {drafter_name!r} and the target {target_name!r} have different "
            f"tokenizers (fingerprints {drafter_fingerprint} and {fingerprint(target)}): "
            "a drafter serves only targets with its own tokenizer"
        )


def check_one_tokenizer(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    """Check that models compared side by side mean the same by a token id.

    Args:
        tokenizers: Of each model, by its name.

    Raises:
        ValueError: Two fingerprints differ.
    """
    first, *others = tokenizers
    for other in others:
        if fingerprint(tokenizers[other]) != fingerprint(tokenizers[first]):
            raise ValueError(
                f"{other!r} and {first!r} have different tokenizers (fingerprints "
                f"{fingerprint(tokenizers[other])} and {fingerprint(tokenizers[first])}): "
                "only models of one tokenizer can be compared token for token"
            )


def _beside(path: str, target: str) -> str:
    """The target's path: a relative folder is searched for from here, then beside the export."""
    if causal.looks_local(target) and not Path(target).exists():
        beside = Path(path) / target
        if beside.exists():
            return str(beside)
    return target
