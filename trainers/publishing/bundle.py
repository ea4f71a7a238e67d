"""The bundle `custom_generate/` of an export: its sampler's source, run by stock transformers.

`generate(..., custom_generate=...)` of transformers copies `generate.py` and the files next to it
that a line `from .name import ...` names, and runs the copy. So a sampler's modules are written
side by side, with relative imports. They are the source that the tests prove lossless.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

BUNDLE = "custom_generate"  # transformers' name for the folder
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("terminal", "data", "models", "recipes", "decoding")
ENTRY = "decoding.custom_generate"
REQUIREMENTS = "torch>=2.8\ntransformers>=5.0\npydantic>=2.11\n"

GENERATE = '''\
"""Lossless decoding with this drafter, by its target's own `generate`:

    target.generate(**inputs, custom_generate="<this folder or repository>", trust_remote_code=True)

Written by parade (trainers/publishing/bundle.py) with copies of its modules.
"""

from typing import TYPE_CHECKING

from .{entry} import generate as _generate
from .{sampler} import METHOD as _method

if TYPE_CHECKING:  # transformers copies only the files that a line of this form names
{modules}


def generate(model, **arguments):
    """Decode losslessly with `model` as the target; the arguments of `{entry}.generate`."""
    return _generate(_method, model, **arguments)
'''


def write_bundle(folder: Path, method: str) -> None:
    """Write `<folder>/custom_generate/` for a sampler, `method`; it needs only REQUIREMENTS."""
    sampler = f"decoding.samplers.{method}"
    modules = closure([ENTRY, sampler])
    bundle = folder / BUNDLE
    bundle.mkdir()
    for module in modules:
        made = "made by trainers/publishing/bundle.py"
        source = f"# A copy of parade's {module}, {made}.\n{flattened(module)}"
        (bundle / f"{flat(module)}.py").write_text(source, encoding="utf-8")
    named = "\n".join(f"    from .{flat(module)} import __name__ as _" for module in modules)
    text = GENERATE.format(entry=flat(ENTRY), sampler=flat(sampler), modules=named)
    (bundle / "generate.py").write_text(text, encoding="utf-8")
    (bundle / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")


def check_bundle(folder: Path, method: str) -> None:
    """Raise ValueError unless `<folder>/custom_generate/` is what `write_bundle` writes."""
    with TemporaryDirectory() as written:
        write_bundle(Path(written), method)
        ours, theirs = (
            {str(f.relative_to(root)): f for f in sorted(root.rglob("*")) if not f.is_dir()}
            for root in (Path(written) / BUNDLE, folder / BUNDLE)
        )
        for name in sorted({*ours, *theirs}):
            there = name in ours and name in theirs and theirs[name].is_file()
            # Its size first: it is read whole.
            same = there and ours[name].stat().st_size == theirs[name].stat().st_size
            if not same or ours[name].read_bytes() != theirs[name].read_bytes():
                raise ValueError(
                    f"{folder / BUNDLE / name} is not what this version of parade writes: read "
                    "it, and allow to run it with trust_remote_code=true"
                )


def closure(modules: Iterable[str]) -> list[str]:
    """Return these modules of parade and all of its modules that they import, sorted."""
    found, left = set(), set(modules)
    while left:
        found |= left
        left = {name for module in left for _, names in _internal(module) for name in names} - found
    return sorted(found)


def flattened(module: str) -> str:
    """Return a module's source with relative imports of parade's other modules.

    `from decoding.engine.params import Stats` becomes `from .decoding_engine_params import Stats`;
    `from decoding.engine import verify`, `from . import decoding_engine_verify as verify`.
    """
    lines = _source(module).split("\n")
    # From the last to the first, so that the line numbers before it stay right.
    for node, names in sorted(_internal(module), key=lambda pair: -pair[0].lineno):
        if names == [node.module]:
            new = [ast.unparse(ast.ImportFrom(flat(names[0]), node.names, level=1))]
        else:
            new = [
                f"from . import {flat(name)} as {alias.asname or alias.name}"
                for name, alias in zip(names, node.names)
            ]
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
    return "\n".join(lines)


def flat(module: str) -> str:
    """Return the name of a module's copy: 'decoding_engine_verify' for 'decoding.engine.verify'."""
    return module.replace(".", "_")


def _internal(module: str) -> Iterator[tuple[ast.ImportFrom, list[str]]]:
    """Yield the imports of parade's modules in a module, each with the names of those modules."""
    for node in _imports(_source(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PACKAGES:
                    raise ValueError(
                        f"{module}: `import {alias.name}` cannot be bundled, write "
                        "`from package import module`"
                    )
        elif (node.module or "").split(".")[0] in PACKAGES:
            assert node.module is not None
            if _file(node.module).is_file():
                yield node, [node.module]
            else:  # modules of a package
                yield node, [f"{node.module}.{alias.name}" for alias in node.names]


@cache
def _imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Return all imports of a source; `ast.walk` visits expressions, too, which takes long."""
    found: list[ast.Import | ast.ImportFrom] = []
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, part, [])
    return found


def _file(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def _source(module: str) -> str:
    if not _file(module).is_file():
        raise ValueError(f"cannot bundle {module}: there is no {_file(module)}")
    return _file(module).read_text(encoding="utf-8")
