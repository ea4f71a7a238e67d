"""Speculative decoding of continuous tokens has the distribution of sequential decoding.

Both run on tiny random models, and the samples are compared: energy distance with a permutation
test, and Kolmogorov-Smirnov of every token. The drafter alone and the published rules fail.
"""

import pytest
import torch

from decoding.continuous.image_state import ImageBatch, ImageParams, PatchNetwork, guidance_scale
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.sequential import SequentialSampler
from tests.support import images
from tests.support.image_samples import (
    check_alone,
    check_always_accepted,
    check_other,
    check_same,
    drawn,
)

CASES = [
    ("mixture", {}),
    ("mixture", {"guidance": 2.0, "guidance_schedule": "linear", "temperature": 0.8}),
    ("diffusion", {}),
    ("diffusion", {"guidance": 2.0, "temperature": 0.9}),
    ("diffusion", {"coupled": 2}),
    ("diffusion", {"align": False}),
    ("learned", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("head", "params"), CASES)
def test_the_distribution_is_that_of_sequential_decoding(head, params):
    target, drafter = images.pair(head)
    plain, _ = drawn(SequentialSampler(target), 1, **params)
    accepted = check_same(CspdSampler(target, drafter, gamma=2), plain, **params)
    assert 0.005 < accepted < 0.98  # both outcomes were seen


WRONG = [
    ("mixture", 42.0),
    # A chain's log-ratios are hundreds: to accept as much as 42 does elsewhere takes more.
    ("learned", 1e4),
    ("diffusion", 1e4),
]


@pytest.mark.parametrize(("head", "inner_temperature"), WRONG)
def test_other_distributions_are_rejected(head, inner_temperature):
    target, drafter = images.pair(head)
    plain, _ = drawn(SequentialSampler(target), 1)
    sampler = CspdSampler(target, drafter, gamma=2)
    relaxed = {"verify": "relaxed", "lossy": True, "inner_temperature": inner_temperature}
    check_other(drawn(SequentialSampler(drafter), 2)[0], plain)
    check_other(drawn(sampler, 2, **relaxed)[0], plain)


@pytest.mark.parametrize("order", ["raster", "random"])
@pytest.mark.parametrize("head", images.HEADS)
def test_sequential_decoding_is_the_plain_chain(head, order):
    """By full forwards without a cache, number for number."""
    target = images.model(head, order=order)
    labels, seeds = [0, 2, 1], [3, 4, 5]
    params = ImageParams(guidance=1.5, guidance_schedule="linear", temperature=0.9)
    results = SequentialSampler(target).generate(labels, params, seeds=seeds)
    randomness = KeyedRandomness(seeds)
    positions = torch.arange(4).expand(3, -1)
    if order == "random":
        positions = randomness.normal((3, 4)).argsort(-1)
    with torch.no_grad():
        expected = images.plain(target, torch.tensor(labels), positions, params, randomness)
    for b, result in enumerate(results):
        torch.testing.assert_close(
            result.patches, expected[b][positions[b].argsort()], rtol=0, atol=1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize("head", images.HEADS)
@pytest.mark.parametrize("options", [{}, {"order": "random"}])
@pytest.mark.parametrize(("prefill", "sizes"), [(0.25, [None, 3]), (0.0, [1, 3, 20])])
def test_a_row_is_the_same_alone_and_in_a_ragged_batch(head, options, prefill, sizes):
    """Also where it takes the place of one that has ended."""
    target, drafter = images.pair(head, strength=0.03, size=3, **options)
    params = ImageParams(guidance=1.3, prefill=prefill)
    ragged = check_alone(CspdSampler(target, drafter, gamma=3), params, sizes)
    assert len({len(r.stats.emitted) for r in ragged}) > 1
    for result in [*ragged, *check_alone(SequentialSampler(target), params, sizes)]:
        # It took part in passes from its own beginning to its end.
        assert result.stats.target_passes == len(result.stats.emitted)


def test_a_batch_does_not_wait_for_its_slowest_row():
    target, drafter = images.pair(strength=0.1, size=4)
    sampler, seeds, passes = CspdSampler(target, drafter, gamma=3), list(range(24)), []
    target.backbone.register_forward_hook(lambda *_: passes.append(1))
    results = sampler.generate([0] * 24, seeds=seeds, at_once=3)
    refilled = len(passes)
    needed = [r.stats.target_passes for r in results]
    slowest = sum(max(needed[b : b + 3]) for b in range(0, 24, 3))  # of batches one by one
    assert sum(needed) / 3 <= refilled < slowest


def test_a_drafter_that_is_the_target_is_always_accepted():
    for head in images.HEADS:
        check_always_accepted(images.model(head, size=3), [1], ImageParams(seed=0))


@pytest.mark.parametrize("head", ["mixture", "diffusion"])
def test_the_target_sees_gamma_tokens_in_one_pass_as_in_gamma_passes(head):
    target = images.model(head, size=3)
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(2, 10, 1, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(2)])
    rows = ImageBatch(torch.tensor([0, 2]), order, patches, KeyedRandomness([0, 1]), [0, 1])
    one, many = (PatchNetwork(target, 12, True) for _ in "ab")
    start = torch.tensor([[0], [0]])
    ragged = torch.tensor([[4], [2]])
    with torch.no_grad():
        for network in (one, many):  # the cache up to different lengths
            network(rows, start + torch.arange(5))
        wide = one(rows, ragged + torch.arange(4))
        single = [many(rows, ragged + j) for j in range(4)]
    for half in range(2):
        narrow = torch.cat([s[half] for s in single], 1)
        torch.testing.assert_close(wide[half], narrow, rtol=0, atol=1e-9)


def test_prefilled_tokens_are_the_targets():
    target, drafter = images.pair(size=3)
    sampler = CspdSampler(target, drafter, gamma=2)
    (result,) = sampler.generate([0], ImageParams(seed=1, prefill=0.34))
    assert result.stats.emitted[:3] == [1, 1, 1]
    assert not result.accepted[:3].any()
    (all_of_it,) = sampler.generate([0], ImageParams(seed=1, prefill=1.0))
    (plain,) = SequentialSampler(target).generate([0], ImageParams(seed=1))
    torch.testing.assert_close(all_of_it.patches, plain.patches)
    assert all_of_it.stats.drafter_passes == 0


def test_the_share_of_the_export_counts_where_a_request_gives_none():
    target, drafter = images.pair(size=3)
    sampler = CspdSampler(target, drafter, gamma=2, prefill=0.34)
    emitted = sampler.generate([0], ImageParams(seed=1))[0].stats.emitted
    given = CspdSampler(target, drafter, gamma=2)
    assert emitted == given.generate([0], ImageParams(seed=1, prefill=0.34))[0].stats.emitted
    assert emitted[:3] == [1, 1, 1]
    none = sampler.generate([0], ImageParams(seed=1, prefill=0.0))[0].stats.emitted
    assert none == given.generate([0], ImageParams(seed=1))[0].stats.emitted
    assert none != emitted


def test_alignment_raises_the_acceptance():
    sampler = CspdSampler(*images.pair("diffusion", strength=0.05), gamma=2)
    shares = [
        torch.stack([r.accepted for r in drawn(sampler, 3, 600, align=a)[1]]).double().mean()
        for a in (True, False)
    ]
    assert shares[0] > shares[1] + 0.1


def test_guidance_schedules():
    index = torch.arange(4)
    linear = ImageParams(guidance=3.0, guidance_schedule="linear")
    assert guidance_scale(index, 4, linear).tolist() == [1.5, 2.0, 2.5, 3.0]
    assert guidance_scale(index, 4, ImageParams(guidance=3.0)).tolist() == [3.0] * 4


BAD = [
    ({"gamma": 0}, "gamma=0"),
    ({"prefill": 1.5}, "prefill=1.5"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"guidance_schedule": "cosine"}, "guidance_schedule 'cosine'"),
    ({"verify": "loose"}, "verify 'loose'"),
    ({"verify": "relaxed"}, "lossy=true"),
]


@pytest.mark.parametrize(("params", "message"), BAD)
def test_bad_parameters_are_one_line(params, message):
    with pytest.raises(ValueError, match=message) as error:
        ImageParams(**params)
    assert "\n" not in str(error.value)


OTHERS = [
    ({"patch": 2}, "patch=2"),
    ({"order": "random"}, "order='random'"),
    ({"classes": 4}, "classes=4"),
    ({"head": images.HEADS["diffusion"] | {"steps": 5}}, "steps=5"),
    ({"head": images.HEADS["mixture"]}, "mixture head"),
]


@pytest.mark.parametrize(("config", "message"), OTHERS)
def test_models_that_do_not_fit_are_one_line(config, message):
    target = images.model("diffusion")
    with pytest.raises(ValueError, match=message) as error:
        CspdSampler(target, images.model("diffusion", **config), gamma=2)
    assert "\n" not in str(error.value)


def test_a_chain_that_ends_without_noise_is_refused():
    head = images.HEADS["diffusion"] | {"noisy_last": False, "variance": "small"}
    target = images.model("diffusion", head=head)
    with pytest.raises(ValueError, match="no density"):
        CspdSampler(target, target, gamma=2)
    SequentialSampler(target).generate([0], ImageParams(seed=0))  # plainly it can be sampled


def test_classes_seeds_and_rows_that_cannot_be():
    target, _ = images.pair()
    with pytest.raises(ValueError, match=r"class 3 .* 0 to 2"):
        SequentialSampler(target).generate([0, 3])
    with pytest.raises(ValueError, match="no class"):
        SequentialSampler(target).generate([])
    with pytest.raises(ValueError, match=r"2 seeds .* 1 classes"):
        SequentialSampler(target).generate([0], seeds=[1, 2])
    with pytest.raises(ValueError, match=r"\b0 images"):
        SequentialSampler(target).generate([0], at_once=0)
