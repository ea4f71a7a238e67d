"""Strategies of sharded training (FSDP2, DeepSpeed), and gathering the whole network again."""

import copy
import re
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

from decoding.commands.recipes import build
from models.packed import multiplies_bfloat16


def precision_of(name: str, accelerator: str) -> str:
    """Lightning's name of a precision; 'auto' is bfloat16 where the device multiplies in it.

    A CPU without such instructions emulates them, several times slower than float32.

    Args:
        name: 'auto', or one of Lightning's, such as 'bf16-mixed'.
        accelerator: Lightning's name of the device, or 'auto'.
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

    Master weights are float32. With trainer.precision=bf16-mixed each layer is gathered and
    computed in bfloat16.

    Args:
        offload: keep shards and optimizer states in CPU memory, and run the optimizer there.
    """

    def __init__(self, offload: bool = False):
        # Shards in CPU memory are reduced (norms) and gathered (checkpoints) over gloo.
        backend = "cpu:gloo,cuda:nccl" if offload else None
        super().__init__(tensor_parallel_size=1, process_group_backend=backend)
        self.offload = offload
        self._skeleton: PreTrainedModel | None = None

    def setup_environment(self) -> None:
        """Set up the process group, with all processes in one data-parallel group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Shard a network in place: one unit per decoder layer, and one for all other weights.

        Args:
            network: any transformers network.
            precision: Lightning's, such as 'bf16-mixed'.
        """
        if self._skeleton is not None:  # Lightning calls `configure_model` at every entry point
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
        # Tied embeddings and head are one parameter, so they must be in one unit, the last one.
        fully_shard(network, **options)

    def model_to_device(self) -> None:
        """Move the module to the device, unless its shards are offloaded to the CPU."""
        if not self.offload:
            super().model_to_device()

    def whole_network(self, network: PreTrainedModel) -> PreTrainedModel | None:
        """The unsharded network on the first process, None on the others; a collective call."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(network, options=options)
        if not self.is_global_zero:
            return None
        return with_weights(self._skeleton, weights, self.root_device)


class DeepSpeed(DeepSpeedStrategy):
    """DeepSpeed ZeRO.

    With trainer.precision=bf16-mixed the network runs in bfloat16, and the optimizer has float32
    master weights.

    Args:
        stage: what is sharded: 1 for optimizer states, 2 for gradients too, 3 for weights too.
        offload: keep what is sharded in CPU memory.
    """

    def __init__(self, stage: int, offload: bool = False):
        super().__init__(
            stage=stage, offload_optimizer=offload, offload_parameters=offload and stage == 3
        )
        self._skeleton: PreTrainedModel | None = None

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]:
        """The AdamW class for the device of the optimizer states."""
        if not self.config["zero_optimization"].get("offload_optimizer"):
            return torch.optim.AdamW
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam

    def shard(self, network: PreTrainedModel, precision: str) -> None:
        """Record the network's structure; DeepSpeed shards it itself."""
        self._skeleton = self._skeleton or without_weights(network)

    def whole_network(self, network: PreTrainedModel) -> PreTrainedModel | None:
        """The unsharded network on the first process, None on the others; a collective call."""
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
    """The strategy of `trainer.strategy`.

    Args:
        value: a node with a `_target_`, or one of Lightning's strategy names; its DeepSpeed names
            give `DeepSpeed`.

    Raises:
        ValueError: for the names of FSDP1; FSDP2 replaces it.
    """
    if isinstance(value, DictConfig):
        return build(value)
    if value.startswith("fsdp"):
        raise ValueError(
            f"trainer.strategy={value} is FSDP1, which is not supported: use strategy=fsdp2"
        )
    zero = re.fullmatch(r"deepspeed(?:_stage_([123])(_offload)?)?", value)
    return DeepSpeed(int(zero[1] or 2), offload=bool(zero[2])) if zero else value


def needs_gpu(strategy: Strategy) -> bool:
    """True for a strategy that needs CUDA: DeepSpeed, and any with CPU offload."""
    return isinstance(strategy, DeepSpeedStrategy) or getattr(strategy, "offload", False)


@contextmanager
def whole_network(module: pl.LightningModule) -> Iterator[bool]:
    """Context in which `module.network` is the whole, unsharded network.

    All processes must enter it; they wait for each other at the end.

    Yields:
        True on the processes that have the whole network.
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
    """A copy of the network with its buffers, and meta tensors in place of its weights."""
    # deepcopy takes from the memo what is in it, so tied parameters stay tied.
    memo = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def with_weights(
    skeleton: PreTrainedModel, weights: dict[str, Tensor], device: torch.device
) -> PreTrainedModel:
    """A copy of a skeleton (see `without_weights`) with weights, in evaluation mode.

    Args:
        skeleton: the network without weights.
        weights: all parameters by name; of tied ones, one name is enough.
        device: where the copy is put.
    """
    network = copy.deepcopy(skeleton)
    unknown = network.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    network.tie_weights()
    lost = [name for name, p in network.named_parameters() if p.is_meta]
    assert not lost + unknown, f"weights lost: {lost}, unknown: {unknown}"
    return network.to(device).eval()
