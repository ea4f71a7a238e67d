"""New DFlash drafters from their target: copied layers, and a projection that is fitted to them.

A drafter's layers begin as copies of some of the target's. What they look for in a prefix they have
to find in the target's states, so the projection of these begins as the one by which they find
most of it (`fitted_context`), and attention as sharp as it was (`sharpness`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from models.dflash import DFlashAttention, DFlashDraftModel
from models.diffusion import copying
from models.hidden_states import check_layers

RIDGE = 0.01  # of the regression on the states: share of each one's own square
CONTEXTS = ("fused", "layerwise")  # of the layers of a drafter
UNREAD = 2  # last layers of a target that `spread` leaves out: they are about the next token alone


def from_target(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int] | int,
    states: Sequence[int] | int,
    draft_ids: Tensor | None = None,
    text: Sequence[Sequence[int]] | None = None,
    causal: bool = False,
    context: str = "fused",
) -> DFlashDraftModel:
    """A new drafter for a target, with layers that begin as copies of the target's.

    Args:
        source: The target, a Llama, Qwen2 or Qwen3 style causal LM; not changed.
        tokenizer: Its tokenizer. Mask token and block size come into the config in training.
        layers: Decoder layers of the target to begin with, in this order; a number of them for
            those that `models.diffusion.copying` chooses. Norms of queries, where the target has
            none, begin with weights by which attention is as sharp as the target's (`sharpness`).
        states: Target layers whose outputs are read, 0-based, without the last; a number n:
            `spread`.
        draft_ids: [Vd], tokens that the drafter has a head of its own for; None: it borrows the
            target's, with all tokens.
        text: Sequences of token ids like those that will be decoded, by which the projection of the
            states is fitted (`fitted_context`); None: it is random.
        causal: Whether a token of a draft block sees none after it.
        context: 'fused', one projection of the states for all layers, as published; or 'layerwise':
            each layer takes keys and values from what its original in the target takes them from,
            the state of the layer before, so both begin with the very same ones. `states` and
            `text` are not read then, the target's layer 0 is not copied, and no engine runs it.

    Raises:
        ValueError: Layers that the target lacks, a target of another style, a token outside of its
            vocabulary, or text without two tokens in a row.
    """
    theirs = source.config.get_text_config()
    if not hasattr(source, "model") or not hasattr(theirs, "num_key_value_heads"):
        raise ValueError(
            f"cannot make a DFlash drafter for a {theirs.model_type!r} model: "
            "a Llama, Qwen2 or Qwen3 style causal LM is needed"
        )
    depth = theirs.num_hidden_layers
    if context not in CONTEXTS:
        raise ValueError(f"unknown network.context {context!r}. Choose from {list(CONTEXTS)}")
    layerwise = context == "layerwise"
    if isinstance(layers, int):  # of which the first is the target's first, but for layerwise
        layers = copying(source, layers + layerwise)[int(layerwise) :]
    layers = [*layers]
    if layerwise:
        if 0 in layers:
            raise ValueError(
                f"layers={layers} is not allowed with context=layerwise: before layer 0 there is "
                "no state; leave it out"
            )
        states = [i - 1 for i in layers]
    states = spread(states, depth) if isinstance(states, int) else [*states]
    check_layers(source, [*layers, *states])
    if depth - 1 in states:
        raise ValueError(
            f"states={states} is not allowed: the last layer's output, {depth - 1}, is that before "
            "the final norm in some engines and after it in others; read earlier layers"
        )
    if len(tokenizer) > theirs.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the target {theirs.vocab_size}: the "
            "drafter reads the target's embeddings, so it can have no token of its own"
        )
    print(f"the drafter begins with layers {layers} of {depth}, and reads layers {states}")
    heads, attention = theirs.num_attention_heads, source.model.layers[0].self_attn
    special = {"mask_token_id": None, "target_layer_ids": states, "causal": causal}
    if layerwise:
        special |= {"context": context, "norms": hasattr(attention, "q_norm")}
    config = Qwen3Config(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        hidden_act=theirs.hidden_act,
        rms_norm_eps=theirs.rms_norm_eps,
        max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters=dict(theirs.rope_parameters),
        tie_word_embeddings=False,
        num_target_layers=depth,
        attention_bias=layerwise and attention.q_proj.bias is not None,
        dflash_config=special,
        **({} if draft_ids is None else {"draft_vocab_size": len(draft_ids)}),
    )
    config.architectures = [DFlashDraftModel.__name__]
    with torch.random.fork_rng(devices=[]):  # independent of the caller's random state
        torch.manual_seed(0)
        network = DFlashDraftModel(config)
    scales = [1.0] * len(layers) if layerwise else sharpness(source, layers)
    for ours, i, scale in zip(network.layers, layers, scales):
        known = source.model.layers[i].state_dict()
        own = ours.state_dict()
        ours.load_state_dict({**own, **{k: t for k, t in known.items() if k in own}})
        # Norms of keys stay 1, as those of queries can learn the same: vLLM 0.32 on the CPU norms
        # the context's keys of every layer by the first layer's weights (docs/how_to/
        # export_and_serve.md), and so with equal weights is right everywhere.
        if layerwise:
            continue
        queries, keys = ours.self_attn.q_norm.weight, ours.self_attn.k_norm.weight
        with torch.no_grad():
            queries.mul_(keys).mul_(scale)
            keys.fill_(1).requires_grad_(False)
        _fold(ours.input_layernorm, ours.self_attn)
    if text is not None and not layerwise:
        weight, scale = fitted_context(source, layers, states, text)
        with torch.no_grad():
            network.fc.weight.copy_(weight)
            network.hidden_norm.weight.fill_(scale)
    network.norm.load_state_dict(source.model.norm.state_dict())
    if draft_ids is not None:
        ids = draft_ids.sort().values
        network.d2t.copy_(ids - torch.arange(len(ids)))
        with torch.no_grad():
            network.lm_head.weight.copy_(source.get_output_embeddings().weight[ids])
    return network


@torch.no_grad()
def _fold(norm: Qwen3RMSNorm, attention: DFlashAttention) -> None:
    """Move a norm's weights into the projections after it, which the context meets without it."""
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
    """The projection of the target's states from which copied layers read most nearly its own keys.

    A target's layer i takes keys and values K_i x_i and V_i x_i of its normed input x_i; its copy
    in a drafter takes them of one context c for all layers. So c is to be near the c* whose keys
    and values are, in all of the layers together, the nearest to the target's (least squares,
    each matrix at its norm), and the projection is the ridge regression of c* on the states.

    Args:
        source: The target.
        layers: Its L layers that the drafter copies.
        states: Its J layers whose outputs are read.
        text: Sequences of token ids. At the first token of each, where target and drafter have
            nothing else to look at, states are of another kind: it is left out.

    Returns:
        The projection's weight [H, J H], and the root mean square of its contexts.

    Raises:
        ValueError: No sequence has two tokens.
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
    gram, products = 0, 0
    for tokens in text:
        ids = torch.tensor([[*tokens]], device=source.device)
        hidden = source.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        inputs = (hidden[i][0, 1:].float() for i in layers)
        normed = (functional.rms_norm(x, (H,), eps=eps) for x in inputs)
        best = sum(x @ m.T for x, m in zip(normed, to_best))
        read = torch.cat([hidden[i + 1][0, 1:].float() for i in states], -1)
        gram, products = gram + read.T @ read, products + read.T @ best
    gram = gram + RIDGE * gram.diagonal().diag()
    weight = torch.linalg.solve(gram, products).T
    return weight, (read @ weight.T).square().mean().sqrt().item()


def sharpness(source: PreTrainedModel, layers: Sequence[int]) -> list[float]:
    """What the norms of queries are to be multiplied by, so that attention is as sharp as before.

    A drafter norms queries and keys. Those of a target that does not (Llama) are longer: with
    weights of 1, copies of its heads would look almost evenly at everything.

    Args:
        source: The target.
        layers: Some of its decoder layers.

    Returns:
        For each layer the root mean squares of its queries and of its keys, multiplied, over
        random tokens, and at least 1: flat attention would take long to learn, as the weight of a
        norm moves by about the learning rate a step. 1 where the target has such norms.
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
    """Evenly spaced layers of a target of `depth` layers, from the second to the third-last.

    Raises:
        ValueError: The target has fewer layers before its last.

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
