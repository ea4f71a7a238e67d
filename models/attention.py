"""What a network attends with in training: the form of its masks, and attention written out.

The fused kernel ('sdpa') is the right one, but on the CPU its backward alone is a fifth of a small
network's step. Written out, torch.compile fuses all but the two products. Memory: a float for
every pair of a head's tokens, in every layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, finfo, float32, nn, promote_types
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from models.masks import Layout, Predicate, dense, flex

WRITTEN_OUT = "written_out"  # a value of transformers' attn_implementation


def written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """softmax(scaling q k^T, where the mask allows it) v: [B, heads, Q, D] -> [B, Q, heads, D].

    attention_mask: bool [B, 1, Q, K], True: may attend.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~attention_mask, finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=promote_types(scores.dtype, float32))
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def whole_mask(*args, **kwargs) -> Tensor:
    """The fused kernel's mask where a model makes its own; that kernel needs none in some cases."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **{**kwargs, **skips})


AttentionInterface.register(WRITTEN_OUT, written_out)
AttentionMaskInterface.register(WRITTEN_OUT, whole_mask)


def write_out_attention(network: PreTrainedModel) -> None:
    """In place of the fused kernel; a network with attention of its own keeps it."""
    if network._supports_attention_backend and network.config._attn_implementation == "sdpa":
        network.set_attn_implementation(WRITTEN_OUT)


def attention_mask(predicate: Predicate, layout: Layout, implementation: str):
    """The form of the mask that a network's attention implementation takes.

    implementation: `config._attn_implementation` of a transformers model.
    """
    if implementation == "flex_attention":
        return flex(predicate, layout)
    if implementation not in ("sdpa", WRITTEN_OUT):
        raise ValueError(
            f"attention implementation {implementation!r} cannot take a custom mask here. "
            "Choose from ['sdpa', 'flex_attention']"
        )
    return dense(predicate, layout)


@contextmanager
def fused_attention(network: PreTrainedModel) -> Iterator[None]:
    """As every user of the export runs it, whatever it trains with; decoding gives dense masks."""
    kind = network.config._attn_implementation
    if kind not in ("flex_attention", WRITTEN_OUT):
        yield
        return
    network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        network.set_attn_implementation(kind)
