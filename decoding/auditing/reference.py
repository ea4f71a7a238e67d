"""What audited code is compared with: plain decoding's exact distribution over a tiny model."""

import itertools
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 6
TARGET, DRAFTER = 0, 1  # seeds of the weights of the two tiny models
# It repeats itself, so that prompt lookup finds something to copy.
PROMPT = (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)


def tiny_model(seed: int, scale: float = 1.0) -> PreTrainedModel:
    """A random Llama of VOCABULARY tokens without an end-of-text token, in float32.

    Its heads have a size that serving engines run.

    Args:
        seed: Of the weights.
        scale: Of the weights; larger ones make distributions that are further from uniform.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(0, scale / p.shape[1] ** 0.5)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> str:
    """Write a model, for code that loads its own; returns the folder."""
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def exact_distribution(
    model: PreTrainedModel, prompt: tuple[int, ...], new: int, temperature: float
) -> Tensor:
    """Plain decoding's distribution of answers, by one forward of every answer there is.

    Args:
        model: A causal LM.
        prompt: Token ids.
        new: n, tokens of an answer.
        temperature: Above 0.

    Returns:
        float64 [V^n]; an answer's index is its number in base V (`index_of`).
    """
    V = model.config.vocab_size
    answers = torch.tensor([*itertools.product(range(V), repeat=new)])
    ids = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], 1)
    logits = model(ids).logits[:, len(prompt) - 1 : -1].double()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, answers[..., None]).sum((1, 2)).exp()


def index_of(answer: list[int], vocabulary: int = VOCABULARY) -> int:
    """The index of an answer in `exact_distribution`.

    >>> index_of([1, 0, 2], 3)
    11
    """
    number = 0
    for token in answer:
        number = number * vocabulary + token
    return number
