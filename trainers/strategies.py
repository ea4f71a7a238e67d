"""Strategies of sharded training (FSDP2, DeepSpeed), and gathering the whole network again."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from models.packed import multiplies_bfloat16
from recipes.compose import build


def precision_of(name: str, accelerator: str) -> str:
    """Return Lightning's name of a precision; 'auto' is bfloat16 if the device multiplies in it.

    A CPU that emulates bfloat16 is several times slower than in float32.
    """
    if name != "auto":
        return name
    if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = multiplies_bfloat16()
    return "bf16-mixed" if native else "32-true"


class FSDP2(ModelParallelStrategy):
    """FSDP2: weights, gradients and optimizer states sharded over all processes (`fully_shard`).

    Master weights are float32; with trainer.precision=bf16-mixed each layer is gathered and
    computed in bfloat16. `offload` keeps shards and optimizer (states and step) on the CPU.
    """

    def __init__(self, offload: bool = False):
        # Shards in CPU memory are reduced (norms) and gathered (checkpoints) over gloo.
        backend = "cpu:gloo,cuda:nccl" if offload else None
        super().__init__(tensor_parallel_size=1, process_group_backend=backend)
        self.offload = offload
        self.skeleton: PreTrainedModel | None = None

    def setup_environment(self) -> None:
        """Set up the process group, with all processes in one data-parallel group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Shard a network in place: one unit per decoder layer, and one for all other weights."""
        if self.skeleton is not None:  # Lightning calls `configure_model` at every entry point
            return
        self.skeleton = without_weights(network)
        half = torch.bfloat16 if precision == "bf16-mixed" else None
        options = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        units = {*(network._no_split_modules or [])}
        for module in [m for m in network.modules() if type(m).__name__ in units]:
            fully_shard(module, **options)
        # Tied embeddings and head are one parameter, so they must be in one unit, the last one.
        fully_shard(network, **options)

    def model_to_device(self) -> None:
        """Move the module to the device, unless its shards are offloaded to the CPU."""
        if not self.offload:
            super().model_to_device()

    def gathered(self, network: PreTrainedModel) -> dict[str, Tensor]:
        """Gather the weights, by name, on the first process; a collective call."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(network, options=options)


class DeepSpeed(DeepSpeedStrategy):
    """DeepSpeed ZeRO: stage 1 shards optimizer states, 2 gradients too, 3 weights too.

    With trainer.precision=bf16-mixed the network runs in bfloat16 with float32 master weights.
    `offload` keeps what is sharded in CPU memory.
    """

    def __init__(self, stage: int, offload: bool = False):
        super().__init__(
            stage=stage, offload_optimizer=offload, offload_parameters=offload and stage == 3
        )
        self.skeleton: PreTrainedModel | None = None

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]:
        """The AdamW class for the device of the optimizer states."""
        if not self.config["zero_optimization"].get("offload_optimizer"):
            return torch.optim.AdamW
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Record the network's structure; DeepSpeed shards it itself."""
        self.skeleton = self.skeleton or without_weights(network)

    def gathered(self, network: PreTrainedModel) -> dict[str, Tensor]:
        """Gather the weights, by name, on the first process; a collective call."""
        import deepspeed

        weights = {}
        for name, p in network.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):  # does nothing below stage 3
                if self.is_global_zero:
                    weights[name] = p.detach().cpu().clone()
        return weights


def strategy_of(value: DictConfig | str) -> Strategy | str:
    """Return the strategy of `trainer.strategy`: a `_target_` node's, or a name of Lightning."""
    if isinstance(value, DictConfig):
        return build(value)
    if value.startswith(("fsdp", "deepspeed")):
        raise ValueError(
            f"trainer.strategy={value} is not allowed: use strategy=fsdp2, or strategy=deepspeed_2 "
            "(1, 2 or 3)"
        )
    return value


def needs_gpu(strategy: Strategy) -> bool:
    """Return whether a strategy needs CUDA: DeepSpeed, and any with CPU offload."""
    return isinstance(strategy, DeepSpeedStrategy) or getattr(strategy, "offload", False)


@contextmanager
def whole_network(module: pl.LightningModule) -> Iterator[bool]:
    """Make `module.network` whole (unsharded) in a context that all processes enter and leave.

    Yields True on processes that have the whole network.
    """
    strategy, sharded = module.trainer.strategy, module.network
    if not hasattr(strategy, "gathered"):
        yield True
        return
    weights, first = strategy.gathered(sharded), strategy.is_global_zero
    if first:
        module.network = with_weights(strategy.skeleton, weights, strategy.root_device)
    try:
        yield first
    finally:
        module.network = sharded
        strategy.barrier()


def without_weights(network: PreTrainedModel) -> PreTrainedModel:
    """Copy a network, with its buffers and with meta tensors for its weights."""
    # deepcopy takes from the memo what is in it, so tied parameters stay tied.
    memo = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def with_weights(
    skeleton: PreTrainedModel, weights: dict[str, Tensor], device: torch.device
) -> PreTrainedModel:
    """Copy a skeleton (`without_weights`) with weights by name; tied ones need one name."""
    network = copy.deepcopy(skeleton)
    unknown = network.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    network.tie_weights()
    lost = [name for name, p in network.named_parameters() if p.is_meta]
    assert not lost + unknown, f"weights lost: {lost}, unknown: {unknown}"
    return network.to(device).eval()
