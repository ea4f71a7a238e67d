"""New DFlash drafters from their target: copied layers and a projection fitted to them.

A drafter's layers begin as copies of some of the target's, but read the prefix as the target's
states. So the projection of these states begins as the one that best recovers the keys and values
of the copies (`fitted_context`), and attention as sharp as it was (`sharpness`).
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from models.dflash import CONTEXTS, DFlashDraftModel, DFlashLayer, class_of
from models.diffusion import Copied, copying
from models.hidden_states import check_layers
from models.regression import ridge
from models.sizes import Layers, Rank, Window
from models.windows import sliding_layers
from terminal.progress import track

Config = TypeVar("Config", bound=PreTrainedConfig)
SHARED = (  # keys of a target's config that its drafter has too
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
UNREAD = 2  # last layers of a target that `spread` leaves out: they are about the next token alone


def from_target(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[Layers] | Layers,
    states: Sequence[Layers] | Layers = 5,
    draft_ids: Tensor | None = None,
    text: Sequence[Sequence[int]] | None = None,
    causal: bool = False,
    context: Literal[*CONTEXTS] = "fused",
    tail: Layers | Literal["all"] = 0,
    window: Window | None = None,
    markov_rank: Rank | None = None,
) -> DFlashDraftModel:
    """Return a new drafter for a target, with layers that begin as copies of the target's.

    Args:
        source: The target, a Llama, Qwen2 or Qwen3 style causal LM; not changed.
        tokenizer: Its tokenizer. Training puts mask token and block size into the config.
        layers: Target layers to copy, in this order, or a number of them, which
            `models.diffusion.copying` chooses. Norms of queries that the target lacks begin with
            weights by which attention is as sharp as the target's (`sharpness`).
        states: Target layers whose outputs are read, 0-based, without the last; a number n:
            `spread`.
        draft_ids: [Vd], tokens of the drafter's own head; None: it uses the target's head.
        text: Sequences of token ids like those to decode, which fit the projection of the states
            (`fitted_context`); None: it is random.
        causal: Whether draft blocks are causal.
        context: 'fused', one projection of the states for all layers, as published; 'layerwise':
            each layer begins with exactly the keys and values of its original in the target, from
            the state of the layer before; or 'shared': it keeps them, so what makes them is not
            trained, and decoding reads them in the target's cache. With these two `states` and
            `text` are not read, and no engine runs it.
        tail: The last layers that run once for each drafted token (`models.dflash`), which no
            engine does; with 'all' the drafter is autoregressive.
        window: Last tokens that the layers attend to; None: all.
        markov_rank: Rank of a head that conditions each drafted token on the one before it
            (`models.markov`), as in DSpark; None: no head.
    """
    theirs = source.config.get_text_config()
    check_target(source)
    if len(tokenizer) > theirs.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the target {theirs.vocab_size}: the "
            "drafter reads the target's embeddings, so it can have no token of its own"
        )
    layerwise, began = context != "fused", time.perf_counter()
    layers, states = _chosen(source, layers, states, layerwise)
    copied = Copied(layers, time.perf_counter() - began)
    tail = len(layers) if tail == "all" else tail
    special: dict = {"mask_token_id": None, "target_layer_ids": states, "causal": causal}
    if layerwise:
        normed = hasattr(source.model.layers[0].self_attn, "q_norm")
        special |= {"context": context, "norms": normed}
    if tail > len(layers):
        raise ValueError(
            f"tail={tail} is not allowed: the drafter has {len(layers)} layers, give 0 to "
            f"{len(layers)}"
        )
    for name, given in (("window", window), ("markov_rank", markov_rank)):
        if tail and given is not None:
            raise ValueError(
                f"{name}={given} is not allowed with tail={tail}: leave one of them out"
            )
    if tail:
        special["tail"] = tail
    with torch.random.fork_rng(devices=[]):  # independent of the caller's random state
        torch.manual_seed(0)
        config = _config(source, len(layers), draft_ids, special, window, markov_rank)
        network = class_of(config)(config)
    _copy(source, network, layers)
    network.copied = copied
    if 0 < tail < len(layers):
        nn.init.zeros_(network.token_before.weight)
    if text is not None and not layerwise:
        weight, scale = fitted_context(source, layers, states, text)
        with torch.no_grad():
            network.fc.weight.copy_(weight)
            network.hidden_norm.weight.fill_(scale)
    if draft_ids is not None:
        network.copy_head(source, draft_ids)
    return network


def check_target(source: PreTrainedModel) -> None:
    """Raise ValueError for a target that no DFlash or EAGLE-3 drafter can be made for."""
    if not is_llama_like(source):
        raise ValueError(
            f"cannot make such a drafter for a {source.config.get_text_config().model_type!r} "
            "model: a Llama, Qwen2 or Qwen3 style causal LM is needed (recipe=deer_stage2 makes "
            "drafters for others)"
        )
    _rotary(source)


def is_llama_like(source: PreTrainedModel) -> bool:
    """Return whether a target's layers and config have the parts that a drafter copies."""
    config = source.config.get_text_config()
    layer: Any = next(iter(getattr(getattr(source, "model", None), "layers", ())), None)
    attention: Any = getattr(layer, "self_attn", None)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    if not hasattr(layer, "input_layernorm") or not all(hasattr(attention, p) for p in projections):
        return False
    # More norms than a drafter's layers have, or sinks: copies would not be of the target's kind.
    if hasattr(layer, "pre_feedforward_layernorm") or hasattr(attention, "sinks"):
        return False
    norm = getattr(attention, "q_norm", None)
    each_head = norm is None or norm.weight.shape == (attention.head_dim,)
    return each_head and all(hasattr(config, key) for key in SHARED)


def _rotary(source: PreTrainedModel) -> dict:
    """Return a drafter's `rope_parameters`, with which its frequencies are the target's own.

    Engines obey partial_rotary_factor, and the drafter's class, Qwen3's, does not: it is left out
    where the target rotates whole heads too. Another rotary embedding raises ValueError.
    """
    theirs = source.config.get_text_config()
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    rope = {k: x for k, x in theirs.rope_parameters.items() if k != "partial_rotary_factor"}
    own: Any = getattr(source.model, "rotary_emb", None)
    known = getattr(own, "inv_freq", None)  # None: one for each type of layer
    if known is not None and 2 * len(known) == size:
        most = theirs.max_position_embeddings
        config = Qwen3Config(head_dim=size, rope_parameters=rope, max_position_embeddings=most)
        ours = Qwen3RotaryEmbedding(config)
        own_values = ours.inv_freq.to(known.device)  # of a 'meta' model there are none
        same = known.is_meta or torch.allclose(own_values, known.float(), rtol=1e-2)
        if same and ours.attention_scaling == own.attention_scaling:
            return rope
    given = {k: x for k, x in theirs.rope_parameters.items() if not isinstance(x, (list, dict))}
    raise ValueError(
        f"cannot make such a drafter for this {theirs.model_type!r} model: its rotary embedding "
        f"({given or [*theirs.rope_parameters]}) is not one that the drafter's class and all "
        "engines compute alike"
    )


def _copy(source: PreTrainedModel, network: DFlashDraftModel, layers: Sequence[int]) -> None:
    """Copy some layers of the target, and its final norm, into its drafter."""
    scales = [1.0] * len(layers) if network.layerwise else sharpness(source, layers)
    for ours, i, scale in zip(network.layers, layers, scales):
        own, known = ours.state_dict(), source.model.layers[i].state_dict()
        ours.load_state_dict({**own, **{k: t for k, t in known.items() if k in own}})
        if not network.layerwise:
            _fold(ours, scale)
    network.norm.load_state_dict(source.model.norm.state_dict())


def _chosen(
    source: PreTrainedModel,
    layers: Sequence[int] | int,
    states: Sequence[int] | int,
    layerwise: bool,
) -> tuple[list[int], list[int]]:
    """Return the copied layers and the read layers, which the target must have."""
    depth = source.config.get_text_config().num_hidden_layers
    layers = copying(source, layers) if isinstance(layers, int) else [*layers]
    if layerwise:
        states = [i - 1 for i in layers]  # before layer 0: the embeddings
    states = spread(states, depth) if isinstance(states, int) else [*states]
    check_layers(source, layers)
    check_states(source, states)
    print(f"the drafter begins with layers {layers} of {depth}, and reads layers {states}")
    return layers, states


def check_states(source: PreTrainedModel, states: Sequence[int]) -> None:
    """Raise ValueError for a layer that the target lacks, or its last one."""
    check_layers(source, states)
    last = source.config.get_text_config().num_hidden_layers - 1
    if last in states:
        raise ValueError(
            f"states={[*states]} is not allowed: the last layer's output, {last}, is that before "
            "the final norm in some engines and after it in others; read earlier layers"
        )


def _config(
    source: PreTrainedModel,
    layers: int,
    draft_ids: Tensor | None,
    special: dict,
    window: int | None,
    markov_rank: int | None,
) -> Qwen3Config:
    """Return the config of a drafter with `layers` layers; `special` is its `dflash_config`."""
    biased = source.model.layers[0].self_attn.q_proj.bias is not None
    config = shared_config(
        source,
        Qwen3Config,
        num_hidden_layers=layers,
        num_target_layers=source.config.get_text_config().num_hidden_layers,
        attention_bias="context" in special and biased,
        dflash_config=special,
        **({} if draft_ids is None else {"draft_vocab_size": len(draft_ids)}),
        **({} if window is None else sliding_layers(window, layers)),
        **({} if markov_rank is None else {"markov_rank": markov_rank}),
    )
    config.architectures = [class_of(config).__name__]
    return config


def shared_config(source: PreTrainedModel, kind: type[Config], **others) -> Config:
    """Return a drafter's config of a class, with the keys that it shares with its target."""
    theirs = source.config.get_text_config()
    heads = theirs.num_attention_heads
    return kind(
        **{key: getattr(theirs, key) for key in SHARED},
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        rope_parameters=_rotary(source),
        tie_word_embeddings=False,
        **others,
    )


@torch.no_grad()
def _fold(layer: DFlashLayer, scale: float) -> None:
    """Move norm weights into the projections, because the context skips the norm.

    Norms of keys stay 1 (those of queries can learn the same): vLLM 0.32 on the CPU norms every
    layer's context keys by the first layer's weights (docs/how_to/export_and_serve.md), which is
    right only if all are equal.
    """
    norm, attention = layer.input_layernorm, layer.self_attn
    queries, keys = attention.q_norm.weight, attention.k_norm.weight
    queries.mul_(keys).mul_(scale)
    keys.fill_(1).requires_grad_(False)
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        project.weight.mul_(norm.weight)
    norm.weight.fill_(1)


@torch.no_grad()
def fitted_context(
    source: PreTrainedModel,
    layers: Sequence[int],
    states: Sequence[int],
    text: Sequence[Sequence[int]],
) -> tuple[Tensor, float]:
    """Return the projection of states by which copied layers best recover keys and values.

    A target's layer i takes keys and values K_i x_i and V_i x_i of its normed input x_i; its copy
    takes them of one context c for all layers. Let c* be the context whose keys and values, in all
    layers together, are nearest to the target's (least squares, each matrix at its norm). The
    projection is the ridge regression of c* on the states.

    Args:
        source: The target.
        layers: The L copied layers.
        states: The J layers whose outputs are read.
        text: Sequences of token ids. The first token of each is left out: it can attend only to
            itself, so its states are unlike all others.

    Returns:
        The projection's weight [H, J H], and the root mean square of its contexts.
    """
    text = [tokens for tokens in text if len(tokens) > 1]
    if not text:
        raise ValueError("text has no sequence of two tokens or more to fit the projection to")
    matrices = []  # of each layer, keys' and values' together [2 KV heads D, H]
    for i in layers:
        layer = source.model.layers[i]
        gain = layer.input_layernorm.weight.float()
        pair = [p.weight.float() * gain for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        matrices.append(torch.cat([matrix / matrix.norm() for matrix in pair]))
    H, eps = matrices[0].shape[1], source.config.get_text_config().rms_norm_eps
    inverse = torch.linalg.pinv(torch.cat(matrices)).split([len(m) for m in matrices], 1)
    to_best = [p @ m for p, m in zip(inverse, matrices)]  # c* = sum of to_best[i] x_i

    def read_and_best(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        inputs = (hidden[i][0, 1:].float() for i in layers)
        normed = (functional.rms_norm(x, (H,), eps=eps) for x in inputs)
        read = torch.cat([hidden[i + 1][0, 1:].float() for i in states], -1)
        return read, sum(x @ m.T for x, m in zip(normed, to_best))

    pairs = [read_and_best(hidden) for hidden in states_of(source, text)]
    weight = ridge(pairs)
    return weight, (pairs[-1][0] @ weight.T).square().mean().sqrt().item()


def states_of(source: PreTrainedModel, text: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Yield the hidden states of each text: the embeddings and all layers' outputs, [1, n, H]."""
    for tokens in track(text, "fit of the states' projection", unit="texts"):
        ids = torch.tensor([[*tokens]], device=source.device)
        yield source.model(ids, use_cache=False, output_hidden_states=True).hidden_states


def sharpness(source: PreTrainedModel, layers: Sequence[int]) -> list[float]:
    """Return the query norms' factors that keep attention as sharp as in the target.

    A drafter norms queries and keys. Those of a target without norms (Llama) are longer, so with
    weights of 1 copies of its heads would attend almost evenly. A layer's factor is the product of
    the root mean squares of its queries and keys over random tokens, at least 1: flat attention
    would take long to learn, as a norm's weight moves by about the learning rate a step. It is 1
    where the target has such norms.
    """
    attentions = [source.model.layers[i].self_attn for i in layers]
    if any(hasattr(attention, "q_norm") for attention in attentions):
        return [1.0] * len(layers)
    found: dict[nn.Module, float] = {}

    def keep(module: nn.Linear, given: tuple, output: Tensor) -> None:
        # Without the first token, at which every head looks that has nothing to look at.
        heads = output[:, 1:].float().unflatten(-1, (-1, attentions[0].head_dim))
        found[module] = heads.square().mean(-1).sqrt().mean().item()

    projections = [(a.q_proj, a.k_proj) for a in attentions]
    hooks = [p.register_forward_hook(keep) for pair in projections for p in pair]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(source.config.get_text_config().vocab_size, (4, 96), generator=generator)
    try:
        with torch.inference_mode():
            source(tokens.to(source.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return [max(1.0, found[query] * found[key]) for query, key in projections]


def spread(count: int, depth: int) -> list[int]:
    """Return evenly spaced layers of a target of `depth` layers, from the second to the third-last.

    >>> spread(5, 36), spread(2, 3)
    ([1, 9, 17, 25, 33], [0, 1])
    """
    if not 1 <= count < depth:
        raise ValueError(
            f"states={count} is not allowed: the model has {depth} layers, of which the last is "
            f"not read; give 1 to {depth - 1}"
        )
    first, last = 1, depth - 1 - UNREAD
    if last - first + 1 < count:
        first, last = 0, depth - 2
    if count == 1:
        return [(first + last) // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]
