"""Training of any-subset models (AS-ARM, arXiv 2504.20456)."""

from torch import Tensor

from data.arguments import BlockSize
from data.text.tokenizer import fingerprint, mask_token_id
from decoding.samplers.asarm import METHOD
from models.twostream import joint_logits
from trainers.base import BaseModule
from trainers.losses.asarm import joint, joint_weight


class JointDensity(BaseModule):
    """The module of two-stream networks: the joint density of all masked tokens (Eq. 7).

    Args:
        draft: The export's decoding method (see `decoding.samplers.asarm`).
        block_size: The export's draft length, in tokens.
    """

    def __init__(self, *args, draft: str, block_size: BlockSize, **kwargs):
        super().__init__(*args, **kwargs)
        METHOD.check({"draft": draft, "block_size": block_size})
        self.draft, self.block_size = draft, block_size

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return joint_weight(batch["masked"])

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return joint(joint_logits(self.network, batch), batch["target"], batch["masked"])

    def export_config(self) -> dict:
        return {
            "method": "asarm",
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "mask_id": mask_token_id(self.tokenizer),
            "draft": self.draft,
            "block_size": self.block_size,
            "example": "def area(r): <hole:12> return a",
        }
