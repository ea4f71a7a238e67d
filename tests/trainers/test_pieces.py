"""Losses in pieces: the values and gradients of one piece, and never all logits in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.losses import diffusion

B, K, V, TOP = 3, 7, 11, 4
LOSSES = {
    "token_nll": lambda: [torch.randint(V, (B, K))],
    "soft_nll": lambda: [torch.randn(B, K, V + 2, dtype=torch.double)],
    "stored_nll": lambda: [torch.randint(V, (B, K, TOP)), torch.rand(B, K, TOP)],
}


def value_and_gradient(name, logits, others):
    logits = logits.detach().requires_grad_()
    loss = getattr(diffusion, name)(logits, *others)
    weight = torch.arange(1.0, loss.numel() + 1).view(loss.shape)
    return loss.detach(), *torch.autograd.grad((loss * weight).sum(), logits)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [1, 4, B * K])
def test_pieces_change_neither_value_nor_gradient(name, tokens, monkeypatch):
    torch.manual_seed(0)
    logits, others = torch.randn(B, K, V, dtype=torch.double), LOSSES[name]()
    whole = value_and_gradient(name, logits, others)
    monkeypatch.setitem(diffusion.LOGITS, "cpu", tokens * V)
    for a, b in zip(value_and_gradient(name, logits, others), whole):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    other = [torch.roll(x, 1, 0) for x in others]
    assert (value_and_gradient(name, logits, other)[0] - whole[0]).abs().max() > 0.1


class Largest(TorchDispatchMode):
    """The most elements of a float32 tensor that an operation makes."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.found = max(self.found, out.numel())
        return out


@pytest.mark.parametrize("name", ["token_nll", "stored_nll"])
def test_no_copy_of_all_logits_is_made(name, monkeypatch):
    logits, others = torch.randn(B, K, V).bfloat16().requires_grad_(), LOSSES[name]()

    def largest():
        with Largest() as seen:
            getattr(diffusion, name)(logits, *others).sum().backward()
        return seen.found

    assert largest() == B * K * V  # negative control: in one piece
    monkeypatch.setitem(diffusion.LOGITS, "cpu", 2 * V)
    assert largest() < B * K * V // 2
