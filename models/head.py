"""Logits of some tokens only: a language model's head reduced to rows of its matrix."""

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel


class ReducedHead:
    """A causal LM whose head computes the logits of some of its tokens.

    The head is a small drafter's most expensive matrix: 49,152 rows of 576 numbers are the size of
    eight of its layers. The model itself is not changed, so it remains the stock class.

    Args:
        network: The model; its head's rows are copied now, so make this anew after a training step.
        ids: [n], the tokens; None, or as many as the model has logits: all of them.
    """

    def __init__(self, network: PreTrainedModel, ids: Tensor | None):
        self.network, self.ids, self.tensors = network, ids, {}
        head = None if ids is None else network.get_output_embeddings()
        if ids is None or head is None or len(ids) == _rows(head):
            self.ids = None
        elif not is_sharded(head.weight):
            (name,) = [name for name, module in network.named_modules() if module is head]
            rows = {key: tensor[ids] for key, tensor in head.named_parameters()}
            self.tensors = {f"{name}.{key}": tensor for key, tensor in rows.items()}

    def __call__(self, **inputs) -> Tensor:
        """Return logits [..., n] of the tokens; the arguments are those of the model."""
        if not self.tensors:
            logits = self.network(**inputs).logits
            return logits if self.ids is None else logits[..., self.ids]
        output = functional_call(
            self.network, self.tensors, kwargs=inputs, tie_weights=False, strict=False
        )
        return output.logits


def _rows(head: torch.nn.Module) -> int:
    """Return the rows of a head's matrix, of which a process may have a share only."""
    return head.out_features if is_sharded(head.weight) else len(head.weight)


def is_sharded(weight: Tensor) -> bool:
    """Return whether a weight is whole only in its module's forward (FSDP2's and ZeRO-3's).

    Both put their own weight there, whatever is given instead of it.
    """
    return hasattr(weight, "placements") or hasattr(weight, "ds_id")


def freeze_embeddings(network: torch.nn.Module) -> None:
    """Freeze a model's embeddings and head in training, in place."""
    for module in (network.get_input_embeddings(), network.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)


def silence_others(network: PreTrainedModel, ids: Tensor) -> None:
    """Set the head's rows of all tokens but `ids` [n] to 0, so that their logits are 0, in place.

    A language model's largest logit is well above 0, so all logits have the same argmax as those of
    `ids` (`ReducedHead`). The head must have no bias; one tied to the embedding gets its own
    weights.
    """
    head, others = network.get_output_embeddings(), torch.ones(network.config.vocab_size).bool()
    others[ids.cpu()] = False
    if head.weight is network.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        network.config.tie_word_embeddings = False
    with torch.no_grad():
        head.weight[others.to(head.weight.device)] = 0
