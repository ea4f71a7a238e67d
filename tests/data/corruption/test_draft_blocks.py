"""Anchors are positions of trained tokens, and a block never leaves its document."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from data.corruption.draft_blocks import DraftBlocks, Noise, SuffixNoise, UniformNoise, draw_anchors
from data.text.tokenizer import draft_token_ids, train_tokenizer, with_draft_tokens

TOKENIZER = with_draft_tokens(train_tokenizer(["ab"], 257))
MASK, SEP = draft_token_ids(TOKENIZER)
SCHEDULES = [UniformNoise(), SuffixNoise()]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def row_of(documents, padding):
    """A packed row; documents: lists of trained flags. Every token has another id."""
    document = [d for d, flags in enumerate(documents) for _ in flags]
    position = [i for flags in documents for i in range(len(flags))]
    trained = [int(f) for flags in documents for f in flags]
    ids = list(range(1, len(document) + 1))
    columns = {
        "input_ids": (ids, 0),
        "document": (document, -1),
        "position": (position, 0),
        "trained": (trained, 0),
    }
    return {k: torch.tensor(v + [pad] * padding) for k, (v, pad) in columns.items()}


@st.composite
def rows(draw):
    """Packed rows of any documents of two tokens or more."""
    flags = st.lists(st.booleans(), min_size=2, max_size=7)
    return row_of(draw(st.lists(flags, min_size=1, max_size=4)), draw(st.integers(0, 3)))


def allowed_anchors(row):
    """Every allowed anchor, found one by one."""
    found = []
    for i in range(1, len(row["input_ids"])):
        same = row["document"][i] == row["document"][i - 1] != -1
        if same and row["trained"][i]:
            found.append(i)
    return found


@settings(deadline=None, max_examples=100)
@given(rows(), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_anchors_are_trained_positions_with_a_prefix(row, count, seed):
    anchors, allowed = draw_anchors(row, count, generator(seed)).tolist(), allowed_anchors(row)
    assert len(anchors) == count
    if not allowed:
        assert anchors == [0] * count
        return
    assert set(anchors) <= set(allowed)
    assert anchors == sorted(anchors)
    # Without replacement: every position is used equally often, give or take one.
    uses = [anchors.count(p) for p in allowed]
    assert max(uses) - min(uses) <= 1


@settings(deadline=None, max_examples=150)
@given(rows(), st.integers(1, 5), st.integers(1, 6), st.sampled_from(SCHEDULES), st.integers(0, 99))
def test_a_block_is_the_trained_continuation_of_its_own_document(row, A, K, schedule, seed):
    sample = DraftBlocks(A, K, schedule, TOKENIZER)(row, generator(seed))
    S = len(row["input_ids"])
    noise_reaches = sample["document"][S:].view(A, 1 + K)
    blocks = sample["input_ids"][S:].view(A, 1 + K)
    for a, anchor in enumerate(sample["start"].tolist()):
        loss = sample["masked"][a].nonzero().flatten().tolist()
        if anchor == 0:
            assert not allowed_anchors(row)
            assert loss == []
            assert sample["size"][a] == 0
            continue
        # How far the continuation goes: same document, all trained.
        n = anchor
        while n < S and row["trained"][n] and row["document"][n] == row["document"][anchor - 1]:
            n += 1
        assert all(i < n - anchor for i in loss)
        assert sample["size"][a] <= min(K, n - anchor)
        for i in loss:
            assert sample["target"][a, i] == row["input_ids"][anchor + i]
            assert blocks[a, 1 + i] == MASK
            assert noise_reaches[a, 1 + i] == row["document"][anchor]
        for i in range(K):  # nothing shows but the mask and clean tokens of the continuation
            shown = int(blocks[a, 1 + i])
            assert shown == MASK or (i < n - anchor and shown == row["input_ids"][anchor + i])
        positions = sample["position_ids"][S:].view(A, 1 + K)[a]
        first = row["position"][anchor - 1] + 1
        assert torch.equal(positions, first + torch.arange(1 + K))
    assert (blocks[:, 0] == SEP).all()
    assert torch.equal(sample["input_ids"][:S], row["input_ids"])
    assert torch.equal(sample["position_ids"][:S], row["position"])
    assert {
        len(sample[k]) for k in ("input_ids", "position_ids", "document", "index", "block")
    } == {S + A * (1 + K)}


def test_a_sample_drawn_by_hand():
    """Documents 1-5 (prompt 1 2) and 6-8; blocks of 4 after token 3 and after token 6."""
    row = row_of([[False, False, True, True, True], [True] * 3], padding=1)
    masked = torch.tensor([[True, False, True, True], [True, True, False, False]])
    present = torch.tensor([[True] * 4, [True, True, False, False]])
    noise = Noise(masked, present, torch.tensor([0.5, 1.0]))
    blocks = DraftBlocks(2, 4, None, TOKENIZER)
    sample = blocks.lay_out(row, torch.tensor([3, 6]), noise)
    M = MASK
    assert sample["input_ids"].tolist() == [
        *[1, 2, 3, 4, 5, 6, 7, 8, 0],
        *[SEP, M, 5, M, M],  # token 5 is shown; 6 and 7 are of another document
        *[SEP, M, M, M, M],
    ]
    assert sample["position_ids"].tolist() == [
        *[0, 1, 2, 3, 4, 0, 1, 2, 0],
        *[3, 4, 5, 6, 7],
        *[1, 2, 3, 4, 5],
    ]
    assert sample["document"].tolist() == [
        *[0, 0, 0, 0, 0, 1, 1, 1, -1],
        *[0, 0, 0, 0, 0],
        *[1, 1, 1, -1, -1],  # what is not present is seen by nobody
    ]
    assert sample["index"].tolist() == [*range(9), *[3] * 5, *[6] * 5]
    assert sample["block"].tolist() == [-1] * 9 + [0] * 5 + [1] * 5
    assert sample["masked"].tolist() == [[True, False, False, False], [True, True, False, False]]
    assert sample["target"][0, :2].tolist() == [4, 5]
    assert sample["target"][1, :2].tolist() == [7, 8]
    assert sample["size"].tolist() == [2, 2]


def test_a_sample_of_the_other_layout_drawn_by_hand():
    """PARD: the prefix's last token and K - 1 masks, each of which drafts the token after it."""
    row = row_of([[False, False, True, True, True], [True] * 3], padding=1)
    masked = torch.tensor([[True, False, True, True], [True, True, False, False]])
    present = torch.tensor([[True] * 4, [True, True, False, False]])
    noise, tokenizer = (
        Noise(masked, present, torch.tensor([0.5, 1.0])),
        train_tokenizer(["ab"], 257),
    )
    blocks = DraftBlocks(2, 4, None, tokenizer, layout="pard")
    sample = blocks.lay_out(row, torch.tensor([3, 6]), noise)
    M, _ = draft_token_ids(tokenizer, "pard")
    assert sample["input_ids"][9:].tolist() == [*[3, M, 5, M], *[6, M, M, M]]
    assert sample["position_ids"][9:].tolist() == [*[2, 3, 4, 5], *[0, 1, 2, 3]]
    assert sample["document"][9:].tolist() == [*[0] * 4, *[1, 1, 1, -1]]
    assert sample["index"].tolist() == [*range(9), *[2] * 4, *[5] * 4]
    assert sample["block"].tolist() == [-1] * 9 + [*range(8)]
    other = DraftBlocks(2, 4, None, TOKENIZER).lay_out(row, torch.tensor([3, 6]), noise)
    for name in ("target", "masked", "size", "start", "rate"):  # what is learned is the same
        assert torch.equal(sample[name], other[name])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_row_with_nothing_trained_has_no_loss(schedule):
    for row in (row_of([[False] * 6], 2), row_of([[True, False], [True, False, False]], 1)):
        sample = DraftBlocks(3, 4, schedule, TOKENIZER)(row, generator())
        assert not sample["masked"].any()
        assert not sample["size"].any()


def test_uniform_noise_masks_at_its_rate_and_rates_are_spread_evenly():
    K = 8
    noise = UniformNoise()(4000, K, generator())
    assert noise.present.all()
    assert noise.rate.min() > 1 / K
    assert noise.rate.max() <= 1
    # Low discrepancy: the sorted rates are an even grid, to within one step of it.
    grid = 1 / K + (1 - 1 / K) * torch.linspace(0, 1, 4000)
    assert (noise.rate.sort().values - grid).abs().max() < 2 / 4000
    assert stats.spearmanr(noise.rate, torch.arange(4000.0)).pvalue > 1e-3  # in random order
    excess = (noise.masked.float() - noise.rate[:, None]).mean(0)
    assert excess.abs().max() < 4 * 0.5 / 4000**0.5
    lower, upper = noise.rate < 0.4, noise.rate > 0.8
    assert noise.masked[upper].float().mean() > 0.85 > 0.4 > noise.masked[lower].float().mean()


def test_suffix_noise_masks_all_of_r_tokens_with_r_uniform():
    noise = SuffixNoise()(6000, 6, generator())
    R = noise.present.sum(1)
    assert torch.equal(noise.masked, noise.present)
    assert torch.equal(noise.present, torch.arange(6) < R[:, None])
    assert (noise.rate == 1).all()
    counts = R.bincount(minlength=7)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shortest_blocks(schedule, length):
    noise = schedule(50, length, generator())
    assert noise.masked.shape == noise.present.shape == (50, length)
    assert noise.present[:, 0].all()
    assert length > 1 or noise.masked.all()  # a lone token is masked at rate 1


def test_a_tokenizer_without_draft_tokens_is_refused():
    with pytest.raises(ValueError, match="with_draft_tokens"):
        DraftBlocks(1, 1, UniformNoise(), train_tokenizer(["ab"], 257))
    with pytest.raises(ValueError, match="layout=separator"):
        DraftBlocks(1, 1, UniformNoise(), TOKENIZER, layout="pard")
