"""FID and Inception Score: against closed forms and an independent Fréchet distance."""

import math

import pytest
import torch

from data.images import digits
from decoding.bench import image_metrics
from decoding.bench.fid import Fid, measure, run
from decoding.bench.image_metrics import Given
from decoding.samplers.sequential import SequentialSampler
from models.patches import from_config


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    network = from_config(
        size=8, channels=1, patch=4, classes=10, order="raster", head="mixture",
        backbone={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2},
        heads={"mixture": {"components": 2, "least_std": 0.03}},
    )  # fmt: skip
    return SequentialSampler(network.eval())


def test_the_classifier_knows_its_digits():
    images, labels = digits()
    features, logits = image_metrics.load("digits", 1, 8)
    with torch.no_grad():
        found = logits(features((images + 1) / 2)).argmax(-1)
    assert (found == labels).float().mean() > 0.99


def frechet_distance(a, b):
    """|m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)): arXiv 1706.08500, Eq. 6."""
    a, b = a.double(), b.double()
    one, other = a.T.cov(), b.T.cov()
    roots = torch.linalg.eigvals(one @ other).real.clamp_min(0).sqrt()
    gap = (a.mean(0) - b.mean(0)).square().sum()
    return (gap + (one + other).trace() - 2 * roots.sum()).item()


def test_the_distance_of_gaussians():
    """|m|^2 + sum (s_a - s_b)^2 for diagonal covariances."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20_000, 3, generator=generator, dtype=torch.float64) for _ in "ab")
    b = 2 * b + torch.tensor([3.0, 0.0, 0.0])
    distance = image_metrics.frechet_distance(3)
    distance.update(a, real=True)
    distance.update(b, real=False)
    assert distance.compute().item() == pytest.approx(9 + 3, rel=0.02)
    distance.reset()
    distance.update(a, real=False)
    assert distance.compute().item() == pytest.approx(0, abs=1e-9)


def test_fid_is_the_distance_of_the_features(target):
    request = Fid(model="", real="digits", ways=("sequential",), samples=64, features="digits")
    (line,) = measure(request, target)
    from decoding.bench.fid import drawn, real

    features, logits = image_metrics.load("digits", 1, 8)
    with torch.no_grad():
        ours = torch.cat([features(x) for x in drawn(request, target, "sequential")])
        theirs = torch.cat([features(x) for x in real(request, 1, 8)])
        p = logits(ours).double().softmax(-1)
    assert float(line["FID"]) == pytest.approx(frechet_distance(ours, theirs), rel=2e-3)
    assert frechet_distance(ours[:32], theirs) != pytest.approx(float(line["FID"]), rel=2e-3)
    whole = (p * (p.log() - p.mean(0).log())).sum(-1).mean().exp().item()
    # Over ten parts instead of the whole: at most the whole's, and at least 1.
    assert 1 <= float(line["IS"].split()[0]) <= whole + 1e-3


def test_the_score_of_sure_and_even_classes_is_their_number():
    from torchmetrics.image.inception import InceptionScore

    score = InceptionScore(Given(4), splits=1)
    score.update(1e3 * torch.eye(4).repeat(5, 1))
    assert score.compute()[0].item() == pytest.approx(4)


def test_inception_is_refused_in_one_line_without_its_package_or_weights(tmp_path):
    with pytest.raises(ValueError, match=r"parade\[images\]|Inception cannot be had") as error:
        image_metrics.load("inception", 3, 32, str(tmp_path / "none.pth"))
    assert "\n" not in str(error.value)


def test_inception_gives_features_and_logits(tmp_path, monkeypatch):
    pytest.importorskip("torch_fidelity")
    from torchmetrics.image.fid import NoTrainInceptionV3

    file = tmp_path / "weights.pth"
    torch.save({}, file)
    monkeypatch.setattr(NoTrainInceptionV3, "load_state_dict", lambda self, state: None)
    torch.manual_seed(0)
    features, logits = image_metrics.load("inception", 3, 32, str(file))
    with torch.no_grad():
        found = features(torch.rand(2, 3, 32, 32))
    assert found.shape == (2, 2048)
    assert logits(found).shape == (2, 1008)
    assert math.isfinite(logits(found).sum().item())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": "resnet"}, "unknown features 'resnet'"),
        ({"features": "inception"}, "wants 3 channels"),
        ({"real": "nowhere"}, "is no folder"),
    ],
)
def test_mistakes_are_one_line(target, given, message):
    request = {"model": "", "real": "digits", "samples": 4, "features": "digits"} | given
    with pytest.raises(ValueError, match=message) as error:
        measure(Fid(ways=("sequential",), **request), target)
    assert "\n" not in str(error.value)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="unknown ways 'exactly'"):
        run(["model=x", "real=digits", "ways=[exactly]"])


def test_too_large_digits_are_refused():
    with pytest.raises(ValueError, match="8 x 8"):
        image_metrics.load("digits", 1, 16)
