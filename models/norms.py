"""RMS norms on the CPU in one compiled loop (numba, where it is installed), for inference only.

transformers' norm is eight operations, whose calls take longer than their work on the few tokens of
a decoding pass: 16 tokens of SmolLM2, one thread, 52 us and now 7, and a pass has 61 norms.
"""

import inspect

import torch
from torch import Tensor, nn

from models.few_queries import bits, loops
from models.placement import is_spread

_MOST_OTHER = 1e-3  # of a norm's numbers: sums in another order round some few of them differently


class FusedNorm(nn.Module):
    """An RMS norm over bfloat16 numbers, as `norm` (weight [D]), which takes all other types."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach(), False)
        self.variance_epsilon = norm.variance_epsilon
        self._norm = [norm]  # in a list, or its weight would be a second parameter
        self._bits = bits(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.bfloat16 or torch.is_grad_enabled():
            return self._norm[0](hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty(rows.shape, dtype=rows.dtype)
        compiled = loops()
        assert compiled is not None  # `fuse` has asked
        compiled.rms_norm(bits(rows), self._bits, self.variance_epsilon, bits(out))
        return out.view(hidden_states.shape)


@torch.no_grad()
def fuse(network: nn.Module) -> None:
    """Replace a CPU network's RMS norms by their loops, in place.

    Some families use other formulas under the same names, such as 1 + weight or another rounding.
    So a norm is replaced only if both agree to the bit, but for a few numbers in a thousand.
    """
    if is_spread(network) or loops() is None:
        return
    for parent in [*network.modules()]:
        for name, norm in parent.named_children():
            if _is_norm(norm) and _same(fused := FusedNorm(norm), norm):
                setattr(parent, name, fused)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        hasattr(module, "variance_epsilon")
        and len(inspect.signature(module.forward).parameters) == 1  # others have a gate
        and isinstance(weight, nn.Parameter)
        and (weight.dim(), weight.dtype, weight.device.type) == (1, torch.bfloat16, "cpu")
    )


def _same(fused: FusedNorm, norm: nn.Module) -> bool:
    numbers = torch.randn(64, len(norm.weight), generator=torch.Generator().manual_seed(0))
    probe = numbers.bfloat16()
    return (fused(probe) != norm(probe)).float().mean().item() < _MOST_OTHER
