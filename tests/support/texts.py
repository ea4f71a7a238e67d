"""Prompts and tiny models whose texts are compared, and plain decoding of each prompt alone."""

from dataclasses import replace
from functools import cache

import torch

from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.results import ids

V = 12
PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6], [11, 10], [6, 6, 6, 0, 9]]
SEEDS = [5, 71, 3, 900, 12]
WARPS = {
    "no warp": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.4},
    "answer": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": ((3, 2.0),)},
    "all": {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}


def target(kind="llama", vocabulary=V, **config):
    return tiny.causal_lm(vocabulary, seed=0, kind=kind, **config).float()


def random_drafter(vocabulary=V + 2):
    return tiny.causal_lm(vocabulary, seed=1).float()


def drafter_of_target(model):
    """The target's own weights, with two more tokens."""
    drafter = tiny.causal_lm(V + 2, seed=1).float()
    with torch.no_grad():
        for new, old in zip(drafter.parameters(), model.parameters()):
            new[: len(old)] = old
    return drafter


def deer(model, drafter, k, cls=DeerSampler, **knobs):
    return cls(model, tiny.tokenizer(V), drafter, block_size=k, mask_id=V, sep_id=V + 1, **knobs)


class Oracle(DeerSampler):
    """A drafter that agrees often: it knows `answers` by row, except at every fourth position."""

    answers: list[list[int]]
    prompts: list[list[int]]

    def draft_pass(self, batch, k, params):
        logits = super().draft_pass(batch, k, params)
        for b, row in enumerate(batch.requests):
            start = int(batch.lengths[b]) - len(self.prompts[row])
            for i, token in enumerate(self.answers[row][start : start + k]):
                if (start + i) % 4 != 3:
                    logits[b, i, token] = 1e4
        return logits


def oracle(model, k, prompts, answers):
    sampler = deer(model, random_drafter(), k, Oracle)
    sampler.prompts, sampler.answers = prompts, answers
    return sampler


def plain_rows(model, params, prompts=PROMPTS, seeds=SEEDS):
    """The reference: plain decoding of every prompt alone."""
    sampler = PlainSampler(model, tiny.tokenizer(V))
    return [sampler.generate([p], params, seeds=[s])[0] for p, s in zip(prompts, seeds)]


def greedy_texts(model, new, prompts=PROMPTS, **options):
    """The tokens of transformers' own greedy `generate`, of every prompt alone."""
    found = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=new,
            pad_token_id=0, **options,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def plain_texts(params, **config):
    """The texts of `plain_rows` by `target(**config)`, decoded once for all tests of a process.

    Whichever of the KEYED rules is given, plain decoding has none.
    """
    return _plain_texts(replace(params, verify="coupled"), **config)


@cache
def _plain_texts(params, **config):
    return ids(plain_rows(target(**config), params))
