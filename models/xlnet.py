"""XLNet over a cache: its two streams as inputs of one row, as two-stream causal LMs have them.

transformers' XLNet runs a whole row in place: it has no way to keep the keys of tokens that stand
anywhere, nor to ask about one position twice. This is the same network (arXiv 1906.08237; the
weights stay transformers') with attention between any inputs and any slots of a cache:
score(i, j) = (q_i + u) . k_j + (q_i + v) . r(position of i - position of j).
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, XLNetLMHeadModel


class CachedXLNet:
    """XLNet called like a causal LM. An input `mask_id` is a query: XLNet's own query vector.

    No query has a key: attention_mask must hide the slots that queries are written to, and leave
    each input something to see.
    """

    def __init__(self, network: XLNetLMHeadModel, mask_id: int):
        if network.config.attn_type != "bi":
            raise ValueError(
                f"attn_type={network.config.attn_type!r} lets XLNet look to the left only, but an "
                "order of any subset needs attn_type='bi'"
            )
        self.network, self.mask_id = network, mask_id
        self.config, self.device = network.config, network.device
        self._distances: list[Tensor] = []
        self._reach = 0

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Cache,
        logits_to_keep: Tensor,
        use_cache: bool = True,
    ) -> SimpleNamespace:
        """Logits [B, keep, V] of input_ids [B, Q] under attention_mask, bool [B, 1, Q, slots]."""
        body = self.network.transformer
        if self._reach < past_key_values.capacity:
            self._encode(past_key_values.capacity)
        # Positions are the cache's first layer: they move and go with the keys that stand there.
        at = position_ids[:, None, :, None]
        there = past_key_values.update(at, at, 0)[0]
        distance = self._reach - (at - there.transpose(2, 3))
        asks = (input_ids == self.mask_id)[..., None]
        h = body.mask_emb[0].where(asks, body.word_embedding(input_ids))
        for i, layer in enumerate(body.layer):
            attention = layer.rel_attn
            k, v = past_key_values.update(_heads(h, attention.k), _heads(h, attention.v), i + 1)
            q = _heads(h, attention.q)
            far = (q + attention.r_r_bias[:, None]) @ self._distances[i].mT
            far = far.gather(-1, distance.expand(-1, far.shape[1], -1, -1)) * attention.scale
            near = q + attention.r_w_bias[:, None]
            seen = far.masked_fill(~attention_mask, float("-inf"))
            out = scaled_dot_product_attention(near, k, v, seen, scale=attention.scale)
            h = layer.ff(attention.post_attention(h, out.transpose(1, 2)))
        return SimpleNamespace(logits=self.network.lm_loss(h[:, logits_to_keep]))

    def _encode(self, reach: int) -> None:
        """Keys of the distances reach to 1 - reach, [heads, 2 reach, head size] a layer."""
        body = self.network.transformer
        table = body.relative_positional_encoding(reach, reach, device=self.device)[:, 0]
        table = table.to(self.network.dtype)
        self._distances = [_heads(table, layer.rel_attn.r) for layer in body.layer]
        self._reach = reach


def _heads(h: Tensor, weight: Tensor) -> Tensor:
    """[..., T, width] times [width, heads, head size]: [..., heads, T, head size]."""
    return torch.einsum("...th,hnd->...ntd", h, weight)
