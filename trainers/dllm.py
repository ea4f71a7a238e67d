"""Training of block-wise masked diffusion LMs: all blocks of a row in one forward."""

from torch import Tensor

from data.arguments import BlockSize
from data.text.tokenizer import fingerprint, mask_token_id
from models.blockwise import denoised_logits, predicate_of
from trainers.base import BaseModule
from trainers.losses.dllm import denoise, denoise_weight


class BlockDiffusion(BaseModule):
    """The module of block-wise diffusion LMs: masked-diffusion bound with weight 1/t.

    Args:
        attention: 'block_causal' or 'bidirectional'.
        block_size: Tokens per block. A bidirectional model may be decoded with other block sizes.
    """

    def __init__(self, *args, attention: str, block_size: BlockSize, **kwargs):
        super().__init__(*args, **kwargs)
        predicate_of(attention, block_size)
        self.attention, self.block_size = attention, block_size

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of the noised tokens, [B, S, V]."""
        return denoised_logits(self.network, batch, self.attention, self.block_size)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return denoise_weight(batch["masked"], batch["rate"])

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return denoise(self.logits(batch), batch["target"], batch["masked"], batch["rate"])

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return loss and accuracy, the share of masked tokens whose likeliest token is right."""
        logits, masked = self.logits(batch), batch["masked"]
        loss, weight = denoise(logits, batch["target"], masked, batch["rate"])
        correct = (logits.argmax(-1) == batch["target"]) & masked
        return {
            "loss": ((loss * weight).sum(), weight.sum()),
            "accuracy": (correct.sum(), masked.sum()),
        }

    def export_config(self) -> dict:
        return {
            "method": "denoise",
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "mask_id": mask_token_id(self.tokenizer),
            "attention": self.attention,
            "block_size": self.block_size,
        }
