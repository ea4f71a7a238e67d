"""The house stands: floors, forbidden imports and the independence of methods, read with `ast`.

Each check is a function over a root folder that returns what is wrong, so that it can be tested
itself on a small tree with one violation.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"trainers": 4, "decoding": 3, "models": 2, "data": 1}
STRANGERS = [{"models", "data"}]  # neighbours that do not know each other
HEAVY = {"pytorch_lightning", "lightning", "deepspeed", "accelerate", "wandb", "hydra", "omegaconf"}
HEAVY |= {"torch.distributed"}
LIGHT = [  # where they must not be imported, not even inside a function
    "decoding/samplers/*.py",
    *(
        f"decoding/{name}.py"
        for name in (
            "blockstates",
            "cache",
            "graph_calibration",
            "chains",
            "cli",
            "coupling",
            "custom_generate",
            "distribution",
            "draft_graph",
            "infill",
            "streams",
            "generate",
            "load",
            "params",
            "patches",
            "randomness",
            "sharpness",
            "tree",
            "unmasking",
            "verify",
        )
    ),
    "models/*.py",
    "data/*.py",
    "trainers/losses/*.py",
]
LAZY = {"datasets"}  # there only inside functions
SHARED_LOSSES = {"diffusion", "ar", "acceptance"}  # pieces of several methods, not methods
KNOWN_METHODS = {"asarm", "assd", "deer", "pcllm", "jacobi", "spiffy", "cspd"}


def imports(path):
    """(module, at the top of the file) of every import; `from a import b` gives a and a.b."""
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in _outside_functions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import; write the whole name"
            names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
        else:
            continue
        yield from ((name, id(node) in top) for name in names)


def _outside_functions(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def sources(root):
    return [p for package in FLOORS for p in sorted((root / package).rglob("*.py"))]


def within(name, module):
    return name == module or name.startswith(f"{module}.")


def wrong_floors(root):
    """Imports upwards, between strangers, and of recipes or tests."""
    found = []
    for path in sources(root):
        here = path.relative_to(root).parts[0]
        for name, _ in imports(path):
            there = name.partition(".")[0]
            up = FLOORS.get(there, 0) > FLOORS[here]
            stranger = here != there and any({here, there} <= pair for pair in STRANGERS)
            if up or stranger or there in ("recipes", "tests"):
                found.append(f"{path.relative_to(root)} imports {name}")
    return found


def heavy_imports(root):
    """Training libraries where a user who only decodes, or only takes a loss, would need them."""
    found = []
    for pattern in LIGHT:
        for path in sorted(root.glob(pattern)):
            for name, top in imports(path):
                heavy = any(within(name, h) for h in HEAVY)
                if heavy or (top and any(within(name, x) for x in LAZY)):
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def methods(root):
    """Names of methods: those to come, and the losses that are no shared pieces."""
    stems = {p.stem for p in (root / "trainers" / "losses").glob("*.py")}
    return KNOWN_METHODS | (stems - SHARED_LOSSES - {"__init__"})


def tangled_methods(root):
    """A method's loss, module or sampler that imports another method's."""
    known, found = methods(root), []
    for folder in ("trainers", "trainers/losses", "decoding/samplers"):
        for path in sorted((root / folder).glob("*.py")):
            if path.stem not in known:
                continue
            for name, _ in imports(path):
                package, _, last = name.rpartition(".")
                parade = package.partition(".")[0] in FLOORS
                if parade and last in known - {path.stem}:
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def named_methods(root):
    """Methods' names in the files of trainers/ that are no method's own: they serve every one."""
    found, known = [], sorted(methods(root))
    for path in sorted((root / "trainers").rglob("*.py")):
        if path.parent.name == "losses":
            continue
        for method in known if path.stem not in known else ():
            # Letters on neither side: 'deer_stage2' counts, 'reindeer' does not.
            pattern = rf"(?<![a-z]){re.escape(method)}(?![a-z])"
            if re.search(pattern, path.read_text(), re.IGNORECASE):
                found.append(f"{path.relative_to(root)} names {method}")
    return found


CHECKS = [wrong_floors, heavy_imports, tangled_methods, named_methods]


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_stands(check):
    assert check(ROOT) == []


def test_there_is_something_to_read():
    assert len(sources(ROOT)) > 20
    assert "deer" in methods(ROOT)
    assert not methods(ROOT) & SHARED_LOSSES


def house(root, **files):
    """A small clean tree, and more files by path ('/' as '__')."""
    files = {
        "trainers__losses__deer": "import torch\nfrom trainers.losses.diffusion import nll",
        "trainers__losses__diffusion": "import torch",
        "trainers__losses__newcomer": "import torch",
        "trainers__deer": "from trainers.base import BaseModule\nfrom trainers.losses import deer",
        "trainers__base": "import pytorch_lightning\nfrom decoding.samplers import base",
        "decoding__samplers__deer": "from decoding import verify\nfrom models.masks import causal",
        "decoding__compose": "import hydra",
        "models__masks": "import torch",
        "data__rows": "def read():\n    import datasets\n    return datasets",
    } | files
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("check", CHECKS)
def test_a_clean_house_passes(check, tmp_path):
    assert check(house(tmp_path)) == []


VIOLATIONS = [
    (wrong_floors, "decoding__verify", "from trainers import base"),
    (wrong_floors, "data__x", "import decoding.cli"),
    (wrong_floors, "models__x", "def f():\n    from decoding import cli"),
    (wrong_floors, "models__x", "from data.anchors import DraftBlocks"),
    (wrong_floors, "data__x", "import models"),
    (wrong_floors, "trainers__x", "import recipes"),
    (wrong_floors, "decoding__x", "from tests.support import tiny"),
    (heavy_imports, "decoding__samplers__x", "import pytorch_lightning as pl"),
    (heavy_imports, "decoding__load", "def f():\n    import hydra"),
    (heavy_imports, "decoding__cli", "from omegaconf import OmegaConf"),
    (heavy_imports, "models__x", "import torch.distributed as dist"),
    (heavy_imports, "models__x", "from torch import distributed"),
    (heavy_imports, "data__x", "import datasets"),
    (heavy_imports, "data__x", "try:\n    import datasets\nexcept ImportError:\n    pass"),
    (heavy_imports, "trainers__losses__x", "from accelerate import Accelerator"),
    (tangled_methods, "trainers__losses__pcllm", "from trainers.losses.deer import refine"),
    (tangled_methods, "trainers__spiffy", "from trainers.losses import deer"),
    (tangled_methods, "trainers__spiffy", "from trainers.losses import newcomer"),
    (tangled_methods, "decoding__samplers__asarm", "import decoding.samplers.deer"),
    (tangled_methods, "trainers__deer", "from trainers.newcomer import Module"),
    (named_methods, "trainers__fit", "# python -m trainers.fit recipe=deer_stage2"),
    (named_methods, "trainers__export", "if method == 'Spiffy': pass"),
    (named_methods, "trainers__callbacks", "NEWCOMER = 1"),
]


@pytest.mark.parametrize(("check", "name", "text"), VIOLATIONS)
def test_every_check_can_fail(check, name, text, tmp_path):
    root = house(tmp_path, **{name: text})
    assert len({found.split()[0] for found in check(root)}) == 1
    others = [c for c in CHECKS if c is not check]
    assert [c(root) for c in others] == [[]] * len(others)


def loaded_by(code):
    """The modules that a fresh interpreter holds after running `code`."""
    code = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


UNWANTED = [
    "pytorch_lightning",
    "lightning",
    "hydra",
    "omegaconf",
    "datasets",
    "wandb",
    "deepspeed",
]


def test_decoding_needs_no_training_library():
    samplers = [p.stem for p in (ROOT / "decoding" / "samplers").glob("*.py")]
    code = "import decoding, decoding.load, models.diffusion, data.tokenizer\n"
    code += "\n".join(f"import decoding.samplers.{s}" for s in samplers if s != "__init__")
    loaded = loaded_by(code).split()
    assert "decoding.samplers.deer" in loaded
    assert [name for name in UNWANTED if name in loaded] == []


def test_a_training_library_would_be_seen():
    assert "hydra" in loaded_by("import decoding.compose").split()
