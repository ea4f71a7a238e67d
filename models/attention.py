"""Attention implementations: mask formats, and two ways of attention for the CPU.

The fused kernel ('sdpa') is the default; decoding on the CPU uses it with grouped query heads
(`grouped`). In CPU training its backward alone takes a fifth of a small network's step.
Attention written as plain operations is faster there, since torch.compile fuses all of it but the
two matrix products, but it needs one float for every head and pair of tokens in every layer.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, finfo, float32, nn, promote_types
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from models import few_queries
from models.masks import Layout, Predicate, dense, flex, limited
from models.windows import FULL, KINDS, windows_of

# Values of transformers' attn_implementation.
WRITTEN_OUT, GROUPED, EAGER = "written_out", "grouped", "eager"
DENSE = ("sdpa", WRITTEN_OUT, GROUPED, EAGER)  # those that take our dense masks
PIECE = 64  # queries: of 1,024 tokens it was the fastest of 64, 128 and 256
ALIBI = ("bloom", "mpt")  # types whose positions are always ALiBi's; Falcon's may be


class Span(NamedTuple):
    """Queries of one row of a batch, and stretches of keys that hold all that they may read."""

    row: int
    queries: slice
    keys: tuple[slice, ...]

    def of(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the span's queries, keys, values and mask, [1, ...] each."""
        row = slice(self.row, self.row + 1)
        key, value = (self._joined([x[row, :, k] for k in self.keys], 2) for x in (key, value))
        mask = self._joined([mask[row, :, self.queries, keys] for keys in self.keys], 3)
        return query[row, :, self.queries], key, value, mask

    @staticmethod
    def _joined(parts: list[Tensor], dim: int) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # a copy only if it must be


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
    """Compute attention as plain operations, in the interface of transformers' functions.

    Args:
        module: The attention layer, for its training mode.
        query: [B, heads, Q, D].
        key, value: [B, key-value heads, K, D].
        attention_mask: bool [B, 1, Q, K], True where a query may attend to a key.
        scaling: Factor of the scores; D^-1/2 by default.
        dropout: Dropout rate of the attention weights.

    Returns:
        softmax(scaling q k^T + mask) v [B, Q, heads, D], and None in place of the weights.
    """
    _check_extras(kwargs)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~attention_mask, finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=promote_types(scores.dtype, float32))
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    spans: Sequence[Span] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Compute attention over groups of heads, in the interface of transformers' functions.

    Query heads that share keys and values become the queries of one head. transformers and the CPU
    kernel's own option repeat keys and values instead: for one token after 350, with nine heads on
    three of keys, that takes 0.41 and 0.37 ms instead of 0.09.

    Args:
        query: [B, G * heads, Q, D]; heads g, ..., g + G - 1 share the keys of head g / G.
        key: [B, heads, K, D].
        value: [B, heads, K, Dv]; Dv is another size than D in latent attention (DeepSeek).
        attention_mask: bool or additive, [B, 1 or G * heads, Q, K].
        scaling: Factor of the scores; D^-1/2 by default.
        spans: Parts that are computed by themselves, so that none of their bits depends on what
            else is in the pass. None: all together, so rounding may depend on the longest row.

    Returns:
        softmax(scaling q k^T + mask) v [B, Q, G * heads, Dv], zeros where a query is in no span,
        and None in place of the weights.
    """
    _check_extras(kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = query, key, value, attention_mask
    if few_queries.attends(*given):
        found = few_queries.attend(*given, scale)
    elif spans is None:
        found = _of_groups(*given, scale, dropout)
    else:
        found = query.new_zeros(*query.shape[:3], value.shape[3])
        for span in spans:
            q, k, v, mask = span.of(*given)
            attend = few_queries.attend if few_queries.attends(q, k, v, mask) else _of_groups
            found[span.row, :, span.queries] = attend(q, k, v, mask, scale)[0]
    return found.transpose(1, 2).contiguous(), None  # some families' layers take a view of it


def _check_extras(given: dict) -> None:
    """Raise ValueError for an argument of attention functions that ours do not follow."""
    for key in ("softcap", "s_aux", "position_bias"):
        if given.get(key) is not None:
            raise ValueError(
                f"this model's attention has {key!r}, which only its own implementation computes: "
                f"load it with attention={EAGER}"
            )


def _of_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """Compute attention [B, G * heads, Q, D] with the fused kernel.

    The kernel computes masked scores too: a wide pass leaves out what none of PIECE neighbouring
    queries reads, which is half of a prompt's scores, more with a window, and most of those of
    draft blocks in training.
    """
    pieces = [slice(start, start + PIECE) for start in range(0, query.shape[2], PIECE)]
    if len(pieces) == 1:
        return _fused(query, key, value, mask, scale, dropout)
    found = []
    for queries in pieces:
        own = mask[:, :, queries]
        keys = _read_by_some(own)
        given = query[:, :, queries], key[:, :, keys], value[:, :, keys], own[..., keys]
        found.append(_fused(*given, scale, dropout))
    return torch.cat(found, 2)


def _read_by_some(mask: Tensor) -> slice | Tensor:
    """Return the keys that some query may read, a slice if there is no gap; one, if none is read.

    `mask` is bool or additive, [B, 1 or heads, Q, K].
    """
    most = mask.flatten(0, 2).amax(0)
    places = (most if mask.dtype == torch.bool else most > -math.inf).nonzero().flatten()
    if not len(places):
        return slice(0, 1)
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if len(places) == last + 1 - first else places


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, dropout: float
) -> Tensor:
    B, heads, Q, D = query.shape
    groups = heads // key.shape[1]
    rows = query.reshape(B, key.shape[1], groups * Q, D)
    if mask.shape[1] == 1:
        mask = torch.cat([mask] * groups, 2)
    else:  # one for each head (Doge)
        mask = mask.reshape(B, key.shape[1], groups * Q, -1)
    found = nn.functional.scaled_dot_product_attention(rows, key, value, mask, dropout, scale=scale)
    return found.reshape(B, heads, Q, value.shape[3])


def whole_mask(*args, **kwargs) -> Tensor:
    """Return transformers' SDPA mask as a tensor, never the None that SDPA itself may use."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **{**kwargs, **skips})


AttentionInterface.register(WRITTEN_OUT, written_out)
AttentionInterface.register(GROUPED, grouped)
for _kind in (WRITTEN_OUT, GROUPED):
    AttentionMaskInterface.register(_kind, whole_mask)


def switch_attention(network: PreTrainedModel, kind: str) -> None:
    """Switch a network from 'sdpa' to `kind`, in place; another implementation is kept."""
    if network._supports_attention_backend and network.config._attn_implementation == "sdpa":
        network.set_attn_implementation(kind)


def check_masks(network: PreTrainedModel) -> None:
    """Raise ValueError for a network that takes no masks of packed texts and draft blocks."""
    config = network.config.get_text_config()
    kind = network.config._attn_implementation
    layers = {*(getattr(config, "layer_types", None) or [])}
    if other := layers - {FULL, *KINDS}:
        raise ValueError(
            f"this {config.model_type!r} model has layers of {sorted(other)}: only "
            f"{', '.join([FULL, *KINDS])} take the masks of packed texts and draft blocks"
        )
    windows_of(config)  # whose sizes must be there
    if getattr(config, "attn_temperature_tuning", False):
        raise ValueError(
            f"this {config.model_type!r} model scales attention by the tokens in its cache instead "
            "of by position (attn_temperature_tuning): it takes no masks of packed texts and draft "
            "blocks"
        )
    # ALiBi's biases are made of a padding mask, or of places in a row instead of positions.
    if getattr(config, "alibi", False) or config.model_type in ALIBI:
        problem = "its positions are ALiBi's"
    elif kind in (*DENSE, "flex_attention") and kind != EAGER:
        return
    elif kind == EAGER and not network._supports_sdpa and network._supports_attention_backend:
        return  # such as gemma2's soft caps and gpt-oss's sinks, which SDPA does not have
    elif network._supports_sdpa:
        raise ValueError(
            f"attention={kind} is not allowed: it would misread the masks of packed texts and "
            "draft blocks: give attention=sdpa, or leave it out"
        )
    else:
        problem = f"transformers has no attention for it but {kind!r}"
    raise ValueError(
        f"a {config.model_type!r} model cannot take the masks of packed texts and draft blocks "
        f"({problem}): give a model of another family, such as llama, qwen3 or gpt2"
    )


def attention_inputs(network: PreTrainedModel, predicate: Predicate, layout: Layout) -> dict:
    """Return the arguments of a forward that give it an attention pattern.

    Args:
        network: A transformers model; its `config._attn_implementation` decides the mask's format.
        predicate: The attention pattern, one of `models.masks`.
        layout: The tokens of the batch, [B, L] each field.

    Returns:
        `attention_mask`: a FlexAttention BlockMask for 'flex_attention', an additive mask for
        'eager', else bool [B, 1, L, L]; a dictionary of them where layers have windows.
    """
    check_masks(network)
    implementation = network.config._attn_implementation
    if implementation == "flex_attention":
        # Its other kernel, for decoding, is chosen for rows below 128 tokens and not always there.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        masks = layer_masks(network, lambda limit: flex(limited(predicate, limit), layout))
        return {"attention_mask": masks, "kernel_options": options}

    def make(limit: Predicate | None) -> Tensor:
        mask = dense(limited(predicate, limit), layout)
        return additive(mask, network.dtype) if implementation == EAGER else mask

    return {"attention_mask": layer_masks(network, make)}


def layer_masks(network: PreTrainedModel, make: Callable[[Predicate | None], Any]) -> Any:
    """Return `attention_mask` of masks that `make` makes: one, or a dictionary by type of layer.

    `make` takes the limit of a layer's window; None: there is none.
    """
    windows = windows_of(network.config)
    return make(None) if windows is None else windows.masks(make)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers to add to scores, as 'eager' and few queries take it."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def masked_inputs(network: PreTrainedModel, batch: dict[str, Tensor], predicate: Predicate) -> dict:
    """Return the arguments of a training forward of packed rows, under an attention pattern.

    `batch` has input_ids and the fields of a layout, [B, L] each; position_ids default to its
    index.
    """
    positions = batch.get("position_ids", batch["index"])
    layout = Layout(batch["document"], batch["index"], batch["block"], positions)
    return {
        "input_ids": batch["input_ids"],
        "position_ids": positions,
        "use_cache": False,
        **attention_inputs(network, predicate, layout),
    }


@contextmanager
def fused_attention(network: PreTrainedModel) -> Iterator[None]:
    """Run a network with 'sdpa' inside the context, because samplers build dense masks.

    A class without it runs with its own.
    """
    kind = network.config._attn_implementation
    if kind not in ("flex_attention", WRITTEN_OUT, GROUPED):
        yield
        return
    network.set_attn_implementation("sdpa" if network._supports_sdpa else EAGER)
    try:
        yield
    finally:
        network.set_attn_implementation(kind)


def cache_argument(network: Callable) -> str:
    """Return the name of a forward's argument for the cache, which transformers 5.24 renamed."""
    names = inspect.signature(getattr(type(network), "forward", network)).parameters
    return "cache" if "cache" in names else "past_key_values"
