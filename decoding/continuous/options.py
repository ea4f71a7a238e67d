"""Options of commands that draw images, which are checked before torch is imported."""

from dataclasses import dataclass
from typing import Literal

from data.arguments import Temperature, Weight
from models.options import DTYPES
from recipes.options import NEEDED, ModelOptions, option

IMAGE_VERIFY = ("exact", "relaxed")
GUIDANCE = ("constant", "linear")


@dataclass(frozen=True, kw_only=True)
class ImageOptions(ModelOptions):
    """The model of images, how it samples, and how its latents become pixels."""

    model: str = option(NEEDED, "an export of a drafter or of a target; a file of MAR's")
    target: str | None = option(None, "a target instead of the one that the export names")
    sampler: tuple[str, ...] = option((), "other knobs than the export's, as [gamma=8]")
    temperature: Temperature = option(1.0, "times the noise of every step")
    guidance: Weight = option(1.0, "scale of classifier-free guidance; 1 is off")
    guidance_schedule: Literal[*GUIDANCE] = option("constant", "linear: from 1 up to the scale")
    prefill: float | None = option(
        None, "share of the tokens that the target makes alone, at the start; null: the export's"
    )
    vae: str | None = option(None, "of the latents that the models were trained on")
    scale: float = option(1.0, "of those latents; MAR's 0.2325")
    dtype: Literal[*DTYPES] = option("float32", "of the weights in memory")

    @property
    def loading(self) -> dict:
        """Return the arguments of `decoding.load`, without the model."""
        return {"target": self.target, "sampler": self.sampler, **self.placing}
