"""The documentation: its commands parse, what it names exists, its figures are measured ones."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from docs.figures.speedup import WAYS, tokens_per_second
from recipes.compose import compose
from tests.support.layers import LAYERS_OF_DECODING
from tests.support.pages import commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOP = {"trainers", "decoding", "models", "data", "recipes", "terminal", "tests", "docs", "examples"}
ADDED_BY_A_METHOD = re.compile(r"foo\.(py|yaml)$")


def module_exists(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def named_paths(text):
    """Paths of the repository in backticks."""
    for name in re.findall(r"`([\w./-]+/[\w./-]*)`", text):
        if name.split("/")[0] in TOP and "." not in name.split("/")[0]:
            yield name


def missing(text):
    """What a page names and the repository lacks."""
    lost = [p for p in named_paths(text) if not (ROOT / p).exists()]
    lost = [p for p in lost if not ADDED_BY_A_METHOD.search(p)]
    return lost + [m for m, _ in commands(text) if not module_exists(m)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    assert missing(page.read_text()) == []


def test_a_path_or_module_that_is_gone_is_found():
    text = "`decoding/load.py`\n\n```\npython -m decoding.gone model=x\n```\n"
    assert missing(text) == ["decoding/load.py", "decoding.gone"]


def every_command():
    found = {(m, *arguments) for page in PAGES for m, arguments in commands(page.read_text())}
    return [c for c in sorted(found) if not {"--help", "pip"} & {*c}]


def check(module, arguments):
    """Raise ValueError for arguments that a command would refuse before it starts."""
    if module in ("trainers.fit", "decoding.collect"):
        compose(arguments, module.rpartition(".")[2])
        return
    if (ROOT / module.replace(".", "/")).is_dir():
        module += ".text"  # `python -m decoding.bench`
    importlib.import_module(module).read_options(arguments)


@pytest.mark.parametrize("command", every_command(), ids=shlex.join)
def test_a_command_is_understood(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # as on a reader's machine
    module, *arguments = command
    check(module, arguments)


@pytest.mark.parametrize(
    ("module", "arguments", "key"),
    [
        ("trainers.fit", ["recipe=deer_stage2", "module.soften=1"], "soften"),
        ("decoding.bench", ["model=x", "asistant=y"], "asistant"),
    ],
)
def test_a_wrong_key_is_not(module, arguments, key):
    with pytest.raises(ValueError, match=key):
        check(module, arguments)


def test_the_architecture_page_has_the_layers():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    for number, packages in enumerate(LAYERS_OF_DECODING, 1):
        for name in packages:
            if (ROOT / "decoding" / name).is_dir():
                assert f"| {number} | `decoding/{name}/` |" in page
    for package in ("data", "trainers"):
        for folder in (ROOT / package).glob("*/__init__.py"):
            assert f"| `{package}/{folder.parent.name}/` |" in page


def unmeasured(readme, results):
    """Decimals of the README's table of figures that no page of results has."""
    table = re.search(r"\| method \|.*?\n\n", readme, re.DOTALL)[0]
    figures = re.findall(r"\d+\.\d+", table)
    assert figures
    return [f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?![\d.])", results)]


def test_the_readme_shows_measured_figures():
    results = "\n".join(p.read_text() for p in (ROOT / "docs/results").glob("*.md"))
    readme = (ROOT / "README.md").read_text()
    assert unmeasured(readme, results) == []
    assert unmeasured(readme.replace("262.2", "999.9"), results) == ["999.9"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_picture_finds_its_figures(temperature):
    found = tokens_per_second((ROOT / "docs/results/deer.md").read_text(), temperature)
    assert found["deer, tree"] > found["plain"]
    assert {"plain", "transformers assisted", "deer, tree"} <= WAYS.keys() & found.keys()
