"""The checks of a written export."""

import copy

import pytest
import torch

from tests.support import tiny
from trainers.publishing.export_check import check_outputs, own_memory


def at_odd_addresses(network):
    """A copy whose weights lie where files are mapped: at no multiple of 16 bytes."""
    again = copy.deepcopy(network)
    for p in again.parameters():
        memory = torch.empty(p.numel() + 1, dtype=p.dtype)
        p.data = memory[1:].view(p.shape).copy_(p.data)
    return again


def test_weights_at_an_odd_address_are_the_same_weights():
    network = tiny.causal_lm(50, hidden=64).float()
    again = at_odd_addresses(network)
    assert any(p.data_ptr() % 16 for p in again.parameters())
    check_outputs(network, again)
    assert not any(p.data_ptr() % 16 for p in own_memory(again).parameters())


def test_other_weights_are_refused():
    network = tiny.causal_lm(50)
    again = copy.deepcopy(network)
    with torch.no_grad():
        again.lm_head.weight[3] += 1e-6
    with pytest.raises(ValueError, match="the export's outputs differ"):
        check_outputs(network, again)
