"""Training a drafter that reads noise: a task whose best answer is known, exports, refusals."""

import json
from types import SimpleNamespace

import pytest
import torch

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import with_draft_tokens
from decoding import SamplingParams, custom_generate, load
from decoding.drafting import noise as noise_file
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers import deer
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from models.diffusion import from_causal_lm
from models.noise import NoiseInput
from tests.support import tiny
from tests.support.runs import cut, same_run
from tests.trainers.test_dflash import module as dflash_module
from tests.trainers.test_markov_head import weights
from trainers.base import Optimization
from trainers.deer import Distillation, Refinement
from trainers.losses.diffusion import soft_nll

V, K = 32, 4


def transitions():
    draw = torch.Generator().manual_seed(0)
    return (2 * torch.randn(V, V, generator=draw)).softmax(-1)


P = transitions()


def target():
    """A causal LM of a Markov chain: no layer does anything, so p is a table of the last token."""
    model = tiny.causal_lm(V, hidden=V)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(V**-0.5)
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(P.log().T)
    return model.float()


@pytest.fixture(scope="module")
def tokenizer():
    return with_draft_tokens(tiny.tokenizer(V))


def drafter(tokenizer):
    return from_causal_lm(
        tiny.causal_lm(V, layers=3, hidden=64, scale=1.0).float(),
        tokenizer,
    )


def module_of(tokenizer, cls=Refinement, network=None, ema=None, **options):
    given = {"method": "deer", "block_size": K, "target_name": "x"}
    if cls is Refinement:
        given |= {"alpha": 1.0, "soft": 1.0}
    network = network or drafter(tokenizer)
    return cls(network, tokenizer, Optimization(1e-3, ema=ema), target(), **given | options)


def batches(tokenizer, layout="separator", temperature=1.0):
    """Endless batches of texts that the target says, K tokens after a first one, and their blocks.

    A row has 16 texts, and a block after the first token of each.
    """
    draw = torch.Generator().manual_seed(1)
    blocks = DraftBlocks(16, K, SuffixNoise(K), tokenizer, layout)
    every = torch.arange(16 * (1 + K))
    row = {"document": every // (1 + K), "position": every % (1 + K), "trained": 0 * every + 1}
    row["temperature"] = torch.full(every.shape, temperature)
    noise = SuffixNoise(K)(16, K, draw)
    while True:
        text = [torch.randint(V, (8 * 16, 1), generator=draw)]
        for _ in range(K):
            text.append(torch.multinomial(P[text[-1][:, 0]], 1, generator=draw))
        rows = [
            blocks.lay_out(row | {"input_ids": ids}, every[:: 1 + K] + 1, noise)
            | {"seed": torch.randint(2**62, (), generator=draw)}
            for ids in torch.cat(text, 1).view(8, -1)
        ]
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(module, tokenizer, steps, lr=3e-3, layout="separator"):
    adam = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, steps, pct_start=0.1)
    for _, batch in zip(range(steps), batches(tokenizer, layout)):
        loss, weight = module.losses(batch)
        adam.zero_grad()
        ((loss * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adam.step()
        schedule.step()
    return module


def independent_limit(draws=4000):
    """Tokens a pass that no drafter exceeds whose position i reads the prefix and g_i alone.

    Given g_i, the target's token at i is a function of the one before it, so the best guess is
    right with the share of those that lead to the likeliest token. All of the first i are right no
    more often than the worst of them is.
    """
    draw = torch.Generator().manual_seed(2)
    before = torch.eye(V)[torch.randint(V, (draws,), generator=draw)]
    right = []
    for _ in range(K):
        noise = -torch.empty(draws, V).exponential_(generator=draw).log()
        choice = (P.log() + noise[:, None]).argmax(-1)
        share = torch.zeros(draws, V).scatter_add_(1, choice, before)
        right.append(share.amax(-1).mean())
        before = before @ P
    return 1 + torch.stack(right).cummin(0).values.sum().item()


def acceptance(sampler, rule="coupled"):
    """Tokens of the first pass at T=1, of each first token many times."""
    params = SamplingParams(K + 1, 1.0, verify=rule, ignore_eos=True)
    prompts = [[u] for u in range(V)] * 24
    results = sampler.generate(prompts, params, seeds=[*range(len(prompts))])
    return sum(r.stats.emitted[0] for r in results) / len(results)


class OtherNoise(DeerSampler):
    """Wrong: the drafter reads the noise of another seed, at the same positions."""

    def reading_noise(self, batch, k, noise, params):
        other = KeyedRandomness([10**6 + request for request in batch.requests])
        positions = batch.lengths[:, None] + torch.arange(k)
        return super().reading_noise(batch, k, other.gumbel(positions, V), params)


def test_it_knows_what_independent_positions_cannot(tokenizer):
    """The best answer is K + 1 = 5 tokens a pass; another seed's noise is no help."""
    module = train(module_of(tokenizer, noise_layers=[0, 1]), tokenizer, 300)
    sampler, limit = module.sampler(), independent_limit()
    found = acceptance(sampler)
    sampler.__class__ = OtherNoise
    other = acceptance(sampler)
    print(found, limit, other)
    assert found > limit + 0.2
    assert other < limit - 0.2
