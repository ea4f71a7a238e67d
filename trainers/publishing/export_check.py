"""Checks that a written export, loaded back, is the trained network."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import load_tokenizer

PROMPT = tuple(range(1, 9))  # the token ids on which outputs are compared


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, model_type: str) -> None:
    """Check that transformers loads the trainer's tokenizer from an export.

    Args:
        tokenizer: The trainer's.
        folder: The export.
        model_type: The network's, for the message.

    Raises:
        ValueError: It loads another one.
    """
    if fingerprint(load_tokenizer(str(folder))) != fingerprint(tokenizer):
        raise ValueError(
            "transformers loads another tokenizer from the export than the trainer's: it chooses "
            f"the class by the model's type, {model_type!r}, and that changes it"
        )


def check_weights(network: nn.Module, again: nn.Module) -> None:
    """Check that a loaded network, or a head, has the weights of the trained one, bit for bit.

    Args:
        network: The trained one.
        again: The loaded one.

    Raises:
        ValueError: A tensor is missing, is one too many or differs.
    """
    ours, theirs = network.state_dict(), again.state_dict()
    if ours.keys() != theirs.keys() or any(not torch.equal(ours[k], theirs[k]) for k in ours):
        raise ValueError("the export's weights are not the trainer's")


@torch.inference_mode()
def check_logits(network: PreTrainedModel, again: PreTrainedModel) -> None:
    """Check that two causal LMs give the same logits, bit for bit.

    Raises:
        ValueError: They differ; the message has the largest difference.
    """
    ids = torch.tensor([PROMPT], device=network.device) % network.config.vocab_size
    _check_same(network(ids).logits, again(ids).logits)


@torch.inference_mode()
def check_outputs(network: PreTrainedModel, again: PreTrainedModel) -> None:
    """Check that two models give the same output on their own `dummy_inputs`, bit for bit.

    Raises:
        ValueError: They differ; the message has the largest difference.
    """
    inputs = {name: x.to(network.device) for name, x in network.dummy_inputs.items()}
    _check_same(network(**inputs), again(**inputs))


def check_drafts(sampler: Sampler, network: PreTrainedModel, again: PreTrainedModel) -> None:
    """Check that a sampler drafts the same with two networks, bit for bit.

    Args:
        sampler: Whose drafter is replaced by each of the two.
        network: The trained drafter.
        again: The loaded one.

    Raises:
        ValueError: The drafts' logits differ; the message has the largest difference.
    """
    drafts = []
    for drafter in (network, again):
        sampler.drafter = drafter
        drafts.append(first_draft(sampler, [t % sampler.vocabulary for t in PROMPT]))
    _check_same(*drafts)


@torch.inference_mode()
def first_draft(sampler: Sampler, prompt: list[int]) -> Tensor:
    """The drafter's logits [k, V] for the first block after a prompt, by the sampler's own pass."""
    rows, params = sampler.start(prompt)
    sampler.begin(rows, params)
    logits = sampler.draft_pass(rows, sampler.block_size, params)[0]
    return torch.where(logits.isfinite(), logits, 0)


def _check_same(ours: Tensor, theirs: Tensor) -> None:
    if difference := (ours - theirs).abs().max().item():
        raise ValueError(f"the export's outputs differ from the trainer's by {difference:.2e}")
