"""DEER's stage II of diffusion-to-AR alignment (arXiv 2512.15176, section 3.1, Eq. 3-4).

Stage I (Eq. 1-2) is masked diffusion of the answers' blocks: `trainers.diffusion`.
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from trainers.losses.deer import refine_weight
from trainers.soft_targets import SoftTargetModule


class Refinement(SoftTargetModule):
    """The module of stage II: fully masked suffixes, weighted towards the prefix (Eq. 3-4).

    With soft=0 the loss is Eq. 4, sum_i w_i * -log q(x_i^0 | prefix). Stage I cannot learn
    distributions, because a token's context holds later tokens, too.

    Args:
        alpha: Base of the weights alpha^(R - i) of a suffix of R tokens, at least 1. 1.01 is stable
            at the published R of up to 96, 1.05 diverges there.
    """

    def __init__(self, *args, alpha: Annotated[float, Field(ge=1)], **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        return refine_weight(batch["masked"], batch["size"], self.alpha)
