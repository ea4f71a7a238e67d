"""Sharded training: FSDP2 for any transformers network, and the whole network back again."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
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

from decoding.commands.recipes import build


class FSDP2(ModelParallelStrategy):
    """Weights, gradients and optimizer states split over all processes (torch's `fully_shard`).

    The masters stay in float32; under trainer.precision=bf16-mixed a layer is gathered, and runs,
    in bfloat16. offload: keep the shards and the optimizer's work in the CPU's memory.
    """

    def __init__(self, offload: bool = False):
        # Norms and checkpoints of shards in the CPU's memory go over gloo.
        backend = "cpu:gloo,cuda:nccl" if offload else None
        super().__init__(tensor_parallel_size=1, process_group_backend=backend)
        self.offload = offload
        self._skeleton: PreTrainedModel | None = None

    def setup_environment(self) -> None:
        """All processes are one data-parallel group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Split a network in place: each decoder layer is a unit, and what is left another one."""
        if self._skeleton is not None:  # Lightning asks again at every entry point
            return
        self._skeleton = without_weights(network)
        half = torch.bfloat16 if precision == "bf16-mixed" else None
        options = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        units = {*(network._no_split_modules or [])}
        for module in [m for m in network.modules() if type(m).__name__ in units]:
            fully_shard(module, **options)
        # Tied embeddings and head are one parameter: they must lie in the same unit, the last one.
        fully_shard(network, **options)

    def model_to_device(self) -> None:
        """Shards that are offloaded stay where they are."""
        if not self.offload:
            super().model_to_device()

    def whole_network(self, network: PreTrainedModel) -> PreTrainedModel | None:
        """The network with all weights, on the first process; None on the others."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(network, options=options)
        if not self.is_global_zero:
            return None
        return with_weights(self._skeleton, weights, self.root_device)


class DeepSpeed(DeepSpeedStrategy):
    """DeepSpeed ZeRO: 1 splits the optimizer's states, 2 the gradients too, 3 the weights too.

    With trainer.precision=bf16-mixed the network runs in bfloat16 and the optimizer holds float32
    masters. offload: keep what is split in the CPU's memory.
    """

    def __init__(self, stage: int, offload: bool = False):
        super().__init__(
            stage=stage, offload_optimizer=offload, offload_parameters=offload and stage == 3
        )
        self._skeleton: PreTrainedModel | None = None

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]:
        """AdamW where the states lie."""
        if not self.config["zero_optimization"].get("offload_optimizer"):
            return torch.optim.AdamW
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Only take note of the network's shape: DeepSpeed splits it by itself."""
        self._skeleton = self._skeleton or without_weights(network)

    def whole_network(self, network: PreTrainedModel) -> PreTrainedModel | None:
        """The network with all weights, on the first process; None on the others."""
        import deepspeed

        weights = {}
        for name, p in network.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):  # does nothing below stage 3
                if self.is_global_zero:
                    weights[name] = p.detach().cpu().clone()
        if not self.is_global_zero:
            return None
        return with_weights(self._skeleton, weights, self.root_device)


def strategy_of(value: DictConfig | str) -> Strategy | str:
    """The strategy of `trainer.strategy`: a node with a `_target_`, or a name of Lightning's.

    Errors: the names of torch's first FSDP, in whose place there is FSDP2.
    """
    if isinstance(value, DictConfig):
        return build(value)
    if value.startswith("fsdp"):
        raise ValueError(f"trainer.strategy={value} is torch's first FSDP: take strategy=fsdp2")
    zero = re.fullmatch(r"deepspeed(?:_stage_([123])(_offload)?)?", value)
    return DeepSpeed(int(zero[1] or 2), offload=bool(zero[2])) if zero else value


def needs_gpu(strategy: Strategy) -> bool:
    """Whether a strategy runs on CUDA only: DeepSpeed, and what is kept in the CPU's memory."""
    return isinstance(strategy, DeepSpeedStrategy) or getattr(strategy, "offload", False)


@contextmanager
def whole_network(module: pl.LightningModule) -> Iterator[bool]:
    """`module.network` is the whole network meanwhile. True on the processes that have it.

    Every process must enter; the others wait at the end.
    """
    strategy, sharded = module.trainer.strategy, module.network
    if not hasattr(strategy, "whole_network"):
        yield True
        return
    whole = strategy.whole_network(sharded)
    module.network = sharded if whole is None else whole
    try:
        yield whole is not None
    finally:
        module.network = sharded
        strategy.barrier()


def without_weights(network: PreTrainedModel) -> PreTrainedModel:
    """A copy that has the network's buffers and, in place of its weights, none (meta tensors)."""
    # A parameter that the memo knows is not copied, and shared ones stay shared.
    memo = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def with_weights(
    skeleton: PreTrainedModel, weights: dict[str, Tensor], device: torch.device
) -> PreTrainedModel:
    """The skeleton's copy with these weights, ready to run."""
    network = copy.deepcopy(skeleton)
    unknown = network.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    network.tie_weights()
    lost = [name for name, p in network.named_parameters() if p.is_meta]
    assert not lost + unknown, f"weights lost: {lost}, unknown: {unknown}"
    return network.to(device).eval()
