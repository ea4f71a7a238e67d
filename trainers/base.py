"""`BaseModule`, the Lightning module that every method's training module extends.

A method supplies unreduced losses and weights. `BaseModule` sums both over the whole global batch,
so the gradient does not depend on how a batch is split over ranks or accumulation steps.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import check_tokenizers, load_tokenizer
from models import causal
from models.placement import place
from trainers.publishing import export_check

# What a module may need of its target in training (`BaseModule.needs_target`).
DISTRIBUTIONS, HIDDEN_STATES = "distributions", "hidden_states"


@dataclass
class Optimization:
    """The settings of AdamW and of its learning-rate schedule.

    Attributes:
        lr: The peak learning rate.
        beside_lr: That of what is trained beside the network, such as a drafter's Markov head,
            which begins at 0 and has further to go; None: `lr`.
        weight_decay: Of matrices; vectors (norms, biases) have none.
        betas: AdamW's two decay rates.
        warmup_steps: Optimizer steps until the peak rate.
        schedule: A name of `transformers.get_scheduler`.
        shorten_warmup: Whether a warm-up longer than a fifth of the run becomes that fifth, so
            that a short run reaches its full rate too.
        ema: Decay of an exponential moving average of the weights, which is then what validations
            measure and what is exported; None: there is none.

    Raises:
        ValueError: A decay outside its range.
    """

    lr: float
    beside_lr: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 100
    schedule: str = "cosine"
    shorten_warmup: bool = False
    ema: float | None = None

    def __post_init__(self):
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(
                f"optimization.betas={list(self.betas)} is not allowed: give two numbers in [0, 1)"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"optimization.ema={self.ema} is not allowed: it must be in (0, 1)")

    def warmup(self, steps: int) -> int:
        """The length of the warm-up in a run.

        Args:
            steps: Optimizer steps of the whole run.

        Returns:
            Optimizer steps of the warm-up.

        Raises:
            ValueError: The warm-up would not end before the run, and may not be shortened.
        """
        if self.shorten_warmup:
            return min(self.warmup_steps, steps // 5)
        if self.warmup_steps >= steps:
            raise ValueError(
                f"optimization.warmup_steps={self.warmup_steps} must be less than "
                f"trainer.max_steps={steps} (optimization.shorten_warmup=true makes it a fifth)"
            )
        return self.warmup_steps


class BaseModule(pl.LightningModule):
    """The Lightning module that trains one network; every method's module extends it.

    A method overrides `weight` and `losses`, and `sampler` and `export_config` where its export is
    decoded by a sampler of its own. A *batch* is the dictionary of tensors that the recipe's
    corruption makes of packed rows; `BaseModule` itself reads `step_weight` (added by
    `WholeSteps`) and, unless `tokens` is overridden, `input_ids` [B, S].

    Args:
        network: The model to train.
        tokenizer: The network's tokenizer; None for models of no language.
        optimization: The settings of the optimizer and its schedule.
        target: The model that a drafter drafts for (None for others); it is not trained or saved.

    Attributes:
        hooked: Whether hooks of each step change the network's forward, so that it may neither be
            compiled nor computed again; a property where it depends on settings.
        exports_weights: False where an export only names the model that it is for, as its target.
        needs_target: What training reads of the target, of DISTRIBUTIONS and HIDDEN_STATES; a
            property where it depends on settings. Empty: the target is loaded only to decode with
            it.
    """

    exports_weights = True
    hooked = False
    needs_target: frozenset[str] = frozenset()

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimization: Optimization,
        target: PreTrainedModel | None = None,
    ):
        super().__init__()
        self.network, self.tokenizer, self.optimization = network, tokenizer, optimization
        # A submodule, so that checkpoints hold it.
        self.average = None
        if optimization.ema is not None:
            self.average = copy.deepcopy(network).requires_grad_(False)
        self.attach_target(target)
        self._sums: dict[str, Tensor] = {}

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that the drafter drafts for; None if there is none, or it is not loaded."""
        return self._target[0]

    def attach_target(self, target: PreTrainedModel | None) -> None:
        """Give the module its target, which is neither trained nor saved.

        Args:
            target: The model to draft for, or None.
        """
        self._target = (target,)  # in a tuple, so that it is no submodule

    @classmethod
    def load_target(cls, name: str, dtype: str, device_map: str | None = None) -> PreTrainedModel:
        """The target that this kind of module drafts for, frozen and in evaluation mode.

        Args:
            name: A folder or Hub id.
            dtype: Of its weights, such as 'bfloat16'.
            device_map: Spreads it over devices (`models.placement.loading_options`); None: it is
                whole, on the network's device.

        Returns:
            The model.

        Raises:
            ValueError: The target cannot be loaded; one line says why.
        """
        return causal.load(name, dtype=dtype, device_map=device_map).eval().requires_grad_(False)

    def check_target(self, name: str, recipe: str) -> None:
        """Check that the module can draft for a target, without reading its weights.

        Args:
            name: The target's folder or Hub id.
            recipe: The recipe that the drafter is of, for the message.

        Raises:
            ValueError: The target has another tokenizer, or cannot be read.
        """
        if self.tokenizer is not None:
            check_tokenizers(load_tokenizer(name), fingerprint(self.tokenizer), name, recipe)

    def on_fit_start(self) -> None:
        """Bring the target to the network's device."""
        self.network.train()  # a loaded one comes in evaluation mode
        if self.target is not None:
            place(self.target, self.device)

    def configure_model(self) -> None:
        """Split the network over the processes, if the strategy does.

        Raises:
            ValueError: Averaged weights under a strategy that shards.
        """
        strategy = self.trainer.strategy
        if hasattr(strategy, "shard"):
            if self.average is not None:
                raise ValueError(
                    f"optimization.ema={self.optimization.ema} needs the whole network in every "
                    "process: give strategy=ddp, or optimization.ema=null"
                )
            strategy.shard(self.network, self.trainer.precision)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The weights that `losses` returns, computed without a forward.

        Args:
            batch: One micro-batch.

        Returns:
            The weight of every loss term, of any shape; 0 where there is nothing to learn.
        """
        raise NotImplementedError

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The unreduced loss and its weights, of one forward.

        Args:
            batch: One micro-batch.

        Returns:
            (loss, weight), of equal shape. The loss of a step is sum(loss * weight) / sum(weight)
            over its whole global batch.
        """
        raise NotImplementedError

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The validation metrics of one batch.

        Args:
            batch: One batch of held-out rows.

        Returns:
            {name: (sum, total)}, scalars that are added up over batches and ranks; the metric
            `val_<name>` is their ratio.
        """
        loss, weight = self.losses(batch)
        return {"loss": ((loss * weight).sum(), weight.sum())}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """The number of tokens of a batch that go into the network, for the rate that is shown."""
        return batch["input_ids"].numel()

    def sampler(self) -> Sampler | None:
        """The lossless sampler of the present weights.

        Returns:
            The sampler, whose acceptance length is measured at validations; None if there is
            nothing to measure.
        """
        return None

    def export_config(self) -> dict:
        """The `parade` entry of an export's config.json: what `decoding.load` must know of it.

        Returns:
            Plain values by name; `method` is a module of `decoding/samplers/`, the others are the
            settings of that sampler.
        """
        return {"method": "plain"}

    def export_files(self) -> dict[str, str | bytes]:
        """The files that an export holds beside weights, config and tokenizer.

        Returns:
            {file name: content}.
        """
        return {}

    def check_vocabulary(self, network: PreTrainedModel) -> None:
        """Check that a network knows every token of the tokenizer.

        Args:
            network: What is about to be exported.

        Raises:
            ValueError: It has fewer tokens than the tokenizer.
        """
        if self.tokenizer is not None and network.config.vocab_size < len(self.tokenizer):
            raise ValueError(
                f"the network knows {network.config.vocab_size} tokens, its tokenizer "
                f"{len(self.tokenizer)}: an export of it could not be used"
            )

    def check_export(self, folder: Path, network: PreTrainedModel) -> None:
        """Check that what was written, loaded as its users do, is the network, bit for bit.

        Args:
            folder: The export.
            network: What was written there, in evaluation mode.

        Raises:
            ValueError: Its weights or outputs differ, or transformers loads another tokenizer.
        """
        if self.tokenizer is None:  # no language model: it is loaded by its own class
            again = type(network).from_pretrained(folder, dtype=network.dtype)
            again = again.to(network.device).eval()
            export_check.check_weights(network, again)
            export_check.check_outputs(network, again)
            return
        export_check.check_tokenizer(self.tokenizer, folder, network.config.model_type)
        again = causal.load(str(folder), dtype=network.dtype).to(network.device).eval()
        export_check.check_logits(network, again)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """The loss of a micro-batch, scaled for the sum over the global batch.

        Args:
            batch: One micro-batch, with `step_weight`, the sum of the weights of its whole step on
                this process.
            index: The micro-batch's number, counted from the start of the run.

        Returns:
            A scalar, so scaled that the gradients of a step add up to that of
            sum(loss * weight) / sum(weight) over the whole global batch.
        """
        loss, weight = self.losses(batch)
        total = (loss * weight).sum()
        step_weight = self._over_ranks(batch["step_weight"]).clamp_min(1e-12)
        accumulate = self.trainer.accumulate_grad_batches
        self._step_loss = total.detach() + (self._step_loss if index % accumulate else 0)
        if (index + 1) % accumulate == 0:
            mean = self._over_ranks(self._step_loss) / step_weight
            self.log("loss", mean, prog_bar=True)
            self._log_step(self.trainer.global_step + 1)
            self.log("lr", self.lr_schedulers().get_last_lr()[0])
        # DDP averages over processes and Lightning over micro-batches: undo both.
        return total * (self.trainer.world_size * accumulate / step_weight)

    def _over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.trainer.world_size == 1:
            return x
        return self.trainer.strategy.reduce(x.clone(), reduce_op="sum")

    def on_train_batch_end(self, outputs, batch: dict[str, Tensor], index: int) -> None:
        """Move the averaged weights, after the last micro-batch of a step."""
        if self.average is not None and (index + 1) % self.trainer.accumulate_grad_batches == 0:
            move = get_ema_multi_avg_fn(self.optimization.ema)
            move([*self.average.parameters()], [*self.network.parameters()], None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the network has the averaged weights, where there are any."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """The network's weights for the averaged ones, and back."""
        if self.average is not None:
            for ours, theirs in zip(self.network.parameters(), self.average.parameters()):
                ours.data, theirs.data = theirs.data, ours.data

    def on_validation_start(self) -> None:
        """Measure the averaged weights, which are those of the export."""
        self._exchange()

    def on_validation_end(self) -> None:
        """Go on with the weights of training."""
        self._exchange()

    @torch.compiler.set_stance("force_eager")  # a few batches are not worth another compilation
    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        """Add up the sums and totals of `evaluate`."""
        for name, pair in self.evaluate(batch).items():
            pair = torch.stack([x.detach().double() for x in pair])
            self._sums[name] = self._sums.get(name, 0) + pair

    def on_validation_epoch_end(self) -> None:
        """Log every metric as one ratio over the whole validation set."""
        for name, pair in self._sums.items():
            pair = self._over_ranks(pair)
            value = (pair[0] / pair[1].clamp_min(1e-12)).float()
            self.log(f"val_{name}", value, prog_bar=name == "loss")
        self._sums.clear()
        self._log_step(self.trainer.global_step)

    def _log_step(self, done: int) -> None:
        """Log the step that loggers use: Lightning's own count slips when a run is resumed."""
        self.log("step", float(done))

    def configure_optimizers(self):
        """The optimizer, AdamW without decay on vectors (norms, biases), and its schedule."""
        o, own = self.optimization, [p for p in self.network.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]
        known = {id(p) for p in own}
        beside = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        if beside:
            rate = o.lr if o.beside_lr is None else o.beside_lr
            groups.append({"params": beside, "weight_decay": o.weight_decay, "lr": rate})
        AdamW = getattr(self.trainer.strategy, "optimizer", torch.optim.AdamW)
        optimizer = AdamW(groups, lr=o.lr, betas=tuple(o.betas))
        steps = self.trainer.max_steps
        scheduler = get_scheduler(o.schedule, optimizer, o.warmup(steps), steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WholeSteps:
    """An iterable over a loader's micro-batches, each with the weight of its whole step.

    It reads one whole step ahead, because `step_weight` (the sum of `BaseModule.weight` over the
    step's micro-batches on this process) must be known before the step's first backward.

    Args:
        loader: Yields micro-batches.
        accumulate: Micro-batches a step on each process.
        steps: Steps of the whole run; a resumed loader has fewer left, but Lightning counts from
            the start.
        module: Whose `weight` is summed.
    """

    def __init__(self, loader: Iterable, accumulate: int, steps: int, module: BaseModule):
        self.loader, self.accumulate, self.steps, self.module = loader, accumulate, steps, module

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = []
        for batch in self.loader:
            step.append(batch)
            if len(step) == self.accumulate:
                # float64, so that the sum does not depend on how the step is split.
                weight = sum(self.module.weight(b).sum(dtype=torch.float64) for b in step)
                yield from ({**b, "step_weight": weight} for b in step)
                step = []
