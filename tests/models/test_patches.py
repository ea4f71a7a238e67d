"""The causal patch transformer and its heads: who sees whom, the densities, the folder."""

from itertools import pairwise

import pytest
import torch

from models import patches
from models.denoising import DiffusionSchedule, kernels, noised, posterior, signal
from models.densities import Gaussian
from models.patches import PatchConfig, PatchTransformer, from_config, load, mar
from tests.support import images
from tests.support.drawing import TorchRandomness


def batch(network, B=2):
    generator = torch.Generator().manual_seed(0)
    N, D = network.config.tokens, network.config.dim
    patches = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(N, generator=generator) for _ in range(B)])
    return {"patches": patches, "label": torch.arange(B) % 3, "order": order}


def test_a_token_sees_what_precedes_it_in_the_order_and_nothing_else():
    network = images.model(size=3)
    given = batch(network)
    z = network(**given)
    for j in range(9):
        other = given["patches"].clone()
        other[:, j] += 1
        changed = (network(**{**given, "patches": other}) - z).abs().amax((0, 2)) > 1e-9
        assert changed.tolist() == [i > j for i in range(9)]


def test_class_and_order_matter():
    network = images.model()
    given = batch(network)
    z = network(**given)
    for key, other in (("label", given["label"] + 1), ("order", given["order"].flip(1))):
        assert ((network(**{**given, key: other}) - z).abs().amax((0, 2)) > 1e-6).all()


@pytest.mark.parametrize("head", images.HEADS)
def test_a_folder_gives_the_same_model(head, tmp_path):
    network = images.model(head, order="random").float()
    network.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    again = load(str(tmp_path)).eval()
    assert torch.equal(again(**again.dummy_inputs), network(**network.dummy_inputs))
    assert again.config.order == "random"
    assert again.head.schedule == network.head.schedule
    x, z = torch.zeros(1, 1), torch.ones(1, 16)
    for ours, theirs in zip(network.head.kernel(0, x, z), again.head.kernel(0, x, z)):
        torch.testing.assert_close(ours, theirs)


def test_new_heads_start_without_modulation():
    heads = {"diffusion": {**images.HEADS["diffusion"], "depth": 2}}
    del heads["diffusion"]["kind"]
    network = from_config("diffusion", heads, backbone=SMALL)
    assert not network.head.out.weight.any()
    assert not network.head.blocks[0].modulation.linear.weight.any()
    assert network.head.token.weight.any()


SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
MISTAKES = [
    ({"patch": 3}, "patch=3.*size=8"),
    ({"order": "spiral"}, "order 'spiral'"),
    ({"head": {"kind": "flow"}}, "head 'flow'"),
    ({"head": {"kind": "mixture"}}, "components"),
    ({"head": images.HEADS["diffusion"] | {"stpes": 3}}, "stpes"),
    ({"head": images.HEADS["diffusion"] | {"steps": 1}}, "steps=1"),
    ({"head": images.HEADS["diffusion"] | {"variance": "none"}}, "variance 'none'"),
]


@pytest.mark.parametrize(("config", "message"), MISTAKES)
def test_mistakes_are_one_line(config, message):
    config = {"head": images.HEADS["mixture"]} | config
    with pytest.raises(ValueError, match=message) as error:
        PatchTransformer(PatchConfig(backbone=SMALL, **config))
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_one_line():
    with pytest.raises(ValueError, match="/nowhere/at/all") as error:
        load("/nowhere/at/all")
    assert "\n" not in str(error.value)


class TestDenoising:
    def test_the_signal_falls_from_one_to_its_least(self):
        abar = signal(1000)
        assert abar[0] == pytest.approx(1, abs=1e-3)
        assert all(a > b for a, b in pairwise(abar))
        assert abar[-1] < 1e-8
        assert signal(1000, 0.01)[-1] == pytest.approx(0.01, rel=1e-3)

    @pytest.mark.parametrize("variance", ["small", "large"])
    def test_a_chain_that_knows_the_noise_ends_at_the_token(self, variance):
        """x_0 given: the true posterior, whose mean and variance are DDPM's Eq. 6 and 7."""
        schedule = DiffusionSchedule(1000, 20, 0.001)
        times = [k.time for k in kernels(schedule)]
        abars = [signal(1000, 0.001)[t] for t in times]
        token = torch.tensor([0.7])
        for i, kernel in enumerate(kernels(schedule)[:-1]):
            x = torch.tensor([-0.4])
            noise = (x - abars[i] ** 0.5 * token) / (1 - abars[i]) ** 0.5
            mean, std = posterior(x, noise, None, kernel, variance)
            before, alpha = abars[i + 1], abars[i] / abars[i + 1]
            expected = before**0.5 * (1 - alpha) / (1 - abars[i]) * token
            expected += alpha**0.5 * (1 - before) / (1 - abars[i]) * x
            torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-5)
            scale = {"small": (1 - before) / (1 - abars[i]), "large": 1.0}[variance]
            assert std.item() ** 2 == pytest.approx((1 - alpha) * scale, rel=1e-4)

    def test_the_last_step_keeps_its_noise_unless_told_otherwise(self):
        *_, before, last = kernels(DiffusionSchedule(100, 10))
        assert last.small == before.small > -20
        assert kernels(DiffusionSchedule(100, 10, 0.0, False))[-1].small == float("-inf")

    def test_a_last_step_without_noise_has_none_of_a_learned_variance_either(self):
        kernel = kernels(DiffusionSchedule(100, 10, 0.0, False))[-1]
        x = torch.ones(5)
        mean, std = posterior(x, x, torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]), kernel, "learned")
        assert not std.any()
        assert mean.isfinite().all()

    @pytest.mark.parametrize("steps", [2, 21, 25, 100, 1000])
    def test_times_are_rounded_sums_of_the_stride(self, steps):
        """As published programs respace; 21 steps differ from rounded multiples."""
        times, at = [], 0.0
        for _ in range(steps):
            times.append(round(at))
            at += 999 / (steps - 1)
        assert [k.time for k in reversed(kernels(DiffusionSchedule(1000, steps)))] == times
        multiples = [round(i * 999 / (steps - 1)) for i in range(steps)]
        assert (times == multiples) == (steps != 21)

    def test_another_chain_of_the_same_weights(self):
        head = images.model("diffusion").head
        head.respace(steps=7)
        assert head.steps == len(kernels(head.schedule)) == 7
        assert head.schedule.noise_steps == 50
        with pytest.raises(ValueError, match="steps=51"):
            head.respace(steps=51)
        assert head.steps == 7

    def test_a_learned_variance_lies_between(self):
        kernel = kernels(DiffusionSchedule(100, 10))[4]
        x = torch.zeros(3)
        _, std = posterior(x, x, torch.tensor([-1.0, 0.0, 1.0]), kernel, "learned")
        for value, log in zip(std, (kernel.small, (kernel.small + kernel.large) / 2, kernel.large)):
            assert 2 * value.log().item() == pytest.approx(log, rel=1e-5)

    def test_noised_tokens(self):
        schedule = DiffusionSchedule(100, 10)
        x = noised(torch.ones(100, 1), torch.arange(100), torch.zeros(100, 1), schedule)
        assert torch.allclose(x[:, 0] ** 2, torch.tensor(signal(100)), atol=1e-6)

    def test_the_chain_of_white_noise_keeps_its_distribution(self):
        """Tokens that are N(0, 1) themselves: eps is known, and large variances are then exact."""
        schedule = DiffusionSchedule(1000, 10, 0.01)
        randomness = TorchRandomness(0)
        x = randomness.normal((100_000, 1))
        for kernel in kernels(schedule):
            abar = signal(1000, 0.01)[kernel.time]
            x = Gaussian(*posterior(x, (1 - abar) ** 0.5 * x, None, kernel, "large")).sample(
                randomness
            )
        assert x.std().item() == pytest.approx(1, abs=0.01)


def test_guidance_of_one_is_no_guidance_and_of_zero_is_no_class():
    for head in images.HEADS:
        network = images.model(head)
        x, z, free = (
            torch.ones(2, 1).double(),
            torch.ones(2, 16).double(),
            torch.zeros(2, 16).double(),
        )
        for scale, same in ((1.0, z), (0.0, free)):
            ours = network.head.kernel(0, x, z, (free, torch.full((2,), scale)))
            theirs = network.head.kernel(0, x, same)
            torch.testing.assert_close(ours.mean, theirs.mean)


def test_sizes_of_mar(monkeypatch):
    monkeypatch.setitem(patches.MAR, "B", (128, 1, 16, 2))
    given = {"heads": {"diffusion": {"steps": 5}}, "size": 2, "patch": 1}
    network = mar("B", "diffusion", **given)
    assert network.backbone.config.num_attention_heads == 2
    assert network.head.token.out_features == 16
    # A size that is given counts.
    wide = mar("B", "diffusion", **given, backbone={"num_attention_heads": 4})
    assert wide.backbone.config.num_attention_heads == 4


def test_a_head_of_odd_numbers():
    given = images.HEADS["mixture"]
    network = images.model(head=given | {"least_std": 10**20})  # more than 64 bits hold
    z = network(**network.dummy_inputs | {"patches": batch(network, 1)["patches"]})
    assert network.head(z).std.min() >= 1e20
    with pytest.raises(ValueError, match="a mixture head cannot be made of"):
        images.model(head=given | {"least_std": 10**400})
