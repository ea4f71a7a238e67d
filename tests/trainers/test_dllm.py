"""All blocks in one forward against one block at a time, the loss by hand, and the recipe."""

import json
import math

import pytest
import torch

from data.corruption.noised_blocks import NoisedBlocks
from data.text.tokenizer import with_mask_token
from decoding.engine.params import SamplingParams
from decoding.loading import load
from models.blockwise import denoised_logits
from tests.support import tiny
from tests.support.denoising import KINDS, V, network, sees
from trainers.base import Optimization
from trainers.dllm import BlockDiffusion
from trainers.losses.dllm import denoise

SPAN = 3


def sample(attention, seed=0):
    """One document of eight tokens and another of three, noised."""
    corruption = NoisedBlocks(attention, SPAN, with_mask_token(tiny.tokenizer(V)))
    row = {
        "input_ids": torch.tensor([5, 3, 8, 1, 2, 9, 7, 4, 6, 0, 11]),
        "document": torch.tensor([0] * 8 + [1] * 3),
        "position": torch.tensor([*range(8), *range(3)]),
        "trained": torch.ones(11, dtype=torch.long),
    }
    noised = corruption(row, torch.Generator().manual_seed(seed))
    return {key: x[None] for key, x in noised.items()}


@torch.no_grad()
def one_block_at_a_time(model, batch, attention):
    """Logits [S, V] by a forward for each block: clean text, then the noised block."""
    S = batch["target"].shape[1]
    noised = batch["input_ids"][0, -S:]
    found, first = [], 0
    for length in (8, 3):
        clean, dirty = batch["target"][0, first : first + length], noised[first : first + length]
        if attention == "bidirectional":
            text, seen = dirty[None], sees(attention, length, SPAN)[None, None]
            found.append(model(text, attention_mask=seen).logits[0])
        else:
            for start in range(0, length, SPAN):
                text = torch.cat([clean[:start], dirty[start : start + SPAN]])[None]
                seen = sees(attention, text.shape[1], SPAN)[None, None]
                found.append(model(text, attention_mask=seen).logits[0, start:])
        first += length
    return torch.cat(found)


@pytest.mark.parametrize("attention", KINDS)
def test_one_forward_trains_every_block_as_decoding_sees_it(attention):
    model = network(scale=1.5)
    for seed in range(3):
        batch = sample(attention, seed)
        with torch.no_grad():
            found = denoised_logits(model, batch, attention, SPAN)[0]
        assert torch.allclose(found, one_block_at_a_time(model, batch, attention), atol=1e-10)


def test_another_block_size_fails_the_same_test():
    model, batch = network(scale=1.5), sample("block_causal")
    with torch.no_grad():
        wrong = denoised_logits(model, batch, "block_causal", SPAN + 1)[0]
    assert (wrong - one_block_at_a_time(model, batch, "block_causal")).abs().max() > 1e-3


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3)]]])
    loss, weight = denoise(
        logits, torch.tensor([[0, 1]]), torch.tensor([[True, False]]), torch.tensor([[0.5, 0.25]])
    )
    assert loss[0].tolist() == pytest.approx([math.log(2), math.log(4 / 3)])
    assert weight.tolist() == [[2, 0]]


def test_the_modules_weights_need_no_forward():
    module = BlockDiffusion(
        network().float(), None, Optimization(1e-3), attention="block_causal", block_size=SPAN
    )
    batch = sample("block_causal")
    assert torch.equal(module.losses(batch)[1], module.weight(batch))
    assert set(module.evaluate(batch)) == {"loss", "accuracy"}


def test_an_unknown_attention_is_asked_for():
    with pytest.raises(ValueError, match=r"attention='prefix'.*attention=block_causal"):
        BlockDiffusion(None, None, Optimization(1e-3), attention="prefix", block_size=4)


@pytest.mark.parametrize("attention", KINDS)
def test_the_recipe_trains_exports_and_decodes(lab, attention):
    name = "null" if attention == "block_causal" else attention
    export = lab.fit("dllm_block", f"name={name}", f"module.attention={attention}")
    config = json.loads((export / "config.json").read_text())["parade"]
    assert (config["method"], config["attention"], config["block_size"]) == (
        "denoise",
        attention,
        4,
    )
    assert "val_accuracy" in (export.parent / "metrics.csv").read_text()
    sampler = load(str(export), sampler=["tokens_per_step=2"])
    (result,) = sampler.generate(["def "], SamplingParams(8, 0, ignore_eos=True))
    assert len(result.token_ids) == 8
    assert result.stats.target_passes <= 6
    assert max(result.token_ids) < config["mask_id"]


def test_the_paper_scale_trains_on_small_inputs(lab):
    start = lab.fit("ar_target")
    small = ["trainer.workers=0", "trainer.compile=false", "trainer.checkpoint_every=4"]
    export = lab.fit("dllm_block", "name=paper", "scale=paper", f"start={start}", *small)
    assert load(str(export)).attention == "block_causal"
