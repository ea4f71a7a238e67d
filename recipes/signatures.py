"""Signatures of what recipes build, read from the source.

A recipe's keys are checked against the arguments of its `_target_`s, and importing these takes ten
seconds: torch, transformers, Lightning. So a function's or class's parameters are read from its
file instead. Names in their annotations and defaults are followed through assignments and imports,
also into other files of ours; a class of ours or of a library that is not imported is `Unread`.
"""

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypedDict, is_typeddict

ROOT = Path(__file__).resolve().parents[1]
OURS = ("data", "models", "recipes", "decoding", "trainers")
# Imported, not read: what takes no time.
LIGHT = {"data.arguments", "pydantic", *sys.stdlib_module_names}
Function = ast.FunctionDef | ast.ClassDef


class Unread(type):
    """The type of a class, or of a module with classes, that was not imported."""

    def __new__(cls, name: str):
        return super().__new__(cls, name, (), {})

    def __init__(cls, name: str):
        super().__init__(name, (), {})

    def __getattr__(cls, name: str) -> "Unread":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unread(name)


class Names(Mapping):
    """The names at the top of a module of ours, each evaluated when it is asked for."""

    def __init__(self, module: str):
        self.module, self.nodes = module, dict[str, ast.stmt]()
        for node in ast.parse(_file(module).read_text(encoding="utf-8")).body:
            for name in _bound(node):
                self.nodes[name] = node

    def __getitem__(self, name: str) -> Any:
        node = self.nodes[name]
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(node, name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return self.value(node.value)
        if isinstance(node, ast.ClassDef) and any(map(self._is_typed, node.bases)):
            fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
            return TypedDict(  # type: ignore[operator]
                name, {ast.unparse(f.target): self.value(f.annotation) for f in fields}, total=False
            )
        return Unread(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def value(self, expression: ast.expr) -> Any:
        """Return the value of an expression of the module."""
        code = compile(ast.Expression(expression), self.module, "eval")
        return eval(code, {}, self)  # of our own source

    def signature(self, name: str) -> Signature:
        """Return the signature of a function."""
        return self._signature(self.nodes[name])

    def inits(self, name: str) -> list[Signature]:
        """Return the signatures of a class's `__init__` and of its bases', as Python calls them.

        A base that is not ours is left out: nothing is passed on to it.
        """
        node, found = self.nodes[name], list[Signature]()
        assert isinstance(node, ast.ClassDef)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                found.append(self._signature(method, skip=1))
        for base in node.bases:
            known = isinstance(base, ast.Name) and self.origin(base.id)
            if known and known[0].partition(".")[0] in OURS:
                found += names_of(known[0]).inits(known[1])
        return found

    def origin(self, name: str) -> tuple[str, str] | None:
        """Return the module that a name comes from, and its name there; None for no class."""
        node = self.nodes.get(name)
        if isinstance(node, ast.ImportFrom):
            return node.module or "", next(a.name for a in node.names if name in (a.name, a.asname))
        return (self.module, name) if isinstance(node, ast.ClassDef) else None

    def _imported(self, node: ast.Import | ast.ImportFrom, name: str) -> Any:
        if isinstance(node, ast.Import):
            return import_module(name) if name in LIGHT else Unread(name)
        module, own = self.origin(name) or ("", "")
        top = module.partition(".")[0]
        if top in LIGHT or module in LIGHT or top == "recipes":
            return getattr(import_module(module), own)
        is_file = top in OURS and not _file(f"{module}.{own}").is_file()  # else a module
        return names_of(module)[own] if is_file else Unread(own)

    def _is_typed(self, base: ast.expr) -> bool:
        value = self.value(base)
        return value is TypedDict or is_typeddict(value)

    def _signature(self, node: ast.stmt, skip: int = 0) -> Signature:
        assert isinstance(node, ast.FunctionDef)
        a, parameters = node.args, list[Parameter]()
        positional = [*a.posonlyargs, *a.args]
        defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
        kinds: list[tuple[Any, ast.arg, ast.expr | None]]
        kinds = [(Parameter.POSITIONAL_OR_KEYWORD, *pair) for pair in zip(positional, defaults)]
        kinds = kinds[skip:]
        kinds += [(Parameter.VAR_POSITIONAL, a.vararg, None)] if a.vararg else []
        kinds += [(Parameter.KEYWORD_ONLY, *pair) for pair in zip(a.kwonlyargs, a.kw_defaults)]
        kinds += [(Parameter.VAR_KEYWORD, a.kwarg, None)] if a.kwarg else []
        for kind, argument, default in kinds:
            given = {"default": default, "annotation": argument.annotation}
            values = {key: self.value(x) for key, x in given.items() if x is not None}
            parameters.append(Parameter(argument.arg, kind, **values))
        returns = Signature.empty if node.returns is None else self.value(node.returns)
        return Signature(parameters, return_annotation=returns)


@functools.cache
def names_of(module: str) -> Names:
    """Return the names of a module of ours."""
    return Names(module)


@functools.cache
def signatures_of(target: str) -> tuple[Signature, ...]:
    """Return a function's signature, or a class's and its bases', to which it passes the rest on.

    `target` is the dotted name of one of ours.
    """
    module, _, name = target.rpartition(".")
    names = names_of(module)
    if isinstance(names.nodes[name], ast.ClassDef):
        return tuple(names.inits(name))
    return (names.signature(name),)


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]
