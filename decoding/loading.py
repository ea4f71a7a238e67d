"""Loading: the sampler of an exported folder or a Hub id, and the checks of its files."""

import hashlib
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import reduce
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.corpora.fingerprints import weights_fingerprint
from data.files import read_json, refuse_links, shortened
from data.text import rendering
from data.text.tokenizer import fingerprint, harmless, no_panic, same_tokenizer
from decoding import samplers
from decoding.engine.sampler import Sampler
from decoding.method import KEYS, MAX_COUNT, Method, check_values
from models import causal, fused_layers, mar, norms, public
from models.attention import GROUPED, switch_attention
from models.options import CONFIGS, config_in
from models.packed import pack, stored_in
from models.placement import input_device
from models.weights import one_line, weight_files
from recipes.values import convert, split, unknown
from terminal.progress import track

VERSION = 1  # of the `parade` entry; one without is of version 1
# How models without an entry are decoded, by their type; all others plainly.
METHODS = {"xlnet": "asarm"}
DFLASH = "dflash_config"  # the key of a DFlash drafter's config.json, whoever trained it
DSPARK = "Qwen3DSparkModel"  # DFlash with a Markov head, whose config.json may lack that key
EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # architectures of EAGLE-3 drafters
EAGLE3_TOKENS = 5  # of a draft, where an EAGLE-3 drafter's config.json does not say
WEIGHTS = (".safetensors", ".bin", ".gguf")  # suffixes of files that may be links


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
    """Load the lossless sampler of an export, with its models ready to decode.

    Args:
        path: An exported folder or a Hub id. An ordinary causal LM gives plain decoding, an
            ordinary XLNet a sampler that fills holes.
        target: Folder or Hub id of a target in place of the one that the export names; a published
            drafter (DFlash) names none.
        sampler: Another method or other knobs than the export names, as pairs 'key=value':
            ('method=jacobi', 'blocks=4').
        dtype: Of the weights in memory: 'auto' (the target's own), 'float32', 'bfloat16', ...
        device: Where the models run: 'cpu', 'cuda', 'cuda:1', ...
        device_map: Spreads a target that is too large for one device over GPUs, host memory and
            disk: 'auto', or limits such as '0:60GiB,cpu:200GiB'
            (`models.options.loading_options`). A drafter stays whole, where the target's inputs
            are.
        trust_remote_code: Whether code that a Hub repository brings may run.

    Returns:
        A `Sampler`, with `generate` and `stream`; for a model of images the sampler of
        `decoding.samplers.sequential`, `mar` or `cspd`.

    Raises:
        ValueError: The export cannot be read, the method or a knob is unknown, the target's
            tokenizer is not the drafter's, or `device_map` is invalid or given for a model of
            images.
    """
    path = os.path.expanduser(path)
    entry = sampling_config(path, sampler)
    method = method_of(entry)
    if method.load is not None:
        if device_map is not None:
            raise ValueError(
                f"device_map={device_map} is not allowed for {path!r}: only language models are "
                "spread over devices, so give device=... alone"
            )
        name = target or ("target" in entry and _beside(path, entry["target"])) or None
        return method.load(path, entry, target=name, dtype=dtype, device=device)
    parts = method.read_files(causal.files_of(path), entry)
    name = target_of(path, entry, target)
    base = name or path
    where: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map}
    tokenizer = load_tokenizer(base, trust_remote_code)
    if tokenizer.chat_template:
        rendering.prepare()  # it is ready once the weights are
    model = causal.load(base, trust_remote_code=trust_remote_code, **where)
    for_inference(model)
    return _with_drafter(path, entry, name, model, tokenizer, parts, trust_remote_code)


def load_newer(
    path: str,
    old: Sampler,
    fingerprint: str | None,
    *,
    target: str | None = None,
    sampler: Iterable[str] = (),
    trust_remote_code: bool = False,
) -> Sampler:
    """Load an export's drafter for the target that another sampler has in memory.

    Args:
        old: The sampler with the target, which both share from then on.
        fingerprint: Of this target's weights, as `target_fingerprint` gave it when it was loaded.
        path, target, sampler, trust_remote_code: See `load`.

    Raises:
        ValueError: As `load`, or the export is no drafter of this target.
    """
    path = os.path.expanduser(path)
    entry = sampling_config(path, sampler)
    method = method_of(entry)
    name = target_of(path, entry, target) if method.drafts and method.load is None else None
    if name is None:
        raise ValueError(f"{path!r} has no drafter, and only a drafter can be replaced")
    if fingerprint is None or target_fingerprint(name) != fingerprint:
        raise ValueError(f"its target {name!r} has not the weights of the one that is served")
    parts = method.read_files(causal.files_of(path), entry)
    models = old.target, old.tokenizer
    return _with_drafter(path, entry, name, *models, parts, trust_remote_code)


def _with_drafter(
    path: str,
    entry: dict,
    name: str | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parts: dict[str, Any],
    trust_remote_code: bool,
) -> Sampler:
    """Load the drafter of an export, if it has one, and make the sampler of all its parts."""
    drafter = None
    if name and method_of(entry).drafts:
        # As it was trained it is often stored in float32, which takes twice as long to read.
        dtype = stored_in(model)
        drafter = load_drafter(entry, path, dtype, trust_remote_code=trust_remote_code)
        drafter = drafter.to(input_device(model))
        for_inference(drafter)
        if "tokenizer_fingerprint" in entry:  # a published drafter says nothing of its tokenizer
            check_tokenizers(tokenizer, entry["tokenizer_fingerprint"], name, path)
    if name:
        _compare_targets(path, entry, name)
    loaded = sampler_of(entry, model, tokenizer, drafter, **parts)
    _ = loaded.eos  # a mistake in it is told here, not with the first answer
    return loaded


def target_of(path: str, entry: dict, target: str | None = None) -> str | None:
    """Return the folder or Hub id of an export's target, or None; a given `target` replaces it."""
    if "target" in entry:
        return target or _beside(path, entry["target"])
    if target is None and loads_drafter(entry):
        raise ValueError(
            f"{path!r} is a drafter that names no target: give target=<the model that it is for>"
        )
    return target if loads_drafter(entry) else None


def target_fingerprint(name: str) -> str | None:
    """Return the fingerprint of a target's weights (`weights_fingerprint`); None: not there yet."""
    with suppress(OSError, ValueError, KeyError):
        if files := weight_files(causal.local_path(name), local_files_only=True):
            return weights_fingerprint(files)
    return None


def _compare_targets(path: str, entry: dict, name: str) -> None:
    """Warn in one line where an export was trained for another target than the one it gets."""
    trained_for = entry.get("target_fingerprint")
    if trained_for is not None and target_fingerprint(name) not in (None, trained_for):
        print(
            f"warning: {path!r} was trained for a target with other weights than {name!r}: texts "
            "stay exact, but fewer drafts may be accepted (python -m decoding.bench measures it)",
            file=sys.stderr,
        )


def for_inference(network: PreTrainedModel) -> None:
    """Make a network faster on the CPU, in place; it can no longer be trained or saved."""
    if input_device(network).type == "cpu":
        switch_attention(network, GROUPED)
        pack(network)
        norms.fuse(network)
        fused_layers.fuse(network)


def sampler_of(
    entry: dict,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None = None,
    **parts,
) -> Sampler:
    """Make the sampler of an entry, from loaded models and `parts` (`Method.read_files`)."""
    return method_of(entry).build(target, tokenizer, drafter, entry, **parts)


def load_drafter(entry: dict, path: str, dtype: str | torch.dtype, **options) -> PreTrainedModel:
    """Load an export's drafter onto the CPU; the options are those of `models.causal.load`."""
    return (method_of(entry).load_drafter or causal.load)(path, dtype=dtype, **options)


def load_assistant(path: str) -> tuple[PreTrainedModel, dict]:
    """Load an export for transformers' `generate(assistant_model=...)`, with further arguments."""
    entry = parade_config(path)
    load_it = method_of(entry).load_assistant
    if load_it is None:
        raise ValueError(
            f"{path!r} cannot be an assistant_model= of transformers, which has no class for a "
            f"drafter of method={entry['method']}: its custom_generate decodes with it"
        )
    return load_it(path)


def loads_drafter(entry: dict) -> bool:
    """Return whether the drafter has a class of its method's own, and is no causal LM."""
    return method_of(entry).load_drafter is not None


def is_drafter(entry: dict) -> bool:
    """Return whether an export decodes with another model, its target."""
    return "target" in entry or loads_drafter(entry)


def artefacts() -> list[str]:
    """Return the names of the files beside the weights that methods read."""
    return sorted({file for name in methods() for file in method_of({"method": name}).files})


def decoding_fingerprint(export: Path) -> str:
    """Return a SHA-256 over all of an export that decodes: weights, what methods read, the entry.

    The target's name is left out, since it may change from a folder to a Hub id.
    """
    entry = {k: v for k, v in parade_config(str(export)).items() if k != "target"}
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode())
    files = sorted(p for name in ("*.safetensors", *artefacts()) for p in export.glob(name))
    for path in track(files, f"fingerprint of {export}", unit="files"):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def methods() -> list[str]:
    """Return the names of the methods: the modules of `decoding.samplers`."""
    return [m.name for m in pkgutil.iter_modules(samplers.__path__)]


def method_of(entry: dict) -> Method:
    """Return the method that an entry names; ValueError where there is none."""
    name = entry["method"]
    if name not in methods():
        raise unknown("method", name, methods())
    return importlib.import_module(f"decoding.samplers.{name}").METHOD


def sampling_config(path: str, sampler: Iterable[str] = ()) -> dict:
    """Return the `parade` entry of an export, changed by knobs that a user gives.

    `sampler` has pairs 'key=value': `method`, or a knob of the method (`Method.options`). Raises
    ValueError where the method, a knob or a value is not allowed or a needed key is missing.
    """
    given, entry = dict(split(pair) for pair in sampler), parade_config(path)
    entry["method"] = given.pop("method", entry["method"])
    method = method_of(entry)
    for key, text in given.items():
        if key not in method.options:
            raise unknown(f"knob of {entry['method']}", key, method.options)
        entry[key] = convert(key, text, _of_text(method.options[key]))
    method.check(entry, f"{path}: parade.")
    for key in method.needed:
        if key not in entry:
            raise ValueError(
                f"{path}: parade.{key} is missing, which method={entry['method']} needs"
            )
    return entry


def _of_text(hint: Any) -> Any:
    """Return the type of a key as one text can give it: no dict, and without its limits."""
    origin, kinds = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _of_text(kinds[0])
    if origin in (Union, UnionType):
        found = [_of_text(kind) for kind in kinds]
        return reduce(or_, (kind for kind in found if dict not in (kind, get_origin(kind))))
    return str if origin is Literal else hint


def parade_config(path: str) -> dict:
    """Return the checked `parade` entry of an export, a folder or Hub id.

    A model without one gets that of plain decoding (XLNet, published drafters: `entry_of`), a file
    in the layout of MAR's program that of MAR's own sampler. Raises ValueError where it cannot be
    read, or is an adapter and peft is missing.
    """
    if path.endswith(mar.CHECKPOINTS):
        return {"method": "mar"}
    file = _config_of(_without_links(path))
    if file.name != CONFIGS[0] and find_spec("peft") is None:
        raise ValueError(
            f"{path!r} is an adapter beside its base model, which needs peft: pip install peft, or "
            "export it with lora.merge=true"
        )
    return entry_of(read_config(file), file)


def _config_of(path: str) -> Path:
    """Return the first of CONFIGS that a folder or a repository has."""
    if causal.looks_local(path):
        return config_in(path)
    try:
        for name in CONFIGS[:-1]:
            try:
                return Path(hf_hub_download(path, name))
            except LocalEntryNotFoundError:  # the Hub cannot be reached: no other file could be
                raise
            except EntryNotFoundError:
                continue
        return Path(hf_hub_download(path, CONFIGS[-1]))
    except Exception as error:
        raise ValueError(
            f"cannot reach {path!r} on the Hub, and there is no such folder here: {error}"
        ) from error


def read_config(file: Path) -> dict:
    """Read an export's config.json and check its `parade` entry, if any: ValueError of one line."""
    config = read_json(file)
    if "parade" not in config:
        return config
    entry = config["parade"]
    if not isinstance(entry, dict) or "method" not in entry:
        raise ValueError(f"{file}: parade={shortened(entry)} is not allowed: it needs a method")
    check_values(KEYS, entry, f"{file}: parade.")
    if entry.get("version", VERSION) > VERSION:
        raise ValueError(
            f"{file} is of version {entry['version']}, and this parade reads up to {VERSION}: "
            "install a newer one"
        )
    method = method_of(entry)
    method.check(entry, f"{file}: parade.")
    if found := [key for key in method.local if key in entry]:
        raise ValueError(
            f"{file}: parade.{found[0]} is not allowed: an export names no files of this machine. "
            f"Give sampler=[{found[0]}=...]"
        )
    return config


def entry_of(config: dict, file: Path) -> dict:
    """Return the `parade` entry in what `read_config` returned, or its default.

    A DFlash or EAGLE-3 drafter that was trained elsewhere gets an entry without a target
    (ValueError where DFlash's mask token or block size is missing), another model that of its
    method.
    """
    if "parade" in config:
        return config["parade"]
    published, named = config.get(DFLASH), {*map(str, config.get("architectures") or ())}
    if {*EAGLE3} & named:
        return {"method": "eagle3", "block_size": EAGLE3_TOKENS}
    if DSPARK in named and published is None:  # the same keys, beside the layers' own
        published = {"sample_from_anchor": True, **config}
    if not isinstance(published, dict):
        return {"method": METHODS.get(config.get("model_type") or "", "plain")}
    mask_id: Any = published.get("mask_token_id")
    size: Any = config.get("block_size")
    whole = type(mask_id) is int and type(size) is int
    if not whole or mask_id < 0 or not 2 <= size <= MAX_COUNT:
        raise ValueError(
            f"{file} is of no whole DFlash drafter: {DFLASH}.mask_token_id={shortened(mask_id)} "
            f"and block_size={shortened(size)}; it needs a token id and an integer from 2 to "
            f"{MAX_COUNT}"
        )
    # Its blocks begin with the last committed token, and each mask drafts one; where that token
    # drafts one too, it is another.
    size -= not published.get("sample_from_anchor")
    return {"method": "dflash", "mask_id": mask_id, "block_size": size}


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, Hub id or gguf file; ValueError where there is none.

    It gives a text the same ids always (`data.text.tokenizer.harmless`).
    """
    path = _without_links(path)
    found = None if trust_remote_code else public.layout_of(path)
    with one_line("a tokenizer", path), no_panic():
        if found and found[0].tokenizer:
            kind, options = getattr(transformers, found[0].tokenizer), {}
        else:
            kind, options = AutoTokenizer, {"trust_remote_code": trust_remote_code}
        return harmless(kind.from_pretrained(path, **options))


def _without_links(path: str) -> str:
    """Return the folder or Hub id that a model is loaded from, after a check of its links.

    Weights may be links; all other files end up in the exports that are made with the model.
    """
    path = causal.local_path(path)
    if Path(path).is_dir():
        files = (file for pattern in ("*", "*/*.jinja") for file in Path(path).glob(pattern))
        small = (file for file in files if file.is_file() and file.suffix not in WEIGHTS)
        refuse_links(Path(path), sorted(small), hub_cache=True)
    return path


def check_tokenizers(
    target: PreTrainedTokenizerBase, drafter_fingerprint: str, target_name: str, drafter_name: str
) -> None:
    """Check that drafter and target mean the same by a token id (padding rows may differ)."""
    if not same_tokenizer(target, drafter_fingerprint):
        raise ValueError(
            f"the drafter {drafter_name!r} and the target {target_name!r} have different "
            f"tokenizers (fingerprints {drafter_fingerprint} and {fingerprint(target)}): "
            "a drafter serves only targets with its own tokenizer"
        )


def check_one_tokenizer(tokenizers: dict[str, PreTrainedTokenizerBase]) -> None:
    """Check that models, by name, mean the same by a token id: ValueError where two do not."""
    prints = {name: fingerprint(tokenizer) for name, tokenizer in tokenizers.items()}
    first, *others = prints
    for other in others:
        if prints[other] != prints[first]:
            raise ValueError(
                f"{other!r} and {first!r} have different tokenizers (fingerprints "
                f"{prints[other]} and {prints[first]}): "
                "only models of one tokenizer can be compared token for token"
            )


def _beside(path: str, target: str) -> str:
    """Return the target's path: a relative folder may be here, or beside the export."""
    if causal.looks_local(target) and not Path(target).exists():
        beside = Path(path) / target
        if beside.exists():
            return str(beside)
    return target
