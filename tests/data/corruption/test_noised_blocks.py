"""Noised blocks: what is masked, at which rates, and how clean and noised copies are laid out."""

import pytest
import torch

from data.corruption.noised_blocks import NoisedBlocks
from data.text.tokenizer import with_mask_token
from tests.support import tiny

V = 12


def corruption(attention="block_causal", block_size=2):
    return NoisedBlocks(attention, block_size, with_mask_token(tiny.tokenizer(V)))


def row(document, trained=None):
    document = torch.tensor(document)
    position = torch.zeros_like(document)
    for i in range(1, len(document)):
        same = document[i] == document[i - 1] and document[i] >= 0
        position[i] = position[i - 1] + 1 if same else 0
    return {
        "input_ids": torch.arange(len(document)) % V,
        "document": document,
        "position": position,
        "trained": torch.ones_like(document) if trained is None else torch.tensor(trained),
    }


ROW = row([0, 0, 0, 0, 0, 1, 1, 1, -1, -1])


def test_the_layout_of_clean_and_noised_copies():
    sample = corruption()(ROW, torch.Generator().manual_seed(0))
    clean, noised = sample["input_ids"].chunk(2)
    assert torch.equal(clean, ROW["input_ids"])
    assert torch.equal(noised, clean.where(~sample["masked"], torch.tensor(V)))
    assert torch.equal(sample["target"], clean)
    for key, column in (("document", "document"), ("index", "position")):
        assert torch.equal(sample[key], ROW[column].repeat(2))
    assert sample["block"].tolist() == [-1] * 10 + [0] * 10
    assert not sample["masked"][8:].any()


def test_a_bidirectional_row_is_noised_alone_with_one_rate_a_document():
    sample = corruption("bidirectional")(ROW, torch.Generator().manual_seed(0))
    assert sample["input_ids"].shape == sample["target"].shape == (10,)
    assert (sample["block"] == -1).all()
    assert len({*sample["rate"][:5].tolist()}) == len({*sample["rate"][5:8].tolist()}) == 1
    assert sample["rate"][0] != sample["rate"][5]


def test_blocks_are_counted_from_each_documents_beginning():
    groups = corruption().rate_groups(ROW["document"], ROW["position"])
    assert groups[:8].tolist() == [0, 0, 1, 1, 2, 3, 3, 4]


def test_a_token_is_masked_at_its_blocks_rate_and_only_where_trained():
    trained = [0] * 8 + [1] * 56
    long = row([0] * 64, trained)
    shares, rates = [], []
    for seed in range(200):
        sample = corruption(block_size=8)(long, torch.Generator().manual_seed(seed))
        assert not sample["masked"][:8].any()
        shares.append(sample["masked"][8:].float().mean())
        rates.append(sample["rate"][::8])
        # Eight blocks of a row have eight different rates, spread evenly over (1/8, 1].
        assert sorted((rates[-1] - 1 / 8).div(7 / 8).mul(8).ceil().int().tolist()) == [*range(1, 9)]
    assert torch.stack(rates).min() > 1 / 8
    expected = (1 + 1 / 8) / 2
    assert torch.stack(shares).mean().item() == pytest.approx(expected, abs=0.02)


def test_weights_of_one_over_t_count_every_token_once_on_average():
    total = torch.zeros(8)
    for seed in range(600):
        sample = corruption(block_size=4)(row([0] * 8), torch.Generator().manual_seed(seed))
        total += sample["masked"] / sample["rate"]
    assert (total / 600).tolist() == pytest.approx([1] * 8, abs=0.15)
