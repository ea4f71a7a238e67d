"""Recipes: settings, a scale, a recipe and overrides become one config, which is checked and built.

The order, from weakest to strongest: the command's settings (`recipes.settings`),
`scale/<scale>.yaml`, `recipe/<recipe>.yaml`, the recipe's own `scales.<scale>`, the command line.
There a key is a dotted path, `+key=value` adds a key that nothing names, and `~key` removes one.

A key's type is that of the setting, or of the argument of a `_target_`, or else of its default.
"""

import functools
import inspect
import itertools
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.corpora.sources import is_own
from data.files import shortened
from recipes.command import Line, asked, help_page
from recipes.options import types_of
from recipes.settings import SWITCHES, Collect, Fit, TakenBy
from recipes.signatures import signatures_of
from recipes.values import check, convert, members, plain, read, show, split, unknown

RECIPES = Path(__file__).parent
MODULES = {"fit": "trainers.fit", "collect": "decoding.collect"}
SETTINGS = {"fit": Fit, "collect": Collect}
GROUPS = {"fit": ("recipe", "scale", "strategy"), "collect": ("recipe", "scale")}
# Of these exactly one is given: one on the command line takes the recipe's place for the others.
EITHER = ("trainer.max_steps", "trainer.max_epochs", "minutes")
# What belongs to the command of an input too: settings of every run, and keys that recipes share.
OF_EVERY_RUN = ("runs", "build_inputs", "strategy", "device_map", "trainer.devices",
                "trainer.num_nodes", "trainer.accelerator", "trainer.precision")  # fmt: skip
SHARED = ("scale", "target", "layout", "answers", "images")
OF_DRAFTERS = ("module.attention", "module.shifted")  # the same in all trainings of a drafter
# Keys for the model that a user brings: a recipe has those that it reads. In others `target` is
# null, and with it the settings of every run that are of the target alone.
BROUGHT = ("target", "model", "start", "base")
OF_TARGET = ("target", "device_map")
CHOSEN = ("command", "recipe", "scale", "strategy")  # keys that are no settings
GIVEN = ("tokenizer", "network", "optimization", "folder")  # by the command, to a `_target_`
# Folders in a run's or a collection's own.
PARTS = ("checkpoints", "export", "bench", "calibration", "shards")
# What the validation's key builds, another one's does too.
SAME = {"validation": "train", "validation_corruption": "corruption"}
YAML_KEY = re.compile(r"^( *)([\w.]+):(.*)$")


def names(group: str) -> list[str]:
    """Return the recipes, scales or strategies that exist."""
    return sorted(p.stem for p in (RECIPES / group).glob("*.yaml"))


def scales_of(recipe: str) -> list[str]:
    """Return the scales that a recipe has."""
    return [*_file(recipe).scales]


def compose(argv: list[str], command: str) -> DictConfig:
    """Return the config of `python -m ... recipe=NAME [scale=NAME] [key=value ...]`.

    Its keys are fixed. `--help` and `--cfg job` print and exit with status 0. `command` is 'fit' or
    'collect'.
    """
    wish, pairs = asked(argv)
    for argument in pairs:
        if not argument.startswith("~"):
            split(argument)
    chosen = {"scale": "lab"}
    chosen |= {k: v for k, _, v in (a.partition("=") for a in pairs) if k in GROUPS[command]}
    for group, name in chosen.items():
        if name not in names(group):
            raise unknown(group, name, names(group))
    if "recipe" in chosen and (other := _file(chosen["recipe"]).command) != command:
        words = shlex.join(argv)
        raise ValueError(
            f"recipe {chosen['recipe']!r} is run by: python -m {MODULES[other]} {words}"
        )
    if wish == "help":
        print(_help(command, chosen))
        sys.exit(0)
    if "recipe" not in chosen:
        raise ValueError(f"recipe= is missing. Choose from {names('recipe')}")
    config = defaults(command, **chosen)
    try:
        given = {a.partition("=")[0] for a in pairs}
        for argument in pairs:
            if argument.partition("=")[0] not in chosen:
                _override(config, argument)
        lengths = [k for k in EITHER if k in given and OmegaConf.select(config, k) is not None]
        if len(lengths) > 1 and "minutes" in lengths:
            said = " with ".join(f"{k}={OmegaConf.select(config, k)}" for k in lengths[::-1])
            raise ValueError(f"{said} is not allowed: each says how long the run is, so give one")
        for key in {*EITHER} - {*lengths} if len(lengths) == 1 else ():
            OmegaConf.update(config, key, None)
        if "prompts.source" in given and "prompts.count" not in given:
            source = OmegaConf.select(config, "prompts.source")
            if isinstance(source, str) and is_own(source):  # the count is that of the recipe's
                OmegaConf.update(config, "prompts.count", None)
        _check_read(config, given)
        resolved = check_config(config, command)
        _carry_on(config, given)
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from error
    if wish == "config":
        print(OmegaConf.to_yaml(OmegaConf.create(resolved)), end="")
        sys.exit(0)
    OmegaConf.set_struct(config, True)
    return config


def check_config(config: DictConfig, command: str) -> dict:
    """Check all of a config (its keys, types and what each key builds), and return it resolved.

    Nothing is built: what comes from a command line or a run's folder is an input.
    """
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    check_targets(config)
    _check_node(resolved, SETTINGS[command])
    _check_places(resolved)
    return resolved


def check_settings(given: Any, kind: type, key: str) -> Any:
    """Return a dataclass of settings, of those given in a config's node and defaults, checked."""
    node = _settings(kind) | check(key, given, dict)
    _check_node(node, kind, f"{key}.")
    return kind(**node)


def defaults(command: str, recipe: str, scale: str, strategy: str | None = None) -> DictConfig:
    """Return a recipe at a scale, with a strategy or none, before the user's overrides."""
    file = _file(recipe).copy()
    scales = file.pop("scales")
    if scale not in scales:
        raise unknown(f"scale of recipe={recipe}", scale, list(scales))
    return OmegaConf.merge(
        _settings(SETTINGS[command]),
        OmegaConf.load(RECIPES / "scale" / f"{scale}.yaml").get(command, {}),
        file,
        scales[scale] or {},
        OmegaConf.load(RECIPES / "strategy" / f"{strategy}.yaml") if strategy else {},
        {"recipe": recipe, "scale": scale} | ({"strategy": strategy} if strategy else {}),
    )


@functools.cache
def _file(recipe: str) -> DictConfig:
    return OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml")


def _settings(kind: type) -> dict:
    """Return the defaults of a dataclass of settings."""
    found: dict[str, Any] = {}
    for f in fields(kind):
        if is_dataclass(types_of(kind)[f.name]):
            found[f.name] = _settings(types_of(kind)[f.name])
        else:
            default = "???" if f.default is MISSING else f.default
            found[f.name] = list(default) if isinstance(default, tuple) else default
    return found


def _check_read(config: DictConfig, given: set[str]) -> None:
    """Check that the settings of every run that the user gave are read with this config."""
    own = f"recipe={config.recipe} at scale={config.scale}"
    for key in () if "target" in _own_keys(config.recipe, config.scale) else OF_TARGET:
        if key in given and config[key] is not None:
            raise ValueError(
                f"{key}={config[key]} is not read by {own}, which has no target: {_brought(config)}"
            )
    for node, (switch, off, also) in SWITCHES.items():
        unread = {k for k in given if k.startswith(f"{node}.")} - {f"{node}.{k}" for k in also}
        chosen = not unread or f"{node}.{switch}" in given
        if not chosen and OmegaConf.select(config, f"{node}.{switch}") == off:
            raise ValueError(
                f"{min(unread)}= is not read by {own}, where {node}.{switch}={show(off)}: give "
                f"{node}.{switch} too"
            )


def _own_keys(recipe: str, scale: str) -> set[str]:
    """Return the top keys that a recipe itself has at a scale; none where it has no such scale."""
    file = _file(recipe)
    return {"scale", *file, *(file.scales[scale] or {})} if scale in file.scales else set()


def _brought(config: DictConfig) -> str:
    """Say with which keys a recipe takes a model that the user brings."""
    own = _own_keys(config.recipe, config.scale)
    found = [key for key in BROUGHT if key in own]
    of_parts = [f"{part}.path" for part in ("network", "tokenizer")]
    found = found or [key for key in of_parts if OmegaConf.select(config, key) is not None]
    keys = " and ".join(f"{key}=" for key in found)
    return f"its model is given with {keys}" if found else "it begins with no other model"


def _carry_on(config: DictConfig, given: set[str]) -> None:
    """Add the keys that the user gave to the input commands that know them.

    A run of so many minutes shares them equally with the inputs that it may have to build: whether
    one is there already does not count, so that a command that was stopped goes on with its share.
    """
    share = None
    if config.minutes is not None and config.build_inputs:
        share = f"minutes={config.minutes / (1 + len(config.needs)):.3g}"
    for need in config.needs:
        words = OmegaConf.to_container(need, resolve=False).get("command", "").split()
        stated = dict(word.partition("=")[::2] for word in words)
        if stated.get("recipe") not in names("recipe"):
            continue
        scale = config.scale if {"scale"} & {*given, *stated} else "lab"
        own = _own_keys(stated["recipe"], scale)
        every = {*paths(OmegaConf.create(_settings(SETTINGS[_file(stated["recipe"]).command])))}
        every -= set() if "target" in own else {*OF_TARGET}
        known = [*(k for k in OF_EVERY_RUN if k in every), *(k for k in SHARED if k in own)]
        module = _file(stated["recipe"]).get("module")
        taken = _parameters_of(*_target(module))[0] if module else {}
        known += [k for k in OF_DRAFTERS if k.removeprefix("module.") in taken]
        for key in known:
            if key in given and key not in stated:
                value = OmegaConf.select(config, key)
                # A text is filled in after the command is split into words.
                words.append(
                    f"{key}=${{{key}}}" if isinstance(value, str) else f"{key}={show(value)}"
                )
        if share and "minutes" in every:
            words.append(share)
        need.command = " ".join(words)


def run_folder(config: DictConfig) -> Path:
    """Return the folder that a composed recipe writes, `<runs>/<recipe>[/<name>]`."""
    name = "" if config.name is None else str(config.name)  # a number is a name too
    if not config.runs:
        raise ValueError(f"runs={config.runs} is not allowed: give a folder")
    if name == ".." or Path(name).name != name:
        raise ValueError(f"name={name} is not allowed: give the name of one folder, without '/'")
    if name in PARTS:
        raise ValueError(f"name={name} is a folder of the run without a name: give another")
    return Path(config.runs) / config.recipe / name


def build(node: DictConfig, **given):
    """Return the result of a config's `_target_`, called with the arguments in `given` too.

    The target's ValueError or OSError is a user's mistake and is raised unchanged.
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
def places() -> dict[str, frozenset[str]]:
    """Return what each key may build: the `_target_`s of recipes and strategies, by dotted path.

    A config may come from a stranger, and Hydra would call any function of any package.
    """
    found: dict[str, set[str]] = {}
    for file in (*RECIPES.glob("recipe/*.yaml"), *RECIPES.glob("strategy/*.yaml")):
        # libyaml's, where PyYAML has it: the other takes every command a quarter of a second.
        content = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        for node in (content, *filter(None, content.pop("scales", {}).values())):
            for place, target in _targets_in(node):
                found.setdefault(place, set()).add(target)
    return {place: frozenset(names) for place, names in found.items()}


@functools.cache
def targets() -> frozenset[str]:
    """Return everything that a config may build, under whatever key."""
    return frozenset().union(*places().values())


def _targets_in(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (the dotted path of a node, its `_target_`); all items of a list have the list's."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield place, node["_target_"]
        for key, value in node.items():
            yield from _targets_in(value, f"{place}.{SAME.get(key, key)}".lstrip("."))
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _targets_in(item, place)


def _check_places(config: dict) -> None:
    """Check that each key of a resolved config builds what recipes build there, and only there."""
    for place, target in _targets_in(config):
        if target not in places().get(place, ()):
            raise ValueError(
                f"{place}._target_={target} is not allowed: recipes build there "
                f"{sorted(places().get(place, ())) or 'nothing'}"
            )
    for prefix, node in (("", config), ("data.", config.get("data", {}))):
        for key, value in node.items():
            known = f"{prefix}{SAME.get(key, key)}" in places()
            if known and isinstance(value, dict) and "_target_" not in value:
                raise ValueError(f"{prefix}{key}._target_ is missing: it names what is built")


def check_targets(node: DictConfig) -> None:
    """Check that a config, or a part of one, builds nothing but `targets`."""
    # Resolved: a reference may lead to a node that builds something.
    nodes = [("", OmegaConf.to_container(node, resolve=True))]
    while nodes:
        key, node = nodes.pop()
        items = enumerate(node) if isinstance(node, list) else node.items()
        for name, value in items:
            if name == "_target_" and str(value) not in targets():
                raise unknown(f"{key}_target_", str(value), targets())
            if str(name).startswith("_") and name != "_target_":  # Hydra's other keys
                raise ValueError(f"{key}{name} is not allowed: give arguments by their names")
            if isinstance(value, (dict, list)):
                nodes.append((f"{key}{name}.", value))


def _target(node: Mapping) -> tuple[Signature, ...]:
    """Return the signatures of what a node's `_target_` names (`signatures_of`)."""
    check_targets(OmegaConf.create({"_target_": node["_target_"]}))
    return signatures_of(node["_target_"])


def _takes(node: Mapping, hint: Any) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters that a node's keys set, and whether it may have other keys.

    They follow from its `_target_` or its type: a dataclass of settings, a TypedDict, a dictionary
    of such, or one annotated with the functions that take it.
    """
    if "_target_" in node:
        return _parameters_of(*_target(node))
    for kind in members(hint):
        if isinstance(kind, type) and is_dataclass(kind):
            return _parameters_of(inspect.signature(kind))[0], kind in SETTINGS.values()
        if typing.is_typeddict(kind):
            return _typed(typing.get_type_hints(kind, include_extras=True)), True
        if typing.get_origin(kind) is dict:
            return _typed(dict.fromkeys(node, typing.get_args(kind)[1])), True
    for taken in getattr(hint, "__metadata__", ()):
        if isinstance(taken, TakenBy):
            return _parameters_of(*(s for name in taken.functions for s in signatures_of(name)))
    return {}, True


def _typed(hints: dict[str, Any]) -> dict[str, Parameter]:
    return {n: Parameter(n, Parameter.KEYWORD_ONLY, default=..., annotation=h)
            for n, h in hints.items()}  # fmt: skip


def _parameters_of(*signatures: Signature) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters of a callable, and of those that it passes further ones on to.

    The second value says whether a config may have other keys: `**keys: Unpack[...]` says so, while
    those of a plain `**options` are for code alone.
    """
    found: dict[str, Parameter] = {}
    free = False
    for signature in signatures:
        parameters = signature.parameters.values()
        named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        found = {p.name: p for p in named} | found
        more = [p.annotation for p in parameters if p.kind == p.VAR_KEYWORD]
        if not more:
            break
        if typing.get_origin(more[0]) is typing.Unpack:
            free = True
            (keys,) = typing.get_args(more[0])
            found = _typed(typing.get_type_hints(keys, include_extras=True)) | found
    return found, free


def _check_node(node: dict, hint: Any, key: str = "") -> None:
    """Check the keys and values of a node at a dotted path, also those of references."""
    parameters, more = _takes(node, hint)
    built = "_target_" in node
    for p in parameters.values():
        if p.name in node or (p.name in GIVEN and built):
            continue
        if not built and is_dataclass(hint):
            raise ValueError(f"{key}{p.name} is missing: every run has this key")
        if p.default is p.empty and p.name != "tokenizer":
            raise ValueError(f"{key}{p.name} is missing: {node.get('_target_', 'it')} needs it")
    for name, value in node.items():
        if name not in parameters and not more and name != "_target_":
            raise unknown("key", f"{key}{name}", [f"{key}{x}" for x in {*parameters} - {*GIVEN}])
        kind = parameters[name].annotation if name in parameters else Any
        # null is for what a `_target_` names to refuse, which knows what it would be.
        if not (value is None and built and _is_object(kind)) and not _builds(value, kind):
            if built and _is_object(kind):
                raise ValueError(
                    f"{key}{name}={shortened(value)} is not allowed: it needs a _target_"
                )
            check(f"{key}{name}", value, kind)
        if isinstance(value, dict):
            _check_node(value, kind, f"{key}{name}.")


def _is_object(hint: Any) -> bool:
    """Return whether a type is of objects alone, such as a network, which no value expresses."""
    kinds = {*members(hint)} - {types.NoneType}
    return not kinds & {Any, Parameter.empty} and all(plain(kind) is Any for kind in kinds)


def _builds(value: Any, hint: Any) -> bool:
    """Return whether a value is a node whose `_target_` returns the type."""
    if not isinstance(value, dict) or "_target_" not in value:
        return False
    (built, *_) = [plain(s.return_annotation) for s in _target(value)] or [Any]
    return plain(hint) in (Any, dict) or built in (plain(hint), *typing.get_args(plain(hint)))


def _override(config: DictConfig, argument: str) -> None:
    """Change one key of a config: `key=value`, `+key=value` or `~key`."""
    if (key := argument.lstrip("~+").partition("=")[0]) in CHOSEN:
        raise ValueError(f"{key}= is not allowed here: recipe=, scale= and strategy= choose a file")
    if argument.startswith("~"):
        parent, leaf, _ = _locate(config, argument[1:])
        if argument[1:] in paths(OmegaConf.create(_settings(SETTINGS[config.command]))):
            raise ValueError(f"{argument} is not allowed: every run has this key; give it a value")
        if leaf == "_target_":
            raise ValueError(f"{argument} is not allowed: it names what is built; give it a value")
        parent.pop(leaf, None)
        return
    key, text = split(argument.lstrip("+"))
    # A key that is there already has a type, whatever stands before it.
    added = argument.startswith("+") and OmegaConf.select(config, key) is None
    if added:
        value = read(text)
    else:
        node, leaf, parameters = _locate(config, key)
        default = node.get(leaf) if _known(node, leaf) else None
        hint = _type(node, leaf, parameters)
        value = read(text) if "${" in text else convert(key, text, hint, default)
    value = list(value) if isinstance(value, tuple) else value
    OmegaConf.update(config, key, value, force_add=True)


def _locate(config: DictConfig, key: str) -> tuple[DictConfig, str, dict[str, Parameter]]:
    """Return the node that holds a key, the key's last part, and the node's parameters."""
    *parents, leaf = key.split(".")
    node, parameters = config, _takes(config, SETTINGS[config.command])[0]
    for part in parents:
        hint = parameters[part].annotation if part in parameters else Any
        node = node.get(part) if isinstance(node, DictConfig) and part in node else None
        parameters = _takes(node, hint)[0] if isinstance(node, DictConfig) else {}
    keys = [*node, *parameters] if isinstance(node, DictConfig) else []
    if leaf not in keys:
        known = {".".join([*parents, str(k)]) for k in keys}
        if key in BROUGHT:
            raise ValueError(f"unknown key {key!r} of recipe={config.recipe}: {_brought(config)}")
        raise unknown("key", key, known or paths(config))
    return node, leaf, parameters


def _known(node: DictConfig, leaf: str) -> bool:
    """Return whether a key has a value of its own, which gives its type."""
    there = leaf in node and not OmegaConf.is_missing(node, leaf)
    return there and not OmegaConf.is_interpolation(node, leaf)


def _type(node: DictConfig, leaf: str, parameters: dict[str, Parameter]) -> Any:
    """Return a key's declared type, or that of its default."""
    declared = parameters[leaf].annotation if leaf in parameters else Any
    if plain(declared) is not Any:
        return declared
    default = node.get(leaf) if _known(node, leaf) else None
    if isinstance(default, DictConfig):
        return dict | None if types.NoneType in members(declared) else dict
    return str | None if isinstance(default, str) else Any


def paths(config: DictConfig, prefix: str = "") -> list[str]:
    """Return every key as a dotted path."""
    found = []
    for key in config:
        path = f"{prefix}{key}"
        found.append(path)
        if isinstance(node := config._get_node(key), DictConfig) and not node._is_none():
            found += paths(node, f"{path}.")
    return found


def _help(command: str, chosen: dict[str, str]) -> str:
    """Return the text of `--help`: all recipes, or every key of the chosen one."""
    recipe, module, notes = chosen.get("recipe"), MODULES[command], {}
    if recipe is None:
        config = OmegaConf.create(_settings(SETTINGS[command]))
        runs = [r for r in names("recipe") if _file(r).command == command]
        groups = {"recipe": runs} | {g: names(g) for g in GROUPS[command][1:]}
        about = "\n\n".join(
            "\n".join([f"{group}=", *(f"  {n:<22} {_about(group, n)}" for n in known)])
            for group, known in groups.items()
        )
        about = f"Run a recipe; with recipe=NAME --help prints the keys of that one.\n\n{about}"
        example = f"recipe={runs[0]} scale=lab seed=1"
    else:
        config, scale = defaults(command, **chosen), chosen["scale"]
        head, example = "\n".join(_head("recipe", recipe)), f"recipe={recipe} scale={scale} seed=1"
        about = f"{head}\n\nThe keys of recipe={recipe} at scale={scale}:"
        found = _notes(RECIPES / "recipe" / f"{recipe}.yaml")
        notes = {path.removeprefix(f"scales.{scale}."): note for path, note in found.items()}
    return help_page(module, about, _lines(config, SETTINGS[command], notes), example)


def _lines(node: DictConfig, hint: Any, notes: dict[str, str], prefix: str = "") -> Iterator[Line]:
    """Return every key below a node, and the parameters of its `_target_` that no recipe names."""
    parameters, _ = _takes(node, hint)
    helps = {f.name: f.metadata.get("help") for f in fields(hint)} if is_dataclass(hint) else {}
    for key in node:
        path, value = f"{prefix}{key}", node._get_node(key)
        if path == "command":
            continue
        declared = parameters[key].annotation if key in parameters else Any
        if isinstance(value, DictConfig) and len(value) and _known(node, key):
            yield from _lines(value, declared, notes, f"{path}.")
            continue
        kind = _type(node, key, parameters)
        if isinstance(value, (DictConfig, ListConfig)) and _known(node, key):
            value = OmegaConf.to_container(value)
            value = "[...]" if any(isinstance(each, dict) for each in value) else value
        else:
            value = value._value()
        yield Line(path, value, kind, notes.get(path) or helps.get(key) or "")
    for p in parameters.values():
        unnamed = p.name not in node and p.default not in (p.empty, ...)
        if unnamed and plain(p.annotation) is not Any:
            yield Line(f"{prefix}{p.name}", p.default, p.annotation)


def _notes(file: Path) -> dict[str, str]:
    """Return the comments after the keys of a YAML file, by dotted path."""
    found, above = {}, list[tuple[int, str]]()
    for line in file.read_text().splitlines():
        if matched := YAML_KEY.match(line):
            indent, key, rest = len(matched[1]), matched[2], matched[3]
            above = [(i, k) for i, k in above if i < indent] + [(indent, key)]
            if note := rest.partition(" #")[2].strip():
                found[".".join(k for _, k in above)] = note
    return found


def _head(group: str, name: str) -> list[str]:
    """Return the comment at the head of a file."""
    lines = (RECIPES / group / f"{name}.yaml").read_text().splitlines()
    return [x[2:] for x in itertools.takewhile(lambda x: x.startswith("#"), lines)]


def _about(group: str, name: str) -> str:
    """Return a file's description: its head up to the commands."""
    return " ".join(itertools.takewhile(lambda x: "python -m" not in x, _head(group, name)))
