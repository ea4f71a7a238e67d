"""Networks of images in decoding: loading, and the evaluation of a bidirectional one by prefixes.

A bidirectional network (MAR) has no cache, and one pass of a row gives the densities given one set
of known tokens. So several tokens of an image are verified in one pass by several rows, one for
each prefix.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from decoding.continuous.image_state import ImageBatch, PatchNetwork
from decoding.engine.cache import CountedNetwork
from models import mar, patches
from models.mar import MarConfig, MarTransformer
from models.patches import PatchTransformer
from models.weights import one_line

CHAIN = {"steps": int, "noisy_last": bool}  # knobs of a diffusion head's chain

ImageTransformer = PatchTransformer | MarTransformer


class PrefixNetwork(CountedNetwork):
    """A MAR, evaluated given prefixes of the order of generation, each as a row of one batch.

    Args:
        network: The transformer.
        free: Run each row a second time without its class, for guidance.
    """

    uncounted = 1  # MAR's program counts the token of its last pass as unknown: `guidance_scale`

    def __init__(self, network: MarTransformer, free: bool):
        super().__init__(network)
        self.free = free

    def __call__(
        self, batch: ImageBatch, index: Tensor, keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """The states that the head conditions on, of each token given the tokens before it.

        Args:
            batch: The unfinished requests.
            index: Indices into the order of generation, [B, n].
            keep: Tokens, the last ones, that are wanted; 0 is all.

        Returns:
            z [B, keep, H], and z without the class (None unless `free`).
        """
        index = index[:, -keep:].clamp_max(self.network.config.tokens - 1)
        z, free = self.evaluate(batch, index, index[..., None])
        return z.squeeze(2), None if free is None else free.squeeze(2)

    def evaluate(
        self, batch: ImageBatch, lengths: Tensor, index: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over several prefixes of every image.

        Args:
            batch: The unfinished requests.
            lengths: Tokens of each prefix, [B, m].
            index: Indices into the order of generation of the tokens whose states are wanted given
                the prefix, [B, m, k].

        Returns:
            z [B, m, k, H], and z without the class (None unless `free`).
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

    def select(self, rows: Tensor, batch: int) -> None:
        """Keep only these rows of the batch: there is no cache."""


def in_decoding(
    network: ImageTransformer, capacity: int, free: bool
) -> PatchNetwork | PrefixNetwork:
    """A network of images with what decoding needs.

    Args:
        network: The transformer.
        capacity: Slots of a cache, where there is one.
        free: Run each row a second time without its class, for guidance.
    """
    if isinstance(network, MarTransformer):
        return PrefixNetwork(network, free)
    return PatchNetwork(network, capacity, free)


def load(path: str, config: dict, dtype: str, device: str) -> ImageTransformer:
    """A network of images, a MAR or a patch transformer.

    Args:
        path: A folder, Hub id, or file of `models.mar.CHECKPOINTS`.
        config: The `parade` entry; its knobs `CHAIN` change the chain of a diffusion head.
        dtype: Of the weights.
        device: Where to run.

    Raises:
        ValueError: It cannot be loaded, or has no chain that a knob changes.
    """
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
