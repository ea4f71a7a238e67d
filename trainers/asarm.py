"""Any-subset models: the joint density of all hidden tokens of a row (arXiv 2504.20456)."""

from torch import Tensor

from data.text.tokenizer import fingerprint, mask_token_id
from models.twostream import joint_logits
from trainers.base import BaseModule
from trainers.losses.asarm import joint, joint_weight


class JointDensity(BaseModule):
    """Teacher-forced joint loss of a two-stream network (Eq. 7).

    draft, block_size: how the export decodes, see `decoding.samplers.asarm`.
    """

    def __init__(self, *args, draft: str, block_size: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.draft, self.block_size = draft, block_size

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """See `BaseModule`."""
        return joint_weight(batch["masked"])

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `BaseModule`."""
        return joint(joint_logits(self.network, batch), batch["target"], batch["masked"])

    def export_config(self) -> dict:
        """See `BaseModule`."""
        return {
            "method": "asarm",
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "mask_id": mask_token_id(self.tokenizer),
            "draft": self.draft,
            "block_size": self.block_size,
            "example": "def area(r): <hole:12> return a",
        }
