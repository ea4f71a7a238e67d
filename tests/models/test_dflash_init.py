"""New DFlash drafters: they begin with what the target has, and refuse what does not fit it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.engine.params import VERIFY, SamplingParams
from decoding.samplers.dflash import DFlashSampler
from models.dflash_init import from_target
from models.hidden_states import capture
from tests.support import tiny

V = 12
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def target(kind="llama"):
    return tiny.causal_lm(V, kind=kind, layers=4)


def normed(x):
    """What a context and, with norms of weight 1, a block's tokens are before the projections."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def test_layers_begin_as_the_target_s():
    """With the weights of the norm before them in the projections, which the context needs too."""
    model = varied_norms(target())
    drafter = from_target(model, tiny.tokenizer(V), [0, 3], 2).double()
    x = torch.randn(7, 16, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(drafter.layers, (model.model.layers[0], model.model.layers[3])):
        given = theirs.input_layernorm(x)
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = getattr(theirs.self_attn, name)(given)
            found = getattr(ours.self_attn, name)(ours.input_layernorm(x))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            assert not torch.allclose(getattr(theirs.self_attn, name)(normed(x)), expected)
        for name in ("mlp", "post_attention_layernorm"):
            expected = getattr(theirs, name)(x)
            torch.testing.assert_close(getattr(ours, name)(x), expected, rtol=1e-6, atol=1e-6)


def varied_norms(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 1.5)
    return model


def unexplained(drafter, model, layers, text):
    """Shares of the variance of the target's own keys and values that its copies miss."""
    states = drafter.target_layer_ids
    found, shares = [], []
    for tokens in text:
        hidden = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        context = drafter.hidden_norm(drafter.fc(torch.cat([hidden[s + 1] for s in states], -1)))
        found.append((context[0, 1:], [hidden[i][0, 1:] for i in layers]))
    for n, i in enumerate(layers):
        theirs, ours = model.model.layers[i], drafter.layers[n].self_attn
        for name in ("k_proj", "v_proj"):
            of = getattr(theirs.self_attn, name)
            expected = torch.cat([of(theirs.input_layernorm(x[n])) for _, x in found])
            error = torch.cat([getattr(ours, name)(c) for c, _ in found]) - expected
            shares.append((error.var(0).sum() / expected.var(0).sum()).item())
    return shares


@torch.no_grad()
def test_copied_layers_begin_with_nearly_the_target_s_keys_and_values():
    """Of text that the projection was not fitted to; a random one begins with worse than none."""
    model = varied_norms(target()).float()
    draws = torch.randint(V, (60, 24), generator=torch.Generator().manual_seed(0)).tolist()
    fitted = from_target(model, tiny.tokenizer(V), [1, 3], [0, 2], text=draws[:40])
    random = from_target(model, tiny.tokenizer(V), [1, 3], [0, 2])
    assert max(unexplained(fitted, model, [1, 3], draws[40:])) < 0.6
    assert min(unexplained(random, model, [1, 3], draws[40:])) > 1
    alone = from_target(model, tiny.tokenizer(V), [3], [2], text=draws[:40])
    assert max(unexplained(alone, model, [3], draws[40:])) < 0.1


def as_a_causal_lm(model, drafter):
    """Logits [S, V] of a drafter of all layers but the first, drafting one token at each place."""
    with torch.no_grad(), capture(model, range(4)) as states:
        model(torch.tensor([TOKENS]))
    hidden = states[0]
    # The last committed token of each block is read as the target's own first layer left it.
    S = len(TOKENS)
    found = []
    for n in range(1, S):
        context = torch.cat([s[:, : n - 1] for s in states[:3]], -1)
        out = drafter(hidden[:, n - 1 : n], context).last_hidden_state
        found.append(drafter.logits(out, model)[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_layers_with_contexts_of_their_own_are_the_target_s(kind):
    """A drafter of all layers after the first gives, after the first's state, the target's logits.

    With one context for all of them it does not.
    """
    model = varied_norms(target(kind))
    copied = {"layers": [1, 2, 3], "states": None, "context": "layerwise", "causal": True}
    drafter = from_target(model, tiny.tokenizer(V), **copied).double()
    expected = model(torch.tensor([TOKENS])).logits[0, :-1]
    torch.testing.assert_close(as_a_causal_lm(model, drafter), expected, rtol=1e-5, atol=1e-5)
    copied |= {"states": 3, "context": "fused", "text": [TOKENS] * 3}
    fused = from_target(model, tiny.tokenizer(V), **copied).double()
    assert (as_a_causal_lm(model, fused) - expected).abs().max() > 0.1


def passes_without(mask, tokens, k):
    """Passes of a text if drafts of k tokens are rejected at the mask alone."""
    count = 0
    while tokens:
        draft = tokens[:k]
        tokens = tokens[(draft.index(mask) if mask in draft else len(draft)) + 1 :]
        count += 1
    return count


@pytest.mark.parametrize("rule", VERIFY)
@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_a_tail_of_all_layers_is_the_target(kind, rule):
    """Every draft is accepted but the mask; without the tail, or a layer, many are not."""
    model = varied_norms(target(kind))
    params = SamplingParams(60, 0.5, verify=rule, ignore_eos=True)
    found = {}
    for layers, tail in [([0, 1, 2, 3], 4), ([0, 1, 2, 3], 0), ([0, 1, 3], 3)]:
        copied = {"states": 1, "context": "layerwise", "tail": tail}
        drafter = from_target(model, tiny.tokenizer(V), layers, **copied).double().eval()
        drafter.config.dflash_config |= {"mask_token_id": V - 1, "sample_from_anchor": True}
        given = {"mask_id": V - 1, "block_size": 4, "nodes": 4, "sharpness": 1.0}
        sampler = DFlashSampler(model, tiny.tokenizer(V), drafter, **given)
        (result,) = sampler.generate([TOKENS], params, seeds=[3])
        found[len(layers), tail] = result.stats.acceptance_length
        if tail == 4 and rule != "tree":
            assert found[4, 4] == 60 / passes_without(V - 1, result.token_ids, 4)
    best = found.pop((4, 4))
    assert best > 3.5
    assert all(length < best - 1 for length in found.values())


def attention_logits(attention, x, norms=False):
    """Queries times keys of a layer [B, heads, N, N], of what it is given, without positions."""
    B, N = x.shape[:2]
    query, key = (
        project(x).view(B, N, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj)
    )
    if norms:
        query, key = attention.q_norm(query), attention.k_norm(key)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ key.mT * attention.scaling


def test_attention_begins_as_sharp_as_the_target_s():
    """With norms of weight 1 the logits would be a ninth of the target's."""
    model = target().float()
    with torch.no_grad():
        for layer in model.model.layers:
            for project in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                project.weight.mul_(3 / project.weight.std() / project.in_features**0.5)
    drafter = from_target(model, tiny.tokenizer(V), 2, 2)
    tokens = torch.randint(V, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), capture(model, [2]) as states:
        model(tokens)
        given = model.model.layers[3].input_layernorm(states[0])
        theirs = attention_logits(model.model.layers[3].self_attn, given)
        ours = drafter.layers[1].self_attn
        found = attention_logits(ours, normed(states[0]), norms=True)
        ours.q_norm.weight.fill_(1)
        flat = attention_logits(ours, normed(states[0]), norms=True)
    assert theirs.std() > 5
    assert found.std() == pytest.approx(theirs.std().item(), rel=0.15)
    assert flat.std() < theirs.std() / 5


def test_norms_of_keys_stay_1():
    """Those of queries take them over, so that engines need not tell layers apart."""
    model = target("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight.uniform_(0.5, 1.5)
    drafter = from_target(model, tiny.tokenizer(V), 2, 2)
    for ours, theirs in zip(drafter.layers, (model.model.layers[0], model.model.layers[3])):
        q, k = theirs.self_attn.q_norm.weight, theirs.self_attn.k_norm.weight
        assert torch.equal(ours.self_attn.q_norm.weight.double(), (q * k).float().double())
        assert (ours.self_attn.k_norm.weight == 1).all()
        assert not ours.self_attn.k_norm.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 5}, "layers=5 is not allowed: the model has 4"),
        ({"layers": [0, 9]}, "layer 9 is not there"),
        ({"states": [4]}, "layer 4 is not there"),
        ({"states": [1, 3]}, "before the final norm"),
        ({"states": 4}, "states=4 is not allowed"),
        ({"layers": [0, 2], "tail": 3}, "tail=3 is not allowed: the drafter has 2 layers"),
        ({"tokenizer": tiny.tokenizer(V + 1)}, "no token of its own"),
        ({"text": [[3], []]}, "no sequence of two tokens"),
    ],
)
def test_what_does_not_fit_the_target(changes, message):
    given = {"tokenizer": tiny.tokenizer(V), "layers": 2, "states": 2, **changes}
    with pytest.raises(ValueError, match=message):
        from_target(target(), **given)


PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}


def other(kind, **config):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | config)).eval()


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("glm", {"head_dim": 8}, "'glm' model.*'partial_rotary_factor': 0.5"),
        ("glm4", {"head_dim": 8}, "'glm4' model.*'partial_rotary_factor': 0.5"),
        ("llama", {"rope_parameters": PARTIAL | {"rope_type": "linear", "factor": 2.0}}, "linear"),
        (
            "hunyuan_v1_dense",
            {"head_dim": 8, "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic",
                                                "factor": 2.0, "alpha": 9.0}},
            "'alpha': 9.0",
        ),
        ("stablelm", {}, "'stablelm' model: a Llama"),
        ("phi3", {}, "'phi3' model: a Llama"),
        ("olmo2", {}, "'olmo2' model: a Llama"),
    ],
)  # fmt: skip
def test_a_target_of_another_kind_is_refused_in_one_line(kind, config, message):
    with pytest.raises(ValueError, match=message) as error:
        from_target(other(kind, **config), tiny.tokenizer(V), 2, 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["mistral", "granite", "smollm3"])
def test_a_target_that_rotates_whole_heads_has_a_drafter(kind):
    """A factor that its class ignores is not handed on to engines, which obey it."""
    model = other(kind, rope_parameters={"rope_type": "default", **PARTIAL})
    drafter = from_target(model, tiny.tokenizer(V), 2, 1)
    assert "partial_rotary_factor" not in drafter.config.to_dict()["rope_parameters"]
    assert torch.equal(drafter.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
