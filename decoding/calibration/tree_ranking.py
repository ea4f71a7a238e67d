"""Calibration of draft trees: sharpness and bigram weight of each depth, by maximum likelihood.

A tree ranks the tokens of a depth by softmax(s z + w score), with z = log q + g, the drafter's
log-probability and the noise, and the bigram score of the token before (`decoding.drafting.tree`,
`decoding.drafting.bigrams`). The sharpness s and weight w of a depth maximise the likelihood of the
tokens that the target chose. s is larger where the drafter is more accurate: near the committed
text, and at temperature 0.
"""

import torch
from torch import Tensor

from decoding.drafting.bigrams import Bigrams
from decoding.drafting.block_sampler import BlockSampler
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness, request_seeds
from decoding.samplers.plain import PlainSampler

MIN_SHARPNESS, MAX_SHARPNESS = 0.05, 20.0
TURNS = 4  # of maximising in w, then in s
RANKED = 4096  # tokens of a depth that the likelihood is over; no tree reaches as far
PREFIXES = 320  # that are fitted to, at the most: each is read anew


def fit(
    z: Tensor, choice: Tensor, bigrams: Bigrams | None = None
) -> tuple[list[float], list[float]]:
    """Fit (s, w) by maximum likelihood: argmax of mean log softmax(s z + w score)[choice].

    The likelihood is concave in (s, w), and is maximised in each in turn, given the other. It is
    over the RANKED best tokens of a depth and the choices among them: a token that the drafter does
    not have tells nothing about s.

    Args:
        z: Log-probabilities of the drafter plus noise, -inf for impossible tokens, [n, k, V].
        choice: The tokens that the target chose, [n, k].
        bigrams: The table of bigram scores, if the tree uses one.

    Returns:
        s and w of the k depths. w is 0 at the first depth, where all nodes have the same parent,
        and without `bigrams`; s is 1 and w is 0 at a depth without such a choice.
    """
    sharpness, weights = [], []
    for i in range(z.shape[1]):
        at, ids = z[:, i].topk(min(RANKED, z.shape[-1]))
        is_choice = (ids == choice[:, i, None]) & at.isfinite()
        known = is_choice.any(-1)
        at, ids, chosen = at[known].double(), ids[known], is_choice[known].int().argmax(-1)
        at = at.masked_fill(at.isinf(), torch.finfo(torch.float32).min)  # 0 times -inf is NaN
        s, w = _best(at, chosen, torch.zeros(()), MIN_SHARPNESS) if len(at) else 1.0, 0.0
        if i and bigrams is not None and len(at):
            score = bigrams.rows(choice[known, i - 1]).gather(-1, ids).double()
            for _ in range(TURNS):
                w = _best(score, chosen, s * at, 0.0)
                s = _best(at, chosen, w * score, MIN_SHARPNESS)
        sharpness.append(round(s, 2))
        weights.append(round(w, 2))
    return sharpness, weights


def _best(x: Tensor, choice: Tensor, others: Tensor, least: float) -> float:
    """Return argmax_a of mean log softmax(a x + others)[choice], within [least, MAX_SHARPNESS].

    The objective is concave in a, with slope x[choice] - E_a[x]: bisection finds where the mean
    slope is 0. x is [n, V], choice [n], others broadcasts with x.
    """
    chosen = x.gather(-1, choice[:, None]).mean()
    low, high = least, MAX_SHARPNESS
    for _ in range(20):
        a = (low + high) / 2
        expected = ((a * x + others).softmax(-1) * x).sum(-1).mean()
        low, high = (a, high) if chosen > expected else (low, a)
    return (low + high) / 2


def observed(
    sampler: BlockSampler, prompts: list[list[int]], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Return z [n, k, V] and choice [n, k] for `fit`, of n prefixes of a sampler's own answers.

    The prefixes end at every other position, or at fewer where these are more than `PREFIXES`;
    params.seed (0 if None) fixes the noise.
    """
    k, device = params.block_size or sampler.block_size, sampler.device
    seeds = request_seeds(params.seed or 0, len(prompts))
    # Keyed drafts have plain decoding's text, which many requests together decode faster.
    plain = PlainSampler(sampler.target, sampler.tokenizer)
    answers = plain.generate(prompts, params, seeds=seeds)
    z, choice = [], []
    ends = sum(max(0, len(answer.token_ids) - k + 1) for answer in answers)
    every = max(2, -(-ends // PREFIXES))
    with torch.inference_mode():
        for seed, prompt, answer in zip(seeds, prompts, answers):
            text = prompt + answer.token_ids
            starts = range(len(prompt), len(text) - k + 1, every)
            if not starts:
                continue
            capacity = len(text) + k + sampler.margin(params)
            randomness = KeyedRandomness([seed] * len(starts), device)
            batch = Batch([text[:n] for n in starts], capacity, randomness, device)
            sampler.begin_drafting(batch, sampler.states_before(batch))
            chosen = [text[n : n + k] for n in starts]
            noise = sampler.noise(batch, k, params)
            q = sampler.forced_pass(batch, torch.tensor(chosen, device=device), params)
            z.append(q.log_softmax(-1) + (0 if noise is None else noise))
            choice += chosen
    if not z:
        raise ValueError(
            f"no answer has {k} tokens, the length of a draft block: raise max_new_tokens="
        )
    return torch.cat(z), torch.tensor(choice, device=device)
