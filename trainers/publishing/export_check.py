"""Checks that a written export, loaded back, is the trained network."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.tokenizer import fingerprint
from decoding.drafting.block_sampler import BlockSampler
from decoding.loading import load_tokenizer

PROMPT = tuple(range(1, 9))  # the token ids on which drafts are compared


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, model_type: str) -> None:
    """Raise ValueError unless transformers loads the trainer's tokenizer from an export."""
    if fingerprint(load_tokenizer(str(folder))) != fingerprint(tokenizer):
        raise ValueError(
            "transformers loads another tokenizer from the export than the trainer's: it chooses "
            f"the class by the model's type, {model_type!r}, and that changes it. Give a network "
            "of another type (network.model_type=llama), or the tokenizer of such a model"
        )


def check_weights(network: nn.Module, again: nn.Module) -> None:
    """Raise ValueError unless a loaded network has the weights of the trained one, bit for bit."""
    ours, theirs = network.state_dict(), again.state_dict()
    if ours.keys() != theirs.keys() or any(not torch.equal(ours[k], theirs[k]) for k in ours):
        raise ValueError("the export's weights are not the trainer's")


def own_memory(network: nn.Module) -> nn.Module:
    """Give a loaded network's weights memory of their own, and return it.

    Products with memory-mapped weights at an odd address round differently.
    """
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()
    return network


@torch.inference_mode()
def check_outputs(network: PreTrainedModel, again: PreTrainedModel) -> None:
    """Raise ValueError unless two models agree on their own `dummy_inputs`, bit for bit."""
    inputs = {name: x.to(network.device) for name, x in network.dummy_inputs.items()}
    ours, theirs = network(**inputs), own_memory(again)(**inputs)
    _check_same(getattr(ours, "logits", ours), getattr(theirs, "logits", theirs))


def check_drafts(sampler: BlockSampler, network: PreTrainedModel, again: PreTrainedModel) -> None:
    """Raise ValueError unless a sampler drafts the same with two drafters, bit for bit."""
    drafts = []
    for drafter in (network, own_memory(again)):
        sampler.drafter = drafter
        drafts.append(first_draft(sampler, [t % sampler.vocabulary for t in PROMPT]))
    _check_same(*drafts)


@torch.inference_mode()
def first_draft(sampler: BlockSampler, prompt: list[int]) -> Tensor:
    """Compute the drafter's logits [k, V] for a first block of tokens 0, by the sampler's pass."""
    rows, params = sampler.start(prompt)
    sampler.begin(rows, params)
    zeros = rows.tokens.new_zeros(1, sampler.block_size)
    logits = sampler.forced_pass(rows, zeros, params)[0]
    return torch.where(logits.isfinite(), logits, 0)


def _check_same(ours: Tensor, theirs: Tensor) -> None:
    if difference := (ours - theirs).abs().max().item():
        raise ValueError(f"the export's outputs differ from the trainer's by {difference:.2e}")
