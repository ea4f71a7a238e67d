"""Noise as an input in decoding: what a drafter reads noise with (`models.noise`), in its export.

The noise is that of `coupled` and `tree` verification, whose text is plain decoding's whatever is
drafted. `rejection` and `block` draw and accept drafts with other numbers, and need the very q that
a draft was drawn from: there the noise says nothing, and the drafter does not read it.
"""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from decoding.engine import tensor_file
from models.noise import NoiseInput

FILE = "noise_input.tensors"  # in an export's folder
INSTEAD = "decode without it, sampler=[noise_input=false], or train one, module.noise_layers=[0,1]"


def for_drafter(
    noise: Tensor | None,
    temperature: float,
    shape: tuple[int, int, int],
    ids: Tensor | None,
    excluded: list[int],
    device: torch.device,
) -> Tensor:
    """The noise that a drafter reads: of its own tokens, times the temperature.

    Args:
        noise: Keyed noise of the next positions, [B, k or more, V]; None at temperature 0.
        temperature: That of decoding.
        shape: (B, k, n), n the tokens that the drafter has logits of.
        ids: [n], the target's token of each; None: token i is the target's i, and either side may
            have padding that the other lacks.
        excluded: The target's ids of tokens that are never drafted.
        device: Where the drafter is.

    Returns:
        [B, 1, k, n], the block's; -inf for tokens that are never drafted.
    """
    B, k, n = shape
    rows = torch.arange(n, device=device) if ids is None else ids
    never = torch.isin(rows, rows.new_tensor(excluded))
    if noise is None:
        return torch.zeros(B, 1, k, n, device=device).masked_fill_(never, -torch.inf)
    never |= rows >= noise.shape[-1]
    found = noise[:, :k].index_select(-1, rows.clamp_max(noise.shape[-1] - 1))
    return (temperature * found).masked_fill_(never, -torch.inf)[:, None]


def stored(noise_input: NoiseInput) -> bytes:
    """The bytes of the file of a noise input: a matrix for each layer, by its number."""
    parts = zip(noise_input.layers, noise_input.project)
    return save({str(i): part.weight.detach().cpu().contiguous() for i, part in parts})


def read(file: Path) -> NoiseInput:
    """The noise input of an export.

    Args:
        file: A file with the bytes of `stored`.

    Raises:
        ValueError: The file is missing, damaged or of something else.
    """
    with tensor_file.opened(file, "the noise input", INSTEAD) as tensors:
        names = tensors.keys()
        found = {int(name): tensors.get_tensor(name) for name in names}
        layers = sorted(found)
        with torch.device("meta"):  # without drawing numbers
            noise_input = NoiseInput(len(found[layers[0]]), layers)
        state = {f"project.{n}.weight": found[i] for n, i in enumerate(layers)}
        noise_input.load_state_dict(state, assign=True)
        tensor_file.finite(*found.values())
    return noise_input.eval().requires_grad_(False)
