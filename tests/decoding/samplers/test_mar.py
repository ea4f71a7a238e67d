"""MAR's own sampler by an independent computation, and exact speculation with MARs."""

import sys

import pytest
import torch

from decoding.continuous.image_state import ImageBatch, ImageParams
from decoding.continuous.prefixes import PrefixNetwork
from decoding.engine.randomness import KeyedRandomness
from decoding.images import run
from decoding.loading import load
from decoding.samplers.cspd import CspdSampler
from decoding.samplers.mar import MarSampler, known_after
from decoding.samplers.sequential import SequentialSampler
from models import mar
from tests.support import images
from tests.support.image_samples import (
    check_alone,
    check_always_accepted,
    check_other,
    check_same,
    drawn,
)
from tests.support.mar import (
    EASY,
    AsPublished,
    Program,
    checkpoint,
    model,
    pair,
    published,
    shifted,
)


class TestOwnSampler:
    """`MarSampler` against the program computed again, with its seeds."""

    LABELS = [1, 0, 2, 2]
    CASES = [  # iterations, guidance, schedule, temperature, denoising steps
        (9, 1.0, "linear", 1.0, 100),
        (9, 3.0, "linear", 0.9, 5),
        (4, 2.5, "linear", 1.0, 21),
        (4, 2.5, "constant", 1.1, 5),
        (1, 2.0, "linear", 1.0, 5),
    ]

    def both(self, case, **other):
        iterations, guidance, schedule, temperature, steps = case
        network = model(size=3, channels=2, head={"depth": 2})
        network.head.respace(steps=steps)
        program = Program(published(network), 2, steps)
        with torch.no_grad():
            theirs = program.sample(
                self.LABELS, iterations, guidance, schedule, temperature, seed=5
            )
        sampler = AsPublished(network, iterations=iterations)
        params = {"guidance": guidance, "guidance_schedule": schedule, "temperature": temperature}
        params = ImageParams(**params | {"seed": 5} | other)
        ours = torch.stack([r.patches for r in sampler.sample(self.LABELS, params)])
        # With random weights a chain's x_0 is large: its noise estimate removes no noise.
        return (ours - theirs).abs().max().item() / theirs.abs().max().item()

    @pytest.mark.parametrize("case", CASES)
    def test_the_images_are_the_programs(self, case):
        assert self.both(case) < 1e-9

    @pytest.mark.parametrize("other", [
        {"seed": 6}, {"guidance": 2.4}, {"guidance_schedule": "constant"}, {"temperature": 0.9},
    ])  # fmt: skip
    def test_others_are_not(self, other):
        assert self.both(self.CASES[2], **other) > 1e-5

    @pytest.mark.parametrize("tokens", [1, 4, 9, 16, 256])
    def test_every_pass_makes_a_token_and_the_last_pass_the_rest(self, tokens):
        for iterations in range(1, tokens + 1):
            known = known_after(tokens, iterations)
            assert len(known) == iterations
            assert known[-1] == tokens
            assert all(a < b for a, b in zip([0, *known], known))
        assert known_after(tokens, tokens) == [*range(1, tokens + 1)]
        assert known_after(256, 64)[:4] == [1, 2, 3, 4]
        assert known_after(256, 64)[-1] - known_after(256, 64)[-2] == 6

    @pytest.mark.parametrize("guidance", [1.0, 1.5])
    def test_one_token_a_pass_is_sequential_decoding(self, guidance):
        network = model(size=3, head=EASY)
        params = ImageParams(seed=2, guidance=guidance, guidance_schedule="linear")
        one = MarSampler(network, iterations=9).generate([0, 1], params)
        plain = SequentialSampler(network).generate([0, 1], params)
        some = MarSampler(network, iterations=4).generate([0, 1], params)
        for a, b, c in zip(one, plain, some):
            assert torch.equal(a.patches, b.patches)
            assert a.stats.emitted == b.stats.emitted == [1] * 9
            assert (c.stats.emitted, c.stats.target_passes) == ([1, 2, 3, 3], 4)

    @pytest.mark.slow
    def test_a_row_does_not_depend_on_its_batch(self):
        sampler = MarSampler(model(size=3, head=EASY), iterations=4)
        check_alone(sampler, ImageParams(guidance=1.3), [1, 3, 8])

    def test_mistakes_are_one_line(self):
        network = model()
        wrong = [
            (lambda: MarSampler(network, iterations=0), "iterations=0"),
            (lambda: MarSampler(network, iterations=5), "iterations=5"),
            (lambda: MarSampler(images.model(), iterations=2), "method=mar"),
        ]
        sampler = MarSampler(network, iterations=2)
        wrong += [
            (lambda: sampler.generate([]), "class"),
            (lambda: sampler.generate([0], at_once=0), r"\b0 images"),
        ]
        for call, named in wrong:
            with pytest.raises(ValueError, match=named) as error:
                call()
            assert "\n" not in str(error.value)


def one_row(self, batch, index, keep=0):
    """The published verification: one row, so that no draft is seen by the drafts after it."""
    index = index[:, -keep:].clamp_max(self.network.config.tokens - 1)
    z, free = self.evaluate(batch, index[:, :1], index[:, None])
    return z.squeeze(1), None if free is None else free.squeeze(1)


class TestSpeculation:
    """`CspdSampler` with two MARs against sequential decoding of the target."""

    @pytest.mark.slow
    @pytest.mark.parametrize("params", [
        {}, {"guidance": 2.0, "guidance_schedule": "linear", "temperature": 0.9}, {"coupled": 2},
    ])  # fmt: skip
    def test_the_distribution_is_that_of_sequential_decoding(self, params):
        target, drafter = shifted()
        plain, _ = drawn(SequentialSampler(target), 1, **params)
        accepted = check_same(CspdSampler(target, drafter, gamma=2), plain, **params)
        assert 0.1 < accepted < 0.9  # both outcomes were seen

    @pytest.mark.slow
    def test_other_distributions_are_rejected(self, monkeypatch):
        target, drafter = shifted()
        plain, _ = drawn(SequentialSampler(target), 1)
        sampler = CspdSampler(target, drafter, gamma=2)
        relaxed = {"verify": "relaxed", "lossy": True, "inner_temperature": 1e4}
        samples = [drawn(SequentialSampler(drafter), 2)[0], drawn(sampler, 2, **relaxed)[0]]
        monkeypatch.setattr(PrefixNetwork, "__call__", one_row)
        samples.append(drawn(sampler, 2)[0])
        for wrong in samples:
            check_other(wrong, plain)

    def test_a_drafter_that_is_the_target_is_always_accepted(self):
        target = model(size=3, head=EASY)
        check_always_accepted(target, [1, 2], ImageParams(seed=0, guidance=1.5))

    def test_rows_of_one_pass_are_passes_over_each_prefix(self):
        target = model(size=3, head=EASY)
        generator = torch.Generator().manual_seed(0)
        order = torch.stack([torch.randperm(9, generator=generator) for _ in range(2)])
        patches = torch.randn(2, 13, 1, generator=generator, dtype=torch.float64)
        batch = ImageBatch(torch.tensor([0, 2]), order, patches, KeyedRandomness([0, 1]), [0, 1])
        network, index = PrefixNetwork(target, True), torch.tensor([[5], [2]]) + torch.arange(4)
        both = network(batch, index)
        for b, label in enumerate((0, 2)):
            for j, i in enumerate(index[b].tolist()):
                for z, c in zip(both, (label, 3)):
                    alone = target(
                        patches[b : b + 1, :i], order[b : b + 1, :i], order[b : b + 1, i : i + 1],
                        torch.tensor([c]),
                    )  # fmt: skip
                    torch.testing.assert_close(z[b, j], alone[0, 0], rtol=0, atol=1e-12)
        for kept, z in zip(network(batch, index, 1), both):
            torch.testing.assert_close(kept, z[:, -1:], rtol=0, atol=1e-12)
        published = one_row(network, batch, index)[0]  # negative control
        torch.testing.assert_close(published[:, 0], both[0][:, 0])
        assert ((published - both[0])[:, 1:].abs().amax(-1) > 1e-3).all()

    @pytest.mark.slow
    def test_a_row_does_not_depend_on_its_batch(self):
        target, drafter = pair(0.02, size=3)
        sampler = CspdSampler(target, drafter, gamma=3)
        together = check_alone(sampler, ImageParams(guidance=1.3), [1, 3, 8])
        assert len({len(r.stats.emitted) for r in together}) > 1  # ragged

    def test_a_causal_drafter_drafts_for_a_mar_too(self):
        target, head = model(head=EASY), images.HEADS["learned"]
        drafter = images.model("learned", order="random", head=head)
        (result,) = CspdSampler(target, drafter, gamma=2).generate([1], ImageParams(seed=0))
        assert sum(result.stats.emitted) == 4

    def test_without_noise_in_the_last_step_drafts_are_refused(self):
        target = model(head=EASY | {"noisy_last": False})
        with pytest.raises(ValueError, match="noisy_last=true") as error:
            CspdSampler(target, target, gamma=2)
        assert "\n" not in str(error.value)
        SequentialSampler(target).generate([0], ImageParams(seed=0))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Checkpoints of a target and of a smaller drafter, in the layout of MAR's program."""
    monkeypatch.setitem(mar.PUBLIC_HEADS, 16, 2)
    monkeypatch.setitem(mar.PUBLIC_HEADS, 8, 2)
    half = {"hidden": 8, "layers": 1, "heads": 2}
    target = checkpoint(model(size=3), tmp_path / "large.pth")
    drafter = checkpoint(model(1, size=3, encoder=half, decoder=half), tmp_path / "small.pth")
    return target, drafter


def test_a_file_has_mars_own_sampler(files):
    sampler = load(files[0], sampler=["iterations=4", "steps=5"])
    assert type(sampler) is MarSampler
    assert (len(sampler.counts), sampler.target.head.steps) == (4, 5)
    assert not sampler.target.head.schedule.noisy_last
    assert type(load(files[0], sampler=["method=sequential"])) is SequentialSampler


def test_a_smaller_file_drafts_for_a_larger_one(files):
    knobs = ["method=cspd", "gamma=2", "steps=5", "noisy_last=true"]
    sampler = load(files[1], target=files[0], sampler=knobs)
    assert type(sampler) is CspdSampler
    assert sampler.target.config.encoder["hidden"] == 16
    assert sampler.drafter.config.encoder["hidden"] == 8
    for network in (sampler.target, sampler.drafter):
        assert (network.head.steps, network.head.schedule.noisy_last) == (5, True)
    (result,) = sampler.generate([2], ImageParams(seed=1, guidance=2.0))
    assert result.patches.shape == (9, 1)


def test_the_command_writes_pictures(files, tmp_path, monkeypatch, capsys):
    out, said = tmp_path / "x.png", []
    options = [f"out={out}", "classes=[0,2]", "count=2", "seed=1", "guidance=2"]
    run([f"model={files[0]}", *options, "sampler=[steps=5,iterations=3]"])
    said.append(capsys.readouterr().out)
    assert "3.00 tokens a target pass" in said[0]
    knobs = "sampler=[method=cspd,gamma=2,steps=5,noisy_last=true]"
    run([f"model={files[1]}", f"target={files[0]}", *options, knobs])
    assert out.stat().st_size > 0
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ValueError, match=r"parade\[images\]"):
        run([f"model={files[0]}", *options, "sampler=[steps=5,iterations=3]", "vae=kl16.ckpt"])


WRONG = [
    ({"target": "x"}, "method=cspd"),
    ({"sampler": ["method=cspd"]}, "target="),
    ({"sampler": ["method=cspd"], "target": "self"}, "gamma"),
    ({"sampler": ["method=cspd", "gamma=2"], "target": "self"}, "noisy_last=true"),
    ({"sampler": ["steps=1"]}, "steps=1"),
]


@pytest.mark.parametrize(("options", "named"), WRONG)
def test_what_cannot_be_decoded_is_one_line(options, named, files):
    if options.get("target") == "self":
        options = options | {"target": files[0]}
    with pytest.raises(ValueError) as error:
        load(files[0], **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mixture_head_has_no_chain_to_change(tmp_path):
    images.model().float().save_pretrained(tmp_path)
    load(str(tmp_path), sampler=["method=sequential"])
    with pytest.raises(ValueError, match="mixture head") as error:
        load(str(tmp_path), sampler=["method=sequential", "steps=5"])
    assert "\n" not in str(error.value)
