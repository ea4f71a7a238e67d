"""Mixtures of experts: a token's result depends neither on its batch nor on a pass's width."""

import pytest
import torch

from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.plain import PlainSampler
from models.masks import causal
from tests.support.results import ids
from tests.support.windowed import PROMPTS, V, causal_lm, tokenizer

KINDS = ["gpt_oss", "mixtral", "qwen3_moe"]
ROWS, WIDTH = 5, 24


def model_of(kind):
    return causal_lm(kind, **({"sliding_window": None} if kind == "mixtral" else {}))


def logits(model, width, rows):
    """Logits of the first text, decoded `width` tokens a pass beside others."""
    text = torch.randint(V, (ROWS, WIDTH), generator=torch.Generator().manual_seed(2))[:rows]
    at = torch.arange(WIDTH).expand(rows, -1)
    network = CachedNetwork(model, causal, WIDTH + 1)
    pieces = zip(text.split(width, 1), at.split(width, 1))
    with torch.inference_mode():
        return torch.cat([network(x, p, keep=x.shape[1]).logits for x, p in pieces], 1)[0]


def same(model):
    alone = logits(model, 1, 1)
    others = [logits(model, width, rows) for width in (1, 4, WIDTH) for rows in (1, ROWS)]
    return all(torch.allclose(x, alone, atol=2e-4, rtol=1e-4) for x in others)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_and_width_change_nothing(kind):
    model = model_of(kind)
    assert same(model)
    params = SamplingParams(24, temperature=1.0, ignore_eos=True)
    plain = PlainSampler(model, tokenizer())
    alone = [ids(plain.generate([p], params, seeds=[n]))[0] for n, p in enumerate(PROMPTS)]
    for sampler in (plain, JacobiSampler(model, tokenizer(), block_size=7)):
        assert ids(sampler.generate(PROMPTS, params, seeds=[0, 1, 2])) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_experts_with_a_capacity_would_fail(kind):
    """Negative control: tokens beyond the first four of a pass get no expert."""
    model = model_of(kind)

    def full(module, given, output):
        found = output[0] if isinstance(output, tuple) else output
        flat = found.flatten(0, -2).clone()
        flat[4:] = 0
        found = flat.view(found.shape)
        return (found, *output[1:]) if isinstance(output, tuple) else found

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(full)
    assert not same(model)
