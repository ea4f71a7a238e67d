"""Any arguments of any command: its options, or a ValueError of one line."""

import importlib
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from recipes.compose import RECIPES, compose, defaults, names, paths, run_folder
from recipes.options import parse
from tests.support.commands import option_classes

pytestmark = pytest.mark.processes

ODD = [
    "null",
    "[]",
    "{}",
    "[1",
    "-1",
    "0",
    "1e9",
    "nan",
    "inf",
    "abc",
    "true",
    "[[1]]",
    "''",
    "99999999999999999999",
    "[null]",
    "cuda",
    "gpu",
    "cpu:7",
    "auto",
    "../x",
    "[1,a]",
    "${x}",
    "{a:1}",
    "/dev/zero",
]
# An error repeats what is given; a command prints it on one line (recipes.command.one_line).
LETTERS = st.characters(exclude_characters="\n")
VALUES = st.one_of(
    st.sampled_from(["", *ODD]),
    st.integers().map(str),
    st.floats().map(str),
    st.text(LETTERS, max_size=8),
)


COMMANDS = option_classes()
assert len(COMMANDS) > 12


def one_line(call):
    """The error of a call, or None."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except SystemExit as error:  # --help, --cfg job
        return None if error.code == 0 else ""
    return None


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_options(kind, data):
    keys = st.sampled_from([f.name for f in fields(kind)]) | st.text(LETTERS, max_size=4)
    pairs = data.draw(st.lists(st.tuples(keys, VALUES), max_size=4))
    argv = [f"{key}={value}" for key, value in pairs]
    problem = one_line(lambda: parse(argv, kind, "decoding.x"))
    assert problem is None or (problem and "\n" not in problem)


@pytest.mark.parametrize("recipe", names("recipe"))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_recipes(recipe, data):
    file = OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml")
    command, scale = file.command, next(iter(file.scales))
    keys = paths(defaults(command, recipe, scale))
    key = st.sampled_from(["", "+", "~"]).flatmap(
        lambda sign: st.sampled_from(keys).map(sign.__add__)
    )
    pairs = data.draw(st.lists(st.tuples(key, VALUES), min_size=1, max_size=3))
    argv = [
        f"recipe={recipe}",
        f"scale={scale}",
        *(k if k[0] == "~" else f"{k}={v}" for k, v in pairs),
    ]
    problem = one_line(lambda: run_folder(compose(argv, command)))
    assert problem is None or (problem and "\n" not in problem)


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("text", ["block_size=1000000000"]),
        ("infill", ["block_sizes=[8,1000000000]"]),
        ("images", ["gamma=1000000000"]),
        ("images", ["gammas=[1,1000000000]"]),
        ("fid", ["samples=1000000000"]),
    ],
)
def test_what_would_fill_the_memory_is_refused(module, given):
    """The limits of recipes hold for the options of commands."""
    key = given[-1].partition("=")[0]
    with pytest.raises(ValueError, match=f"^{key}=.*less than or equal"):
        importlib.import_module(f"decoding.bench.{module}").run(["model=x", *given])
