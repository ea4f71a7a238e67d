"""Training of any-subset models (AS-ARM, arXiv 2504.20456)."""

import math

import torch
from torch import Tensor

from data.text.tokenizer import fingerprint, mask_token_id
from decoding.bench.generated_text import entropy, generative_perplexity
from decoding.engine.params import SamplingParams
from decoding.loading import load_tokenizer, sampler_of
from decoding.samplers.asarm import check_draft
from models import causal
from models.attention import fused_attention
from models.twostream import joint_logits
from trainers.base import BaseModule
from trainers.losses.asarm import joint, joint_weight
from trainers.strategies import whole_network


class JointDensity(BaseModule):
    """Training module of two-stream networks: the joint density of all masked tokens (Eq. 7).

    With a judge, validation also fills the held-out rows' masked tokens with the present weights,
    and logs `val_generative_perplexity` (Eq. 21) and `val_entropy` (Eq. 22), means over the texts
    (appendices E.3 and E.4). Where a strategy shards the network, the first process fills its own
    rows only.

    Args:
        draft: the export's decoding method (see `decoding.samplers.asarm`).
        block_size: the export's draft length, in tokens.
        judge: folder or Hub id of a causal LM that rates filled texts; None: they are not filled.
    """

    def __init__(self, *args, draft: str, block_size: int, judge: str | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        check_draft(draft, block_size)
        self.draft, self.block_size = draft, block_size
        self._judge = None  # a tuple, so that it is no submodule
        if judge is not None:
            self._judge = (causal.load(judge).eval(), load_tokenizer(judge))
        self._heldout: list[list[list[int | None]]] = []

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return joint_weight(batch["masked"])

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return joint(joint_logits(self.network, batch), batch["target"], batch["masked"])

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        if self._judge is not None:
            self._heldout.append(templates(batch, mask_token_id(self.tokenizer)))
        return super().evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._judge is None:
            return
        with whole_network(self) as here, fused_attention(self.network):
            sums = self.rated() if here else torch.zeros(3, dtype=torch.float64, device=self.device)
        perplexity, entropy, texts = self._over_ranks(sums).tolist()
        self.log("val_generative_perplexity", perplexity / max(1, texts))
        self.log("val_entropy", entropy / max(1, texts))
        self._heldout.clear()
        self.network.train()

    @torch.compiler.set_stance("force_eager")  # every pass has another shape
    def rated(self) -> Tensor:
        """Fill the rows of this validation, and let the judge read them.

        Returns:
            The sums of perplexities and of entropies in bits, and the number of texts: float64 [3].
        """
        judge, tokenizer = self._judge
        judge.to(self.device)
        sampler = sampler_of(self.export_config(), self.network, self.tokenizer)
        found = []
        for seed, rows in enumerate(filter(None, self._heldout)):
            for result in sampler.generate(rows, SamplingParams(seed=seed)):
                perplexity = generative_perplexity(judge, tokenizer, result.text)
                if math.isfinite(perplexity):
                    ids = tokenizer(result.text)["input_ids"]
                    found.append([perplexity, entropy(ids), 1])
        return torch.tensor([[0, 0, 0], *found], dtype=torch.float64, device=self.device).sum(0)

    def export_config(self) -> dict:
        return {
            "method": "asarm",
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "mask_id": mask_token_id(self.tokenizer),
            "draft": self.draft,
            "block_size": self.block_size,
            "example": "def area(r): <hole:12> return a",
        }


def templates(batch: dict[str, Tensor], mask_id: int) -> list[list[int | None]]:
    """The rows of a batch as prompts with holes: their tokens, None where they are masked.

    Args:
        batch: samples of `data.corruption.any_subset.AnySubset`.
        mask_id: a token that no prompt may have.

    Returns:
        The rows with both masked and given tokens, without padding.
    """
    target, masked = batch["target"], batch["masked"]
    present = batch["document"][:, : target.shape[1]] >= 0
    found = []
    for ids, hidden, there in zip(target, masked, present):
        row = zip(ids[there].tolist(), hidden[there].tolist())
        found.append([None if hole else token for token, hole in row])
    return [row for row in found if None in row and mask_id not in row and len({*row}) > 1]
