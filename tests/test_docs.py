"""The documentation: its commands compose, what it names exists, its figures are measured ones."""

import re
import shlex
from pathlib import Path

import pytest

from decoding.commands.recipes import compose
from docs.figures.speedup import WAYS, tokens_per_second

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOP = {"trainers", "decoding", "models", "data", "recipes", "tests", "docs", "examples"}
ADDED_BY_A_METHOD = re.compile(r"foo\.(py|yaml)$|test_foo\.py$|test_new_method\.py$")


def code(text):
    """The lines of a page's code blocks; a line that ends in a backslash goes on."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


def commands(text):
    """(module, arguments) of every `python -m` of a page's code blocks."""
    for line in code(text):
        _, dash, rest = line.partition("python -m ")
        if dash and not line.lstrip().startswith("#"):
            module, *arguments = shlex.split(rest, comments=True)
            yield module, arguments


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


def recipe_commands(pages):
    for page in pages:
        for module, arguments in commands(page.read_text()):
            if module in ("trainers.fit", "decoding.collect"):
                yield pytest.param(
                    module.rpartition(".")[2], arguments, id=f"{page.stem}: {shlex.join(arguments)}"
                )


@pytest.mark.parametrize(("command", "arguments"), recipe_commands(PAGES))
def test_a_command_of_a_recipe_composes(command, arguments):
    assert compose(arguments, command).recipe


def test_a_wrong_key_does_not_compose():
    with pytest.raises(ValueError, match=r"module\.soften"):
        compose(["recipe=deer_stage2", "module.soften=1"], "fit")


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
