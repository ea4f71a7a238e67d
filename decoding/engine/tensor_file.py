"""Files of tensors that an export has beside its weights, such as a Markov head.

They are in the safetensors format under another name: engines read every *.safetensors as weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


@contextmanager
def opened(file: Path, what: str, instead: str) -> Iterator[safe_open]:
    """A context in which a file is read, and what it holds is made of it.

    Args:
        file: The file.
        what: It holds, such as 'the Markov head'.
        instead: What to do if it cannot be used.

    Raises:
        ValueError: The file is missing, damaged or of something else: whatever was raised inside.
    """
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"cannot read {what} {file} ({reason}): {instead}") from error


def finite(*tensors: Tensor) -> None:
    """Refuse tensors with numbers that are not finite."""
    if not all(x.isfinite().all() for x in tensors):
        raise ValueError("it has numbers that are not finite")
