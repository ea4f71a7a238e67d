"""Signatures that are read from the source are those that Python has."""

import inspect

import pytest
from hydra.utils import get_object

from data.corpora.sources import load_documents
from data.text.prompts import prompt_set
from recipes import signatures
from recipes.compose import _parameters_of, targets
from recipes.settings import Collect
from recipes.signatures import signatures_of
from recipes.values import plain


def shown(signatures):
    """Every key with its type, as values are checked, and its default; and if others are allowed.

    pydantic's limits are compared as text, since equal ones are different objects.
    """
    parameters, free = _parameters_of(*signatures)
    parameters.pop("self", None)
    return {n: (str(plain(p.annotation)), p.default) for n, p in parameters.items()}, free


def imported(target):
    """The signatures of what a `_target_` names, imported."""
    found = get_object(target)
    owners = [c for c in getattr(found, "__mro__", ()) if "__init__" in vars(c)] or [found]
    return [inspect.signature(owner) for owner in owners]


@pytest.mark.parametrize("target", sorted(targets()))
def test_every_target_is_read_as_it_is_imported(target):
    assert shown(signatures_of(target)) == shown(imported(target))
    returned = [s[0].return_annotation if s else None for s in (signatures_of(target),)]
    if not inspect.isclass(get_object(target)):
        assert str(plain(returned[0])) == str(plain(imported(target)[0].return_annotation))


def test_prompts_are_those_of_their_functions():
    (taken,) = Collect.__annotations__["prompts"].__metadata__
    read = [s for name in taken.functions for s in signatures_of(name)]
    assert shown(read) == shown(map(inspect.signature, (prompt_set, load_documents)))


def test_another_signature_would_be_seen(tmp_path, monkeypatch):
    source = """
from typing import Annotated, Literal, TypedDict, Unpack
from pydantic import Field
import torch
from torch import nn
from data.arguments import Count as Number
KINDS = {"a": nn.Linear, "b": None}
class Keys(TypedDict, total=False):
    size: Number
def make(n: Annotated[int, Field(ge=1)], kind: Literal[*KINDS] = "a", *,
         of: torch.device | str = "cpu", **keys: Unpack[Keys]) -> nn.Module: ...
class Base(nn.Module):
    def __init__(self, a: str, **rest): ...
class Child(Base):
    def __init__(self, *args, b: float = 0.5, **kwargs): ...
"""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "made.py").write_text(source)
    monkeypatch.setattr(signatures, "ROOT", tmp_path)
    names = signatures.Names("data.made")
    space = {}
    exec(source, space)
    made = [names.signature("make")]
    assert shown(made) == shown([inspect.signature(space["make"])])
    assert shown(made)[0]["size"] != shown([inspect.signature(space["Child"])])[0].get("size")
    monkeypatch.setattr(signatures, "names_of", lambda module: names)
    child, free = shown(names.inits("Child"))
    assert ([*child], free) == (["a", "b"], False)
    (tmp_path / "data" / "made.py").write_text(source.replace("ge=1", "ge=2"))
    assert shown([signatures.Names("data.made").signature("make")]) != shown(made)
