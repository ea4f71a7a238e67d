"""`BaseModule`, the Lightning module that every method's training module extends.

It sums a method's unreduced losses and weights over the whole global batch, so the gradient does
not depend on how a batch is split over ranks or accumulation steps.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import Strategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import check_tokenizers, load_tokenizer
from models import causal
from models.placement import place
from recipes.settings import Optimization
from trainers.publishing import export_check

# Outputs of the target that training may read (`BaseModule.needs_target`).
DISTRIBUTIONS, HIDDEN_STATES = "distributions", "hidden_states"


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
        target: The model that a drafter drafts for, not trained or saved; None for others.

    Attributes:
        exports_weights: False where an export only names its model, as its target.
        interrupted: Whether a signal has cut this step's validation short: nothing of it counts.
    """

    exports_weights = True

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
        self.interrupted = False
        self._sums: dict[str, Tensor] = {}
        self._step_loss: Tensor | int = 0
        self._trained: Tensor | None = None  # the weight of all steps since the start

    @property
    def target(self) -> PreTrainedModel | None:
        """The model that the drafter drafts for; None if there is none, or it is not loaded."""
        return self._target[0]

    @property
    def needs_target(self) -> frozenset[str]:
        """The outputs of the target that training reads (DISTRIBUTIONS, HIDDEN_STATES)."""
        return frozenset()

    def attach_target(self, target: PreTrainedModel | None) -> None:
        """Give the module its target, which is neither trained nor saved."""
        self._target = (target,)  # in a tuple, so that it is no submodule

    @classmethod
    def load_target(cls, name: str, dtype: str, device_map: str | None = None) -> PreTrainedModel:
        """Load the target (a folder or Hub id) of this kind of module, frozen, to evaluate.

        `device_map` spreads it over devices (`models.options.loading_options`).
        """
        return causal.load(name, dtype=dtype, device_map=device_map).eval().requires_grad_(False)

    def check_target(self, name: str, recipe: str) -> None:
        """Raise ValueError if the module cannot draft for a target; its weights are not loaded."""
        if self.tokenizer is not None:
            check_tokenizers(load_tokenizer(name), fingerprint(self.tokenizer), name, recipe)

    def on_fit_start(self) -> None:
        """Move the target to the network's device."""
        self.network.train()  # a loaded one comes in evaluation mode
        if self.target is not None:
            place(self.target, self.device)

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise ValueError if the module cannot be trained with a strategy."""
        if hasattr(strategy, "shard") and self.average is not None:
            raise ValueError(
                f"optimization.ema={self.optimization.ema} needs the whole network in every "
                "process: give strategy=ddp, or optimization.ema=null"
            )

    @property
    def trained(self) -> dict[str, nn.Module]:
        """The networks that are trained, and sharded one by one, by their attributes' names."""
        return {"network": self.network}

    def configure_model(self) -> None:
        """Split what is trained over the processes, if the strategy does."""
        strategy = self.trainer.strategy
        if hasattr(strategy, "shard"):
            strategy.shard(self.trained, self.trainer.precision)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the weights that `losses` returns, without a forward; 0: nothing to learn."""
        raise NotImplementedError

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the unreduced loss of a micro-batch and its weights, of equal shape.

        The loss of a step is sum(loss * weight) / sum(weight) over its whole global batch.
        """
        raise NotImplementedError

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the validation metrics of a batch of held-out rows: {name: (sum, total)}.

        Scalars are added up over batches and ranks; the metric `val_<name>` is their ratio.
        """
        loss, weight = self.losses(batch)
        return {"loss": ((loss * weight).sum(), weight.sum())}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """Count the tokens of a batch that go into the network, for the rate that is shown."""
        return batch["input_ids"].numel()

    def sampler(self) -> Sampler | None:
        """Return the lossless sampler whose acceptance is validated; None: nothing to measure."""
        return None

    def export_config(self) -> dict:
        """Return the `parade` entry of an export's config.json, which `decoding.load` reads.

        Its `method` is a module of `decoding/samplers/`; the rest are that sampler's settings.
        """
        return {"method": "plain"}

    def export_files(self) -> dict[str, str | bytes]:
        """Return the export's further files, {file name: content}."""
        return {}

    def check_vocabulary(self, network: PreTrainedModel) -> None:
        """Raise ValueError unless the network to export has an embedding for every token."""
        if self.tokenizer is not None and network.config.vocab_size < len(self.tokenizer):
            raise ValueError(
                f"the network knows {network.config.vocab_size} tokens, its tokenizer "
                f"{len(self.tokenizer)}: an export of it could not be used"
            )

    def check_export(self, folder: Path, network: PreTrainedModel) -> None:
        """Raise ValueError unless an export, loaded as users do, equals the network bit for bit."""
        if self.tokenizer is None:  # no language model: it is loaded by its own class
            again = type(network).from_pretrained(folder, dtype=network.dtype)
            export_check.check_weights(network, again.to(network.device))
        else:
            export_check.check_tokenizer(self.tokenizer, folder, network.config.model_type)
            again = causal.load(str(folder), dtype=network.dtype).to(network.device)
        export_check.check_outputs(network, again.eval())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the scaled loss of the `index`-th micro-batch of the run.

        The scale makes the gradients of a step add up to that of sum(loss * weight) / sum(weight)
        over the whole global batch; `step_weight` is this process's sum of weights of the step.
        """
        loss, weight = self.losses(batch)
        total = (loss * weight).sum()
        step_weight = self._over_ranks(batch["step_weight"])
        self._trained = step_weight + (0 if self._trained is None else self._trained)
        step_weight = step_weight.clamp_min(1e-12)
        accumulate = self.trainer.accumulate_grad_batches
        self._step_loss = total.detach() + (self._step_loss if index % accumulate else 0)
        if (index + 1) % accumulate == 0:
            mean = self._over_ranks(self._step_loss) / step_weight
            self.log("loss", mean, prog_bar=True)
            # The step that loggers use: Lightning's own count slips when a run is resumed.
            self.log("step", float(self.trainer.global_step + 1))
            self.log("lr", self.lr_schedulers().get_last_lr()[0])
        # DDP averages over processes and Lightning over micro-batches: undo both.
        return total * (self.trainer.world_size * accumulate / step_weight)

    def _over_ranks(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes."""
        if self.trainer.world_size == 1:
            return x
        return self.trainer.strategy.reduce(x.clone(), reduce_op="sum")

    def on_train_batch_end(self, outputs, batch: dict[str, Tensor], index: int) -> None:
        """Update the averaged weights after the last micro-batch of a step."""
        if self.average is not None and (index + 1) % self.trainer.accumulate_grad_batches == 0:
            step = self.trainer.global_step
            # A short run's average would else be the weights that it began with.
            decay = min(self.optimization.ema, (1 + step) / (10 + step))
            move = get_ema_multi_avg_fn(decay)
            move([*self.average.parameters()], [*self.network.parameters()], None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averaged weights, if there are any, into the network within a context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        if self.average is not None:
            for ours, theirs in zip(self.network.parameters(), self.average.parameters()):
                ours.data, theirs.data = theirs.data, ours.data

    def on_validation_start(self) -> None:
        """Swap in the averaged weights, which are exported, to measure them."""
        if self._trained is not None and not self._trained.any():
            raise ValueError(
                f"the {self.trainer.global_step} steps so far have trained nothing: no token of "
                "data.train is a target with these settings"
            )
        self._exchange()

    def on_validation_end(self) -> None:
        """Swap the training weights back in."""
        self._exchange()

    @torch.compiler.set_stance("force_eager")  # a few batches are not worth another compilation
    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        """Add up the sums and totals of `evaluate`."""
        if self.interrupted:
            return
        counts = self.trainer.val_dataloaders.batch_sampler.counts(index)
        for name, pair in self.evaluate(batch).items():
            pair = torch.stack([x.detach().double() for x in pair]) * counts
            self._sums[name] = self._sums.get(name, 0) + pair

    def on_validation_epoch_end(self) -> None:
        """Log every metric as one ratio over the whole validation set."""
        if self.interrupted:
            self._sums.clear()
            return
        for name, pair in self._sums.items():
            pair = self._over_ranks(pair)
            if name == "loss" and not pair[1]:
                raise ValueError(
                    "the validation has measured nothing: no token of data.validation is a target "
                    "with these settings: give more of it, or a larger data.validation_rows"
                )
            value = (pair[0] / pair[1].clamp_min(1e-12)).float()
            self.log(f"val_{name}", value, prog_bar=name == "loss")
        self._sums.clear()
        self.log("step", float(self.trainer.global_step))

    def auxiliary(self) -> list[nn.Parameter]:
        """Return the parameters of auxiliary heads, whose rate is `optimization.aux_lr`."""
        own = {id(p) for p in self.network.parameters()}
        return [p for p in self.parameters() if id(p) not in own]

    def configure_optimizers(self):
        """Build AdamW, without decay on vectors (norms, biases), and its schedule."""
        o, auxiliary = self.optimization, [p for p in self.auxiliary() if p.requires_grad]
        known = {id(p) for p in auxiliary}
        own = [p for p in self.network.parameters() if p.requires_grad and id(p) not in known]
        groups = [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0},
        ]
        if auxiliary:
            rate = o.lr if o.aux_lr is None else o.aux_lr
            groups.append({"params": auxiliary, "weight_decay": o.weight_decay, "lr": rate})
        groups = [group for group in groups if group["params"]]  # DeepSpeed takes no empty one
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
        accumulate: Micro-batches per step on each process.
        steps: Steps of the whole run, also of a resumed one: Lightning counts from the start.
        module: The module that computes the weights.
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
                weight = sum(self._weight(b).sum(dtype=torch.float64) for b in step)
                yield from ({**b, "step_weight": weight} for b in step)
                step = []

    def _weight(self, batch: dict[str, Tensor]) -> Tensor:
        try:
            return self.module.weight(batch)
        except KeyError as error:
            if error.args[0] in batch:
                raise
            name = type(self.module).__name__
            raise ValueError(
                f"{name} reads {error} of a batch, which has {sorted(batch)}: data.corruption "
                "makes what a module reads, so leave it as the recipe has it"
            ) from error
