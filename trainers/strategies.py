"""Strategies of sharded training (FSDP2, DeepSpeed), and gathering the whole network again."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from models.packed import multiplies_bfloat16
from recipes.compose import build
from trainers.runs.checkpoint_files import renamed
from trainers.runs.safe_load import read_file

Network = TypeVar("Network", bound=nn.Module)


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
        self.strategy_name = "fsdp2_offload" if offload else "fsdp2"
        self.offload = offload
        self.skeletons: dict[str, nn.Module] = {}

    def setup_environment(self) -> None:
        """Set up the process group, with all processes in one data-parallel group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, networks: dict[str, nn.Module], precision: str) -> None:
        """Shard networks in place: one unit per decoder layer, and one for all other weights."""
        if self.skeletons:  # Lightning calls `configure_model` at every entry point
            return
        self.skeletons = {name: without_weights(network) for name, network in networks.items()}
        half = torch.bfloat16 if precision == "bf16-mixed" else None
        options = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        for network in networks.values():
            units = {*(getattr(network, "_no_split_modules", None) or [])}
            for module in [m for m in network.modules() if type(m).__name__ in units]:
                fully_shard(module, **options)
            # Tied embeddings and head are one parameter, so they must be in one unit, the last one.
            fully_shard(network, **options)

    def model_to_device(self) -> None:
        """Move the module to the device, unless its shards are offloaded to the CPU."""
        if not self.offload:
            super().model_to_device()

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load shards, or the file of a strategy that has none.

        Lightning would take the file's optimizer states, which are in the order of the parameter
        groups, for those of the module's parameters in their own order.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        content, (optimizer,) = read_file(path), self.optimizers
        assert self.model is not None
        names = {id(p): name for name, p in self.model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        states = renamed(content.pop("optimizer_states")[0], order)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, content.pop("state_dict"), options=options)
        set_optimizer_state_dict(self.model, optimizer, states, options=options)
        return content

    def gathered(self, network: nn.Module) -> dict[str, Tensor]:
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
        self.strategy_name = f"deepspeed_{stage}{'_offload' if offload else ''}"
        self.skeletons: dict[str, nn.Module] = {}

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]:
        """The AdamW class for the device of the optimizer states."""
        if not self.config["zero_optimization"].get("offload_optimizer"):
            return torch.optim.AdamW
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam

    def backward(self, closure_loss: Tensor, *args, **kwargs) -> Tensor:
        """Run the engine's backward, without its division by the number of micro-batches.

        Lightning has divided the loss by it already.
        """
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)

    def shard(self, networks: dict[str, nn.Module], precision: str) -> None:
        """Record the networks' structure; DeepSpeed shards them itself."""
        if not self.skeletons:
            self.skeletons = {name: without_weights(network) for name, network in networks.items()}

    def gathered(self, network: nn.Module) -> dict[str, Tensor]:
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
    """Make `module.trained` whole (unsharded) in a context that all processes enter and leave.

    Yields True on processes that have the whole networks.
    """
    strategy = module.trainer.strategy
    if not hasattr(strategy, "gathered"):
        yield True
        return
    sharded, first = module.trained, strategy.is_global_zero
    for name, network in sharded.items():
        weights = strategy.gathered(network)
        if first:
            whole = with_weights(strategy.skeletons[name], weights, strategy.root_device)
            setattr(module, name, whole)
    try:
        yield first
    finally:
        for name, network in sharded.items():
            setattr(module, name, network)
        strategy.barrier()


def without_weights(network: Network) -> Network:
    """Copy a network, with its buffers and with meta tensors for its weights."""
    # deepcopy takes from the memo what is in it, so tied parameters stay tied.
    memo = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def with_weights(skeleton: Network, weights: dict[str, Tensor], device: torch.device) -> Network:
    """Copy a skeleton (`without_weights`) with weights by name; tied ones need one name."""
    network = copy.deepcopy(skeleton)
    unknown = network.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    if isinstance(network, PreTrainedModel):
        network.tie_weights()
    lost = [name for name, p in network.named_parameters() if p.is_meta]
    assert not lost + unknown, f"weights lost: {lost}, unknown: {unknown}"
    return network.to(device).eval()
