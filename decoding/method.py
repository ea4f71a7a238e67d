"""Decoding methods, as loading, export, calibration and the model card know them.

Each module of `decoding/samplers` defines one, under the name that a `parade` entry gives as its
`method`. For a sampler that decodes with one causal LM this is all:

    METHOD = Method(FooSampler)

The sampler's keyword arguments are then the keys of the entry and the knobs of a user
(`sampler=[foo=3]`), and their annotations are what both may be: `foo: Annotated[int, Field(ge=1)]`,
`way: Literal["fast", "exact"]`. Arguments of other types than JSON has (tensors, networks) are made
from files of the export (`read_files`), or from other keys (`arguments`).
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipes.values import check_json

MAX_COUNT = 2**16  # of tokens, nodes, steps: more is a mistake, and would take all memory

T = TypeVar("T")
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # of a file beside it
Amount = Annotated[float, Field(ge=0)]
Amounts = Annotated[list[Amount], Field(min_length=1)]
# A value for each of some batch sizes or temperatures; JSON has them as text.
ByNumber = Annotated[dict[Annotated[float, Field(strict=False)], T], Field(min_length=1)]

# Keys of every method's entry.
KEYS = {"version": Count, "method": Text, "target": Text, "tokenizer_fingerprint": Text}
KEYS |= {"target_fingerprint": Text, "example": Text, "command": Text}


@dataclass(frozen=True, eq=False)
class Method:
    """A decoding method.

    Attributes:
        sampler: Its class, which takes target, tokenizer and, where it has one, `drafter`.
        keys: Further keys of the entry, by type, that are no arguments of the sampler.
        knobs: The keys that a user may set; None: all but those that every method has.
        needed: The keys that an entry must have.
        local: The keys that name files of this machine: a user may set them, no export.
        files: The names of the files that may lie beside the weights (`read_files`).
        load_drafter: Loads the drafter's network, (path, dtype=..., **options of
            `models.causal.load`); None: it is a causal LM.
        load_assistant: Loads an export for transformers' `generate(assistant_model=...)`: the
            model, and further arguments; None: transformers has no class for it.
        load: Makes the sampler, (path, entry, target=, dtype=, device=), where the models are no
            language models.
    """

    sampler: type
    keys: Mapping[str, Any] = field(default_factory=dict)
    knobs: tuple[str, ...] | None = None
    needed: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    load_drafter: Callable[..., PreTrainedModel] | None = None
    load_assistant: Callable[[str], tuple[PreTrainedModel, dict]] | None = None
    load: Callable[..., Any] | None = None

    def read_files(self, fetch: Callable[[str], Path], entry: dict) -> dict[str, Any]:
        """Read the files beside the weights that an entry names; `fetch` gives the path of each."""
        return {}

    def arguments(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entry: dict
    ) -> dict[str, Any]:
        """Return the sampler's keyword arguments from an entry, or from the models.

        Raises:
            ValueError: A needed value is missing, or values do not go together.
        """
        return {name: entry[name] for name in self._arguments if name in entry}

    def build(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: PreTrainedModel | None,
        entry: dict,
        **parts,
    ) -> Any:
        """Make the sampler of loaded models; `parts` are what `read_files` has read."""
        self.check(entry)
        models = (target, tokenizer, drafter) if self.drafts else (target, tokenizer)
        return self.sampler(*models, **self.arguments(target, tokenizer, entry), **parts)

    def check(self, entry: dict, where: str = "") -> None:
        """Check the values of an entry, which a stranger may have written.

        Raises:
            ValueError: A value is not allowed; one line of `where`, key, value and limits.
        """
        check_values(self.types, entry, where)

    @cached_property
    def drafts(self) -> bool:
        """Return whether the sampler decodes with a drafter."""
        return "drafter" in inspect.signature(self.sampler).parameters

    @cached_property
    def types(self) -> dict[str, Any]:
        """Return the keys of its entry, with the type of each."""
        return {**KEYS, **self._arguments, **self.keys}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Return the keys that a user may set, with the type of each."""
        names = self.types.keys() - KEYS if self.knobs is None else self.knobs
        return {name: self.types[name] for name in sorted(names)}

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the sampler whose types JSON has."""
        found: dict[str, Any] = {}
        for base in self.sampler.__mro__:  # a subclass passes further arguments on
            if "__init__" not in vars(base):
                continue
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            hints = get_type_hints(vars(base)["__init__"], include_extras=True)
            own = {p.name: hints.get(p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
            found = own | found
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return {name: hint for name, hint in found.items() if _is_json(hint)}


def check_values(types: Mapping[str, Any], entry: Mapping, where: str = "") -> None:
    """Check an entry's values by their types: ValueError of one line for the first bad one."""
    for key, hint in types.items():
        if key in entry:
            check_json(f"{where}{key}", entry[key], hint)


def _is_json(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_json(get_args(hint)[0])
    if origin in (Union, types.UnionType, dict, list):
        return all(map(_is_json, get_args(hint)))
    return origin is Literal or hint in (bool, int, float, str, dict, list, types.NoneType)
