"""Recurrent drafters: a small network that goes on from the target's states, token by token.

Sources: ReDrafter (arXiv 2403.09919), Hydra (arXiv 2402.05109). With s_i the states of some target
layers at position i, each normed, and e the target's embedding, the tokens after x_{i+1} are
drafted by

    h_0 = fc(s_i),    h_j = h_{j-1} + mlp(norm(h_{j-1}), norm(e(x_{i+j}))),
    q(x_{i+j+1}) = softmax(head(norm(h_j))).

It attends to nothing, so it has no cache, and a run costs its head and its MLP. What a text repeats
it cannot copy: n-grams do that (`decoding.samplers.redrafter`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel, LlamaRMSNorm

from models.dflash_init import is_llama_like
from models.draft_head import DraftHead
from models.hidden_states import check_layers
from models.sizes import Layers, Size
from models.weights import bounded, check_complete, check_depth, one_line

LAYER_IDS = "target_layer_ids"  # 0-based: i is the output of decoder layer i, before a final norm


class RecurrentMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) of a state and an embedding together."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(2 * hidden, width, bias=False)
        self.up_proj = nn.Linear(2 * hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Redrafter(DraftHead, LlamaPreTrainedModel):
    """The network of a recurrent drafter.

    config is a LlamaConfig, of which it has the sizes `hidden_size` and `intermediate_size` (of the
    MLP), with `draft_vocab_size` (Vd) and `target_layer_ids`.
    """

    config_class = LlamaConfig
    base_model_prefix = ""
    main_input_name = "embedded"

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        H, eps = config.hidden_size, config.rms_norm_eps
        self.target_layer_ids = tuple(getattr(config, LAYER_IDS))
        count = len(self.target_layer_ids)
        self.state_norms = nn.ModuleList(LlamaRMSNorm(H, eps=eps) for _ in range(count))
        self.fc = nn.Linear(count * H, H, bias=False)
        self.hidden_norm, self.embedding_norm = (LlamaRMSNorm(H, eps=eps) for _ in range(2))
        self.mlp = RecurrentMLP(H, config.intermediate_size)
        self.norm = LlamaRMSNorm(H, eps=eps)
        self.lm_head: nn.Linear | None = nn.Linear(H, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    def combined(self, states: Tensor) -> Tensor:
        """Return h_0 [..., H] of the target's states [..., L H]."""
        parts = states.chunk(len(self.state_norms), -1)
        return self.fc(torch.cat([norm(part) for norm, part in zip(self.state_norms, parts)], -1))

    def forward(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Read a token: return norm(h_j), for the head, and h_j, both [..., H].

        `embedded` [..., H] is the token's embedding, `state` [..., H] is h_{j-1}.
        """
        read = torch.cat([self.hidden_norm(state), self.embedding_norm(embedded)], -1)
        state = state + self.mlp(read)
        return self.norm(state), state


def draft_states(
    network: Redrafter, target: PreTrainedModel, batch: dict[str, Tensor], states: Sequence[Tensor]
) -> Tensor:
    """Return last states [B, A, K, H] of all drafted tokens of a training batch.

    `batch` has samples of `data.corruption.draft_blocks.DraftBlocks`, layout `none`; `states` is
    [B, S, H] for each layer that the drafter reads. All blocks read the text's own tokens, K times.
    The target gives embeddings, without gradients.
    """
    start, S, found = batch["start"], states[0].shape[1], []
    root = (start - 2).clamp_min(0)[..., None]  # whose state knows all but the last token before
    read = torch.cat([s.gather(1, root.expand(-1, -1, s.shape[-1])) for s in states], -1)
    state = network.combined(read.to(network.dtype))
    table = target.get_input_embeddings()
    for j in range(batch["target"].shape[2]):
        tokens = batch["input_ids"].gather(1, (start - 1 + j).clamp(0, S - 1))
        with torch.no_grad():
            embedded = table(tokens).to(network.dtype)
        last, state = network(embedded, state)
        found.append(last)
    return torch.stack(found, 2)


def from_target(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: Sequence[Layers] | Layers = 3,
    width: Size = 1024,
    draft_ids: Tensor | None = None,
) -> Redrafter:
    """Return a new drafter for a target, which begins as its head on its last layer's state.

    Args:
        source: The target, a causal LM of transformers; not changed.
        tokenizer: Its tokenizer.
        states: Target layers whose outputs are read, 0-based; a number n: every (depth / n)-th, up
            to the last.
        width: Units of the MLP.
        draft_ids: [Vd], the tokens that it drafts; None: all of the target's.
    """
    theirs = source.config.get_text_config()
    depth, H = theirs.num_hidden_layers, theirs.hidden_size
    if isinstance(states, int):
        if not 1 <= states <= depth:
            raise ValueError(
                f"states={states} is not allowed: the model has {depth} layers; give 1 to {depth}"
            )
        states = [depth * (i + 1) // states - 1 for i in range(states)]
    check_layers(source, states)
    if draft_ids is None:
        draft_ids = torch.arange(theirs.vocab_size)
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=H,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", 1e-6),
        tie_word_embeddings=False,
        draft_vocab_size=len(draft_ids),
        **{LAYER_IDS: [*states]},
    )
    with torch.random.fork_rng(devices=[]):  # independent of the caller's random state
        torch.manual_seed(0)
        network = Redrafter(config)
    network.copy_head(source, draft_ids)
    with torch.no_grad():
        network.fc.weight.zero_()
        network.fc.weight[:, -H:].copy_(torch.eye(H))
        network.mlp.down_proj.weight.zero_()
        if states[-1] == depth - 1 and is_llama_like(source):
            own: Any = source.get_decoder().norm
            network.state_norms[-1].load_state_dict(own.state_dict())
            network.norm.weight.fill_(own.weight.float().square().mean().sqrt())
    return network


def load(path: str, dtype: str | torch.dtype = "auto") -> Redrafter:
    """Return the network of an export, on the CPU; ValueError where it is damaged."""
    with one_line("a recurrent drafter", path):
        check_depth(LlamaConfig.get_config_dict(path)[0])
        config = LlamaConfig.from_pretrained(path)
        ids = getattr(config, LAYER_IDS, None)
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError(f"its config.json names no {LAYER_IDS}, the layers that it reads")
        with bounded(path):
            network, found = Redrafter.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True
            )
        check_complete(network, found)
        network.check_ids()
    return network
