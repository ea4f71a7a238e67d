"""Hidden states of named target layers, from the cached passes that give the logits."""

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

V = 12
LAYERS = (1, 0)


class Reading(PlainSampler):
    """Plain decoding that keeps what its passes say of the layers."""

    hidden_layers = LAYERS

    def begin(self, batch, params):
        self.seen = [self.prefill(batch, "target", self.cached_target(batch))]

    def target_pass(self, batch, draft, params):
        output = super().target_pass(batch, draft, params)
        self.seen.append(output.hidden_states)
        return output


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_cached_passes_give_the_states_of_one_whole_forward(kind):
    target = tiny.causal_lm(V, layers=2, kind=kind).float()
    sampler = Reading(target, tiny.tokenizer(V))
    prompt = [3, 1, 4, 1, 5]
    (result,) = sampler.generate([prompt], SamplingParams(max_new_tokens=4, seed=0))
    ids = torch.tensor([prompt + result.token_ids[:-1]])
    with torch.inference_mode():
        whole = target.model(ids, output_hidden_states=True).hidden_states
    # transformers counts the embedding as state 0, and its last state is after the final norm.
    first = torch.cat([states[1] for states in sampler.seen], 1)
    torch.testing.assert_close(first, whole[1])
    last = torch.cat([states[0] for states in sampler.seen], 1)
    torch.testing.assert_close(target.model.norm(last), whole[2])
    assert (last - whole[2]).abs().max() > 1e-3  # the norm left out would be seen
    assert (first - whole[0]).abs().max() > 1e-3  # a layer too early would be seen


def test_nothing_is_kept_where_nobody_asks():
    sampler = PlainSampler(tiny.causal_lm(V).float(), tiny.tokenizer(V))
    rows, params = sampler.start([1, 2, 3])
    with torch.inference_mode():
        sampler.begin(rows, params)
        assert sampler.target_pass(rows, rows.tokens[:, :0], params).hidden_states == ()
    assert not any(m._forward_hooks for m in sampler.target.modules())
