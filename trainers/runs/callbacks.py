"""The callback that measures acceptance length at every validation of a run."""

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.callbacks import Callback
from transformers import PreTrainedTokenizerBase

from data.text.prompts import heldout_prompts
from decoding.engine.params import SamplingParams, accepted_counts
from decoding.engine.sampler import Sampler
from models.attention import fused_attention
from trainers.runs.signals import Interrupted, Signals
from trainers.strategies import whole_network


def validation_prompts(a: DictConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each prompt that validations decode; `a` is `acceptance`.

    Of a file or folder of the user these may be fewer than `acceptance.prompts`.
    """
    which = {"subset": a.subset, "split": a.split, "limit": a.limit, "chat": a.chat}
    prompts = heldout_prompts(a.source, tokenizer, a.prompts, a.prompt_length, fewer=True, **which)
    return [p["prompt_ids"] for p in prompts]


class AcceptanceLength(Callback):
    """The callback that decodes held-out prompts with the module's sampler at every validation.

    It logs `acceptance_length_t<temperature>`: tokens emitted per target pass, the bonus or
    correction token included; for a sampler that drafts blocks also `accepted_<i>_t<temperature>`:
    the share of drafts with at least i accepted tokens (`accepted_counts`).
    """

    def __init__(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_new_tokens: int,
        signals: Signals,
    ):
        self.prompts, self.signals = prompts, signals
        self.temperatures, self.max_new_tokens = temperatures, max_new_tokens

    @torch.compiler.set_stance("force_eager")  # every pass has another shape
    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if module.interrupted:
            return
        with fused_attention(module.network):
            there = module.sampler() is not None
        # The first process decides for all: only there is a target that training does not read.
        if not trainer.strategy.broadcast(there):
            return
        with whole_network(module) as here, fused_attention(module.network):
            measures = here and trainer.is_global_zero
            lengths = self._measure(module.sampler()) if measures else None
        # What is logged must be the same on every process: it decides what is kept.
        lengths = trainer.strategy.broadcast(lengths)
        module.interrupted = lengths is None
        for name, length in (lengths or {}).items():
            module.log(name, length, prog_bar=name.startswith("acceptance_length"))
        module.network.train()

    def _measure(self, sampler: Sampler) -> dict[str, float] | None:
        """Return what is logged; None where a signal comes meanwhile."""
        try:
            with self.signals.raising():
                return self._lengths(sampler)
        except Interrupted:
            return None

    def _lengths(self, sampler: Sampler) -> dict[str, float]:
        lengths = {}
        for temperature in self.temperatures:
            drafted = temperature > 0 and "rejection" in sampler.rules
            params = SamplingParams(
                temperature=temperature,
                max_new_tokens=self.max_new_tokens,
                seed=0,
                verify="rejection" if drafted else "coupled",
            )
            results = sampler.generate(self.prompts, params)
            emitted = [n for r in results for n in r.stats.emitted]
            at = f"t{temperature:g}"
            lengths[f"acceptance_length_{at}"] = sum(emitted) / len(emitted)
            positions = getattr(sampler, "block_size", 0)
            counts = [accepted_counts(r.stats.passes, positions) for r in results]
            drafts = max(1, sum(n for n, _ in counts))
            for i, accepted in enumerate(zip(*(c for _, c in counts)), start=1):
                lengths[f"accepted_{i}_{at}"] = sum(accepted) / drafts
        return lengths
