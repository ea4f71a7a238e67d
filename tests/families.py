"""Try every family that transformers has, and write the documentation's table of them.

    python -m tests.families              # all of them, ten minutes on one core
    python -m tests.families only=llama,gemma3   # the other rows stay

Each family is a tiny random model of its own class. Status 1: a wrong text, or a traceback.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from tests.support.families import PAGE, attempt, kinds, page, read_page


def main(names: list[str]) -> None:
    """Try families, and write the page."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = read_page() if names else {}
    for name in names or kinds():
        with tempfile.TemporaryDirectory() as folder:
            outcome = attempt(name, Path(folder))
        print(f"{name}: {outcome.result} {outcome.reason}", flush=True)
        for way in ("plain", "jacobi", "chain", "tree", "batch", "copied"):
            if "DEFECT" in (fault := getattr(outcome, way)):
                print(f"  {way}: {fault}", flush=True)
        found[name] = outcome
    PAGE.write_text(page(found))
    sys.exit(any(outcome.result == "defect" for outcome in found.values()))


if __name__ == "__main__":
    given = dict(pair.partition("=")[::2] for pair in sys.argv[1:])
    main([name for name in given.get("only", "").split(",") if name])
