"""Lossless samplers, verification, caches, and the commands that use them.

    from decoding import SamplingParams, load

    sampler = load("runs/deer_stage2/export")
    (result,) = sampler.generate(["def fib(n):"], SamplingParams(temperature=0.7, seed=1))

These names are imported on first use, so that `import decoding` loads nothing heavy.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

_PUBLIC = {
    "Chunk": "decoding.engine.params",
    "Result": "decoding.engine.params",
    "Sampler": "decoding.engine.sampler",
    "SamplingParams": "decoding.engine.params",
    "Stats": "decoding.engine.params",
    "load": "decoding.loading",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has {__all__}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def check_not_shadowed(*packages: str) -> None:
    """Check that top-level packages, such as 'data', are parade's, not other folders of that name.

    An ImportError names the other folder. Under `python -m` the process instead ends with that one
    line and status 2.
    """
    root = Path(__file__).resolve().parents[1]
    for name in packages:
        spec = find_spec(name)
        if spec is None:
            continue  # the import itself says that it is missing
        found = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""]))).resolve()
        if found.parent == root:
            continue
        message = (
            f"{found} hides parade's own package {name!r} ({root / name}): run elsewhere, or "
            "rename that folder"
        )
        if sys.argv[:1] == ["-m"]:  # a command that is still being located
            print(f"error: {message}", file=sys.stderr)
            sys.exit(2)
        raise ImportError(message)


check_not_shadowed("data", "models", "recipes", "terminal")
