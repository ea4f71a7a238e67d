"""Models whose layers have windows: texts and logits are transformers' own, past the window too."""

import pytest
import torch

from decoding.engine import cache
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.samplers.deer import DeerSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from models import windows
from models.diffusion import from_causal_lm
from models.masks import causal, sliding
from tests.support import tiny
from tests.support.arrivals import texts_of
from tests.support.exact import distance
from tests.support.results import ids
from tests.support.windowed import KINDS, LENGTH, PROMPTS, WINDOW, V, causal_lm, tokenizer

SEEDS = [5, 71, 3]


def filling(prompt, **options):
    """Parameters by which a text has `LENGTH` tokens."""
    options = {"temperature": 0.0, "ignore_eos": True} | options
    return SamplingParams(LENGTH - len(prompt), **options)


def answers(sampler, **options):
    """Answers of a batch of prompts of different lengths."""
    return ids(sampler.generate(PROMPTS, [filling(p, **options) for p in PROMPTS], seeds=SEEDS))


def stock(model):
    """Answers of transformers' greedy generate, each prompt alone, with its own cache."""
    options = {"do_sample": False, "pad_token_id": 0}
    rows = [
        model.generate(torch.tensor([p]), max_new_tokens=LENGTH - len(p), **options)[0, len(p) :]
        for p in PROMPTS
    ]
    return [row.tolist() for row in rows]


def pard(model, kind, k=6):
    """A drafter of the same class with the target's weights, of which some are a little off."""
    drafter = causal_lm(kind)
    with torch.no_grad():
        drafter.get_output_embeddings().weight.add_(
            0.2 * torch.randn(V, 16, generator=torch.Generator().manual_seed(3))
        )
    return DeerSampler(model, tokenizer(), drafter, block_size=k, mask_id=0, attention="causal")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_transformers_own(kind):
    model = causal_lm(kind)
    expected = stock(model)
    assert answers(PlainSampler(model, tokenizer())) == expected
    assert answers(JacobiSampler(model, tokenizer(), block_size=WINDOW + 2)) == expected
    drafted = pard(model, kind)
    for verify in ("coupled", "tree"):
        assert answers(drafted, verify=verify) == expected
    assert max(len(set(text)) for text in expected) > 4  # texts in which something happens


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers_own_at_every_position(kind):
    model = causal_lm(kind)
    text = torch.randint(V, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.inference_mode():
        expected = model(text).logits
        for width in (LENGTH, 5, 1):
            network = CachedNetwork(model, causal, LENGTH + 1)
            pieces = zip(text.split(width, 1), positions.split(width, 1))
            found = torch.cat([network(x, at, keep=x.shape[1]).logits for x, at in pieces], 1)
            assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "llama4_text", "mistral", "qwen3"])
def test_a_mask_without_the_window_or_off_by_one_is_another_text(kind, monkeypatch):
    """Negative controls."""
    model = causal_lm(kind)
    expected = stock(model)
    plain = PlainSampler(model, tokenizer())
    with monkeypatch.context() as patch:
        patch.setattr(cache, "windows_of", lambda config: None)
        assert answers(plain) != expected
    wider = {kind: (key, lambda n, f=f: f(n + 1)) for kind, (key, f) in windows.KINDS.items()}
    monkeypatch.setattr(windows, "KINDS", wider)
    assert answers(plain) != expected


def test_a_tree_s_node_counts_its_window_by_depth(monkeypatch):
    """Negative control: by slots, of which siblings have many, a node would lose keys."""
    model = causal_lm("mistral")
    expected = stock(model)
    assert answers(pard(model, "mistral"), verify="tree") == expected
    branched = cache._branched

    def by_slot(q, k, slots, branch):
        q, k = branched(q, k, slots, branch)
        own = torch.arange(k.index.shape[1]).expand_as(k.index)
        return q._replace(position=slots), k._replace(position=own)

    monkeypatch.setattr(cache, "_branched", by_slot)
    assert answers(pard(model, "mistral"), verify="tree") != expected


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_requests_that_come_and_leave_and_prompts_in_pieces(kind):
    model = causal_lm(kind)
    params = filling(PROMPTS[1], temperature=1.0)
    samplers = [PlainSampler(model, tokenizer()), pard(model, kind)]
    samplers.append(JacobiMRSampler(model, tokenizer(), block_size=4))
    expected = [
        ids(samplers[0].generate([p], params, seeds=[s]))[0] for p, s in zip(PROMPTS, SEEDS)
    ]
    for sampler in samplers:
        for pieces in (None, 3):
            found = texts_of(sampler, params, PROMPTS, SEEDS, [(2, -1), (0, -1), (1, -1)], pieces)
            assert [found[n] for n in range(3)] == expected


@pytest.mark.parametrize("verify", ["coupled", "tree"])
def test_drafters_with_a_window_of_their_own(verify):
    """Texts are the target's own past every window, and the window decides what is accepted."""
    model = tiny.causal_lm(V, layers=3, scale=1.0).float()
    params = [filling(p, temperature=1.0, verify=verify) for p in PROMPTS]
    expected = ids(PlainSampler(model, tokenizer()).generate(PROMPTS, params, seeds=SEEDS))
    passes = {}
    for window in (None, WINDOW, WINDOW + 1):
        drafter = from_causal_lm(model, tokenizer(), window=window)
        options = {"block_size": 6, "mask_id": 0, "attention": "causal"}
        sampler = DeerSampler(model, tokenizer(), drafter, **options)
        found = sampler.generate(PROMPTS, params, seeds=SEEDS)
        assert ids(found) == expected
        for pieces in (None, 3):
            arrived = texts_of(
                sampler, params[1], PROMPTS, SEEDS, [(2, -1), (0, -1), (1, -1)], pieces
            )
            alone = sampler.generate([PROMPTS[1]], params[1], seeds=SEEDS[1:2])
            assert arrived[1] == alone[0].token_ids
        passes[window] = sum(r.stats.target_passes for r in found)
    assert len({*passes.values()}) == 3  # the control


def windowed(vocabulary, window=2, seed=0):
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"use_sliding_window": True, "sliding_window": window}
    return tiny.causal_lm(vocabulary, seed=seed, kind="qwen3", **layers, **sizes)


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_the_exact_distribution_past_the_window(verify, monkeypatch):
    target, drafter = windowed(3), windowed(5, seed=1)
    sampler = DeerSampler(target, tiny.tokenizer(3), drafter, block_size=2, mask_id=3, sep_id=4)
    params = SamplingParams(max_new_tokens=2, verify=verify)
    assert distance(sampler, params) <= 1e-9
    wider = windows.KINDS | {"sliding_attention": ("sliding_window", lambda n: sliding(n + 1))}
    monkeypatch.setattr(windows, "KINDS", wider)
    assert distance(sampler, params) > 1e-3  # the control


def test_a_text_within_the_window_has_one_mask(monkeypatch):
    """It costs what it costs without windows."""
    model, seen = causal_lm("qwen3"), []
    run = CachedNetwork.run

    def noted(self, tokens, positions, slots, mask, *others):
        seen.append(isinstance(mask, dict))
        return run(self, tokens, positions, slots, mask, *others)

    monkeypatch.setattr(CachedNetwork, "run", noted)
    PlainSampler(model, tokenizer()).generate([[1]], SamplingParams(WINDOW, temperature=0))
    assert not any(seen)
    PlainSampler(model, tokenizer()).generate([[1]], SamplingParams(WINDOW + 1, temperature=0))
    assert any(seen)
