"""Captured hidden states are those that transformers gives, counted from the layers' outputs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models.hidden_states import EMBEDDINGS, capture, check_layers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture(params=["llama", "qwen3"])
def network(request):
    torch.manual_seed(0)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


@pytest.fixture
def tokens():
    return torch.arange(10).view(2, 5)


def hooks_of(network):
    return [m for m in network.modules() if m._forward_hooks]


@torch.no_grad()
def test_the_states_are_those_of_transformers_one_index_on(network, tokens):
    with capture(network, (1, 0)) as states:
        logits = network(input_ids=tokens).logits
    theirs = network(input_ids=tokens, output_hidden_states=True)
    assert torch.equal(logits, theirs.logits)
    assert torch.equal(states[0], theirs.hidden_states[2])
    assert torch.equal(states[1], theirs.hidden_states[1])
    assert not torch.equal(states[0], theirs.hidden_states[1])  # off by one would be seen


@torch.no_grad()
def test_the_last_layer_is_taken_before_the_final_norm(network, tokens):
    with capture(network, (2,)) as states:
        network(input_ids=tokens)
    last = network(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    assert not torch.allclose(states[0], last)
    torch.testing.assert_close(network.model.norm(states[0]), last)


@torch.no_grad()
def test_a_further_forward_replaces_the_states(network, tokens):
    with capture(network, (0, 2)) as states:
        assert not states
        network(input_ids=tokens)
        first = states[1]
        network(input_ids=tokens[:, :2])
    assert len(states) == 2
    assert (first.shape[1], states[1].shape[1]) == (5, 2)


def test_nothing_is_hooked_without_layers_or_afterwards(network, tokens):
    with capture(network, ()) as states:
        assert not hooks_of(network)
        network(input_ids=tokens)
    assert states == []
    with capture(network, (0,)):
        assert len(hooks_of(network)) == 1
    assert not hooks_of(network)


def test_hooks_go_after_an_error_too(network):
    with pytest.raises(RuntimeError), capture(network, (0,)):
        raise RuntimeError
    assert not hooks_of(network)


@torch.no_grad()
def test_the_embeddings_are_the_input_of_the_first_layer(network, tokens):
    with capture(network, (1, EMBEDDINGS)) as states:
        network(input_ids=tokens)
    theirs = network(input_ids=tokens, output_hidden_states=True).hidden_states
    assert torch.equal(states[1], theirs[0])
    assert torch.equal(states[0], theirs[2])
    check_layers(network, (EMBEDDINGS,))
    assert not network.model.layers[0]._forward_pre_hooks


@pytest.mark.parametrize("layer", [3, -2])
def test_a_layer_that_is_not_there(network, layer):
    with pytest.raises(ValueError, match=f"layer {layer} .* 0 to 2"), capture(network, (layer,)):
        pass
    with pytest.raises(ValueError, match=str(layer)):
        check_layers(network, (layer,))
    check_layers(network, (0, 2))
