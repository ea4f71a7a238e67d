"""EAGLE-3 drafters: one decoder layer over the target's states and the token after them.

Source: arXiv 2503.01840. With s_i the states of some target layers at position i, concatenated, and
e the target's embedding, slot i reads the token x_{i+1} and drafts x_{i+2}:

    f_i = fc(s_i)
    g_i = layer(e(x_{i+1}), f_i),    q(x_{i+2}) = softmax(head(norm(g_i)))

Further tokens are drafted one after the other: the slot after i has no state of the target yet, so
it reads g_i in place of f_{i+1}. Training does the same, with the text's own tokens (training-time
test), which is what makes drafts after the first ones good. Tensors and config keys have the names
that vLLM, SGLang and speculators read, so an export needs no renaming.

P-EAGLE (arXiv 2602.01469) drafts all tokens in one pass: the slots after i read a mask token, and a
learned state in place of f.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from models import speculators
from models.causal import load as load_target
from models.dflash_init import check_states, check_target, shared_config, spread, states_of
from models.draft_head import DraftHead
from models.hidden_states import check_layers
from models.masks import Layout, causal, dense, numbered_blocks
from models.regression import ridge
from models.sizes import Layers
from models.weights import bounded, check_complete, check_depth, one_line

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # 0: the embeddings, i: layer i - 1's output
# Keys that change what the network computes. Absent they are false, as in vLLM.
CHOICES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PARALLEL = "parallel_drafting"  # ours: engines are told that of a drafter
TABLE = "embed_tokens.weight"
EMBEDDINGS = "own_embeddings"  # ours: engines see it by the tensor


class Eagle3Attention(nn.Module):
    """Attention whose queries, keys and values are of an embedding and a state together."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, 0, False
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(2 * H, config.num_attention_heads * D, bias=bias)
        self.k_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=bias)
        self.v_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=bias)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, cache: Cache
    ) -> Tensor:
        """Attend from x [B, Q, 2 H], at `rotary` [B, Q, D], to the cache and to x."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (r[:, None] for r in rotary)
        query, key = (t * cos + rotate_half(t) * sin for t in (query, key))
        key, value = cache.update(key, value, self.layer_idx)
        attend = AttentionInterface().get_interface(self.config._attn_implementation, None)
        found, _ = attend(self, query, key, value, mask, scaling=self.scaling)
        return self.o_proj(found.flatten(2))


class Eagle3Layer(nn.Module):
    """The decoder layer: `input_layernorm` is of the embedding, `hidden_norm` of the state."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = bool(config.norm_before_residual)
        self.self_attn, self.mlp = Eagle3Attention(config), LlamaMLP(config)
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(H, eps=eps), LlamaRMSNorm(H, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(H, eps=eps)

    def forward(self, embedded: Tensor, state: Tensor, *given) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = residual + self.self_attn(x, *given)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class LlamaForCausalLMEagle3(DraftHead, LlamaPreTrainedModel):
    """The network of an EAGLE-3 drafter, by the name that engines know.

    config is a LlamaConfig with `draft_vocab_size` (Vd), `eagle_aux_hidden_state_layer_ids`, and
    `norm_before_residual` (whether the residual is the normed state). Keys of EAGLE-3.1 are
    `fc_norm` (each state is normed before fc), `norm_before_fc` (all are normed together) and
    `norm_output` (the next slot reads norm(g)). With `parallel_drafting` it is P-EAGLE's, whose
    mask token is `pard_token`. With `own_embeddings` it has a table of its own, which is not
    trained; else it reads the target's.
    """

    config_class = LlamaConfig
    base_model_prefix = ""
    main_input_name = "embedded"
    _no_split_modules = ("Eagle3Layer",)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # its layer asks the registry of attention functions

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        H, ids = config.hidden_size, getattr(config, LAYER_IDS)
        # States are numbered by the layers whose outputs they are (`models.hidden_states`).
        self.target_layer_ids = tuple(i - 1 for i in ids)
        norm = partial(LlamaRMSNorm, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(ids) * H, H, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        if getattr(config, EMBEDDINGS, False):
            self.embed_tokens = nn.Embedding(config.vocab_size, H).requires_grad_(False)
        if config.norm_before_fc:
            self.input_norm = norm(len(ids) * H)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(H) for _ in ids)
        if config.parallel_drafting:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(ids) * H))
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = norm(H)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head: nn.Linear | None = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        # Engines other than vLLM read the same tokens in this form too.
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.post_init()

    def copy_head(self, source: PreTrainedModel, draft_ids: Tensor) -> None:
        super().copy_head(source, draft_ids)
        self.t2d[draft_ids] = True

    def add_speculators(self, target: str, architectures: Sequence[str]) -> None:
        """Add what speculators reads to config and weights; see `DFlashDraftModel`.

        That is the target's table of embeddings too, which the package takes from the weights.
        """
        if self.embed_tokens is None:
            known = load_target(target).get_input_embeddings()
            self.embed_tokens = known.to(self.dtype).requires_grad_(False)
            setattr(self.config, EMBEDDINGS, True)
        config, kind = self.config, "peagle" if self.parallel else "eagle3"
        count = config.parade["block_size"]
        config.update(speculators.entry(kind, config, count, target, architectures))
        if self.parallel:
            config.mask_token_id = config.pard_token

    @property
    def parallel(self) -> bool:
        """Whether all tokens of a draft come from one pass (P-EAGLE)."""
        return self.config.parallel_drafting

    def masks(self, target: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """Return what the slot of a P-EAGLE mask reads: an embedding and a state, [1, 1, H]."""
        token = torch.tensor([[self.config.pard_token]], device=target.device)
        return self.embedded(token, target).detach(), self.combined(self.mask_hidden)

    def embedded(self, tokens: Tensor, target: PreTrainedModel) -> Tensor:
        """Return the embeddings [..., H] of tokens, by the own table or the target's."""
        table = self.embed_tokens or target.get_input_embeddings()
        return table(tokens).to(self.dtype)

    def combined(self, states: Tensor) -> Tensor:
        """Return f [B, Q, H] of the target's states [B, Q, L H]."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(states)

    def forward(
        self, embedded: Tensor, state: Tensor, mask: Tensor, position_ids: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Run the layer: return the last states, norm(g), and what the next slot reads.

        Args:
            embedded: [B, Q, H], embeddings of the tokens that the slots read.
            state: [B, Q, H], `combined` states of the target, or what the slot before gives.
            mask: bool [B, 1, Q, K] over the cache's keys and the new ones.
            position_ids: [B, Q], those of the target's states.
            cache: Holds keys and values of earlier slots.

        Returns:
            Two tensors [B, Q, H]; the second is g, or with `norm_output` norm(g) too.
        """
        rotary = self.rotary_emb(embedded, position_ids)
        g = self.layers[0](embedded, state, rotary, mask, cache)
        last = self.norm(g)
        return last, last if self.config.norm_output else g


def draft_states(
    network: LlamaForCausalLMEagle3,
    target: PreTrainedModel,
    batch: dict[str, Tensor],
    states: Sequence[Tensor],
) -> Tensor:
    """Return last hidden states [B, A, K, H] of all drafted tokens of a training batch.

    `batch` has samples of `data.corruption.draft_blocks.DraftBlocks`, layout `none`; `states` is
    [B, S, H] for each layer that the drafter reads. All slots of a row run once; then the A blocks
    run K - 1 times, each on its own output and the text's next token, or in P-EAGLE once, on K - 1
    masks each. The target gives embeddings, without gradients.
    """
    B, A, K = batch["target"].shape
    S = states[0].shape[1]
    ids, document, position = (
        batch[name][:, :S] for name in ("input_ids", "document", "position_ids")
    )
    index = torch.arange(S, device=ids.device).expand(B, S)
    # The slot before a text's first token has the state of another text.
    slot = document.where(document == document.roll(-1, 1), -1)
    slots = Layout(slot, index, torch.full_like(slot, -1))
    with torch.no_grad():
        embedded = network.embedded(ids, target)
    cache, state = DynamicCache(), network.combined(torch.cat([*states], -1).to(network.dtype))
    after = embedded.roll(-1, 1)
    last, state = network(after, state, dense(causal, slots), position, cache)
    root = (batch["start"] - 2).clamp_min(0)  # the slot that drafts a block's first token

    def at(x: Tensor, where: Tensor) -> Tensor:
        return x.gather(1, where[..., None].expand(-1, -1, x.shape[-1]))

    found, state = [at(last, root)[:, :, None]], at(state, root)
    block = torch.arange(A, device=ids.device)[:, None] * K
    document, position = slot.gather(1, root), position.gather(1, root)
    for i in torch.arange(1, K, device=ids.device).split(K if network.parallel else 1):
        n = len(i)  # slots of each block in this run
        # They see clean slots up to the block's root.
        texts, index = (x.repeat_interleave(n, 1) for x in (document, root + 1))
        queries = Layout(texts, index, (block + i).flatten().expand(B, -1))
        slots = Layout(*(torch.cat([x, y], 1) for x, y in zip(slots[:3], queries[:3])))
        if network.parallel:
            token, state = (x.expand(B, A * n, -1) for x in network.masks(target))
        else:
            token = at(embedded, (root + 1 + i).clamp_max(S - 1))
        mask = dense(numbered_blocks(K, causal=True), queries, slots)
        last, state = network(token, state, mask, (position[..., None] + i).flatten(1), cache)
        found.append(last.unflatten(1, (A, n)))
    return torch.cat(found, 2)


def from_target(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: Sequence[Layers] | Layers = 3,
    draft_ids: Tensor | None = None,
    text: Sequence[Sequence[int]] | None = None,
    layer: Layers | None = None,
    norm_before_residual: bool = True,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    parallel: bool = False,
) -> LlamaForCausalLMEagle3:
    """Return a new drafter for a target.

    Args:
        source: The target, a Llama, Qwen2 or Qwen3 style causal LM; not changed.
        tokenizer: Its tokenizer.
        states: Target layers whose outputs are read, 0-based, without the last; a number n:
            `models.dflash_init.spread`.
        draft_ids: [Vd], the tokens that it drafts; None: all of the target's.
        text: Sequences of token ids like those to decode. `fc` begins as the regression of the
            last layer's input at the next position on the states that are read; None: random.
        layer: The target's layer that its own begins as, on the state's half of its input; None:
            the last. The embedding's half begins random.
        norm_before_residual, fc_norm, norm_before_fc, norm_output: See `LlamaForCausalLMEagle3`.
        parallel: Whether it is P-EAGLE's. Training puts the mask token into the config.
    """
    theirs = source.config.get_text_config()
    check_target(source)
    if parallel and (fc_norm or norm_before_fc or norm_output):
        raise ValueError(
            "network.parallel=true is not allowed with EAGLE-3.1's fc_norm, norm_before_fc and "
            "norm_output, which engines do not run with it"
        )
    depth = theirs.num_hidden_layers
    states = spread(states, depth) if isinstance(states, int) else [*states]
    layer = depth - 1 if layer is None else layer
    check_layers(source, [layer])
    check_states(source, states)
    if draft_ids is None:
        draft_ids = torch.arange(theirs.vocab_size)
    config = shared_config(
        source,
        LlamaConfig,
        num_hidden_layers=1,
        draft_vocab_size=len(draft_ids),
        target_hidden_size=theirs.hidden_size,
        norm_before_residual=norm_before_residual,
        fc_norm=fc_norm,
        norm_before_fc=norm_before_fc,
        norm_output=norm_output,
        parallel_drafting=parallel,
        **({"pard_token": None} if parallel else {}),
        **{LAYER_IDS: [i + 1 for i in states], "num_aux_hidden_states": len(states)},
    )
    with torch.random.fork_rng(devices=[]):  # independent of the caller's random state
        torch.manual_seed(0)
        network = LlamaForCausalLMEagle3(config)
    _copy(source, network, layer)
    network.copy_head(source, draft_ids)
    if text is not None:
        with torch.no_grad():
            network.fc.weight.copy_(fitted_state(source, states, text))
    if parallel:
        nn.init.normal_(network.mask_hidden, std=theirs.initializer_range)
    return network


@torch.no_grad()
def _copy(source: PreTrainedModel, network: LlamaForCausalLMEagle3, layer: int) -> None:
    """Begin the layer as one of the target's, on the state's half of its input."""
    ours: Any = network.layers[0]
    theirs: Any = source.model.layers[layer]
    H = network.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(ours.self_attn, name).weight[:, H:] = getattr(theirs.self_attn, name).weight
    ours.self_attn.o_proj.load_state_dict(theirs.self_attn.o_proj.state_dict())
    ours.mlp.load_state_dict(theirs.mlp.state_dict())
    ours.hidden_norm.load_state_dict(theirs.input_layernorm.state_dict())
    ours.post_attention_layernorm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    network.norm.load_state_dict(source.model.norm.state_dict())


@torch.no_grad()
def fitted_state(
    source: PreTrainedModel, states: Sequence[int], text: Sequence[Sequence[int]]
) -> Tensor:
    """Return `fc`'s weight [H, J H] by which f_i is nearest to the last layer's input at i + 1."""
    text = [tokens for tokens in text if len(tokens) > 1]
    if not text:
        raise ValueError("text has no sequence of two tokens or more to fit the projection to")
    return ridge(
        (torch.cat([h[i + 1][0, :-1].float() for i in states], -1), h[-2][0, 1:].float())
        for h in states_of(source, text)
    )


def load(path: str, dtype: str | torch.dtype = "auto") -> LlamaForCausalLMEagle3:
    """Return the network of an export in EAGLE-3's format, ours or another's, on the CPU.

    Networks of several layers, and tokens that the target lacks, raise ValueError.
    """
    with one_line("an EAGLE-3 drafter", path):
        given = LlamaConfig.get_config_dict(path)[0]
        check_depth(given)
        config = LlamaConfig.from_pretrained(path)
        check_config(config)
        speculators.forget(config, ["mask_token_id"])
        with bounded(path):
            network, found = _loaded(path, config, dtype)
            if TABLE in found["unexpected_keys"]:
                setattr(config, EMBEDDINGS, True)
                network, found = _loaded(path, config, dtype)
        check_complete(network, found)
        network.check_ids()
    return network


def _loaded(
    path: str, config: LlamaConfig, dtype: str | torch.dtype
) -> tuple[LlamaForCausalLMEagle3, dict]:
    return LlamaForCausalLMEagle3.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        key_mapping={r"^midlayer\.": "layers.0."},  # as EAGLE's authors name it
    )


def check_config(config: LlamaConfig) -> None:
    """Raise ValueError for a config whose network this class does not compute."""
    if config.num_hidden_layers != 1:
        raise ValueError(f"it has {config.num_hidden_layers} layers, and one is known")
    if not getattr(config, LAYER_IDS, None):
        raise ValueError(f"its config.json names no {LAYER_IDS}, the target's layers that it reads")
    for key in (*CHOICES, PARALLEL):
        setattr(config, key, bool(getattr(config, key, False)))
    if config.parallel_drafting and type(getattr(config, "pard_token", None)) is not int:
        raise ValueError("its config.json names no pard_token, the mask that it reads")
