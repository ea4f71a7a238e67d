"""Two-stream (any-subset) networks: content and query tokens in one forward.

Source: AS-ARM (arXiv 2504.20456), section 4 and appendix D. The content stream holds the tokens; a
query predicts the token of one position. One interface serves two kinds of network:

- any Llama, Qwen2 or Qwen3 style causal LM (`models.diffusion.from_causal_lm` adds a mask token): a
  query is one more input, a mask token at the position that it predicts, under the attention
  pattern `draft_blocks` with blocks of one token. No other token attends to it, so the content is
  unchanged; it attends to itself, so attention is defined without a prompt. The class, and every
  export, remains that of transformers.
- XLNet, which has a query stream of its own (`perm_mask`, `target_mapping`).
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from models.attention import masked_inputs
from models.masks import Layout, dense, draft_blocks


def joint_logits(network: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return logits [B, N, V] of every position given the tokens before it in the order.

    They are meaningful at masked positions only. `batch` has samples of
    `data.corruption.orders.two_streams` ([B, 2N] each), and masked, bool [B, N]: where to predict.
    """
    N = batch["input_ids"].shape[1] // 2
    if is_xlnet(network):
        content = Layout(batch["document"], batch["index"], batch["block"])
        seen = dense(draft_blocks, content.map(lambda t: t[:, :N]))[:, 0]
        everywhere = batch["position_ids"][:, N:]
        return xlnet_logits(network, batch["input_ids"][:, :N], seen, everywhere, batch["masked"])
    return network(**masked_inputs(network, batch, draft_blocks), logits_to_keep=N).logits


def xlnet_logits(
    network: PreTrainedModel, ids: Tensor, seen: Tensor, positions: Tensor, asked: Tensor
) -> Tensor:
    """Return logits [B, Q, V] of XLNet's query stream.

    Args:
        network: XLNet.
        ids: Token ids [B, L].
        seen: bool [B, L, L], the positions that each position attends to, in both streams. The
            diagonal is ignored: a query never attends to its own token, a content token always.
        positions: Different positions to predict [B, Q].
        asked: bool [B, Q], the queries whose logits are used.

    Raises:
        ValueError: For a used query without any key, which would attend to all tokens, future ones
            too.
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
    """Return True for transformers' XLNet, which implements two streams itself."""
    return network.config.model_type == "xlnet"


def check_prompt(network: PreTrainedModel, sees: Tensor) -> None:
    """Raise ValueError if a query of XLNet sees no token; bool `sees` says which do."""
    if is_xlnet(network) and not sees.all():
        raise ValueError(
            "XLNet needs a prompt of at least one token: a query without any key attends to all "
            "tokens, future ones included. Give a token, or use a two-stream causal LM"
        )
