"""Causal LMs: stock transformers models, made from a configuration or loaded."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from models.weights import check_complete, check_finite


def from_config(tokenizer: PreTrainedTokenizerBase, model_type: str, **config) -> PreTrainedModel:
    """A new causal LM of any transformers model type; `config` are that type's own keys."""
    configuration = AutoConfig.for_model(
        model_type,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **config,
    )
    return AutoModelForCausalLM.from_config(configuration, attn_implementation="sdpa")


def pretrained(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    dtype: str = "float32",
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A trained network to go on with; it must know every token of the tokenizer."""
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
    **options,
) -> PreTrainedModel:
    """A causal LM from a folder or the Hub, with every weight as the checkpoint has it.

    Args:
        path: A folder or Hub id.
        dtype: Of the weights; 'auto' takes the checkpoint's own.
        attention: 'sdpa', or 'flex_attention' (CUDA: block masks instead of dense ones in
            training); None takes 'sdpa' where the class has it (XLNet has only its own).
        trust_remote_code: Whether the model's own code may run.
        options: Further ones of `from_pretrained`.

    Raises:
        ValueError: one line that names the path and what is wrong with it: missing, damaged, not a
            model, tensors missing or too many, in a local folder weights that are not finite.
    """
    try:
        kind = _remote_class(path) if trust_remote_code else AutoModelForCausalLM
        network, found = kind.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
        )
        check_complete(network, found)
        if Path(path).exists():  # what the Hub has was made with care; reading it all takes time
            check_finite(network)
        return network
    except Exception as error:  # each library below has its own; a user needs one line
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if looks_local(path) and not Path(path).exists():
            reason = "there is no such folder"
        elif "trust_remote_code" in str(error):
            reason = "it brings code of its own: read it, and allow it with trust_remote_code=true"
        raise ValueError(f"cannot load a model from {path!r}: {reason}") from error


def _remote_class(path: str) -> type:
    """AutoModel for a model whose own code offers itself as that alone (as Dream does)."""
    offered = getattr(AutoConfig.from_pretrained(path, trust_remote_code=True), "auto_map", {})
    only = "AutoModel" in offered and "AutoModelForCausalLM" not in offered
    return AutoModel if only else AutoModelForCausalLM


def files_of(path: str, **hub) -> Callable[[str], Path]:
    """What fetches a file that lies beside a model's weights, by its name.

    Args:
        path: The model's folder or Hub id.
        hub: Options of the Hub, such as revision and token.

    Returns:
        A function of a file's name, which gives its path on this machine (of a folder's file,
        whether or not it is there), or raises ValueError, in one line, where the Hub has none.
    """

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
    """True for what can only be a folder: Hub ids have at most one slash and no leading dot."""
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()
