"""What every block drafter's module shares: packed blocks, accuracy by position, the sampler."""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.tokenizer import draft_token_ids, fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import sampler_of
from models.attention import attention_mask
from models.diffusion import draft_logits
from models.masks import Layout, causal
from trainers.base import BaseModule, Optimization


class DrafterModule(BaseModule):
    """A diffusion drafter on packed draft blocks; a method supplies the loss of their logits.

    method: the sampler that serves the drafter. block_size: tokens drafted a cycle.
    target_name: the path or Hub id that the export names as its target.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimization: Optimization,
        target: PreTrainedModel | None = None,
        *,
        method: str,
        block_size: int,
        target_name: str,
    ):
        super().__init__(network, tokenizer, optimization, target)
        self.method, self.block_size, self.target_name = method, block_size, target_name

    def block_losses(self, logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(loss, weight) [B, A, K] of the drafted tokens' logits [B, A, K, V]."""
        raise NotImplementedError

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `BaseModule`."""
        return self.block_losses(draft_logits(self.network, batch), batch)

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Loss, and teacher-forced accuracy at each position of a block."""
        logits = draft_logits(self.network, batch)
        loss, weight = self.block_losses(logits, batch)
        right = (logits.argmax(-1) == batch["target"]) & batch["masked"]
        metrics = {"loss": ((loss * weight).sum(), weight.sum())}
        for i in range(min(self.block_size, right.shape[-1])):
            metrics[f"accuracy_{i + 1}"] = (right[..., i].sum(), batch["masked"][..., i].sum())
        return metrics

    @torch.no_grad()
    def teacher_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """The target's logits [B, A, K, Vt] for every drafted token, given the clean tokens."""
        B, A, K = batch["target"].shape
        S = batch["input_ids"].shape[1] - A * (1 + K)
        layout = Layout(batch["document"], batch["position_ids"], batch["block"])
        layout = layout.map(lambda t: t[:, :S])
        kind = self.target.config._attn_implementation
        logits = self.target(
            input_ids=batch["input_ids"][:, :S],
            position_ids=batch["position_ids"][:, :S],
            attention_mask=attention_mask(causal, layout, kind),
            use_cache=False,
        ).logits
        # Token start + i is predicted at the place before it.
        at = batch["start"].unsqueeze(-1) + torch.arange(K, device=logits.device) - 1
        rows = torch.arange(B, device=logits.device)[:, None, None]
        return logits[rows, at.clamp(0, S - 1)]

    def sampler(self) -> Sampler | None:
        """See `BaseModule`."""
        if self.target is None:
            return None
        return sampler_of(self.export_config(), self.target, self.tokenizer, self.network)

    def export_config(self) -> dict:
        """See `BaseModule`."""
        mask_id, sep_id = draft_token_ids(self.tokenizer)
        return {
            "method": self.method,
            "target": self.target_name,
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "attention": "prefix_causal",
            "block_size": self.block_size,
            "mask_id": mask_id,
            "sep_id": sep_id,
        }
