"""LoRA adapters (arXiv 2106.09685) for the network of any recipe, by peft.

peft inserts its layers into the network, which keeps its class, so samplers, masks, compilation,
strategies and checkpoints need no change. peft is imported only when adapters are used.
"""

import copy

from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from data.text.tokenizer import SEPARATOR_TOKEN, draft_token_ids
from recipes.values import unknown

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
    """Freeze a network's weights and add trainable adapters, in place.

    Each target layer computes W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]; B
    starts at 0, so the network's outputs do not change. Draft tokens' embeddings are trained too:
    they may be new and random, and no adapter could compensate. (The rows of an untied head that
    predict draft tokens need no training: samplers never draw them.)

    Args:
        network: A transformers causal LM; adapters that it already has are merged first.
        tokenizer: The network's.
        rank: Rank of the adapters; 0 for none, so that all weights are trained.
        alpha: Numerator of the adapters' scale.
        dropout: Dropout rate of the adapters' inputs.
        targets: Names of linear layers, or ['all-linear'] for all but the head.
        merge: Whether the export will merge the adapters, else their base must be loadable again.
    """
    if hasattr(network, "peft_config"):  # loaded from an export that kept its adapter
        network = _merge(network).requires_grad_(True)
        network._weight_conversions = None  # they map names of an adapter file only
    if rank == 0:
        return network
    try:
        network.get_input_embeddings()
    except NotImplementedError:
        raise ValueError(
            f"lora.rank={rank} is not allowed: adapters are for causal LMs, and a "
            f"{type(network).__name__} has no embeddings; give lora.rank=0"
        ) from None
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
    if tokens and network._tied_weights_keys:  # peft has wrapped the tied embedding
        network._tied_weights_keys = {
            _wrapped(one): _wrapped(other) for one, other in network._tied_weights_keys.items()
        }
    return network


def to_export(network: PreTrainedModel, merge: bool) -> PreTrainedModel:
    """Return the network to export: itself, or a copy if it has adapters.

    With `merge` adapters are added to the weights; otherwise they are kept in the network's dtype,
    the only one in which transformers loads them.
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
    """Merge a network's adapters into its weights and remove them, in place."""
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
    network.__dict__.pop("_tied_weights_keys", None)  # back to those of the class
    del network.peft_config
    network._hf_peft_config_loaded = False
    # The merged weights are saved nowhere, so they cannot be the base of another adapter.
    network.name_or_path = network.config.name_or_path = ""
    return network


def _check_targets(network: PreTrainedModel, targets: list[str]) -> None:
    linear = {n: m for n, m in network.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    head = network.get_output_embeddings()
    tied = head is not None and head.weight is network.get_input_embeddings().weight
    for target in targets:
        found = [m for n, m in linear.items() if f".{n}".endswith(f".{target}")]
        if not found:
            known = {ALL, *(name.rpartition(".")[2] for name in linear)}
            raise unknown("layer in lora.targets", target, known)
        if tied and head in found:
            raise ValueError(
                f"lora.targets={target} is not allowed: the head of this network is tied to its "
                "embedding, which merging the adapter would change too"
            )


def _wrapped(name: str) -> str:
    return f"{name.removesuffix('.weight')}.token_adapter.base_layer.weight"


def _check_base(network: PreTrainedModel) -> None:
    """Check, by its configuration only, that the network can be loaded again from its path."""
    base = network.name_or_path
    if not base:
        raise ValueError(
            "lora.merge=false is not allowed: it needs a base that can be loaded again, and this "
            "network starts with weights that no folder holds: choose lora.merge=true"
        )
    stored = AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config()
    config = network.config.get_text_config()
    for key, what in (("num_hidden_layers", "layers"), ("vocab_size", "tokens")):
        there, here = getattr(stored, key), getattr(config, key)
        if there != here:
            raise ValueError(
                f"lora.merge=false is not allowed: the network has {here} {what}, its base "
                f"{base!r} has {there}: choose lora.merge=true"
            )
