"""pcLLM: the loss by hand, and one packed forward against the 2N separate ones."""

from math import log

import pytest
import torch

from data.rows.trajectories import Answer, interleave
from data.text.tokenizer import train_tokenizer
from tests.support import tiny
from trainers.base import Optimization
from trainers.losses.diffusion import token_nll
from trainers.losses.pcllm import divergence, progressive_consistency
from trainers.pcllm import ProgressiveConsistency

TOKENIZER = train_tokenizer(["ab"], 257)
V, N, n = 257, 3, 4


def test_divergence_by_hand():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert divergence(p.log(), q.log()).item() == pytest.approx(log(4 / 3) / 2)
    assert divergence(p.log() + 3, p.log()).item() == pytest.approx(0, abs=1e-6)


def test_equations_8_and_9_by_hand():
    # Two tokens, the second after a wrong one; then one that the answer does not have.
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    noisy, clean = torch.stack([q, q, q]).view(1, 1, 3, 2), torch.stack([p, p, p]).view(1, 1, 3, 2)
    L_AR = token_nll(clean, torch.zeros(1, 1, 3, dtype=torch.long))
    noised, present = torch.tensor([[[False, True, False]]]), torch.tensor([[[True, True, False]]])
    loss, weight = progressive_consistency(noisy, clean, L_AR, noised, present, w=0.5)
    assert weight.tolist() == [[[1, 1, 0]]]
    expected = [log(2) / 2, log(4 / 3) / 2 + log(2) / 2]
    assert loss[0, 0, :2].tolist() == pytest.approx(expected)


def test_the_clean_blocks_are_a_teacher_without_gradient():
    noisy, clean = torch.randn(2, 1, 1, 2, 5, dtype=torch.double, requires_grad=True).unbind()
    every = torch.ones(1, 1, 2, dtype=torch.bool)
    loss, _ = progressive_consistency(noisy, clean, clean[..., 0], every, every, w=0.0)
    gradient = torch.autograd.grad(loss.sum(), [noisy, clean], allow_unused=True)
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0


def module_of(network, **given):
    options = {"mask": "nc", "window": 2, "w": 0.7, "sampling": {"method": "plain"}} | given
    return ProgressiveConsistency(network, TOKENIZER, Optimization(lr=1e-3), **options)


def batch_of():
    """Prompts of 5 and 2 tokens, answers of 12 and 9: the last block is not whole."""
    draw = torch.Generator().manual_seed(3)
    answers, noisy = [], []
    for prompt, size in ((5, 12), (2, 9)):
        ids = torch.randint(1, V, (5,), generator=draw)
        clean = torch.randint(1, V, (N, n), generator=draw)
        wrong = torch.rand(N, n, generator=draw) < 0.5
        noisy.append(torch.where(wrong, torch.randint(1, V, (N, n), generator=draw), clean))
        answers.append(Answer(ids, prompt, clean, size, []))
    samples = [interleave(a, x, 0) for a, x in zip(answers, noisy)]
    return answers, noisy, {k: torch.stack([s[k] for s in samples]) for k in samples[0]}


def network_of():
    """The real class, but for its norms: transformers computes them in float32 in any case."""
    network = tiny.causal_lm(V, scale=1.0)
    for name, norm in [*network.named_modules()]:
        if type(norm).__name__.endswith("RMSNorm"):
            exact = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.double)
            network.set_submodule(name, exact)
    return network


def separate_passes(network, answers, noisy, window, mask, w):
    """Eq. 8-9 by two forwards a block and row, each of an ordinary causal sequence."""
    total, count = 0.0, 0
    for answer, blocks in zip(answers, noisy):
        prompt = answer.prompt[len(answer.prompt) - answer.prompt_size :]
        for i in range(N):
            size = min(n, answer.size - i * n)
            at = len(prompt) + i * n - 1
            opened = i - i % window if mask == "nc_ic" else 0
            before = [*answer.clean[:opened], *blocks[opened:i]]
            rows = [[*before, blocks[i]], [*answer.clean[: i + 1]]]
            q, p = (
                network(torch.cat([prompt, *row])[None]).logits[0, at:].log_softmax(-1)
                for row in rows
            )
            right = (blocks[i] == answer.clean[i])[:size].long()
            first = int(right.cumprod(0).sum())
            teacher = p[first:size].detach()
            total += (teacher.exp() * (teacher - q[first:size])).sum()
            total += w * -p[torch.arange(size), answer.clean[i][:size]].sum()
            count += size
    return total / count


def loss_and_gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize(("mask", "window"), [("nc", 2), ("nc_ic", 2), ("nc_ic", 1), ("nc_ic", 3)])
def test_one_packed_forward_is_the_separate_passes(mask, window):
    network = network_of()
    answers, noisy, batch = batch_of()
    module = module_of(network, mask=mask, window=window)
    loss, weight = module.losses(batch)
    assert torch.equal(weight, module.weight(batch))
    packed = loss_and_gradients(network, (loss * weight).sum() / weight.sum())
    apart = loss_and_gradients(network, separate_passes(network, answers, noisy, window, mask, 0.7))
    assert abs(packed[0] - apart[0]) <= 1e-9
    assert max((a - b).abs().max() for a, b in zip(packed[1], apart[1])) <= 1e-9


def test_where_nothing_is_noised_the_loss_is_the_ar_loss():
    network = network_of()
    answers, _, _ = batch_of()
    samples = [interleave(answer, answer.clean, 0) for answer in answers]
    batch = {k: torch.stack([s[k] for s in samples]) for k in samples[0]}
    module = module_of(network)
    noisy, clean = module.predictions(network, batch)
    real = batch["present"]
    torch.testing.assert_close(noisy[real], clean[real], rtol=0, atol=1e-9)
    expected = module.w * token_nll(clean, batch["target"])
    assert torch.equal(module.losses(batch)[0], expected)


def test_validation_has_the_loss_of_training():
    _, _, batch = batch_of()
    module = module_of(network_of())
    loss, weight = module.losses(batch)
    found = module.evaluate(batch)
    assert found["loss"][0].item() == pytest.approx((loss * weight).sum().item())


def test_another_mask_or_another_noise_fails_the_same_comparison():
    network = network_of()
    answers, noisy, batch = batch_of()
    apart = separate_passes(network, answers, noisy, 2, "nc", 0.7)
    loss, weight = module_of(network, mask="nc_ic", window=1).losses(batch)
    assert abs((loss * weight).sum() / weight.sum() - apart) > 1e-3
    shifted = {**batch, "position_ids": batch["position_ids"] + (batch["block"] == 1)}
    loss, weight = module_of(network).losses(shifted)
    assert abs((loss * weight).sum() / weight.sum() - apart) > 1e-3


def test_ordinary_text_has_the_base_s_distribution_as_its_label():
    """Row 0 has wrong guesses, row 1 none: row 1's AR loss is against the base's distribution."""
    network, base = network_of(), tiny.causal_lm(V, seed=9, scale=1.0)
    _, _, batch = batch_of()
    batch["noised"][1] = False
    plain, _ = module_of(network, w=1.0).losses(batch)
    held, weight = module_of(network, w=1.0, base=base).losses(batch)
    assert torch.equal(held[0], plain[0])
    module = module_of(network)
    found = (module.predictions(n, batch) for n in (network, base))
    (_, ours), (_, theirs) = found
    expected = -(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1)[1]
    torch.testing.assert_close(held[1], expected, rtol=0, atol=1e-9)
    (held * weight).sum().backward()
    assert all(p.grad is None for p in base.parameters())
    # Held to itself nothing pulls: the gradient of row 1 is that of a minimum.
    network.zero_grad()
    module_of(network, w=1.0, base=network).losses(batch)[0][1].sum().backward()
    assert max(p.grad.abs().max() for p in network.parameters()) < 1e-9
    network.zero_grad()
    module_of(network, w=1.0).losses(batch)[0][1].sum().backward()
    assert max(p.grad.abs().max() for p in network.parameters()) > 1e-2
