"""Warping in bfloat16: the numbers as they are, and an error for those that are none."""

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.engine.warp import warp

EVERY = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
NUMBERS = EVERY[~EVERY.isnan()]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_logit_is_the_number_that_it_was(temperature):
    logits = NUMBERS[: len(NUMBERS) // 3 * 3].view(1, 3, -1)
    found = warp(logits, SamplingParams(1, temperature))
    expected = logits.float() / (temperature or 1.0)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(warp(logits[:, :, ::2], SamplingParams(1, temperature)), expected[:, :, ::2])


@pytest.mark.parametrize("bits", [0x7F81, 0x7FC0, 0xFF81, 0xFFFF])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 2, 40)])
def test_what_is_no_number_is_an_error(bits, place):
    logits = torch.full((2, 3, 41), -torch.inf).bfloat16()
    warp(logits, SamplingParams(1, 1.0))  # negative control: infinite is a number here
    logits[place] = torch.tensor(bits).to(torch.uint16).view(torch.bfloat16)
    with pytest.raises(ValueError, match=r"not numbers \(NaN\).* overflow in torch\.bfloat16"):
        warp(logits, SamplingParams(1, 1.0))
