"""The vocabulary of a drafter: that of its target, but for padding, or some of its tokens."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

KEY = "draft_vocabulary"  # of a `parade` entry: the file beside the weights, if there is one
FILE = "draft_vocabulary.safetensors"
# Rows longer than any padding of a vocabulary (multiples of 512 are usual).
PADDING = 1024


def stored(ids: Tensor) -> bytes:
    """The file of a drafter's vocabulary: ids [Vd] of the target's tokens, in its logits' order."""
    return save({"ids": ids.detach().long().cpu().contiguous()})


def read(file: Path) -> Tensor:
    """The ids [Vd] of such a file.

    Raises:
        ValueError: a file that is missing, damaged or of something else.
    """
    try:
        with safe_open(file, "pt") as tensors:
            ids = tensors.get_tensor("ids")
    except Exception as error:
        raise ValueError(f"cannot read the drafter's vocabulary {file}: {error}") from error
    if ids.ndim != 1 or ids.dtype != torch.long:
        raise ValueError(f"{file} holds no list of token ids: {ids.dtype} {list(ids.shape)}")
    return ids


def check_vocabulary(
    drafter: int | None, target: int, ids: Tensor | None = None, names: str = ""
) -> None:
    """Check that a drafter's tokens are its target's.

    Args:
        drafter: Tokens that the drafter's configuration names; None where it names none.
        target: Tokens of the target, padding included.
        ids: [Vd], the target's tokens that the drafter's logits are of; None: all, from 0 on.
        names: What the message ends with: which target it was made for.

    Raises:
        ValueError: ids that the target does not have, or have twice; vocabularies of sizes that
            padding does not explain.
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
