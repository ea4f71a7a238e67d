"""Images as continuous tokens: what a user asks for, what comes back, and the network's cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.engine.cache import CountedNetwork, RaggedCache
from decoding.engine.params import Stats
from decoding.engine.randomness import ContinuousRandomness
from models.masks import Layout, causal, dense
from models.patches import PatchTransformer

IMAGE_VERIFY = ("exact", "relaxed")
GUIDANCE = ("constant", "linear")


@dataclass(frozen=True)
class ImageParams:
    """How to sample images.

    temperature: times the noise of every step. guidance: scale of classifier-free guidance, 1 is
    off; guidance_schedule: 'constant', or 'linear' from 1 at the first token to the scale (MAR's).
    seed: None draws one; the seeds of further images are derived from it.

    Of drafts: gamma, tokens drafted a cycle (None takes the export's). prefill: share of the tokens
    that the target makes alone, at the start. verify: 'exact', or 'relaxed', the published rule,
    which is lossy and wants lossy=true; inner_temperature: of that rule, 42 in the authors'
    program, 1 in the paper. align, coupled: see `decoding.continuous.denoising_chains.follow`.
    """

    temperature: float = 1.0
    guidance: float = 1.0
    guidance_schedule: str = "constant"
    seed: int | None = None
    gamma: int | None = None
    prefill: float = 0.0
    verify: str = "exact"
    lossy: bool = False
    inner_temperature: float = 1.0
    align: bool = True
    coupled: int | None = None

    def __post_init__(self):
        allowed = [
            (self.temperature > 0, "temperature", "positive: without noise there is no density"),
            (self.guidance >= 0, "guidance", "0 or a positive number; 1 is off"),
            (self.guidance_schedule in GUIDANCE, "guidance_schedule", f"one of {list(GUIDANCE)}"),
            (self.gamma is None or self.gamma >= 1, "gamma", "at least 1"),
            (0 <= self.prefill <= 1, "prefill", "in [0, 1]"),
            (self.verify in IMAGE_VERIFY, "verify", f"one of {list(IMAGE_VERIFY)}"),
            (self.inner_temperature > 0, "inner_temperature", "a positive number"),
            (self.coupled is None or self.coupled >= 1, "coupled", "at least 1 step"),
        ]
        for ok, name, rule in allowed:
            if not ok:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}"
                )
        if self.verify == "relaxed" and not self.lossy:
            raise ValueError(
                "verify='relaxed' changes the law of the images: give lossy=true to have it "
                "nevertheless, or verify=exact"
            )


@dataclass
class ImageResult:
    """One image. patches [N, D] in raster order; accepted: bool [N], where the draft's stands.

    stats: `emitted` counts tokens a target pass, as everywhere.
    """

    patches: Tensor
    label: int
    accepted: Tensor
    stats: Stats


class PatchRows:
    """The unfinished rows of a batch.

    row: each row's number in the request. label [B]; order [B, capacity], positions in the order of
    generation (the last one again behind the end); patches [B, capacity, D] in that order, the
    first lengths [B] of them committed; accepted: bool [B, capacity].
    """

    TENSORS = ("label", "order", "patches", "accepted", "lengths")

    def __init__(
        self,
        label: Tensor,
        order: Tensor,
        patches: Tensor,
        randomness: ContinuousRandomness,
        row: list[int],
    ):
        B, capacity = patches.shape[:2]
        behind = order[:, -1:].expand(B, capacity - order.shape[1])
        self.row = row
        self.label, self.order, self.patches = label, torch.cat([order, behind], 1), patches
        self.accepted = torch.zeros_like(self.order, dtype=torch.bool)
        self.lengths = torch.zeros_like(label)
        self.randomness = randomness
        self.networks: dict[str, PatchNetwork] = {}

    def append(self, patches: Tensor, counts: Tensor, accepted: Tensor) -> None:
        """Commit the first counts [B] of patches [B, m, D], accepted [B, m] from the draft."""
        slots = self.lengths[:, None] + torch.arange(patches.shape[1], device=counts.device)
        here = torch.arange(len(counts), device=counts.device)[:, None]
        # What lies behind a row's length means nothing: the surplus is written too.
        self.patches[here, slots], self.accepted[here, slots] = patches, accepted
        self.lengths = self.lengths + counts

    def select(self, keep: list[int]) -> None:
        """Drop the finished rows."""
        rows = torch.tensor(keep, device=self.lengths.device)
        for network in self.networks.values():
            network.select(rows, len(self.row))
        self.row = [self.row[b] for b in keep]
        for name in self.TENSORS:
            setattr(self, name, getattr(self, name)[rows])
        self.randomness.select(rows)

    def replace(self, done: list[int], fresh: "PatchRows") -> None:
        """The rows at places `done` make room for others; the caches' masks hide what was there."""
        rows = torch.tensor(done, device=self.lengths.device)
        for b, row in zip(done, fresh.row):
            self.row[b] = row
        for name in self.TENSORS:
            getattr(self, name)[rows] = getattr(fresh, name)
        self.randomness.replace(rows, fresh.randomness)


class PatchNetwork(CountedNetwork):
    """A patch transformer with a ragged cache: inputs at given places of the order -> z.

    free: each row runs a second time without its class, for guidance.
    """

    def __init__(self, network: PatchTransformer, capacity: int, free: bool):
        super().__init__(network)
        self.free = free
        self.cache = RaggedCache(capacity, network.backbone.config.num_hidden_layers)

    def __call__(self, rows: PatchRows, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """z [B, n, H] of the tokens at places index [B, n] of the order; and z of no class."""
        if self.free:
            no_class = torch.full_like(rows.label, self.network.config.classes)
            inputs = torch.cat([self.inputs(rows, index, c) for c in (rows.label, no_class)])
            index = index.repeat(2, 1)
        else:
            inputs = self.inputs(rows, index, rows.label)
        places = torch.arange(int(index.max()) + 1, device=index.device)[None]
        q, k = (Layout(torch.zeros_like(i), i, torch.zeros_like(i) - 1) for i in (index, places))
        self.cache.place(index, places.shape[1])
        with self.counted():
            z = self.network.backbone(
                inputs_embeds=inputs,
                attention_mask=dense(causal, q, k),
                position_ids=index,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        return tuple(z.chunk(2)) if self.free else (z, None)

    def inputs(self, rows: PatchRows, index: Tensor, label: Tensor) -> Tensor:
        """What stands at places index [B, n] of the sequence: [B, n, H]."""
        before = (index - 1).clamp_min(0)
        here = torch.arange(len(index), device=index.device)[:, None]
        following = rows.order.gather(1, index)
        patches = rows.patches[here, before]
        tokens = self.network.embed_patches(patches, rows.order.gather(1, before), following)
        start = self.network.embed_class(label, following)
        return torch.where((index == 0)[..., None], start, tokens)

    def select(self, rows: Tensor, batch: int) -> None:
        """Keep only these rows of the batch."""
        self.cache.select(torch.cat([rows, rows + batch]) if self.free else rows)


def guidance_scale(index: Tensor, tokens: int, params: ImageParams) -> Tensor:
    """The scale at places index of the order: [...]. 'linear' is MAR's: 1 + (s - 1) (i + 1) / N."""
    scale = torch.full(index.shape, params.guidance, device=index.device)
    if params.guidance_schedule == "linear":
        scale = 1 + (params.guidance - 1) * ((index + 1) / tokens).clamp_max(1)
    return scale
