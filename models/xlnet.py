"""XLNet with a key-value cache, in the interface of two-stream causal LMs.

transformers' XLNet computes a whole row at once: it cannot cache the keys of tokens at arbitrary
positions, nor have two queries for one position. This class runs the same network (arXiv
1906.08237, with the weights in transformers' model) with attention from any inputs to any slots of
a cache: score(i, j) = (q_i + u) . k_j + (q_i + v) . r(position of i - position of j).
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, XLNetLMHeadModel


class CachedXLNet:
    """XLNet, callable like a causal LM; an input of id `mask_id` is a query.

    A query is embedded as XLNet's query vector. The attention mask must hide the cache slots of
    queries (XLNet's queries have no keys), and leave every input at least one key. The network must
    be bidirectional (attn_type='bi').
    """

    def __init__(self, network: XLNetLMHeadModel, mask_id: int):
        if network.config.attn_type != "bi":
            raise ValueError(
                f"attn_type={network.config.attn_type!r} is not allowed: it is unidirectional, and "
                "any-subset orders need attn_type='bi'"
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
        """Return an object with `logits` [B, keep, V], of one forward; it always uses the cache.

        Args:
            input_ids: [B, Q].
            attention_mask: bool [B, 1, Q, slots], True where an input may attend to a slot.
            position_ids: [B, Q].
            past_key_values: The cache; its first layer holds positions, the others keys and values.
            logits_to_keep: Indices of the inputs whose logits are computed.
        """
        body = self.network.transformer
        if self._reach < past_key_values.capacity:
            self._encode(past_key_values.capacity)
        # Positions are stored as the cache's first layer, so that they are moved and dropped
        # together with the keys of their slots.
        query_position = position_ids[:, None, :, None]
        key_position = past_key_values.update(query_position, query_position, 0)[0]
        distance = self._reach - (query_position - key_position.transpose(2, 3))
        is_query = (input_ids == self.mask_id)[..., None]
        h = body.mask_emb[0].where(is_query, body.word_embedding(input_ids))
        for i, layer in enumerate(body.layer):
            attention = layer.rel_attn
            k, v = past_key_values.update(_heads(h, attention.k), _heads(h, attention.v), i + 1)
            q = _heads(h, attention.q)
            bias = (q + attention.r_r_bias[:, None]) @ self._distances[i].mT
            bias = bias.gather(-1, distance.expand(-1, bias.shape[1], -1, -1)) * attention.scale
            bias = bias.masked_fill(~attention_mask, float("-inf"))
            content = q + attention.r_w_bias[:, None]
            out = scaled_dot_product_attention(content, k, v, bias, scale=attention.scale)
            h = layer.ff(attention.post_attention(h, out.transpose(1, 2)))
        return SimpleNamespace(logits=self.network.lm_loss(h[:, logits_to_keep]))

    def _encode(self, reach: int) -> None:
        """Compute each layer's keys of the distances reach to 1 - reach: [heads, 2 reach, size]."""
        body = self.network.transformer
        table = body.relative_positional_encoding(reach, reach, device=self.device)[:, 0]
        table = table.to(self.network.dtype)
        self._distances = [_heads(table, layer.rel_attn.r) for layer in body.layer]
        self._reach = reach


def _heads(h: Tensor, weight: Tensor) -> Tensor:
    """Return the projection of h [..., T, width] to heads, [..., heads, T, head size]."""
    return torch.einsum("...th,hnd->...ntd", h, weight)
