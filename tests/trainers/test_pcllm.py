"""pcLLM: the loss by hand, and one packed forward against the 2N separate ones."""

from math import log

import pytest
import torch

from data.tokenizer import train_tokenizer
from data.trajectories import Answer, interleave
from tests.support import tiny
from trainers.base import Optimization
from trainers.losses.pcllm import divergence, progressive_consistency
from trainers.pcllm import ProgressiveConsistency

TOKENIZER = train_tokenizer(["ab"], 257)
V, N, n = 257, 3, 4


def test_divergence_by_hand():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    assert divergence(p.log(), q.log()).item() == pytest.approx(log(4 / 3) / 2)
    assert divergence(p.log() + 3, p.log()).item() == pytest.approx(0, abs=1e-6)


def test_equations_8_and_9_by_hand():
    # Two tokens, the second behind a wrong one; then one that the answer does not have.
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    noisy, clean = torch.stack([q, q, q]).view(1, 1, 3, 2), torch.stack([p, p, p]).view(1, 1, 3, 2)
    target = torch.zeros(1, 1, 3, dtype=torch.long)
    noised, present = torch.tensor([[[False, True, False]]]), torch.tensor([[[True, True, False]]])
    loss, weight = progressive_consistency(noisy, clean, target, noised, present, w=0.5)
    assert weight.tolist() == [[[1, 1, 0]]]
    expected = [log(2) / 2, log(4 / 3) / 2 + log(2) / 2]
    assert loss[0, 0, :2].tolist() == pytest.approx(expected)


def test_the_clean_blocks_are_a_teacher_without_gradient():
    noisy, clean = torch.randn(2, 1, 1, 2, 5, dtype=torch.double, requires_grad=True).unbind()
    target, every = torch.zeros(1, 1, 2, dtype=torch.long), torch.ones(1, 1, 2, dtype=torch.bool)
    loss, _ = progressive_consistency(noisy, clean, target, every, every, w=0.0)
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
            context = [*answer.clean[:opened], *blocks[opened : i + 1]]
            q = network(torch.cat([prompt, *context])[None]).logits[0, at : at + size]
            p = network(torch.cat([prompt, *answer.clean[: i + 1]])[None]).logits[0, at : at + size]
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            right = (blocks[i] == answer.clean[i])[:size].long()
            first = int(right.cumprod(0).sum())
            teacher = log_p.detach()
            total += (teacher.exp() * (teacher - log_q)).sum(-1)[first:].sum()
            total += w * -log_p[torch.arange(size), answer.clean[i][:size]].sum()
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


def test_another_mask_or_another_noise_fails_the_same_comparison():
    network = network_of()
    answers, noisy, batch = batch_of()
    apart = separate_passes(network, answers, noisy, 2, "nc", 0.7)
    loss, weight = module_of(network, mask="nc_ic", window=1).losses(batch)
    assert abs((loss * weight).sum() / weight.sum() - apart) > 1e-3
    shifted = {**batch, "position_ids": batch["position_ids"] + (batch["block"] == 1)}
    loss, weight = module_of(network).losses(shifted)
    assert abs((loss * weight).sum() / weight.sum() - apart) > 1e-3


def test_mistakes():
    network = tiny.causal_lm(V)
    with pytest.raises(ValueError, match=r"unknown mask 'ic'. Choose from \['nc', 'nc_ic'\]"):
        module_of(network, mask="ic")
    with pytest.raises(ValueError, match=r"w=-1 is not allowed"):
        module_of(network, w=-1)
