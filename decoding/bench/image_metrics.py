"""Distances between sets of images: by a network's features, and by a two-sample test."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from data.images import digits

Features = Callable[[Tensor], Tensor]
Logits = Callable[[Tensor], Tensor]


def load(
    kind: str, channels: int, size: int, weights: str | None = None, device: str = "cpu"
) -> tuple[Features, Logits]:
    """Load a network, pixels [B, C, S, S] in [0, 1] to features [B, F], and its classifier [B, K].

    'digits' is the hidden layer of a classifier trained here on scikit-learn's digits. 'inception'
    is the network of FID and IS (F = 2048, K = 1008); weights=None downloads torch-fidelity's.
    """
    if kind == "digits":
        if (channels, size) != (1, 8):
            raise ValueError(
                f"features='digits' is for images of 8 x 8 pixels and 1 channel; these have "
                f"{size} x {size} and {channels}: choose 'inception'"
            )
        hidden, output = _digits()
        return hidden.to(device), output.to(device)
    if channels != 3:
        raise ValueError(f"features='inception' wants 3 channels, not {channels}: choose 'digits'")
    inception = Inception(weights).to(device)
    return inception, inception.logits


def _digits() -> tuple[nn.Module, nn.Module]:
    """Train a multilayer perceptron with a fixed seed; return its hidden and its last layer."""
    from sklearn.neural_network import MLPClassifier

    images, labels = digits()
    pixels = (images.flatten(1).numpy() + 1) / 2
    fitted = MLPClassifier((64,), max_iter=400, random_state=0).fit(pixels, labels.numpy())
    layers = []
    for weight, bias in zip(fitted.coefs_, fitted.intercepts_):  # [in, out], [out]
        layers.append(nn.Linear(*weight.shape).requires_grad_(False))
        layers[-1].weight.copy_(torch.from_numpy(weight.T))
        layers[-1].bias.copy_(torch.from_numpy(bias))
    return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU()).eval(), layers[1].eval()


class Inception(nn.Module):
    """torchmetrics' Inception v3 of FID, for pixels in [0, 1]; weights=None: torch-fidelity's."""

    def __init__(self, weights: str | None = None):
        super().__init__()
        try:
            from torchmetrics.image.fid import NoTrainInceptionV3

            self.network = NoTrainInceptionV3("inception-v3-compat", ["2048"], weights)
        except (ModuleNotFoundError, OSError) as error:
            raise ValueError(
                f"Inception cannot be had ({error}): pip install 'parade[images]', or weights= "
                "with weights-inception-2015-12-05-6726825d.pth of torch-fidelity's releases"
            ) from None

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels [B, 3, S, S] to features [B, 2048]."""
        return self.network((pixels * 255).round().byte())

    def logits(self, features: Tensor) -> Tensor:
        """Map features [B, 2048] to the Inception Score's logits [B, 1008], without bias."""
        return features @ self.network.fc.weight.T


class Given(nn.Module):
    """The identity: torchmetrics wants a network even if features are already computed."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet_distance(size: int) -> FrechetInceptionDistance:
    """Make the metric for features of this size (Heusel et al., arXiv 1706.08500, Eq. 6)."""
    metric = FrechetInceptionDistance(Given(size), reset_real_features=False)
    return metric.set_dtype(torch.float64)


def permutation_test(
    a: Tensor, b: Tensor, permutations: int = 199, seed: int = 0
) -> tuple[float, float]:
    """Return the energy distance of samples a [n, ...] and b [m, ...], and its permutation p-value.

    The distance is 2 E|A - B| - E|A - A'| - E|B - B'| (Székely and Rizzo, Energy statistics,
    J. Statist. Plann. Inference 143 (2013), Eq. 5), 0 only if the distributions are equal.
    p = (1 + shuffles with at least this distance) / (1 + permutations).
    """
    n, m = len(a), len(b)
    pooled = torch.cat([a, b]).flatten(1).double()
    distance = torch.cdist(pooled, pooled)
    generator = Generator().manual_seed(seed)
    shuffled = [torch.randperm(n + m, generator=generator) < n for _ in range(permutations)]
    labels = torch.stack([torch.arange(n + m) < n, *shuffled]).to(distance)
    sums = labels @ distance
    aa = (sums * labels).sum(-1)
    ab = sums.sum(-1) - aa
    bb = distance.sum() - 2 * ab - aa
    energy = 2 * ab / (n * m) - aa / n**2 - bb / m**2
    p = (1 + (energy[1:] >= energy[0] * (1 - 1e-9)).sum().item()) / (1 + permutations)
    return energy[0].item(), p
