"""LoRA (arXiv 2106.09685): small trained matrices beside frozen weights, in any recipe's network.

peft puts its layers into the network itself, which stays the class that it was: samplers, masks,
compilation, processes and checkpoints take no notice. peft is imported by those who use it only.
"""

import copy

from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from data.text.tokenizer import SEPARATOR_TOKEN, draft_token_ids
from decoding.commands.cli import unknown

ALL = "all-linear"


def add_lora(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: list[str],
    merge: bool,
) -> PreTrainedModel:
    """Freeze a network and add adapters to it, in place; rank 0 trains all weights instead.

    Each target layer computes W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]; B
    starts at 0, so the network's output starts as it was. Where the tokenizer has draft tokens,
    their embeddings are trained too: they may be new, and no adapter makes up for a random one.
    (The rows of an untied head that would predict them need no training: they are never drawn.)

    targets: names of linear layers, or ['all-linear'], every one but the head.
    merge: what the export will do (see `to_export`).
    Errors: a value that is not allowed; targets that are not there, or that cannot be merged; an
    adapter to be kept whose base could not be loaded again.
    """
    if rank < 0:
        raise ValueError(f"lora.rank={rank} is not allowed: give 1 or more, or 0 for no LoRA")
    if hasattr(network, "peft_config"):  # loaded from an export that kept its adapter
        network = _merge(network).requires_grad_(True)
        network._weight_conversions = None  # names of the adapter's file: not for saving the whole
    if rank == 0:
        return network
    if alpha <= 0:
        raise ValueError(f"lora.alpha={alpha} is not allowed: it must be above 0")
    if not 0 <= dropout < 1:
        raise ValueError(f"lora.dropout={dropout} is not allowed: it must be in [0, 1)")
    if targets != [ALL]:
        _check_targets(network, targets)
    if not merge:
        _check_base(network)
    from peft import LoraConfig
    from peft.functional import cast_adapter_dtype

    tokens = None
    if SEPARATOR_TOKEN in tokenizer.get_vocab():
        tokens = [*draft_token_ids(tokenizer)]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=ALL if targets == [ALL] else targets,
        trainable_token_indices=tokens,
    )
    network.add_adapter(config)
    cast_adapter_dtype(network, "default")  # small steps would be lost in bfloat16
    if tokens and network._tied_weights_keys:  # what is tied lies deeper now
        network._tied_weights_keys = {
            _wrapped(one): _wrapped(other) for one, other in network._tied_weights_keys.items()
        }
    return network


def to_export(network: PreTrainedModel, merge: bool) -> PreTrainedModel:
    """What an export holds: the network, or, where it has adapters, a copy.

    merge: the adapters are added to the weights, and what is left is an ordinary network. Else
    they are kept, in the network's own dtype: transformers loads them in no other.
    """
    if not hasattr(network, "peft_config"):
        return network
    network = copy.deepcopy(network)
    if merge:
        return _merge(network)
    for p in network.parameters():
        if p.requires_grad:
            p.data = p.data.to(network.dtype)
    return network


def _merge(network: PreTrainedModel) -> PreTrainedModel:
    """Add the adapters to the weights and take their layers out, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    def visit(parent: nn.Module) -> None:
        for name, child in [*parent.named_children()]:
            if isinstance(child, AuxiliaryTrainingWrapper):  # the embeddings of trained tokens
                plain = child.unload_and_optionally_merge_module(True, True, None)
                setattr(parent, name, plain)
            elif isinstance(child, BaseTunerLayer):
                child.merge(safe_merge=True)
                setattr(parent, name, child.get_base_layer())
            else:
                visit(child)

    visit(network)
    network.__dict__.pop("_tied_weights_keys", None)  # as the class has them
    del network.peft_config
    network._hf_peft_config_loaded = False
    # Nothing on disk or on the Hub holds these weights: no base for another adapter.
    network.name_or_path = network.config.name_or_path = ""
    return network


def _check_targets(network: PreTrainedModel, targets: list[str]) -> None:
    linear = {n: m for n, m in network.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    head = network.get_output_embeddings()
    tied = head is not None and head.weight is network.get_input_embeddings().weight
    if not targets:
        raise ValueError(f"lora.targets=[] names no layer: give names, or [{ALL}]")
    for target in targets:
        found = [m for n, m in linear.items() if f".{n}".endswith(f".{target}")]
        if not found:
            raise unknown("layer in lora.targets", target, {ALL, *map(_last_part, linear)})
        if tied and head in found:
            raise ValueError(
                f"lora.targets={target} is not allowed: this network's head is its embedding, "
                "which would change with it when the adapter is merged"
            )


def _wrapped(name: str) -> str:
    return f"{name.removesuffix('.weight')}.token_adapter.base_layer.weight"


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _check_base(network: PreTrainedModel) -> None:
    """The network is what its path holds, as far as can be told without loading it again."""
    base = network.name_or_path
    if not base:
        raise ValueError(
            "lora.merge=false keeps an adapter to a network that can be loaded again, and this one "
            "starts with weights that no folder holds: choose lora.merge=true"
        )
    stored = AutoConfig.from_pretrained(base).get_text_config()
    config = network.config.get_text_config()
    for key, what in (("num_hidden_layers", "layers"), ("vocab_size", "tokens")):
        there, here = getattr(stored, key), getattr(config, key)
        if there != here:
            raise ValueError(
                f"lora.merge=false keeps an adapter to {base!r}, but the network has {here} {what} "
                f"and that one {there}: choose lora.merge=true"
            )
