"""Losses against numbers derived by hand."""

from math import log

import pytest
import torch

from tests.support.tiny import logits_of
from trainers.losses import ar, deer, diffusion


def numbers(tensor):
    return pytest.approx(tensor.flatten().tolist())


def test_token_nll_is_minus_log_p():
    # p(0) = 1/2 under the first distribution, p(2) = 1/8 under the second.
    logits = logits_of([0.5, 0.25, 0.25], [0.5, 0.375, 0.125])
    loss = diffusion.token_nll(logits, torch.tensor([0, 2]))
    assert loss.tolist() == pytest.approx([log(2), log(8)])
    assert loss.dtype == torch.float64
    assert diffusion.token_nll(logits.bfloat16(), torch.tensor([0, 2])).dtype == torch.float32


# One row, two blocks of K = 3 over V = 4. Every distribution gives its own probability to the
# token 1, the target everywhere, so each position has a loss of its own: log 2, log 4, ...
P = [[1 / 2, 1 / 4, 1 / 8], [1 / 16, 1 / 32, 1 / 64]]
LOGITS = logits_of([[[(1 - p) / 3, p, (1 - p) / 3, (1 - p) / 3] for p in block] for block in P])
LOGITS = LOGITS.view(1, 2, 3, 4)
TARGET = torch.ones(1, 2, 3, dtype=torch.long)
NLL = [log(2) * n for n in (1, 2, 3, 4, 5, 6)]


def test_stage_one_eq_1_and_2():
    # Block 1: t = 1/2, L = 3, tokens 1 and 3 masked:
    #   (1 / (1/2 * 3)) * (log 2 + log 8) = 2/3 * 4 log 2.
    # Block 2: t = 1, L = 2 (the third token is in another document), tokens 1 and 2 masked:
    #   (1 / (1 * 2)) * (log 16 + log 32) = 1/2 * 9 log 2.
    masked = torch.tensor([[[True, False, True], [True, True, False]]])
    t, L = torch.tensor([[0.5, 1.0]]), torch.tensor([[3, 2]])
    loss = diffusion.token_nll(LOGITS, TARGET)
    weight = diffusion.denoising_weight(masked, t, L)
    assert numbers(loss) == NLL
    assert numbers(weight) == [2 / 3, 0, 2 / 3, 1 / 2, 1 / 2, 0]
    total = (loss * weight).sum(-1)[0]
    assert total.tolist() == pytest.approx([2 / 3 * 4 * log(2), 1 / 2 * 9 * log(2)])


def test_the_bound_is_the_loss_of_the_whole_sequence_on_average():
    # E over the masks at rate t of sum_i 1[masked] / (t L) * nll_i = sum_i nll_i / L, whatever t:
    # here all 2^3 masks of L = 3 tokens at t = 1/4, summed with their probabilities.
    t, L, expected = torch.tensor([[0.25]]), torch.tensor([[3]]), 0.0
    loss = diffusion.token_nll(LOGITS, TARGET)[:, :1]
    for bits in range(8):
        masked = torch.tensor([[[bool(bits >> i & 1) for i in range(3)]]])
        probability = 0.25 ** masked.sum() * 0.75 ** (~masked).sum()
        expected += probability * (loss * diffusion.denoising_weight(masked, t, L)).sum()
    assert float(expected) == pytest.approx((1 + 2 + 3) * log(2) / 3)


def test_a_block_without_tokens_weighs_nothing():
    masked = torch.zeros(1, 1, 3, dtype=torch.bool)
    weight = diffusion.denoising_weight(masked, torch.tensor([[0.3]]), torch.tensor([[0]]))
    assert weight.tolist() == [[[0, 0, 0]]]
    assert deer.refine_weight(masked, torch.tensor([[0]]), 1.01).tolist() == [[[0, 0, 0]]]


def test_stage_two_eq_3_and_4():
    # alpha = 2. Block 1: R = 3: weights 2^2, 2^1, 2^0 for i = 1, 2, 3.
    # Block 2: R = 2: weights 2^1, 2^0, and nothing for the third token, which is not there.
    # Eq. 4: block 1: 4 log 2 + 2 log 4 + log 8 = (4 + 4 + 3) log 2;
    #        block 2: 2 log 16 + log 32 = (8 + 5) log 2.
    masked = torch.tensor([[[True, True, True], [True, True, False]]])
    R = torch.tensor([[3, 2]])
    loss, weight = diffusion.token_nll(LOGITS, TARGET), deer.refine_weight(masked, R, alpha=2.0)
    assert numbers(loss) == NLL
    assert numbers(weight) == [4, 2, 1, 2, 1, 0]
    assert (loss * weight).sum(-1)[0].tolist() == pytest.approx([11 * log(2), 13 * log(2)])


def test_the_token_next_to_the_prefix_weighs_most_and_alpha_one_is_flat():
    masked = torch.ones(1, 1, 96, dtype=torch.bool)
    weight = deer.refine_weight(masked, torch.tensor([[96]]), 1.01)[0, 0]
    assert (weight.diff() < 0).all()
    assert float(weight[0]) == pytest.approx(1.01**95, rel=1e-5)
    assert float(weight[-1]) == 1
    assert (deer.refine_weight(masked, torch.tensor([[96]]), 1.0) == 1).all()


def test_next_token_across_documents():
    # Tokens      a  b | c  d  e | pad
    # document    0  0   1  1  1   -1
    # trained     1  1   1  0  1    0
    # pairs: a>b weighs 1; b>c crosses; c>d not trained; d>e weighs 1; e>pad crosses.
    document = torch.tensor([[0, 0, 1, 1, 1, -1]])
    trained = torch.tensor([[1, 1, 1, 0, 1, 0]])
    ids = torch.tensor([[0, 1, 0, 1, 2, 0]])
    # The logits at position i predict token i + 1: p = 1/2, ., ., 1/4 where it counts.
    p = torch.full((1, 6, 3), 1 / 3, dtype=torch.float64)
    p[0, 0] = torch.tensor([0.25, 0.5, 0.25])
    p[0, 3] = torch.tensor([0.5, 0.25, 0.25])
    loss, weight = ar.next_token(p.log(), ids, document, trained)
    assert weight.tolist() == [[1, 0, 0, 1, 0]]
    assert float((loss * weight).sum()) == pytest.approx(log(2) + log(4))
    assert torch.equal(weight, ar.next_token_weight(document, trained))


def test_padding_next_to_padding_weighs_nothing():
    document, trained = torch.tensor([[0, 0, -1, -1]]), torch.ones(1, 4)
    assert ar.next_token_weight(document, trained).tolist() == [[1, 0, 0]]


def modules():
    """Every training module with a batch that it takes."""
    from data.corruption.draft_blocks import DraftBlocks, SuffixNoise, UniformNoise
    from data.text.tokenizer import train_tokenizer, with_draft_tokens
    from tests.support import tiny
    from trainers.ar import Autoregressive
    from trainers.base import Optimization
    from trainers.deer import Refinement
    from trainers.diffusion import MaskedDiffusion

    tokenizer = with_draft_tokens(train_tokenizer(["ab"], 257))
    network = tiny.causal_lm(len(tokenizer)).float()
    row = {
        "input_ids": torch.arange(1, 13),
        "document": torch.tensor([0] * 6 + [1] * 4 + [-1] * 2),
        "position": torch.tensor([*range(6), *range(4), 0, 0]),
        "trained": torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0]),
    }

    def batch(schedule):
        blocks = DraftBlocks(4, 5, schedule, tokenizer)
        samples = [blocks(row, torch.Generator().manual_seed(s)) for s in (0, 1)]
        return {k: torch.stack([s[k] for s in samples]) for k in samples[0]}

    base = (network, tokenizer, Optimization(lr=1e-3))
    drafter = {"method": "deer", "block_size": 5, "target_name": "target"}
    yield Autoregressive(*base), {k: v[None] for k, v in row.items()}
    yield MaskedDiffusion(*base, **drafter), batch(UniformNoise())
    yield Refinement(*base, **drafter, alpha=1.01), batch(SuffixNoise())


def test_weight_is_the_weight_of_the_losses_and_every_gradient_is_finite():
    for module, batch in modules():
        loss, weight = module.losses(batch)
        assert torch.equal(weight, module.weight(batch)), type(module).__name__
        assert loss.shape == weight.shape
        assert weight.sum() > 0
        (loss * weight).sum().backward()
        gradients = [p.grad for p in module.network.parameters()]
        assert all(torch.isfinite(g).all() for g in gradients)
        assert any(g.abs().sum() > 0 for g in gradients)
