"""The vocabulary of a drafter: its target's up to padding, or a part of the target's tokens."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from data.text.chat import text_ends
from decoding.engine import tensor_file

KEY = "draft_vocabulary"  # in a `parade` entry: the name of the file beside the weights
FILE = "draft_vocabulary.tensors"
INSTEAD = "fetch the export again"
# More tokens than any vocabulary is padded by (to multiples of 512 at most, usually).
PADDING = 1024


def stored(ids: Tensor) -> bytes:
    """Return the bytes of a vocabulary's file: the target's ids [Vd] by the drafter's logits."""
    return save({"ids": ids.detach().long().cpu().contiguous()})


def read(file: Path) -> Tensor:
    """Read the ids [Vd] of a vocabulary's file; ValueError where it is missing or damaged."""
    with tensor_file.opened(file, "the drafter's vocabulary", INSTEAD) as tensors:
        ids = tensors.get_tensor("ids")
        if ids.ndim != 1 or ids.dtype != torch.long:
            raise ValueError(f"it holds no list of token ids: {ids.dtype} {list(ids.shape)}")
    return ids


def check_vocabulary(
    drafter: int | None, target: int, ids: Tensor | None = None, names: str = ""
) -> None:
    """Check that a drafter's tokens are its target's: ValueError where they are not.

    The vocabulary sizes are the configurations' (None: unknown), with padding; `ids` [Vd] are the
    target's tokens of the drafter's logits (None: all); `names` ends the message.
    """
    if ids is not None:
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= target:
            raise ValueError(f"the drafter's tokens are not among the target's {target}{names}")
        if len(ids.unique()) < len(ids):
            raise ValueError("the drafter's vocabulary names a token of the target twice")
    elif drafter is not None and abs(drafter - target) > PADDING:
        raise ValueError(
            f"the drafter has {drafter} tokens, the target {target}: more than padding "
            f"explains{names}"
        )


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer, sorted, in every command.

    They are those of generation_config.json, the tokenizer's end token, and the token with which
    its chat template ends an answer: files of one model often disagree, and after any of them the
    model would go on with turns that it imagines.

    Raises ValueError for an `eos_token_id` that is no token id or list of token ids.
    """
    eos: Any = None if config is None else config.eos_token_id
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise ValueError(
            f"eos_token_id={str(eos)[:60]} of generation_config.json is not allowed: give a token "
            "id, or a list of them"
        )
    return sorted({*ids, *text_ends(tokenizer)})


def check_known(size: int, **tokens: int | None) -> None:
    """Check that a network of `size` tokens knows special tokens, given by their knobs' names."""
    for name, token in tokens.items():
        if token is not None and not 0 <= token < size:
            raise ValueError(
                f"{name}={token} is not allowed: the network's tokens are 0 to {size - 1}"
            )
