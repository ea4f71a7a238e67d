"""A run's config.yaml, read as the input of a stranger: no more than a command line could say.

YAML can hold more: aliases, by which a few bytes stand for more nodes than any memory has, tags
that make objects, and OmegaConf's interpolations, which read the environment. A run's config is
written resolved and has none of them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.files import read_text, shortened
from recipes.compose import check_config, check_settings, names
from recipes.settings import Acceptance
from recipes.values import check, unknown

LARGEST = 200_000  # characters; configs have about 3,000
DEEPEST = 20  # levels of nodes in each other


def read_config(file: Path) -> DictConfig:
    """Read a config of plain nodes, lists and values; raise ValueError of one line for another."""
    text = read_text(file)
    try:
        if len(text) > LARGEST:
            raise ValueError(f"it has {len(text):,} characters, and a config at most {LARGEST:,}")
        _check_plain(text)
        config = OmegaConf.create(text)
        if not isinstance(config, DictConfig):
            raise ValueError("it holds no keys and values")
        _check_keys(OmegaConf.to_container(config))
    except (ValueError, AssertionError, yaml.YAMLError, OmegaConfBaseException) as error:
        # AssertionError: OmegaConf's for a number.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} is damaged: {reason or 'it is no YAML'}") from None
    return config


def checked_config(file: Path) -> DictConfig:
    """Read the config of a run of `trainers.fit`, and check it as its command line was checked."""
    config = read_config(file)
    try:
        if config.get("recipe") not in names("recipe"):
            raise unknown("recipe", config.get("recipe"), names("recipe"))
        check_config(config, "fit")
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(
            f"{file} is no config of this version: {' '.join(str(error).split())}"
        ) from None
    return config


def measured_with(file: Path) -> tuple[str | None, Acceptance]:
    """Read what a run's validations used: its target and settings; no other key is read."""
    config = OmegaConf.to_container(read_config(file))
    assert isinstance(config, dict)
    try:
        target = check("target", config.get("target"), str | None)
        return target, check_settings(config.get("acceptance"), Acceptance, "acceptance")
    except ValueError as error:
        raise ValueError(f"{file} is no config of this version: {error}") from None


def asks_for_code(config: DictConfig) -> bool:
    """Return whether a config asks to run code that a model brings (`trust_remote_code`)."""
    nodes = [OmegaConf.to_container(config)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict) and node.get("trust_remote_code", False) is not False:
            return True
        nodes += [x for x in (node.values() if isinstance(node, dict) else node)
                  if isinstance(x, (dict, list))]  # fmt: skip
    return False


def _check_plain(text: str) -> None:
    """Raise ValueError for aliases, tags, interpolations and nodes deeper than `DEEPEST`.

    It reads the parser's events, before anything is made of them.
    """
    depth = 0
    events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
    for event in events:
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"{where} has an anchor or an alias (& and *): write each value out")
        if getattr(event, "tag", None):
            raise ValueError(f"{where} has the tag {shortened(event.tag)}: leave it out")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            raise ValueError(
                f"{where} has an interpolation, {shortened(event.value)}: write its value"
            )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"{where} is {depth} levels deep, and a config at most {DEEPEST}")


def _check_keys(node: dict | list) -> None:
    """Raise ValueError for a key that is no text."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(node, dict) and not isinstance(key, str):
            raise ValueError(f"the key {shortened(key)} is no text")
        if isinstance(value, (dict, list)):
            _check_keys(value)
