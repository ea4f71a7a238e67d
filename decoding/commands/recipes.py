"""Recipes: `recipes/<command>.yaml`, a scale, a recipe and the user's overrides become one config.

Later wins: the command's defaults, `scale/<scale>.yaml`, `recipe/<recipe>.yaml`, the recipe's own
`scales.<scale>`, the command line. The grammar of overrides is Hydra's.
"""

import inspect
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.commands.cli import unknown

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def names(group: str) -> list[str]:
    """The recipes or scales that exist."""
    return sorted(p.stem for p in (RECIPES / group).glob("*.yaml"))


def compose(argv: list[str], command: str) -> DictConfig:
    """The config of `python -m ... recipe=NAME [scale=NAME] [key=value ...]`.

    command: 'fit' or 'collect'; a recipe says which one runs it.
    """
    for argument in argv:
        if "=" not in argument:
            raise ValueError(
                f"{argument!r} is not of the form key=value. Recipes: {names('recipe')}"
            )
    chosen = {"scale": "lab"}
    groups = ("recipe", "scale", "strategy") if command == "fit" else ("recipe", "scale")
    chosen |= {k: v for k, _, v in (a.partition("=") for a in argv) if k in groups}
    if "recipe" not in chosen:
        raise ValueError(f"recipe= is missing. Choose from {names('recipe')}")
    for group, name in chosen.items():
        if name not in names(group):
            raise unknown(group, name, names(group))
    config = defaults(command, **chosen)
    rest = [a for a in argv if a.partition("=")[0] not in chosen]
    try:
        for override in OverridesParser.create().parse_overrides(rest):
            _check(config, override)
        ConfigStore.instance().store(name="parade_composed", node=config)
        with initialize_config_dir(config_dir=str(RECIPES), version_base="1.3"):
            config = hydra_compose("parade_composed", overrides=rest)
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return config


def build(node: DictConfig, **given):
    """`hydra.utils.instantiate`, with a user's mistake as it was raised."""
    try:
        return instantiate(node, **given)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, (ValueError, OSError)):
            raise cause from None
        raise


def defaults(command: str, recipe: str, scale: str, strategy: str | None = None) -> DictConfig:
    """A recipe at a scale before the user's overrides."""
    file = OmegaConf.load(RECIPES / "recipe" / f"{recipe}.yaml")
    if file.command != command:
        module = {"fit": "trainers.fit", "collect": "decoding.collect"}[file.command]
        raise ValueError(f"recipe {recipe!r} is run by: python -m {module} recipe={recipe}")
    scales = file.pop("scales")
    return OmegaConf.merge(
        OmegaConf.load(RECIPES / f"{command}.yaml"),
        OmegaConf.load(RECIPES / "scale" / f"{scale}.yaml").get(command, {}),
        file,
        scales[scale] or {},
        OmegaConf.load(RECIPES / "strategy" / f"{strategy}.yaml") if strategy else {},
        {"recipe": recipe, "scale": scale} | ({"strategy": strategy} if strategy else {}),
    )


def _check(config: DictConfig, override) -> None:
    """The key exists (unless `+key` adds it) and the value is of the default's type."""
    if override.is_add() or override.is_force_add():
        return
    key, node = override.key_or_group, config
    *parents, leaf = key.split(".")
    for part in parents:
        node = node.get(part) if isinstance(node, DictConfig) and part in node else None
    optional = _parameters(node) if isinstance(node, DictConfig) else []
    if leaf in optional:
        node[leaf] = None  # a parameter that the recipe leaves at its default
        return
    keys = [*node, *optional] if isinstance(node, DictConfig) else []
    known = {".".join([*parents, str(k)]) for k in keys}
    if key not in known:
        raise unknown("key", key, known or _paths(config))
    if override.is_delete() or OmegaConf.is_interpolation(node, leaf):
        return
    default, value = node[leaf], override.value()
    if default is None or value is None:
        return
    allowed = {float: (float, int), ListConfig: list, DictConfig: dict, str: (str, int, float)}
    expected = allowed.get(type(default), type(default))
    wrong = isinstance(value, bool) and not isinstance(default, bool)
    if wrong or not isinstance(value, expected):
        names = {ListConfig: "list", DictConfig: "dict"}
        expected_name = names.get(type(default), type(default).__name__)
        raise ValueError(
            f"{key}={value!r} is of type {type(value).__name__}, "
            f"but {expected_name} is needed (default: {default})"
        )


def _parameters(node: DictConfig) -> list[str]:
    """What a `_target_` takes beside the keys that its node has."""
    if "_target_" not in node:
        return []
    parameters = inspect.signature(get_object(node._target_)).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in named if name not in node]


def _paths(config: DictConfig, prefix: str = "") -> list[str]:
    """Every key as a dotted path."""
    found = []
    for key in config:
        path = f"{prefix}{key}"
        found.append(path)
        if isinstance(node := config._get_node(key), DictConfig) and not node._is_none():
            found += _paths(node, f"{path}.")
    return found
