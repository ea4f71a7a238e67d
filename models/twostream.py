"""Any-subset networks: two streams through one forward (arXiv 2504.20456, section 4, appendix D).

The content stream holds the tokens, the query stream asks about positions. Two networks, one
interface:

- any Llama, Qwen2 or Qwen3 style causal LM (`models.diffusion.from_causal_lm` gives it a mask
  token): a query is one more input, the mask token at the position that it asks about, under the
  attention `draft_blocks` with blocks of one token. Nothing sees a query but itself, so it changes
  no content, and its own key keeps attention defined where there is no prompt. The class stays
  transformers' own and so does every export.
- XLNet, which has a query stream of its own (`perm_mask`, `target_mapping`).
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from models.attention import attention_mask
from models.masks import Layout, dense, draft_blocks


def joint_logits(network: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Logits [B, N, V] of every position given what stands before it in the order: one forward.

    batch: rows of `data.corruption.orders.two_streams` ([B, 2N] each), and masked: bool [B, N], the
    positions that are asked about; what the others' queries say means nothing.
    """
    N = batch["input_ids"].shape[1] // 2
    layout = Layout(batch["document"], batch["index"], batch["block"])
    if is_xlnet(network):
        content = layout.map(lambda t: t[:, :N])
        seen = dense(draft_blocks, content)[:, 0]
        everywhere = batch["position_ids"][:, N:]
        return xlnet_logits(network, batch["input_ids"][:, :N], seen, everywhere, batch["masked"])
    return network(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=attention_mask(draft_blocks, layout, network.config._attn_implementation),
        use_cache=False,
        logits_to_keep=N,
    ).logits


def xlnet_logits(
    network: PreTrainedModel, ids: Tensor, seen: Tensor, positions: Tensor, asked: Tensor
) -> Tensor:
    """XLNet's query stream at different positions [B, Q] of ids [B, L]: [B, Q, V].

    seen: bool [B, L, L], what a position sees, in both streams: a query never sees its own token,
    a content token always does. asked: bool [B, Q], the queries that matter.

    Errors: a query that sees nothing. XLNet's softmax would then spread over all tokens, those to
    come included.
    """
    seen = seen & ~torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
    check_prompt(network, seen.any(-1).gather(1, positions) | ~asked)
    return network(
        input_ids=ids,
        perm_mask=(~seen).to(network.dtype),
        target_mapping=one_hot(positions, ids.shape[1]).to(network.dtype),
        use_mems=False,
    ).logits


def is_xlnet(network: PreTrainedModel) -> bool:
    """True for transformers' XLNet, whose two streams are its own."""
    return network.config.model_type == "xlnet"


def check_prompt(network: PreTrainedModel, sees: Tensor) -> None:
    """Errors: a query of XLNet's that sees nothing. sees: bool, any shape."""
    if is_xlnet(network) and not sees.all():
        raise ValueError(
            "XLNet needs a prompt of at least one token: a query that sees nothing attends to all "
            "tokens, those to come included. Give a token, or use a two-stream causal LM"
        )
