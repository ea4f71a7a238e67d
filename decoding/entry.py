"""The `parade` entry of an export's config.json: its keys, and the values that they may have.

An export may come from anybody, so nothing of it is used before it is checked. A key has one
meaning in all methods; a method may have keys of its own, which its sampler checks.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data.files import read_json, shortened

VERSION = 1  # of the entry; one without is of version 1
# How models without an entry are decoded, by their type; all others plainly.
METHODS = {"xlnet": "asarm"}
DFLASH = "dflash_config"  # the key of a DFlash drafter's config.json, whoever trained it
MOST = 2**16  # of tokens, nodes, steps: more is a mistake, and would take all memory


class Shape(NamedTuple):
    """What a value must be.

    Attributes:
        name: As an error says it.
        fits: Whether a value is it.
    """

    name: str
    fits: Callable[[Any], bool]

    def __or__(self, other: "Shape") -> "Shape":
        return Shape(f"{self.name} or {other.name}", lambda x: self.fits(x) or other.fits(x))


def _integer(x: Any, least: int, most: int) -> bool:
    return type(x) is int and least <= x <= most


def _number(x: Any, most: float) -> bool:
    return type(x) in (int, float) and math.isfinite(x) and 0 <= x <= most


def _plain(x: Any) -> bool:  # the name of a file of this very folder
    return isinstance(x, str) and x == Path(x).name not in ("", "..")


def _numeral(x: str) -> bool:
    try:
        return math.isfinite(float(x))
    except ValueError:
        return False


def listed(item: Shape) -> Shape:
    """A list of one or more such values."""
    return Shape(
        f"a list of {item.name}", lambda x: isinstance(x, list) and x and all(map(item.fits, x))
    )


def by_number(item: Shape) -> Shape:
    """Such a value for each of one or more numbers, such as batch sizes or temperatures."""
    return Shape(
        f"{item.name} by number",
        lambda x: isinstance(x, dict) and x and all(_numeral(k) and item.fits(x[k]) for k in x),
    )


COUNT = Shape(f"an integer from 1 to {MOST}", lambda x: _integer(x, 1, MOST))
TOKEN = Shape("a token id", lambda x: _integer(x, 0, 2**31))
NUMBER = Shape("a number of at least 0", lambda x: _number(x, math.inf))
SHARE = Shape("a number from 0 to 1", lambda x: _number(x, 1))
TEXT = Shape("a text", lambda x: isinstance(x, str) and x != "")
FILE = Shape("the name of a file beside it", _plain)
FLAG = Shape("true or false", lambda x: type(x) is bool)
NULL = Shape("null", lambda x: x is None)
NODE = Shape("an object", lambda x: isinstance(x, dict))

KEYS = {
    "version": COUNT,
    "method": TEXT,
    "target": TEXT,
    "tokenizer_fingerprint": TEXT,
    "mask_id": TOKEN,
    "sep_id": TOKEN,
    "block_size": COUNT,
    "attention": TEXT,
    "shifted": FLAG,
    "draft_vocabulary": FILE,
    "markov_head": FLAG,
    "noise_input": FLAG,
    "nodes": COUNT | by_number(COUNT),
    "lengths": by_number(by_number(COUNT)),
    "sharpness": NUMBER | by_number(listed(NUMBER)),
    "rank_noise": FLAG,
    "bigrams": FLAG | by_number(listed(NUMBER)),
    "lookup": FLAG,
    "draft": TEXT,
    "tolerance": NUMBER,
    "cache": FLAG | TEXT | NULL,
    "tokens_per_step": COUNT,
    "threshold": NUMBER | NULL,
    "order": TEXT,
    "guidance": NUMBER,
    "graph": NODE | TEXT,
    "pass": TEXT | NULL,
    "draft_cache": TEXT | NULL,
    "draft_steps": COUNT,
    "blocks": COUNT,
    "spawn_ratio": SHARE,
    "pool_size": TOKEN,
    "running": FLAG,
    "gamma": COUNT,
    "prefill": SHARE,
    "steps": COUNT,
    "noisy_last": FLAG,
    "iterations": COUNT,
    "numbers": TEXT,
    "example": TEXT,
    "command": TEXT,
}


def read_config(file: Path) -> dict:
    """An export's config.json, whose `parade` entry, if it has one, is checked.

    Args:
        file: The file.

    Raises:
        ValueError: It is damaged or no object, or the entry has a value that is not allowed; one
            line that names the file, the key and what is allowed.
    """
    config = read_json(file)
    if "parade" in config:
        entry = config["parade"]
        if not isinstance(entry, dict) or "method" not in entry:
            raise ValueError(f"{file}: parade={shortened(entry)} is not allowed: it needs a method")
        check_entry(entry, str(file))
        if entry.get("version", VERSION) > VERSION:
            raise ValueError(
                f"{file} is of version {entry['version']}, and this parade reads up to {VERSION}: "
                "install a newer one"
            )
    return config


def entry_of(config: dict, file: Path) -> dict:
    """The `parade` entry of a config.json, or what stands for it where there is none.

    Args:
        config: What `read_config` returned.
        file: The file, for the error.

    Returns:
        Of a DFlash drafter that was trained elsewhere an entry without a target, of another model
        that of its method.

    Raises:
        ValueError: A drafter's config.json lacks its mask token or its block size.
    """
    if "parade" in config:
        return config["parade"]
    published = config.get(DFLASH)
    if not isinstance(published, dict):
        return {"method": METHODS.get(config.get("model_type"), "plain")}
    mask_id, size = published.get("mask_token_id"), config.get("block_size")
    if not TOKEN.fits(mask_id) or not _integer(size, 2, MOST):
        raise ValueError(
            f"{file} is of no whole DFlash drafter: {DFLASH}.mask_token_id={shortened(mask_id)} "
            f"and block_size={shortened(size)}; it needs {TOKEN.name} and an integer from 2 to "
            f"{MOST}"
        )
    # Its blocks begin with the last committed token, and each mask drafts one; where that token
    # drafts one too, it is another.
    size -= not published.get("sample_from_anchor")
    return {"method": "dflash", "mask_id": mask_id, "block_size": size}


def check_entry(entry: dict, where: str, needed: Iterable[str] = ()) -> None:
    """Check the values of an entry.

    Args:
        entry: The `parade` entry.
        where: The file, for the error.
        needed: Keys that must be there.

    Raises:
        ValueError: A value is not allowed, or a key is missing.
    """
    for key, value in entry.items():
        if key in KEYS and not KEYS[key].fits(value):
            raise ValueError(
                f"{where}: parade.{key}={shortened(value)} is not allowed: it must be "
                f"{KEYS[key].name}"
            )
    for key in needed:
        if key not in entry:
            raise ValueError(
                f"{where}: parade.{key} is missing, which method={entry['method']} needs"
            )
