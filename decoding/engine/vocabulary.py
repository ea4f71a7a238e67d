"""The vocabulary of a drafter: its target's up to padding, or a part of the target's tokens."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from decoding.engine import tensor_file

KEY = "draft_vocabulary"  # in a `parade` entry: the name of the file beside the weights
FILE = "draft_vocabulary.tensors"
INSTEAD = "fetch the export again"
# More tokens than any vocabulary is padded by (to multiples of 512 at most, usually).
PADDING = 1024


def stored(ids: Tensor) -> bytes:
    """The bytes of the file of a drafter's vocabulary.

    Args:
        ids: [Vd], the target's token ids in the order of the drafter's logits.

    Returns:
        A safetensors file with the tensor `ids`.
    """
    return save({"ids": ids.detach().long().cpu().contiguous()})


def read(file: Path) -> Tensor:
    """The token ids in the file of a drafter's vocabulary.

    Args:
        file: A file that `stored` made.

    Returns:
        ids [Vd], as `stored` takes them.

    Raises:
        ValueError: A file that is missing, damaged or of something else.
    """
    with tensor_file.opened(file, "the drafter's vocabulary", INSTEAD) as tensors:
        ids = tensors.get_tensor("ids")
        if ids.ndim != 1 or ids.dtype != torch.long:
            raise ValueError(f"it holds no list of token ids: {ids.dtype} {list(ids.shape)}")
    return ids


def check_vocabulary(
    drafter: int | None, target: int, ids: Tensor | None = None, names: str = ""
) -> None:
    """Check that a drafter's tokens are its target's.

    Args:
        drafter: The vocabulary size in the drafter's configuration; None where it has none.
        target: The vocabulary size of the target, with padding.
        ids: [Vd], the target's token ids in the order of the drafter's logits; None: all, from 0.
        names: The end of the message: which target the drafter was made for.

    Raises:
        ValueError: Ids that the target does not have, or have twice; vocabularies of sizes that
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


def check_known(size: int, **tokens: int | None) -> None:
    """Check that a network knows special tokens, such as a mask.

    Args:
        size: Tokens that the network knows.
        tokens: Token ids by the names of their knobs; None: there is none.

    Raises:
        ValueError: It does not know one.
    """
    for name, token in tokens.items():
        if token is not None and not 0 <= token < size:
            raise ValueError(
                f"{name}={token} is not allowed: the network's tokens are 0 to {size - 1}"
            )
