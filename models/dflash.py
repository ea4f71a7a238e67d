"""DFlash drafters: a few decoder layers that read a prefix as the target's hidden states.

Source: arXiv 2602.06036. The states of some target layers are concatenated and projected (`fc`,
`hidden_norm`) to one context, from which every drafter layer takes keys and values of the prefix.
Queries come only from the draft block, [last committed token, masks], which attends to the context
and, both ways, to itself. Embeddings and head are the target's. Tensors and config keys have the
names that vLLM, SGLang and transformers read, so an export needs no renaming.

A tail (ours) makes the drafts conditional: the last n layers run once for each drafted token,

    x_i = h_i + P e(t_i),   causal within the block,

with h_i the other layers' state at position i, t_i the token before the one that position i drafts,
e its embedding, and P a matrix that begins at 0. Where all layers are the tail, x_i = e(t_i): an
autoregressive drafter that reads its target's states.

With a Markov head (`models.markov`) it is DSpark's drafter (arXiv 2607.05147), without the head
that estimates confidence.
"""

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Cache,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from models import speculators
from models.attention import layer_masks
from models.draft_head import DraftHead
from models.markov import MarkovHead
from models.masks import Layout, dense, limited, numbered_blocks
from models.sizes import Rank
from models.weights import bounded, check_complete, check_depth, one_line
from models.windows import FULL, SLIDING, windows_of

# Of a drafter as an assistant of transformers: tensors with another name, and keys with the same.
ASSISTANT_NAMES = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
ASSISTANT_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings", "block_size", "layer_types",
)  # fmt: skip
# Further keys of the package `speculators`.
SPECULATORS = (
    "aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor",
    "sliding_window_non_causal",
)  # fmt: skip
CONTEXTS = ("fused", "layerwise", "shared")
HEADS = {  # of DSpark's drafters there
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def unserved(special: dict) -> str:
    """Name the recipe's keys of a `dflash_config` that no engine runs; '' where there are none."""
    found = [f"network.{key}={special.get(key)}" for key in ("context", "tail")]
    ours = [special.get("context", "fused") != "fused", bool(special.get("tail"))]
    return " and ".join(key for key, is_ours in zip(found, ours) if is_ours)


class DFlashAttention(nn.Module):
    """Attention of a draft block over the context and itself, with normed queries and keys."""

    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(H, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=bias)
        normed = config.dflash_config.get("norms", True)
        norm = partial(Qwen3RMSNorm, D, eps=config.rms_norm_eps) if normed else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Attend from block [B, Q, H] to context [B, C, H] and block, at `rotary` [B, C + Q, D]."""
        both = torch.cat([context, block], 1) if context.shape[1] else block
        key, value = self.remembered(both, rotary, cache)
        cos, sin = (x[:, None, -block.shape[1] :] for x in rotary)
        query = self.q_norm(self._heads(self.q_proj, block))
        query = query * cos + rotate_half(query) * sin
        attend = AttentionInterface().get_interface(self.config._attn_implementation, None)
        found, _ = attend(self, query, key, value, mask, scaling=self.scaling)
        return self.o_proj(found.flatten(2))

    def remembered(
        self, states: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of states [B, C, H], after those that the cache holds."""
        cos, sin = (x[:, None] for x in rotary)
        key = self.k_norm(self._heads(self.k_proj, states))
        key, value = key * cos + rotate_half(key) * sin, self._heads(self.v_proj, states)
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx)

    def _heads(self, project: nn.Module, states: Tensor) -> Tensor:
        return project(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DFlashLayer(GradientCheckpointingLayer):
    """A decoder layer whose attention also reads the context."""

    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run a block's states [B, Q, H]; see `DFlashAttention`."""
        given = context, position_embeddings, attention_mask, past_key_values
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *given)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DFlashDraftModel(DraftHead, Qwen3PreTrainedModel):
    """The network of a DFlash drafter.

    config is a Qwen3Config with `block_size` (W tokens: the last committed token and masks),
    `num_target_layers` and `dflash_config`: `mask_token_id`, `target_layer_ids` (0-based; states
    are outputs of these layers: `models.hidden_states`), `causal` (whether a block is causal) and
    `sample_from_anchor` (whether the last committed token drafts the first token and each mask the
    one after it, which takes a mask less; default false). Keys of our own are `context`, 'fused' as
    published, 'layerwise': each layer's context is the state of one target layer, or 'shared': so,
    with the keys and values of that layer's successor, the layer's original; and with these two
    `norms` (whether queries and keys are normed); and `tail`, the last layers that run once for
    each drafted token, 0 by default. With `draft_vocab_size` the drafter has its own head for these
    tokens: draft token d is the target's d + d2t[d].
    """

    config_class = Qwen3Config
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _no_split_modules = ("DFlashLayer",)
    # speculators' other table of the same tokens.
    _keys_to_ignore_on_load_unexpected: tuple[str, ...] = ("t2d",)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # its layers ask the registry of attention functions

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.markov_head: MarkovHead | None = None
        H = config.hidden_size
        special = config.dflash_config
        self.causal = bool(special.get("causal"))  # whether a block's token sees none after it
        # Whether each layer has a context of its own, and the target's keys and values of it.
        context = special.get("context", "fused")
        if context not in CONTEXTS:
            raise ValueError(f"it has context={context!r}: only {', '.join(CONTEXTS)} are known")
        self.layerwise, self.shared = context != "fused", context == "shared"
        self.target_layer_ids = tuple(special["target_layer_ids"])
        states, layers = len(self.target_layer_ids), config.num_hidden_layers
        if self.layerwise and states != layers:
            raise ValueError(f"it has {layers} layers with contexts of {states} states")
        self.tail = int(special.get("tail", 0))
        if not 0 <= self.tail <= layers:
            raise ValueError(f"tail={self.tail} is not allowed: the drafter has {layers} layers")
        if self.tail and windows_of(config) is not None:
            raise ValueError(f"window={config.sliding_window} is not allowed with a tail")
        if 0 < self.tail < layers:
            self.token_before = nn.Linear(H, H, bias=False)
        if not self.layerwise:
            self.fc = nn.Linear(states * H, H, bias=False)
            self.hidden_norm = Qwen3RMSNorm(H, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, i) for i in range(layers))
        self.norm = Qwen3RMSNorm(H, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        size = getattr(config, "draft_vocab_size", None)
        self.lm_head = None if size is None else nn.Linear(H, size, bias=False)
        if size is not None:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.post_init()
        if self.shared:
            for layer in self.layers:
                own = layer.self_attn
                for part in (layer.input_layernorm, own.k_proj, own.v_proj, own.k_norm):
                    part.requires_grad_(False)

    @property
    def samples_from_anchor(self) -> bool:
        """Return whether the last committed token drafts the first token of a block."""
        return bool(self.config.dflash_config.get("sample_from_anchor"))

    def drafted(self, hidden: Tensor) -> Tensor:
        """Return the states [..., K, H] that draft tokens, from a block's states [..., W, H]."""
        return hidden if self.samples_from_anchor else hidden[..., 1:, :]

    @property
    def originals(self) -> list[int]:
        """Return the target's layers whose keys and values a drafter with a shared context has."""
        return [state + 1 for state in self.target_layer_ids]

    def contexts(self, states: Tensor) -> Sequence[Tensor]:
        """Return the context [B, C, H] from which each layer takes keys and values of a prefix.

        `states` [B, C, L H] are those of the L target layers.
        """
        if not self.layerwise:
            return [self.hidden_norm(self.fc(states))] * len(self.layers)
        own = states.chunk(len(self.layers), -1)
        return [layer.input_layernorm(state) for layer, state in zip(self.layers, own)]

    @property
    def depth(self) -> int:
        """Return the number of layers that run once for a block: all but the tail."""
        return len(self.layers) - self.tail

    def remember(self, contexts: Sequence[Tensor], positions: Tensor, cache: Cache) -> None:
        """Write the keys and values of contexts at positions [B, C] into a cache."""
        rotary = self.rotary_emb(contexts[0], positions)
        for layer, context in zip(self.layers, contexts):
            layer.self_attn.remembered(context, rotary, cache)

    def parallel(self, block: Tensor, contexts: Sequence[Tensor], *given) -> Tensor:
        """Run the layers before the tail: embeddings [B, Q, H] of a block to its states.

        `contexts` are of all layers; `given` are a mask, positions and a cache as `forward` has
        them.
        """
        return self._run(range(self.depth), block, contexts, *given)

    def sequential(
        self, states: Tensor, before: Tensor, contexts: Sequence[Tensor], *given
    ) -> Tensor:
        """Run the tail: the block's states and the embeddings `before` [B, Q, H] to last states.

        `before` are of the tokens before the drafted ones. See `parallel`.
        """
        if self.depth:
            before = states + self.token_before(before)
        return self._run(range(self.depth, len(self.layers)), before, contexts, *given)

    def _run(
        self,
        layers: range,
        block: Tensor,
        contexts: Sequence[Tensor],
        mask: Tensor | dict[str, Tensor] | None,
        positions: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        rotary, kinds = self.rotary_emb(block, positions), self.config.layer_types
        of = mask if isinstance(mask, dict) else dict.fromkeys(kinds, mask)
        for i in layers:
            block = self.layers[i](
                block,
                context=contexts[i],
                position_embeddings=rotary,
                attention_mask=of[kinds[i]],
                past_key_values=cache,
            )
        return block

    def masks(self, queries: Layout, keys: Layout, width: int) -> Tensor | dict[str, Tensor]:
        """Return the `attention_mask` of blocks of `width` numbered tokens over a prefix and them.

        Where layers have windows it is a dictionary of one for each type of layer.
        """
        pattern = numbered_blocks(width, self.causal)
        return layer_masks(self, lambda limit: dense(limited(pattern, limit), queries, keys))

    def add_speculators(self, target: str, architectures: Sequence[str]) -> None:
        """Add the config keys that speculators reads, and `t2d` to a reduced head.

        `architectures` are those of the target's config.json. A full own head or a context for each
        layer raises ValueError.
        """
        if own := unserved(self.config.dflash_config):
            raise ValueError(
                f"format=speculators is not allowed: the drafter has {own}, which the package does "
                "not know"
            )
        config, chosen = self.config, self.draft_ids
        vocabulary, count = config.vocab_size, config.block_size - (not self.samples_from_anchor)
        if chosen is not None and len(chosen) == vocabulary:
            raise ValueError(
                "format=speculators is not allowed: the drafter has a head of its own for all "
                f"{vocabulary} tokens, and the package takes the target's for such a one"
            )
        kind = "dflash" if self.markov_head is None else "dspark"
        config.update(
            {
                **speculators.entry(kind, config, count, target, architectures),
                # Here 0 is the embeddings' output, so a layer's is one higher.
                "aux_hidden_state_layer_ids": [i + 1 for i in self.target_layer_ids],
                "mask_token_id": config.dflash_config["mask_token_id"],
                "draft_vocab_size": vocabulary if chosen is None else len(chosen),
                "sample_from_anchor": self.samples_from_anchor,
                # Windows or none: by this key vLLM 0.32 makes the blocks of all layers causal, as
                # it does by the package's default, false.
                "sliding_window_non_causal": not self.causal,
            }
        )
        if self.markov_head is not None:
            config.update(HEADS)
        if chosen is not None:
            t2d = torch.zeros(vocabulary, dtype=torch.bool)
            t2d[chosen] = True
            self.register_buffer("t2d", t2d)

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        before_embeds: Tensor | None = None,
        tail_mask: Tensor | None = None,
        **ignored,
    ) -> BaseModelOutputWithPast:
        """Return the block's last hidden states; argument names are transformers' own for DFlash.

        Args:
            noise_embeds: [B, Q, H], the target's embeddings of the last committed token and masks.
            context_hidden_states: [B, C, L H], states of the L target layers at tokens that the
                cache does not hold yet.
            attention_mask: bool [B, 1, Q, K] over all keys (True: attended to), or one for each of
                the config's `layer_types`; or [B, K], 0 where a key is padding; None: all keys.
            position_ids: [B, C + Q], of the context and then of the block; None: from 0 on.
            past_key_values: Holds keys and values of earlier context.
            before_embeds: [B, Q, H], for a tail: the target's embeddings of the tokens before those
                that the block drafts, known in training.
            tail_mask: The tail's own mask, causal within a block.

        Returns:
            `last_hidden_state` [B, Q, H], which a head turns into logits, and the cache.
        """
        if position_ids is None:
            count = context_hidden_states.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(count, device=noise_embeds.device)[None]
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            wide = attention_mask[:, None, None].bool()
            attention_mask = wide.expand(-1, -1, noise_embeds.shape[1], -1)
        given = self.contexts(context_hidden_states), attention_mask, position_ids, past_key_values
        block = self.parallel(noise_embeds, *given)
        if self.tail:
            assert before_embeds is not None
            block = self.sequential(block, before_embeds, given[0], tail_mask, *given[2:])
        return BaseModelOutputWithPast(self.norm(block), past_key_values)


class Qwen3DSparkModel(DFlashDraftModel):
    """The network of a DSpark drafter, under the name by which vLLM knows it.

    config has DFlash's keys, and `markov_rank` and `sample_from_anchor`. A confidence head, which
    engines use to verify fewer drafts under load, is not read.
    """

    _keys_to_ignore_on_load_unexpected = ("t2d", "confidence_head")

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.markov_head = MarkovHead(config.vocab_size, drafted, config.markov_rank)


def class_of(config: Qwen3Config) -> type[DFlashDraftModel]:
    """Return the class of a drafter's config: DSpark's where it has a Markov head."""
    return Qwen3DSparkModel if getattr(config, "markov_rank", None) else DFlashDraftModel


def draft_states(
    network: DFlashDraftModel,
    target: PreTrainedModel,
    batch: dict[str, Tensor],
    states: Sequence[Tensor],
) -> Tensor:
    """Return last hidden states [B, A, K, H] of all drafted tokens of a training batch.

    `batch` has samples of `data.corruption.draft_blocks.DraftBlocks`, layout `dflash` or `dspark`;
    `states` is [B, S, H] for each layer that the drafter reads, at the S clean tokens. The target
    gives embeddings, without gradients.
    """
    B, A, _ = batch["target"].shape
    S = states[0].shape[1]
    W = batch["input_ids"][:, S:].shape[1] // A
    number = torch.arange(-S, A * W, device=batch["block"].device).clamp_min(-1)
    number = number.expand_as(batch["block"])
    layout = Layout(batch["document"], batch["index"], number, batch["position_ids"])
    embed = target.get_input_embeddings()
    with torch.no_grad():
        block = embed(batch["input_ids"][:, S:])
    tail: dict = {}
    if network.tail:  # the text's own tokens from the last committed one on
        at = (batch["start"][..., None] + torch.arange(W, device=block.device) - 1).clamp(0, S - 1)
        with torch.no_grad():
            before = embed(batch["input_ids"].gather(1, at.flatten(1)))
        queries = layout.map(lambda t: t[:, S:])
        tail["before_embeds"] = before.to(network.dtype)
        tail["tail_mask"] = dense(numbered_blocks(W, causal=True), queries, layout)
    hidden = network(
        noise_embeds=block.to(network.dtype),
        context_hidden_states=torch.cat([*states], -1).to(network.dtype),
        attention_mask=network.masks(layout.map(lambda t: t[:, S:]), layout, W),
        position_ids=batch["position_ids"],
        **tail,
    ).last_hidden_state
    return network.drafted(hidden.view(B, A, W, -1))


def load(path: str, dtype: str | torch.dtype = "auto") -> DFlashDraftModel:
    """Return the network of an export in DFlash's format, ours or another's, on the CPU.

    Missing or unexpected tensors (a later version, such as DFlash 2) raise ValueError.
    """
    with one_line("a DFlash drafter", path):
        check_depth(Qwen3Config.get_config_dict(path)[0])
        with bounded(path):
            config = _in_one_layout(Qwen3Config.from_pretrained(path))
            network, found = class_of(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
            )
        if (share := network.config.rope_parameters.get("partial_rotary_factor", 1)) != 1:
            raise ValueError(
                f"it has partial_rotary_factor={share}, which this class does not know and engines "
                "obey: they would draft with another rotation"
            )
        check_complete(network, found)
    return network


def _in_one_layout(config: Qwen3Config) -> Qwen3Config:
    """Return a drafter's config without speculators' keys, which a new drafter has anew.

    Its layers' kinds and windows must be known; where it does not say whether draft blocks are
    causal, those of windowed layers are, as in vLLM.
    """
    if getattr(config, "markov_rank", None):
        _as_dflash(config)
    kinds, special = {*config.layer_types}, getattr(config, "dflash_config", None) or {}
    if unknown := kinds - {FULL, SLIDING}:
        raise ValueError(f"it has layers of {sorted(unknown)}: only {FULL} and {SLIDING} are known")
    windows_of(config)  # whose size must be there
    size = special.get("swa_window_size", config.sliding_window)
    if special.get("use_swa") or size != config.sliding_window:
        raise ValueError(
            "it has a window by dflash_config.use_swa or swa_window_size: only layer_types and "
            "sliding_window are known"
        )
    if SLIDING in kinds and special.get("causal") is None:
        if FULL in kinds:
            raise ValueError(
                f"it has layers with and without windows (layer_types={config.layer_types}) and "
                "does not say whether draft blocks are causal: set dflash_config.causal"
            )
        config.dflash_config = special | {"causal": True}
    whole = getattr(config, "draft_vocab_size", None) == config.vocab_size
    if hasattr(config, "speculators_config") and whole:  # its way to say that there is no head
        config.draft_vocab_size = None
    speculators.forget(config, (*SPECULATORS, *HEADS))
    return config


def _as_dflash(config: Qwen3Config) -> None:
    """Give a DSpark drafter's config DFlash's keys, which others write beside the layers' own."""
    if (kind := getattr(config, "markov_head_type", "vanilla")) != "vanilla":
        raise ValueError(f"it has markov_head_type={kind}: only vanilla is known")
    if not hasattr(config, "dflash_config"):
        config.dflash_config = {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.target_layer_ids,
            "sample_from_anchor": getattr(config, "sample_from_anchor", True),
        }


def pretrained(
    tokenizer: PreTrainedTokenizerBase, path: str, markov_rank: Rank | None = None
) -> DFlashDraftModel:
    """Return a trained drafter, with a new Markov head; `tokenizer` is its target's."""
    network = load(path, "float32")
    if network.config.vocab_size < len(tokenizer):
        raise ValueError(
            f"{path!r} is for a target of {network.config.vocab_size} tokens, and the tokenizer "
            f"has {len(tokenizer)}"
        )
    if markov_rank is None:
        return network
    if network.markov_head is not None:
        warnings.warn(
            f"the drafter in {path} has a Markov head, which is left behind: a new one is trained",
            stacklevel=2,
        )
    network.config.markov_rank = markov_rank
    new = Qwen3DSparkModel(network.config)
    found = new.load_state_dict(network.state_dict(), strict=False)
    assert all(key.startswith("markov_head") for key in found.missing_keys)
    new.name_or_path = network.name_or_path
    return new


def load_assistant(path: str) -> PreTrainedModel:
    """Return a drafter, by its folder or Hub id, as transformers' own `assistant_model` takes it.

    transformers files the network under another family and renames two tensors. A drafter that its
    class cannot run (own head, other attention or block layout) raises ValueError.
    """
    network = load(path)
    if network.lm_head is not None:
        raise ValueError(
            f"{path!r} has a head of its own for {len(network.d2t)} tokens, and transformers' "
            "class borrows the target's: train with network.draft_ids=null"
        )
    config, special = network.config, network.config.dflash_config
    windowed = windows_of(config) is not None  # its class counts a window from another token
    other = unserved(special) or windowed or network.markov_head is not None
    if network.samples_from_anchor or network.causal or other:
        raise ValueError(
            f"{path!r} has layout=dspark, causal blocks, context=layerwise, a tail, a window or a "
            "Markov head, and transformers' class has none of them: train with layout=dflash "
            "network.causal=false network.context=fused network.tail=0 network.window=null "
            "network.markov_rank=null"
        )
    theirs = MuseGlimmerAssistantConfig(
        **{key: getattr(config, key) for key in ASSISTANT_KEYS},
        mask_token_id=special["mask_token_id"],
        target_layer_ids=[*special["target_layer_ids"]],
    )
    assistant = MuseGlimmerAssistantModel(theirs).to(network.dtype)
    tensors = network.state_dict().items()
    assistant.load_state_dict({ASSISTANT_NAMES.get(name, name): x for name, x in tensors})
    return assistant
