"""Types of networks' arguments, with limits far above what anybody trains."""

from typing import Annotated, TypedDict

from pydantic import Field

Size = Annotated[int, Field(ge=1, le=65536)]
Few = Annotated[int, Field(ge=1, le=4096)]
Layers = Annotated[int, Field(ge=0, le=1000)]  # a number of layers, or the number of one
Window = Annotated[int, Field(ge=1, le=2**20)]  # tokens that a layer attends to
Rank = Annotated[int, Field(ge=1, le=65536)]  # columns of a Markov head's matrices
Positive = Annotated[float, Field(ge=0)]


class TransformerSizes(TypedDict, total=False):
    """Keys of a transformer's configuration."""

    hidden_size: Size
    intermediate_size: Annotated[int, Field(ge=1, le=10**6)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=1000)]
    num_attention_heads: Annotated[int, Field(ge=1, le=1024)]
    num_key_value_heads: Annotated[int, Field(ge=1, le=1024)]
    max_position_embeddings: Annotated[int, Field(ge=1)]


class HeadSizes(TypedDict, total=False):
    """Keys of a head that gives the density of a continuous token."""

    components: Few
    least_std: Positive
    width: Size
    depth: Annotated[int, Field(ge=1, le=1000)]
    steps: Annotated[int, Field(ge=1, le=10**4)]
    least_signal: Annotated[float, Field(ge=0, le=1)]


class ImageSizes(TypedDict, total=False):
    """Keys of a model of images."""

    size: Annotated[int, Field(ge=1, le=8192)]
    channels: Few
    patch: Annotated[int, Field(ge=1, le=1024)]
    classes: Annotated[int, Field(ge=1, le=10**6)]
    backbone: TransformerSizes
