"""What a run measures of itself beside its losses: acceptance length."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from models.attention import fused_attention
from trainers.strategies import whole_network


class AcceptanceLength(Callback):
    """Measures the real sampler on held-out prompts at every validation.

    Logs tokens emitted per target pass, the bonus or correction token included.
    """

    def __init__(self, prompts: list[list[int]], temperatures: list[float], max_new_tokens: int):
        self.prompts = prompts
        self.params = [
            SamplingParams(temperature=t, max_new_tokens=max_new_tokens, seed=0, ignore_eos=True)
            for t in temperatures
        ]

    @torch.compiler.set_stance("force_eager")  # every pass has another shape
    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Decode the prompts at every temperature."""
        with fused_attention(module.network):
            if module.sampler() is None:
                return
        with whole_network(module) as here, fused_attention(module.network):
            lengths = self._measure(module.sampler()) if here else None
        # What is logged must be the same on every process: it decides what is kept.
        for name, length in trainer.strategy.broadcast(lengths).items():
            module.log(name, length, prog_bar=True)
        module.network.train()

    def _measure(self, sampler: Sampler) -> dict[str, float]:
        lengths = {}
        for params in self.params:
            drafted = params.temperature > 0 and "rejection" in sampler.rules
            verify = "rejection" if drafted else "coupled"
            params = SamplingParams(**{**vars(params), "verify": verify})
            emitted = [n for r in sampler.generate(self.prompts, params) for n in r.stats.emitted]
            lengths[f"acceptance_length_t{params.temperature:g}"] = sum(emitted) / len(emitted)
        return lengths
