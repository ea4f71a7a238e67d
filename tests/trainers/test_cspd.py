"""Losses of continuous heads by hand, and both recipes from fit to images."""

import copy
import csv
import json
import math
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from data.images import TokenNoise
from decoding.bench.images import ImageBench, accepted, report
from decoding.continuous.image_state import ImageParams, ImageResult
from decoding.engine.params import Stats
from decoding.images import run
from decoding.loading import load
from decoding.samplers.sequential import SequentialSampler
from models.denoising import DiffusionSchedule, kernels
from models.densities import GaussianMixture
from models.patches import MAR
from recipes.compose import build, compose
from tests.support import images
from tests.support.drawing import gaussian_overlap
from tests.support.lab import SMALL_IMAGES, fit_images
from tests.support.runs import curve, cut, same_run
from trainers.base import Optimization
from trainers.cspd import Draft, Drawn, Target
from trainers.fit import fit
from trainers.losses import cspd

SCHEDULE = DiffusionSchedule(50, 4, 0.05)


def test_losses_by_hand():
    assert cspd.denoising(torch.zeros(2), torch.tensor([1.0, 3.0])).item() == 5
    density = GaussianMixture(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2))
    assert cspd.mixture(density, torch.zeros(2)).item() == pytest.approx(math.log(2 * math.pi))


def test_the_variational_term_is_the_kl_of_two_gaussians():
    kernel = list(reversed(kernels(DiffusionSchedule(50, 50, 0.05))))[7]
    eps, noise, raw = torch.tensor([0.3]), torch.tensor([-0.2]), torch.tensor([0.5])
    ours = cspd.variational(eps, raw, noise, torch.tensor(7), SCHEDULE).item()
    gap = kernel.scale * kernel.shift * 0.5
    p, q = math.exp(kernel.small), math.exp(0.75 * kernel.large + 0.25 * kernel.small)
    expected = 0.5 * (math.log(q / p) + (p + gap**2) / q - 1)
    assert ours == pytest.approx(expected * 50 / 1000, rel=1e-4)
    best = cspd.variational(noise, raw - 1.5, noise, torch.tensor(7), SCHEDULE).item()
    assert best == pytest.approx(0, abs=1e-7)  # the true posterior


@pytest.mark.parametrize("variance", ["small", "large"])
def test_the_distillation_loss_is_minus_the_log_of_the_sampler_s_acceptance(variance):
    head = images.HEADS["diffusion"] | {"variance": variance}
    target, draft = images.pair("diffusion", strength=0.002, head=head)
    x, z = torch.tensor([[0.4]]).double(), torch.ones(1, 16).double()
    for i, kernel in enumerate(kernels(target.head.schedule)):
        p, q = (network.head.kernel(i, x, z) for network in (target, draft))
        time = torch.tensor([kernel.time])
        eps, wanted = (network.head(x, time, z)[0] for network in (draft, target))
        step = torch.tensor([i])
        loss = cspd.parting(eps, wanted, step, target.head.schedule, variance)
        expected = -gaussian_overlap(q, p).log()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=1e-5)


def test_the_distillation_loss_of_mixtures_is_minus_the_log_of_their_overlap():
    one, draws = torch.ones(1, 1, 1).double(), 200_000
    p, q = (GaussianMixture(one[..., 0], mean * one, one) for mean in (0.0, 0.8))
    x = torch.randn(1, draws, 1, generator=torch.Generator().manual_seed(0)).double()
    expected = -math.log(2 * torch.special.ndtr(torch.tensor(-0.4)).item())
    assert cspd.mixture_parting(q, p, x).item() == pytest.approx(expected, abs=5e-3)
    assert cspd.mixture_parting(p, p, x).item() == pytest.approx(0, abs=1e-12)
    # Draws of the draft instead give another number.
    assert cspd.mixture_parting(q, p, x + 0.8).item() != pytest.approx(expected, abs=5e-2)


def test_drawn_numbers_make_draws_of_a_mixture():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(100_000, generator=generator), torch.randn(100_000, 1, generator=generator)
    logits = torch.tensor([0.3, 0.7]).log().expand(100_000, 2)
    mean = torch.tensor([[-5.0], [5.0]]).expand(100_000, 2, 1)
    x = GaussianMixture(logits, mean, torch.ones_like(mean)).sample(Drawn(*numbers))
    assert (x < 0).float().mean().item() == pytest.approx(0.3, abs=5e-3)
    assert x[x > 0].mean().item() == pytest.approx(5, abs=0.02)


@pytest.mark.parametrize("scale", ["lab", "paper"])
@pytest.mark.parametrize("recipe", ["cspd_target", "cspd_draft"])
def test_a_recipe_s_schedule_lets_drafts_be_accepted(recipe, scale):
    head = compose([f"recipe={recipe}", f"scale={scale}"], "fit").network.heads.diffusion
    given = DiffusionSchedule(steps=head.steps, least_signal=head.get("least_signal", 0.0))
    assert cspd.staying(given, head.variance, 0.01) > 0.8
    assert cspd.staying(given._replace(least_signal=0.0), head.variance, 0.01) < 0.1  # as published


def test_a_schedule_that_parts_drafts_is_told():
    config = compose(["recipe=cspd_draft", "network.head=diffusion"], "fit").network
    published = copy.deepcopy(config)
    published.heads.diffusion.least_signal = 0.0
    module = partial(Draft, tokenizer=None, optimization=Optimization(1e-3), target_name="")
    with pytest.warns(UserWarning, match="least_signal=0: hardly a draft will be accepted"):
        module(build(published), gamma=4)
    with warnings.catch_warnings(action="error"):
        module(build(config), gamma=4)


def test_parting_of_equal_estimates_is_nothing_and_has_a_gradient():
    eps = torch.ones(1, 2, requires_grad=True)
    loss = cspd.parting(eps, torch.ones(1, 2), torch.tensor([1]), SCHEDULE, "large")
    loss.sum().backward()
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert torch.isfinite(eps.grad).all()


def batch(network, rows=3, repeats=2):
    noise, N, D = TokenNoise(repeats=repeats), network.config.tokens, network.config.dim
    generator = torch.Generator().manual_seed(0)
    row = {"patches": torch.ones(N, D), "label": torch.tensor(1)}
    samples = [noise(row, generator, n) for n in range(rows)]
    return {k: torch.stack([s[k] for s in samples]) for k in samples[0]}


@pytest.mark.parametrize("head", images.HEADS)
def test_losses_are_unreduced_and_repeats_are_averaged(head):
    network = images.model(head).float()
    module = Target(network, None, Optimization(1e-3))
    given = batch(network)
    loss, weight = module.losses(given)
    assert loss.shape == weight.shape == (3, 4)
    assert torch.equal(weight, module.weight(given))
    if network.head.schedule is not None:
        halves = [{**given, "time": given["time"][:, [r]], "noise": given["noise"][:, [r]]}
                  for r in range(2)]  # fmt: skip
        mean = sum(module.losses(half)[0] for half in halves) / 2
        torch.testing.assert_close(loss, mean)


def test_no_class_is_the_last_one():
    network = images.model().float()
    module = Target(network, None, Optimization(1e-3))
    given = batch(network)
    none, last = ({**given, "label": torch.full((3,), c)} for c in (-1, network.config.classes))
    assert torch.equal(module.losses(none)[0], module.losses(last)[0])


def test_training_learns_a_density():
    """Tokens that are all 1: the mixture's density there grows."""
    network = images.model().float().train()
    module = Target(network, None, Optimization(1e-3))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    given, losses = batch(network), []
    for _ in range(30):
        loss = module.losses(given)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A mixture pair and a diffusion pair, both with distillation."""
    runs = tmp_path_factory.mktemp("runs")
    found = {}
    for head, weight in (("mixture", 0.5), ("diffusion", 1.0)):
        name = [f"name={head}", f"network.head={head}"]
        target = fit_images(runs, "cspd_target", *name)
        options = [f"target={target}", f"module.distillation={weight}", "module.gamma=2"]
        found[head] = (target, fit_images(runs, "cspd_draft", *name, *options))
    return found


@pytest.mark.parametrize("head", ["mixture", "diffusion"])
def test_recipes_train_export_and_draw(exports, head):
    target, draft = exports[head]
    config = json.loads((draft / "config.json").read_text())
    assert config["model_type"] == "parade_patches"
    assert config["parade"]["method"] == "cspd"
    assert "decoding.images" in (draft / "README.md").read_text()
    assert not (draft / "custom_generate").exists()
    sampler = load(str(draft), sampler=["gamma=3", "prefill=0.1"])
    assert (sampler.gamma, sampler.prefill) == (3, 0.1)
    results = sampler.generate([0, 9], ImageParams(seed=0))
    assert results[0].patches.shape == (4, 16)
    plain = load(str(draft), sampler=["method=sequential"])
    assert type(plain) is SequentialSampler
    assert type(load(str(target))) is SequentialSampler
    torch.testing.assert_close(
        plain.generate([3], ImageParams(seed=0))[0].patches,
        load(str(target)).generate([3], ImageParams(seed=0))[0].patches,
    )
    assert set(curve(draft.parent, "val_parting")) == {4}


def test_a_killed_run_goes_on_as_if_it_had_not_been(exports, tmp_path):
    whole = fit_images(tmp_path, "cspd_target", "name=whole").parent
    killed = cut(whole, "killed", 2)
    fit_images(tmp_path, "cspd_target", "name=killed")
    assert same_run(whole, killed)


def test_the_published_scale_on_a_tiny_folder(tmp_path, monkeypatch):
    """MAR's sizes and a VAE, both tiny: any order, latents on disk."""
    monkeypatch.setitem(MAR, "B", (64, 1, 8, 1))
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(AutoencoderKL=images.Vae))
    (tmp_path / "photos").mkdir()
    arguments = [
        "scale=paper", f"images={images.image_folder(tmp_path / 'photos')}", f"runs={tmp_path}",
        "trainer.workers=0", "network.mar_size=B", "network.size=2", "network.channels=3",
        "network.patch=1", "network.classes=2", "network.heads.diffusion.steps=3",
        "data.train.size=4", "data.validation.size=4", "data.train.vae=tiny",
        *(a for a in SMALL_IMAGES if not a.startswith("network")), "trainer.batch_size=2",
        "trainer.micro_batch_size=2",
    ]  # fmt: skip
    target = fit(compose(["recipe=cspd_target", *arguments], "fit"))
    draft = fit(compose(["recipe=cspd_draft", *arguments], "fit"))
    assert target.parent != draft.parent
    (result,) = load(str(draft)).generate([1], ImageParams(seed=0, guidance=1.5))
    assert result.patches.shape == (4, 3)
    assert len(list((tmp_path / "data").glob("images-*"))) == 1


def test_images_are_written(exports, tmp_path, capsys):
    file = tmp_path / "digits.png"
    run([f"model={exports['mixture'][1]}", "classes=[0,1]", "count=2", "seed=1", f"out={file}"])
    assert file.stat().st_size > 1000
    assert "tokens a target pass" in capsys.readouterr().out


@pytest.mark.slow
def test_the_bench_reports(exports, tmp_path):
    bench = ImageBench(
        model=str(exports["diffusion"][1]), gamma=2, gammas=(1, 2), prefills=(0.5,),
        guidances=(1.5,), temperatures=(0.9,), images=6, samples=20,
        batch_sizes=(1, 4), batches=1, seed=1, features="digits",
    )  # fmt: skip
    report(bench, load(bench.model), tmp_path)
    with (tmp_path / "acceptance.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["knob"] for line in lines] == ["gamma"] * 2 + [
        "prefill",
        "guidance",
        "temperature",
    ]
    assert all(0 <= float(line["acceptance rate"]) <= 1 for line in lines)
    with (tmp_path / "ways.csv").open() as file:
        ways = {line["way"]: line for line in csv.DictReader(file)}
    assert "relaxed (lossy)" in ways
    assert 0 < float(ways["exact"]["p"]) <= 1
    assert float(ways["exact"]["Fréchet"]) > 0
    drafting = {w: ways[w]["ms: target, drafter, rest, batch 4"].split(", ")[1] for w in ways}
    assert float(drafting["sequential"]) == 0 < float(drafting["exact"])
    assert (tmp_path / "accepted.png").exists()


def test_the_bench_s_acceptance_by_hand():
    """Pre-filled 1; two accepted drafts and a bonus; none and a correction; one at the end."""
    kept = torch.tensor([0, 1, 1, 0, 0, 1]).bool()
    result = ImageResult(torch.zeros(6, 1), 0, kept, Stats(emitted=[1, 3, 1, 1]))
    line = accepted([result], 2, 1)
    assert line == {"acceptance rate": 0.75, "tokens a pass": 1.5}


MISTAKES = [
    (["module.distillation=-1.0"], "distillation=-1.0 is not allowed"),
    (["module.gamma=0"], "gamma=0 is not allowed"),
    (["module.prefill=1.5"], "prefill=1.5 is not allowed"),
    (["network.order=random"], "order='random'"),
    (["network.head=flow"], "unknown network.head 'flow'"),
    (["lora.rank=4"], "only causal LMs take LoRA"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistakes_are_one_line(exports, tmp_path, overrides, message):
    target = [f"target={exports['mixture'][0]}"]
    with pytest.raises(ValueError, match=message) as error:
        fit_images(tmp_path, "cspd_draft", *target, *overrides)
    assert "\n" not in str(error.value)


def test_a_bench_of_a_target_is_refused(exports):
    from decoding.bench.images import run as bench

    with pytest.raises(ValueError, match="is no drafter"):
        bench([f"model={exports['mixture'][0]}"])


def test_commands_for_texts_refuse_images(exports):
    from decoding.bench.text import Bench, measure
    from decoding.generate import run as generate

    model = str(exports["mixture"][1])
    with pytest.raises(ValueError, match=r"decoding\.images"):
        generate([f"model={model}", "prompt=def"])
    with pytest.raises(ValueError, match=r"python -m decoding\.bench\.images"):
        measure(Bench(model=model))
