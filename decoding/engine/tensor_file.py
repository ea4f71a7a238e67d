"""Files of tensors beside an export's weights, such as a Markov head.

They are safetensors under another name: engines read every *.safetensors as weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


@contextmanager
def opened(file: Path, what: str, instead: str) -> Iterator[safe_open]:
    """Open a file of tensors; any error inside becomes a ValueError that names `what` it holds."""
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
