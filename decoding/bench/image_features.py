"""Feature networks for comparing sets of images: a small classifier of digits, or Inception v3."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from data.images import digits

Features = Logits = Callable[[Tensor], Tensor]
KINDS = ("digits", "inception")


def load(
    kind: str, channels: int, size: int, weights: str | None = None, device: str = "cpu"
) -> tuple[Features, Logits]:
    """A feature network and its classifier.

    Args:
        kind: 'digits', the hidden layer of a classifier that is trained here on scikit-learn's
            digits, for images like them; 'inception', the network of FID and IS (F = 2048,
            K = 1008).
        channels: C of the images.
        size: S of the images, pixels of a side.
        weights: Inception's file; None downloads torch-fidelity's.
        device: Where the networks run.

    Returns:
        The map from pixels [B, C, S, S] in [0, 1] to features [B, F], and the map from features to
        logits [B, K].

    Raises:
        ValueError: The kind is unknown or does not fit the images, torch-fidelity is missing, or
            the weights cannot be loaded.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown features {kind!r}. Choose from {list(KINDS)}")
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
    """The hidden and the last layer of a multilayer perceptron, trained with a fixed seed."""
    from sklearn.neural_network import MLPClassifier

    images, labels = digits()
    pixels = (images.flatten(1).numpy() + 1) / 2
    fitted = MLPClassifier((64,), max_iter=400, random_state=0).fit(pixels, labels.numpy())
    layers = [_linear(w, b) for w, b in zip(fitted.coefs_, fitted.intercepts_)]
    return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU()).eval(), layers[1].eval()


def _linear(weight, bias) -> nn.Linear:
    """A layer with the weights [in, out] and bias [out] of scikit-learn."""
    layer = nn.Linear(*weight.shape)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight.T))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


class Inception(nn.Module):
    """torchmetrics' Inception v3 as FID takes it, for pixels in [0, 1].

    Args:
        weights: Its file; None downloads torch-fidelity's.
    """

    def __init__(self, weights: str | None = None):
        super().__init__()
        try:
            from torchmetrics.image.fid import NoTrainInceptionV3

            self.network = NoTrainInceptionV3("inception-v3-compat", ["2048"], weights)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"features='inception' needs torch-fidelity ({error}). Run: pip install "
                "'parade[images]'"
            ) from None
        except OSError as error:
            raise ValueError(
                f"Inception's weights cannot be had ({error}): download "
                "weights-inception-2015-12-05-6726825d.pth from torch-fidelity's releases on "
                "GitHub and give its path as weights="
            ) from None

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, 2048]."""
        return self.network((pixels * 255).round().byte())

    def logits(self, features: Tensor) -> Tensor:
        """[B, 2048] -> [B, 1008], without bias, as the Inception Score takes them."""
        return features @ self.network.fc.weight.T
