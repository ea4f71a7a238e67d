"""How sure of its drafter a tree should be at each depth: maximum likelihood, from real texts.

A tree ranks the tokens of a depth by softmax(s z), z = log q + g (`decoding.tree.draft_trees`). The
s of that depth is the one under which the tokens that the target did choose are the likeliest. It
is larger where the drafter knows more: near the committed text, and at temperature 0.
"""

import torch
from torch import Tensor

from decoding.params import SamplingParams
from decoding.randomness import KeyedRandomness
from decoding.samplers.base import Rows
from decoding.samplers.deer import DeerSampler

LEAST, MOST = 0.05, 20.0


def fit(z: Tensor, choice: Tensor) -> list[float]:
    """argmax_s mean log softmax(s z)[choice] of each depth, within [LEAST, MOST].

    z [n, k, V] (-inf: impossible), choice [n, k]. The likelihood is concave in s, and its slope is
    z[choice] - E_s[z]: bisection finds where its mean is 0.
    """
    return [round(_fit_depth(z[:, i].double(), choice[:, i]), 2) for i in range(z.shape[1])]


def _fit_depth(z: Tensor, choice: Tensor) -> float:
    """z [n, V], choice [n]: of one depth, for n V numbers of a real vocabulary are many."""
    chosen = z.gather(-1, choice[:, None]).mean()
    z = z.masked_fill(z.isinf(), torch.finfo(torch.float32).min)  # 0 times -inf is no number
    low, high = LEAST, MOST
    for _ in range(30):
        s = (low + high) / 2
        expected = ((s * z).softmax(-1) * z).sum(-1).mean()
        low, high = (s, high) if chosen > expected else (low, s)
    return (low + high) / 2


def observed(
    sampler: DeerSampler, prompts: list[list[int]], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """(z [n, k, V], choice [n, k]) at every other place of the answers to these prompts."""
    k, device = params.block_size or sampler.block_size, sampler.target.device
    first = params.seed or 0
    seeds = [first + b for b in range(len(prompts))]
    answers = sampler.generate(prompts, params, seeds=seeds)
    z, choice = [], []
    with torch.inference_mode():
        for seed, prompt, answer in zip(seeds, prompts, answers):
            text = prompt + answer.token_ids
            starts = range(len(prompt), len(text) - k + 1, 2)
            if not starts:
                continue
            capacity = len(text) + k + sampler.margin(params)
            randomness = KeyedRandomness([seed] * len(starts), device)
            rows = Rows([text[:n] for n in starts], capacity, randomness, device)
            sampler.begin(rows, params)
            q, noise = sampler.draft_pass(rows, k, params), sampler.noise(rows, k, params)
            z.append(q.log_softmax(-1) + (0 if noise is None else noise))
            choice += [text[n : n + k] for n in starts]
    if not z:
        raise ValueError(f"no answer has {k} tokens: ask for more with max_new_tokens=")
    return torch.cat(z), torch.tensor(choice, device=device)
