"""The architecture: layers, forbidden imports and the independence of methods, read with `ast`.

Each check is a function over a root folder that returns what is wrong, so that it can be tested
itself on a small tree with one violation.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.layers import LAYERS_OF_DATA, LAYERS_OF_DECODING

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"trainers": 4, "decoding": 3, "recipes": 2, "models": 1, "data": 1, "terminal": 0}
INDEPENDENT = [{"models", "data"}]  # packages that must not import each other
HEAVY = {"pytorch_lightning", "lightning", "deepspeed", "accelerate", "wandb", "hydra", "omegaconf"}
HEAVY |= {"torch.distributed"}
# Only what composes recipes may need Hydra.
COMPOSES = {"recipes/compose.py", "recipes/inputs.py", "recipes/stored.py", "decoding/collect.py"}
LAZY = {"datasets"}  # there only inside functions
SHARED_LOSSES = {"diffusion", "ar", "acceptance", "rollout"}  # pieces of several methods
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
    return [p for package in PACKAGES for p in sorted((root / package).rglob("*.py"))]


def within(name, module):
    return name == module or name.startswith(f"{module}.")


def upward_imports(root):
    """Imports upwards, between strangers, and of tests."""
    found = []
    for path in sources(root):
        here = path.relative_to(root).parts[0]
        for name, _ in imports(path):
            there = name.partition(".")[0]
            up = PACKAGES.get(there, 0) > PACKAGES[here]
            stranger = here != there and any({here, there} <= pair for pair in INDEPENDENT)
            if up or stranger or there == "tests":
                found.append(f"{path.relative_to(root)} imports {name}")
    return found


def wrong_layers(root):
    """Imports inside decoding/ and data/ that do not go down, or go across."""
    found = []
    for package, layers in (("decoding", LAYERS_OF_DECODING), ("data", LAYERS_OF_DATA)):
        height = {part: n for n, parts in enumerate(layers) for part in parts}
        for path in sorted((root / package).rglob("*.py")):
            here = path.relative_to(root / package).parts[0].removesuffix(".py")
            if here not in height:  # the package's own file, what travels with exports
                continue
            for name, _ in imports(path):
                there = name.split(".")[1] if name.count(".") and within(name, package) else here
                # A name that the package itself offers stands for no part of it.
                if there != here and height.get(there, -1) >= height[here]:
                    found.append(f"{path.relative_to(root)} imports {name}")
    return found


def unknown_parts(root):
    """Parts of decoding/ and data/ that no layer names."""
    found = []
    for package, layers in (("decoding", LAYERS_OF_DECODING), ("data", LAYERS_OF_DATA)):
        known = set().union(*layers) | {"__init__", "custom_generate"}
        parts = {p.relative_to(root / package).parts[0] for p in (root / package).rglob("*.py")}
        found += [
            f"{package}/{p} has no layer" for p in parts if p.removesuffix(".py") not in known
        ]
    return sorted(found)


def heavy_imports(root):
    """Training libraries where a user who only decodes, or only takes a loss, would need them."""
    found = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        part = "/".join(name.split("/")[:2])
        if name.startswith("trainers/") and part != "trainers/losses":
            continue
        for module, top in imports(path):
            heavy = part not in COMPOSES and any(within(module, h) for h in HEAVY)
            if heavy or (top and any(within(module, x) for x in LAZY)):
                found.append(f"{name} imports {module}")
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
                parade = package.partition(".")[0] in PACKAGES
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


CHECKS = [
    upward_imports, wrong_layers, unknown_parts, heavy_imports, tangled_methods, named_methods
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_the_architecture_holds(check):
    assert check(ROOT) == []


def test_there_is_something_to_read():
    assert len(sources(ROOT)) > 20
    assert "deer" in methods(ROOT)
    assert not methods(ROOT) & SHARED_LOSSES


def small_tree(root, **files):
    """A small clean tree, and more files by path ('/' as '__')."""
    files = {
        "trainers__losses__deer": "import torch\nfrom trainers.losses.diffusion import nll",
        "trainers__losses__diffusion": "import torch",
        "trainers__losses__newcomer": "import torch",
        "trainers__deer": "from trainers.base import BaseModule\nfrom trainers.losses import deer",
        "trainers__base": "import pytorch_lightning\nfrom decoding.engine import sampler",
        "decoding__samplers__deer": "from decoding.engine import verify\nfrom models import masks",
        "recipes__compose": "import hydra",
        "models__masks": "import torch",
        "data__corpora__sources": "def read():\n    import datasets\n    return datasets",
    } | files
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("check", CHECKS)
def test_a_clean_tree_passes(check, tmp_path):
    assert check(small_tree(tmp_path)) == []


VIOLATIONS = [
    (upward_imports, "decoding__engine__x", "from trainers import base"),
    (upward_imports, "data__text__x", "import recipes.values"),
    (upward_imports, "models__x", "def f():\n    from decoding import cli"),
    (upward_imports, "models__x", "from data.corruption.draft_blocks import DraftBlocks"),
    (upward_imports, "data__text__x", "import models"),
    (upward_imports, "recipes__x", "def f():\n    from decoding import loading"),
    (upward_imports, "recipes__x", "import trainers.base"),
    (upward_imports, "decoding__engine__x", "from tests.support import tiny"),
    (heavy_imports, "decoding__samplers__x", "import pytorch_lightning as pl"),
    (wrong_layers, "decoding__engine__x", "from decoding.drafting import tree"),
    (wrong_layers, "decoding__drafting__x", "def f():\n    import decoding.masked.unmasking"),
    (wrong_layers, "decoding__samplers__x", "from decoding.loading import load"),
    (wrong_layers, "data__text__x", "from data.rows.packing import pack"),
    (unknown_parts, "decoding__helpers", "import torch"),
    (unknown_parts, "data__things__x", "import torch"),
    (heavy_imports, "recipes__options", "import omegaconf"),
    (heavy_imports, "decoding__loading", "def f():\n    import hydra"),
    (heavy_imports, "decoding__generate", "from omegaconf import OmegaConf"),
    (heavy_imports, "models__x", "import torch.distributed as dist"),
    (heavy_imports, "models__x", "from torch import distributed"),
    (heavy_imports, "data__text__x", "import datasets"),
    (heavy_imports, "data__text__x", "try:\n    import datasets\nexcept ImportError:\n    pass"),
    (heavy_imports, "trainers__losses__x", "from accelerate import Accelerator"),
    (tangled_methods, "trainers__losses__pcllm", "from trainers.losses.deer import refine_weight"),
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
    root = small_tree(tmp_path, **{name: text})
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


@pytest.mark.processes
def test_decoding_needs_no_training_library():
    samplers = [p.stem for p in (ROOT / "decoding" / "samplers").glob("*.py")]
    code = "import decoding, decoding.loading, models.diffusion, data.text.tokenizer\n"
    code += "import recipes.values, recipes.options\n"
    code += "\n".join(f"import decoding.samplers.{s}" for s in samplers if s != "__init__")
    loaded = loaded_by(code).split()
    assert "decoding.samplers.deer" in loaded
    assert [name for name in UNWANTED if name in loaded] == []


@pytest.mark.processes
def test_a_training_library_would_be_seen():
    assert "hydra" in loaded_by("import recipes.compose").split()


def untracked_or_unlinted(root):
    """Python files of the packages that git ignores, or that ruff does not read."""
    run = partial(subprocess.run, cwd=root, capture_output=True, text=True, check=True)
    there = {
        p.relative_to(root).as_posix() for p in (*sources(root), *(root / "tests").rglob("*.py"))
    }
    tracked = run(["git", "ls-files", "-co", "--exclude-standard", "*.py"]).stdout.split()
    listed = run([sys.executable, "-m", "ruff", "check", "--show-files"]).stdout.split()
    linted = {Path(p).resolve().relative_to(root.resolve()).as_posix() for p in listed}
    return sorted(there - {*tracked}), sorted(there - linted)


def imported_tests(root):
    """Imports of test files and of the scripts beside them: only tests/support is shared."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        here = path.relative_to(root)
        for name, _ in imports(path):
            package, _, part = name.partition(".")
            if package == "tests" and part and not within(part, "support"):
                found.append(f"{here} imports {name}")
    return found


def test_tests_import_from_support_only():
    assert imported_tests(ROOT) == []


@pytest.mark.parametrize(
    "text",
    [
        "from tests.decoding.test_identity import PROMPTS",
        "def f():\n    import tests.models.test_masks as masks",
        "from tests import chaos",
    ],
)
def test_an_import_of_a_test_would_be_seen(text, tmp_path):
    clean = {"tests__test_x": "from tests.support import tiny\nimport tests.support.lab"}
    assert imported_tests(small_tree(tmp_path, **clean)) == []
    found = imported_tests(small_tree(tmp_path, tests__trainers__test_y=text))
    assert {line.split()[0] for line in found} == {"tests/trainers/test_y.py"}


def test_every_file_is_tracked_and_linted():
    assert untracked_or_unlinted(ROOT) == ([], [])


def test_an_ignored_file_would_be_seen(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("runs\n")
    (tmp_path / "ruff.toml").write_text('extend-exclude = ["runs"]\n')
    for name in ("trainers/runs/x.py", "trainers/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Nothing."""\n')
    assert untracked_or_unlinted(tmp_path) == (["trainers/runs/x.py"], ["trainers/runs/x.py"])


SHADOWED = "from decoding import load; print(load.__module__)"


HIDDEN = ["data", "models", "recipes", "terminal"]


@pytest.mark.processes
@pytest.mark.parametrize("name", HIDDEN)
def test_a_folder_that_hides_a_package_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True)
    done = run([sys.executable, "-m", "decoding.generate", "model=x"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(tmp_path / name) in done.stderr
    assert f"ImportError: {tmp_path / name}" in run([sys.executable, "-c", SHADOWED]).stderr


@pytest.mark.processes
def test_folders_without_code_hide_nothing(tmp_path):
    for name in HIDDEN:
        (tmp_path / name).mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SHADOWED], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == "decoding.loading", done.stderr


def test_other_folders_that_hide_nothing_are_left_alone(tmp_path):
    (tmp_path / "recipes").mkdir()  # no package, so it hides none
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True)
    done = run([sys.executable, "-c", "import trainers; print('imported')"])
    assert done.stdout.strip() == "imported"
    (tmp_path / "decoding").mkdir()
    (tmp_path / "decoding" / "__init__.py").write_text("")
    done = run([sys.executable, "-m", "trainers.fit", "recipe=x"])
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert str(tmp_path / "decoding") in done.stderr


def test_the_public_names_are_light_and_there():
    loaded = loaded_by("import decoding").split()
    assert "torch" not in loaded
    assert "transformers" not in loaded
    import decoding

    for name in decoding.__all__:
        assert getattr(decoding, name).__name__ == name
    with pytest.raises(AttributeError, match="SamplingParams"):
        decoding.SamplingParam  # noqa: B018


def undocumented(classes):
    """Public methods and properties without a docstring, neither their own nor an inherited one."""
    return sorted(
        f"{cls.__module__}.{cls.__qualname__}.{name}"
        for cls in classes
        for name, member in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
        if not any(getattr(vars(c).get(name), "__doc__", None) for c in cls.__mro__)
    )


def public_classes():
    for package in PACKAGES:
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if module.name.endswith("__main__"):
                continue
            loaded = importlib.import_module(module.name)
            for name, cls in inspect.getmembers(loaded, inspect.isclass):
                if cls.__module__ == module.name and not name.startswith("_"):
                    yield cls


def test_every_public_method_is_documented():
    """ruff asks for docstrings of overrides, too (D102, switched off): a base's serves them."""
    classes = [*public_classes()]
    assert len(classes) > 50
    assert undocumented(classes) == []


def test_a_method_without_a_docstring_would_be_seen():
    class Base:
        def known(self):
            """Documented."""

        def unknown(self): ...

    class Override(Base):
        def known(self): ...

    assert [name.rpartition(".")[2] for name in undocumented([Base, Override])] == ["unknown"]
