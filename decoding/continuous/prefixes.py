"""Networks of images in decoding: loading, and evaluation of a bidirectional one by prefixes.

A bidirectional network (MAR) has no cache, and one row gives the densities given one set of known
tokens. So one pass verifies several tokens of an image by several rows, one for each prefix.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from decoding.continuous.image_state import ImageBatch
from decoding.engine.cache import CountedNetwork
from decoding.method import Count
from models import mar, patches
from models.mar import MarConfig, MarTransformer
from models.patches import PatchTransformer
from models.weights import one_line

CHAIN = {"steps": Count, "noisy_last": bool}  # knobs of a diffusion head's chain

ImageTransformer = PatchTransformer | MarTransformer


class PrefixNetwork(CountedNetwork):
    """A MAR evaluated on prefixes, each a row; `free` adds rows without a class, for guidance."""

    uncounted = 1  # MAR's program counts the token of its last pass as unknown: `guidance_scale`

    def __init__(self, network: MarTransformer, free: bool):
        super().__init__(network)
        self.free = free

    def __call__(
        self, batch: ImageBatch, index: Tensor, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return each token's states given the tokens before it, as `PatchNetwork` does."""
        index = index[:, -keep:].clamp_max(self.network.config.tokens - 1)
        z, free = self.evaluate(batch, index, index[..., None])
        return z.squeeze(2), None if free is None else free.squeeze(2)

    def evaluate(
        self, batch: ImageBatch, lengths: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass over prefixes of lengths [B, m]; return z [B, m, k, H] at index [B, m, k].

        The second result is z without the class, None unless `free`.
        """
        m, most = lengths.shape[1], int(lengths.max())
        known, patches = (x[:, :most].repeat_interleave(m, 0) for x in (batch.order, batch.patches))
        padding = torch.arange(most, device=lengths.device) >= lengths.flatten()[:, None]
        wanted = batch.order.gather(1, index.flatten(1)).view(-1, index.shape[2])
        label = batch.label.repeat_interleave(m)
        inputs = [patches, known, wanted, label, padding]
        if self.free:
            inputs = [torch.cat([x, x]) for x in inputs]
            inputs[3][len(label) :] = self.network.config.classes
        if not padding.any():
            inputs[4] = None
        with self.counted():
            z = self.network(*inputs)
        z = z.unflatten(0, (-1, *lengths.shape))
        return z[0], z[1] if self.free else None

    def keep(self, rows: Tensor, batch: int) -> None:
        """Do nothing: there is no cache."""


def load(path: str, config: dict, dtype: str, device: str) -> ImageTransformer:
    """Load a network of images; the knobs `CHAIN` of an entry change a diffusion head's chain."""
    network = (mar if _is_mar(path) else patches).load(path, dtype).to(device)
    changes = {knob: config[knob] for knob in CHAIN if knob in config}
    if changes:
        if network.head.schedule is None:
            raise ValueError(
                f"{path!r} has a mixture head, whose chain is one step: leave out {[*changes]}"
            )
        network.head.respace(**changes)
    return network


def _is_mar(path: str) -> bool:
    if path.endswith(mar.CHECKPOINTS):
        return True
    with one_line("a model of images", path):
        return PreTrainedConfig.get_config_dict(path)[0].get("model_type") == MarConfig.model_type
