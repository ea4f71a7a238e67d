"""Argument types whose limits, far above any real use, stop a typo before it fills the memory."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field

Count = Annotated[int, Field(ge=1, le=10**8)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]  # of a text, a row or an answer
Small = Annotated[int, Field(ge=1, le=4096)]  # tokens or candidates of one cycle
BlockSize = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0, le=1000)]  # of sampling; 0 is greedy
Whole = Annotated[int, Field(ge=0, le=10**8)]

Item = TypeVar("Item")
Split = Literal["train", "heldout"]
Several = Annotated[tuple[Item, ...], Field(min_length=1)]
