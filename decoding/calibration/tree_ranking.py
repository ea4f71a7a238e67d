"""How sure of its drafter a tree should be at each depth: maximum likelihood, from real texts.

A tree ranks the tokens of a depth by softmax(s z + w lift), z = log q + g
(`decoding.drafting.tree`, `decoding.drafting.bigrams`). The s and w of that depth are those under
which the tokens that the target did choose are the likeliest. s is larger where the drafter knows
more: near the committed text, and at temperature 0.
"""

import torch
from torch import Tensor

from decoding.drafting.bigrams import Bigrams
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.engine.sampler import Rows
from decoding.samplers.deer import DeerSampler

LEAST, MOST = 0.05, 20.0
TURNS = 4


def fit(
    z: Tensor, choice: Tensor, bigrams: Bigrams | None = None
) -> tuple[list[float], list[float]]:
    """argmax_(s, w) mean log softmax(s z + w lift)[choice] of each depth: all s, all w.

    z [n, k, V] (-inf: impossible), choice [n, k]; lift: `decoding.drafting.bigrams`, of the token
    before. w is 0 at the first depth, before which nothing is drafted, and where there are no
    bigrams. The likelihood is concave in (s, w): each in turn, given the other.
    """
    sharpness, weights = [], []
    for i in range(z.shape[1]):  # of one depth at a time: n V numbers of a real vocabulary are many
        at = z[:, i].double()
        at = at.masked_fill(at.isinf(), torch.finfo(torch.float32).min)  # 0 times -inf is no number
        s, w, lift = _best(at, choice[:, i], torch.zeros(()), LEAST), 0.0, None
        if i and bigrams is not None:
            lift = bigrams.rows(choice[:, i - 1]).double()
            for _ in range(TURNS):
                w = _best(lift, choice[:, i], s * at, 0.0)
                s = _best(at, choice[:, i], w * lift, LEAST)
        sharpness.append(round(s, 2))
        weights.append(round(w, 2))
    return sharpness, weights


def _best(x: Tensor, choice: Tensor, others: Tensor, least: float) -> float:
    """argmax_a mean log softmax(a x + others)[choice], within [least, MOST]; x [n, V], choice [n].

    Concave in a, and its slope is x[choice] - E_a[x]: bisection finds where its mean is 0.
    """
    chosen = x.gather(-1, choice[:, None]).mean()
    low, high = least, MOST
    for _ in range(20):
        a = (low + high) / 2
        expected = ((a * x + others).softmax(-1) * x).sum(-1).mean()
        low, high = (a, high) if chosen > expected else (low, a)
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
