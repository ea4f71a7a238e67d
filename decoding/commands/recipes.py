"""Recipes: composing `recipes/<command>.yaml`, a scale, a recipe and overrides into one config.

Later ones win: the command's defaults, `scale/<scale>.yaml`, `recipe/<recipe>.yaml`, the recipe's
own `scales.<scale>`, the command line. There a key is a dotted path, `+key=value` adds
a key that nothing names, and `~key` removes one. Values are read as every command reads them
(`decoding.commands.values`), and a key takes values of its default's type.
"""

import functools
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.commands.cli import Line, asked, help_page
from decoding.commands.options import RECIPES, check, check_limits
from decoding.commands.values import convert, fits, read, show, split, type_name, unknown
from models.placement import loading_options

MODULES = {"fit": "trainers.fit", "collect": "decoding.collect"}
GROUPS = {"fit": ("recipe", "scale", "strategy"), "collect": ("recipe", "scale")}
# Keys that may be null, and what they are otherwise.
OPTIONAL = {"name": str, "logger": str, "target": str, "device_map": str}
OPTIONAL |= {"max_steps": int, "max_epochs": float, "ema": float}
# Of these exactly one is given: one on the command line takes the recipe's place for the other.
EITHER = ("trainer.max_steps", "trainer.max_epochs")
CHOSEN = ("command", "recipe", "scale", "strategy")  # keys that are no settings
GIVEN = ("tokenizer", "network", "optimization", "folder")  # by the command, to a `_target_`
# Folders in a run's or a collection's own.
PARTS = ("checkpoints", "export", "bench", "calibration", "shards")
TARGET = re.compile(r"""\b_target_: *["']?([\w.]+)""")
YAML_KEY = re.compile(r"^( *)([\w.]+):(.*)$")


def names(group: str) -> list[str]:
    """The recipes, scales or strategies that exist."""
    return sorted(p.stem for p in (RECIPES / group).glob("*.yaml"))


def compose(argv: list[str], command: str) -> DictConfig:
    """The config of `python -m ... recipe=NAME [scale=NAME] [key=value ...]`.

    `--help` and `--cfg job` print and exit with status 0.

    Args:
        argv: The arguments.
        command: 'fit' or 'collect'; a recipe names the one that runs it.

    Returns:
        The composed config, whose keys are fixed.

    Raises:
        ValueError: A recipe or key is unknown, a value has a wrong type, or a reference is broken.
    """
    wish, pairs = asked(argv)
    for argument in pairs:
        if not argument.startswith("~") and not argument.partition("=")[1]:
            raise ValueError(
                f"{argument!r} is not of the form key=value. Recipes: {names('recipe')}"
            )
    chosen = {"scale": "lab"}
    chosen |= {k: v for k, _, v in (a.partition("=") for a in pairs) if k in GROUPS[command]}
    for group, name in chosen.items():
        if name not in names(group):
            raise unknown(group, name, names(group))
    if wish == "help":
        print(_help(command, chosen))
        sys.exit(0)
    if "recipe" not in chosen:
        raise ValueError(f"recipe= is missing. Choose from {names('recipe')}")
    config = defaults(command, **chosen)
    try:
        for argument in pairs:
            if argument.partition("=")[0] not in chosen:
                _override(config, argument)
        given = [key for key in EITHER if any(a.startswith(f"{key}=") for a in pairs)]
        if len(given) == 1 and OmegaConf.select(config, given[0]) is not None:
            (other,) = {*EITHER} - {*given}
            OmegaConf.update(config, other, None)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        check_targets(config)
        _check_types(resolved, OmegaConf.to_container(_of_every_run(command)))
        check_limits(resolved)
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from error
    if wish == "config":
        print(OmegaConf.to_yaml(OmegaConf.create(resolved)), end="")
        sys.exit(0)
    loading_options(config.device_map)  # raises now, not after the inputs are made
    OmegaConf.set_struct(config, True)
    return config


def run_folder(config: DictConfig) -> Path:
    """The folder that a composed recipe writes, `<runs>/<recipe>[/<name>]`.

    Raises:
        ValueError: No `runs`, or a name that is no folder's, or that of a part of the run without
            a name.
    """
    name = "" if config.name is None else str(config.name)  # a number is a name too
    if not config.runs:
        raise ValueError(f"runs={config.runs} is not allowed: give a folder")
    if name == ".." or Path(name).name != name:
        raise ValueError(f"name={name} is not allowed: give the name of one folder, without '/'")
    if name in PARTS:
        raise ValueError(f"name={name} is a folder of the run without a name: give another")
    return Path(config.runs) / config.recipe / name


def build(node: DictConfig, **given):
    """`hydra.utils.instantiate`, which raises a user's mistake as the callee raised it.

    Args:
        node: A config with a `_target_`.
        given: Further arguments of the target.

    Returns:
        What the target returns.

    Raises:
        ValueError: The target raised it, a `_target_` is not among `targets`, or the keys of
            `network` make no network.
        OSError: The target raised it.
    """
    check_targets(node)
    try:
        return instantiate(node, **given)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, (ValueError, OSError)):
            raise cause from None
        if node._get_full_key("") == "network":
            # Its keys go into classes of other libraries, which raise what they please.
            reason = " ".join(str(cause).split()) or type(cause).__name__
            raise ValueError(
                f"network: {node._target_} makes none with these keys ({reason})"
            ) from cause
        raise


@functools.cache
def targets() -> frozenset[str]:
    """What a config may build: the `_target_`s of all recipes and strategies.

    A config may come from a stranger, in a run's folder or an export, and Hydra would call any
    function of any package.
    """
    files = (*RECIPES.glob("recipe/*.yaml"), *RECIPES.glob("strategy/*.yaml"))
    # Read as text: to parse all of them as YAML takes every command a quarter of a second.
    return frozenset(target for file in files for target in TARGET.findall(file.read_text()))


def check_targets(node: DictConfig) -> None:
    """Check that a config builds nothing but `targets`.

    Args:
        node: A config, or a part of one.

    Raises:
        ValueError: Another `_target_`; the line names its key.
    """
    # Resolved: a reference may lead to a node that builds something.
    for key, target in _targets_of(OmegaConf.to_container(node, resolve=True)).items():
        if target not in targets():
            raise unknown(key, target, targets())


def _check_types(node: dict, known: dict | None, key: str = "") -> None:
    """Check the values of a node, also those that a reference leads to or that are left out.

    Args:
        node: The node.
        known: The same node of the command's defaults, or None.
        key: Its dotted path, with a dot at its end.
    """
    if "_target_" in node:
        parameters, more = _signature(OmegaConf.create(node))
        for p in parameters:
            if p.default is p.empty and p.name not in node and p.name not in GIVEN:
                raise ValueError(f"{key}{p.name} is missing: {node['_target_']} needs it")
        hydra = [name for name in node if name.startswith("_")]
        check_arguments(node, parameters, key, None if more else hydra)
    for name in known or ():
        if name not in node:
            raise ValueError(f"{key}{name} is missing: every run has this key")
    for name, value in node.items():
        below = (known or {}).get(name)
        # What every recipe gives (???) is a node too; some give null.
        needed = below == "???" and name not in CHOSEN and value is not None
        if (isinstance(below, dict) or needed) and not isinstance(value, dict):
            raise ValueError(f"{key}{name}={show(value)} is not allowed: it is a node with keys")
        if isinstance(below, list) and not isinstance(value, list):
            raise ValueError(f"{key}{name}={show(value)} is not allowed: it is a list")
        if isinstance(value, dict):
            _check_types(value, below if isinstance(below, dict) else None, f"{key}{name}.")


def check_arguments(
    node: Mapping[str, Any],
    parameters: Iterable[inspect.Parameter],
    key: str = "",
    more: Container[str] | None = (),
) -> None:
    """Check that a callable takes the values of a node.

    Args:
        node: Its arguments by name, without references.
        parameters: What it takes.
        key: The node's dotted path, with a dot at its end.
        more: Further names that are allowed; None: any.

    Raises:
        ValueError: A value has a wrong type, or a name is unknown.
    """
    taken = {p.name: _hint(p.annotation) for p in parameters}
    for name, value in node.items():
        if name not in taken and more is not None and name not in more:
            raise unknown("key", f"{key}{name}", [f"{key}{x}" for x in taken])
        # null is for the maker to refuse, who knows what it would be.
        hint = taken.get(name, Any)
        if value is not None and not fits(value, hint) and not _builds(value, hint):
            raise ValueError(
                f"{key}{name}={show(value)} is of type {type(value).__name__}, "
                f"but {type_name(hint)} is needed"
            )


def _targets_of(node: Any, key: str = "") -> dict[str, str]:
    """Every `_target_` below a node, by its dotted path."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return {}
    found = {f"{key}_target_": str(node["_target_"])} if "_target_" in node else {}
    for name, value in node.items():
        found |= _targets_of(value, f"{key}{name}.")
    return found


def defaults(command: str, recipe: str, scale: str, strategy: str | None = None) -> DictConfig:
    """A recipe at a scale before the user's overrides.

    Args:
        command: 'fit' or 'collect'.
        recipe: Its name.
        scale: Name of a file of `recipes/scale`.
        strategy: Name of a file of `recipes/strategy`, or None.

    Raises:
        ValueError: Another command runs the recipe, or it has no such scale.
    """
    file = OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml")
    if file.command != command:
        module = MODULES[file.command]
        raise ValueError(f"recipe {recipe!r} is run by: python -m {module} recipe={recipe}")
    scales = file.pop("scales")
    if scale not in scales:
        raise unknown(f"scale of recipe={recipe}", scale, list(scales))
    return OmegaConf.merge(
        _of_every_run(command),
        OmegaConf.load(RECIPES / "scale" / f"{scale}.yaml").get(command, {}),
        file,
        scales[scale] or {},
        OmegaConf.load(RECIPES / "strategy" / f"{strategy}.yaml") if strategy else {},
        {"recipe": recipe, "scale": scale} | ({"strategy": strategy} if strategy else {}),
    )


@functools.cache
def _of_every_run(command: str) -> DictConfig:
    """What every recipe of a command has, `recipes/<command>.yaml`; not to be changed."""
    return OmegaConf.load(RECIPES / f"{command}.yaml")


def _override(config: DictConfig, argument: str) -> None:
    """Change one key of a config: `key=value`, `+key=value` or `~key`."""
    if (key := argument.lstrip("~+").partition("=")[0]) in CHOSEN:
        raise ValueError(f"{key}= is not allowed here: recipe=, scale= and strategy= choose a file")
    if argument.startswith("~"):
        parent, leaf = _locate(config, argument[1:])
        if argument[1:] in paths(_of_every_run(config.command)):
            raise ValueError(f"{argument} is not allowed: every run has this key; give it a value")
        if leaf == "_target_":
            raise ValueError(f"{argument} is not allowed: it names what is built; give it a value")
        parent.pop(leaf, None)
        return
    key, text = split(argument.lstrip("+"))
    # A key that is there already has a type, whatever stands before it.
    added = argument.startswith("+") and OmegaConf.select(config, key) is None
    if added or "${" in text:
        if not added:
            _locate(config, key)
        value = read(text)
    else:
        node, leaf = _locate(config, key)
        default = node.get(leaf) if _known(node, leaf) else None
        value = convert(key, text, _type(node, leaf), default)
        scalars = isinstance(default, ListConfig) and not any(map(_is_node, default))
        check(key, value, some=scalars and len(default) > 0)
    value = list(value) if isinstance(value, tuple) else value
    OmegaConf.update(config, key, value, force_add=True)


def _locate(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """The node that holds a key, and the key's last part; ValueError where there is none."""
    *parents, leaf = key.split(".")
    node = config
    for part in parents:
        node = node.get(part) if isinstance(node, DictConfig) and part in node else None
    keys = [*node, *_parameters(node)] if isinstance(node, DictConfig) else []
    if leaf not in keys:
        known = {".".join([*parents, str(k)]) for k in keys}
        raise unknown("key", key, known or paths(config))
    return node, leaf


def _known(node: DictConfig, leaf: str) -> bool:
    """Whether a key has a value of its own, from which its type is known."""
    there = leaf in node and not OmegaConf.is_missing(node, leaf)
    return there and not OmegaConf.is_interpolation(node, leaf)


def _type(node: DictConfig, leaf: str) -> Any:
    """The type of a key: that of the parameter of its `_target_`, or that of its default."""
    hint = _hint(_parameters(node).get(leaf, inspect.Parameter.empty))
    default = node.get(leaf) if _known(node, leaf) else None
    if hint is not Any:
        return hint
    if leaf in OPTIONAL and leaf in node:
        return OPTIONAL[leaf] | None
    if default is None:
        return Any
    if leaf == "needs":
        return tuple[dict, ...]
    if isinstance(default, ListConfig):
        kind = tuple[_item_type(default), ...]
        return kind if default else kind | None
    if isinstance(default, DictConfig):
        return dict | None if _left_out(node, leaf) else dict
    # A count or a switch is needed; what is a rate, a name or a list may be left out.
    return type(default) if isinstance(default, int) else type(default) | None


def _left_out(node: DictConfig, leaf: str) -> bool:
    """Whether a node may be null: what takes it says so, or else the command's defaults."""
    annotation = _parameters(node).get(leaf)
    if annotation is not None:
        return types.NoneType in typing.get_args(annotation)
    above = _of_every_run(node._get_root().command)
    for part in filter(None, node._get_full_key("").split(".")):
        above = above.get(part) if isinstance(above, DictConfig) and part in above else None
    # One that is missing there is needed.
    known = isinstance(above, DictConfig) and leaf in above
    return known and not OmegaConf.is_missing(above, leaf) and above[leaf] is None


def _item_type(items: ListConfig) -> Any:
    kinds = {type(item) for item in items}
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 and kinds <= {int, float, str} else Any


def _hint(annotation: Any) -> Any:
    """A parameter's annotation as `convert` takes it; Any where it says too much or too little."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = typing.get_args(annotation)
        hints = [t if t is types.NoneType else _hint(t) for t in kinds]
        return Any if Any in hints else typing.Union[tuple(hints)]  # noqa: UP007 (of a list)
    if typing.get_origin(annotation) in (list, tuple, Sequence):
        (item, *_) = typing.get_args(annotation)
        return tuple[_hint(item), ...]
    return annotation if annotation in (str, int, float, bool) else Any


def _builds(value: Any, hint: Any) -> bool:
    """Whether a value is a node whose `_target_` says that it returns what `_hint` gave."""
    if not isinstance(value, dict) or "_target_" not in value:
        return False
    check_targets(OmegaConf.create({"_target_": value["_target_"]}))
    built = _hint(inspect.signature(get_object(value["_target_"])).return_annotation)
    return built in (hint, *typing.get_args(hint))


def _parameters(node: DictConfig) -> dict[str, Any]:
    """The annotations of what a `_target_` takes, by name."""
    return {p.name: p.annotation for p in _signature(node)[0]}


def _signature(node: DictConfig) -> tuple[list[inspect.Parameter], bool]:
    """What a `_target_` takes, and whether it takes anything else too."""
    if "_target_" not in node:
        return [], True
    check_targets(OmegaConf.create({"_target_": node._target_}))
    target = get_object(node._target_)
    makers = [target]
    if inspect.isclass(target):  # one that passes **kwargs on takes what its base takes
        makers = [c for c in target.__mro__ if "__init__" in vars(c)] or [target]
    found, more = {}, True
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        found = {**{p.name: p for p in named}, **found}
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            more = False
            break
    return list(found.values()), more


def _is_node(item: Any) -> bool:
    return isinstance(item, (DictConfig, ListConfig))


def paths(config: DictConfig, prefix: str = "") -> list[str]:
    """Every key as a dotted path."""
    found = []
    for key in config:
        path = f"{prefix}{key}"
        found.append(path)
        if isinstance(node := config._get_node(key), DictConfig) and not node._is_none():
            found += paths(node, f"{path}.")
    return found


def _help(command: str, chosen: dict[str, str]) -> str:
    """The text of `--help`: the recipes to choose from, or every key of the chosen one."""
    recipe, module = chosen.get("recipe"), MODULES[command]
    files = [(RECIPES / f"{command}.yaml", "")]
    if recipe is None:
        config = OmegaConf.load(files[0][0])
        runs = [r for r in names("recipe") if _command(r) == command]
        groups = {"recipe": runs} | {g: names(g) for g in GROUPS[command][1:]}
        about = "\n\n".join(
            "\n".join([f"{group}=", *(f"  {n:<22} {_about(group, n)}" for n in known)])
            for group, known in groups.items()
        )
        about = f"Run a recipe; with recipe=NAME --help prints the keys of that one.\n\n{about}"
        example = f"recipe={runs[0]} scale=lab seed=1"
    else:
        config = defaults(command, **chosen)
        files += [(RECIPES / "recipe" / f"{recipe}.yaml", f"scales.{chosen['scale']}.")]
        head, example = "\n".join(_head("recipe", recipe)), f"recipe={recipe} scale=lab seed=1"
        about = f"{head}\n\nThe keys of recipe={recipe} at scale={chosen['scale']}:"
    notes = {}
    for file, prefix in files:
        notes |= {path.removeprefix(prefix): note for path, note in _notes(file).items()}
    return help_page(module, about, _lines(config, notes), example)


def _lines(config: DictConfig, notes: dict[str, str], prefix: str = "") -> Iterator[Line]:
    """Every key below a node, and the parameters of its `_target_` that no recipe names."""
    for key in config:
        path, node = f"{prefix}{key}", config._get_node(key)
        if path == "command":
            continue
        if isinstance(node, DictConfig) and len(node) and _known(config, key):
            yield from _lines(node, notes, f"{path}.")
            continue
        value = "[...]" if isinstance(node, ListConfig) and any(map(_is_node, node)) else (
            OmegaConf.to_container(node) if _is_node(node) and _known(config, key)
            else node._value()
        )  # fmt: skip
        hint = _type(config, key)
        yield Line(path, value, hint if value is None else _without_null(hint), notes.get(path, ""))
    for p in _signature(config)[0]:
        if p.name not in config and p.default is not p.empty and _hint(p.annotation) is not Any:
            yield Line(f"{prefix}{p.name}", p.default, _hint(p.annotation))


def _without_null(hint: Any) -> Any:
    kinds = [t for t in typing.get_args(hint) if t is not types.NoneType]
    return kinds[0] if isinstance(hint, types.UnionType) else hint


def _notes(file: Path) -> dict[str, str]:
    """The comments of a YAML file after its keys, by dotted path."""
    found, above = {}, []
    for line in file.read_text().splitlines():
        if matched := YAML_KEY.match(line):
            indent, key, rest = len(matched[1]), matched[2], matched[3]
            above = [(i, k) for i, k in above if i < indent] + [(indent, key)]
            if note := rest.partition(" #")[2].strip():
                found[".".join(k for _, k in above)] = note
    return found


def _head(group: str, name: str) -> list[str]:
    """The comment at the head of a file."""
    lines = (RECIPES / group / f"{name}.yaml").read_text().splitlines()
    return [x[2:] for x in itertools.takewhile(lambda x: x.startswith("#"), lines)]


def _about(group: str, name: str) -> str:
    """The description of a file: its head up to the commands."""
    return " ".join(itertools.takewhile(lambda x: "python -m" not in x, _head(group, name)))


def _command(recipe: str) -> str:
    return OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml").command
