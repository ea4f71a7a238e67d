"""A reduced head gives the logits of some tokens, bit for bit those of the whole head."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from models.head import ReducedHead, freeze_embeddings, silence_others
from tests.support import tiny

IDS = torch.tensor([5, 2, 9])
TOKENS = torch.tensor([[1, 2, 3, 4]])


def gemma():
    """A class whose forward changes the head's logits (soft-capping)."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.5,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).double().eval()


@pytest.mark.parametrize(
    "network",
    [tiny.causal_lm(12), tiny.causal_lm(12, kind="qwen3", tie_word_embeddings=True), gemma()],
    ids=["llama", "tied", "softcap"],
)
def test_it_gives_the_rows_of_the_whole_head(network):
    whole = network(TOKENS).logits
    found = ReducedHead(network, IDS)(input_ids=TOKENS)
    torch.testing.assert_close(found, whole[..., IDS], rtol=0, atol=1e-12)
    assert torch.equal(network(TOKENS).logits, whole)  # the network itself is unchanged
    assert (found - whole[..., :3]).abs().max() > 1e-3  # negative control: other rows differ


def test_no_ids_are_all_tokens():
    network = tiny.causal_lm(12)
    assert torch.equal(ReducedHead(network, None)(input_ids=TOKENS), network(TOKENS).logits)


def test_a_head_that_is_reduced_already_stays():
    network = tiny.causal_lm(12)
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight[IDS])
    assert torch.equal(ReducedHead(network, IDS)(input_ids=TOKENS), network(TOKENS).logits)


def test_gradients_reach_the_rows_and_no_others():
    network = tiny.causal_lm(12)
    ReducedHead(network, IDS)(input_ids=TOKENS).square().sum().backward()
    reached = network.lm_head.weight.grad.abs().sum(-1) > 0
    assert reached.nonzero().flatten().tolist() == sorted(IDS.tolist())


def test_frozen_embeddings_are_not_trained():
    network = tiny.causal_lm(12)
    freeze_embeddings(network)
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_silenced_head_is_silent_about_other_tokens_only(tied):
    network = tiny.causal_lm(12, tie_word_embeddings=tied)
    before, embedding = network(TOKENS).logits, network.model.embed_tokens.weight.clone()
    silence_others(network, IDS)
    after = network(TOKENS).logits
    others = [t for t in range(12) if t not in IDS]
    assert torch.equal(after[..., IDS], before[..., IDS])
    assert (after[..., others] == 0).all()
    assert torch.equal(network.model.embed_tokens.weight, embedding)


def test_a_silenced_head_survives_the_disk(tmp_path):
    network = tiny.causal_lm(12, tie_word_embeddings=True)
    silence_others(network, IDS)
    network.save_pretrained(tmp_path)
    again = type(network).from_pretrained(tmp_path, dtype="float64")
    assert torch.equal(again(TOKENS).logits, network(TOKENS).logits)
