"""Every sampler says on any device what it says on the CPU. Where there is a GPU, also there."""

from dataclasses import replace

import pytest
import torch

from decoding.continuous.image_state import ImageParams
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.masked.draft_graph import graph_of
from decoding.samplers.asarm import AsarmSampler
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.deer import DeerSampler
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.jacobi_mr import JacobiMRSampler
from decoding.samplers.plain import PlainSampler
from decoding.samplers.sequential import SequentialSampler
from tests.support import denoising, images, subsets, tiny
from tests.support.runs import curve

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
V = 12
_ = None
PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9]]
HOLES = [[3, _, _, _, 7, _, _], [2, 7, 1, _, _, _, _, _, _], [_, _, 5, _]]
SEEDS = [5, 71, 3]
CHAIN = [[(i, 1) for i in range(1, n + 1)] for n in range(1, denoising.L + 1)]


def target(device, seed=0, more=0):
    return tiny.causal_lm(V + more, seed=seed).to(device)


def plain(device):
    return PlainSampler(target(device), tiny.tokenizer(V))


def deer(device):
    drafter = target(device, seed=1, more=2)
    return DeerSampler(
        target(device), tiny.tokenizer(V), drafter, block_size=4, mask_id=V, sep_id=V + 1
    )


def infiller(model, draft):
    return AsarmSampler(model, tiny.tokenizer(V), mask_id=V, draft=draft, block_size=3)


def subset(draft):
    return lambda device: infiller(subsets.network(V).to(device), draft)


def xlnet(draft):
    return lambda device: infiller(subsets.xlnet(V).to(device), draft)


def blocks(attention):
    return lambda device: denoising.denoise(denoising.network().to(device), attention)


def spiffy(attention):
    graph = graph_of(denoising.L, 1, CHAIN)
    return lambda device: denoising.spiffy(denoising.network().to(device), attention, graph)


# Name: the sampler, how it verifies, what it is fed, and the plain way whose text it must give
# (None: only the distribution is the same; the text is that of its own draws).
WAYS = {
    "deer, coupled": (deer, "coupled", PROMPTS, plain),
    "deer, tree": (deer, "tree", PROMPTS, plain),
    "deer, rejection": (deer, "rejection", PROMPTS, None),
    "deer, block": (deer, "block", PROMPTS, None),
    "jacobi": (
        lambda device: JacobiSampler(target(device), tiny.tokenizer(V), block_size=5),
        "coupled", PROMPTS, plain,
    ),
    "jacobi_mr": (
        lambda device: JacobiMRSampler(target(device), tiny.tokenizer(V), block_size=4),
        "coupled", PROMPTS, plain,
    ),
    "assd": (subset("assd"), "coupled", HOLES, subset("sequential")),
    "assd_fused": (subset("assd_fused"), "tree", HOLES, subset("sequential")),
    "assd, rejection": (subset("assd"), "rejection", HOLES, None),
    "xlnet": (xlnet("assd_fused"), "coupled", HOLES, xlnet("sequential")),
    "spiffy, appended": (
        spiffy("block_causal"), "coupled", PROMPTS, blocks("block_causal")
    ),
    "spiffy, batched": (
        spiffy("bidirectional"), "coupled", PROMPTS, blocks("bidirectional")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", WAYS)
def test_a_text_is_the_cpus(name, temperature, device):
    make, verify, prompts, reference = WAYS[name]
    common = SamplingParams(max_new_tokens=12, temperature=temperature)
    params = replace(common, verify=verify)
    found = make(device).generate(prompts, params, seeds=SEEDS)
    given = (make, params) if reference is None else (reference, common)
    expected = given[0]("cpu").generate(prompts, given[1], seeds=SEEDS)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", ["mixture", "diffusion"])
def test_an_image_is_the_cpus(head, device):
    def drawn(device, speculative):
        pair = [network.to(device) for network in images.pair(head)]
        sampler = CspdSampler(*pair, gamma=2) if speculative else SequentialSampler(pair[0])
        results = sampler.generate([0, 1, 2], ImageParams(seed=4))
        return torch.stack([r.patches.cpu() for r in results])

    # The diffusion head embeds times in float32, as published, and devices round cos differently.
    atol = {"mixture": 1e-6, "diffusion": 1e-5}[head]
    for speculative in (False, True):
        assert torch.allclose(drawn(device, speculative), drawn("cpu", speculative), atol=atol)
    assert not torch.allclose(drawn(device, True), drawn("cpu", False), atol=atol)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_the_cpus(device):
    positions = torch.arange(7).expand(3, -1)
    here, there = KeyedRandomness(SEEDS, device), KeyedRandomness(SEEDS)
    assert torch.equal(here._uniform((3, 50)).cpu(), there._uniform((3, 50)))
    noise = here.gumbel(positions.to(device), 999).cpu()
    assert torch.allclose(noise, there.gumbel(positions, 999), rtol=1e-5, atol=1e-5)


@GPU
@pytest.mark.parametrize("recipe", ["ar_target", "diffusion_adapt", "deer_stage1", "deer_stage2"])
def test_a_gpu_trains_with_block_masks_as_the_cpu_does(lab, recipe):
    key = {"ar_target": None, "diffusion_adapt": "network.source"}.get(recipe, "network")
    flex = [f"+{key}.attention=flex_attention"] if key else []  # the target is made anew
    lab.fit(recipe, "name=gpu", "trainer.log_every=1", "trainer.accelerator=cuda", *flex)
    lab.fit(recipe, "name=cpu", "trainer.log_every=1")
    here, there = (curve(lab.runs / recipe / name) for name in ("gpu", "cpu"))
    assert here.keys() == there.keys() == {1, 2, 3, 4}
    assert [*here.values()] == pytest.approx([*there.values()], rel=1e-3)
