"""EAGLE-3 drafters: training's forward is decoding's, and the format is that of engines."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.external.vllm_engine import speculative_config
from decoding.samplers.eagle3 import Eagle3Sampler
from models import eagle3
from models.hidden_states import capture
from tests.support import tiny

V, K = 12, 4
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 7]
ANCHORS = [2, 3, 5, 7]


def target(kind="llama"):
    return tiny.causal_lm(V, kind=kind, layers=4)


def trained_logits(model, drafter, anchors, tokens=TOKENS, document=None, change=lambda x: x):
    """Logits [A, K, V] of training's forward at some anchors."""
    blocks = DraftBlocks(len(anchors), K, SuffixNoise(K), tiny.tokenizer(V), "none")
    S = len(tokens)
    document = torch.zeros(S, dtype=torch.long) if document is None else document
    row = {
        "input_ids": torch.tensor(tokens),
        "document": document,
        "position": torch.cat([torch.arange(n) for n in document.bincount().tolist()]),
        "trained": torch.ones(S, dtype=torch.bool),
    }
    noise = SuffixNoise(K)(len(anchors), K, torch.Generator())
    batch = {k: x[None] for k, x in blocks.lay_out(row, torch.tensor(anchors), noise).items()}
    states = []
    with torch.no_grad():
        for text in document.unique():  # each text by itself, as decoding has it
            with capture(model, drafter.target_layer_ids) as found:
                model(torch.tensor([tokens])[:, document == text])
            states.append([*found])
        states = change([torch.cat(layer, 1) for layer in zip(*states)])
        return drafter.logits(eagle3.draft_states(drafter, model, batch, states), model)[0]


@torch.no_grad()
def decoded_logits(model, drafter, lengths, tokens=TOKENS):
    """Logits [A, K, V] of decoding's passes after prefixes of a text, as one ragged batch."""
    sampler = Eagle3Sampler(model, tiny.tokenizer(V), drafter, block_size=K)
    prompts = [tokens[:n] for n in lengths]
    batch = Batch(prompts, 32, KeyedRandomness([0] * len(lengths)), "cpu")
    params = SamplingParams(max_new_tokens=1, temperature=0)
    sampler.begin(batch, params)
    drafted = torch.tensor([tokens[n : n + K] for n in lengths])
    return sampler.forced_pass(batch, drafted, params)


VARIANTS = [{}, *({key: key != "norm_before_residual"} for key in eagle3.CHOICES)]
VARIANTS += [{"parallel": True}]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_training_computes_what_decoding_does(kind, variant):
    """Each variant, and each is a network of its own."""
    model = target(kind)
    drafter = tiny.eagle3(model, **variant)
    ours = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(ours, decoded_logits(model, drafter, ANCHORS), atol=1e-10, rtol=0)
    if variant:
        plain = tiny.eagle3(model)
        plain.load_state_dict(drafter.state_dict(), strict=False)
        assert (trained_logits(model, plain, ANCHORS) - ours).abs().max() > 1e-3


def test_a_text_in_a_packed_row_is_that_text_alone():
    model = target()
    drafter, first = tiny.eagle3(model), [6, 2, 2]
    document = torch.tensor([0] * 3 + [1] * len(TOKENS))
    packed = trained_logits(model, drafter, [n + 3 for n in ANCHORS], first + TOKENS, document)
    alone = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=0)


def test_only_some_tokens_are_drafted():
    """With their own head's rows; all others are never drafted."""
    model, ids = target(), torch.tensor([1, 4, 5, 9])
    drafter = tiny.eagle3(model, draft_ids=ids)
    assert drafter.draft_ids.tolist() == ids.tolist()
    assert drafter.t2d.nonzero().flatten().tolist() == ids.tolist()
    found = decoded_logits(model, drafter, ANCHORS)
    assert found.isfinite().any(1).any(0).nonzero().flatten().tolist() == ids.tolist()
    ours = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(ours, found[..., ids], atol=1e-10, rtol=0)


def shifted(states):
    return [s.roll(1, 1) for s in states]


def swapped(states):
    return [*states][::-1]


@pytest.mark.parametrize("wrong", [shifted, swapped])
def test_wrong_states_change_what_is_drafted(wrong):
    """Positions off by one, layers exchanged: negative controls."""
    model = target()
    drafter = tiny.eagle3(model)
    right = trained_logits(model, drafter, ANCHORS)
    assert (trained_logits(model, drafter, ANCHORS, change=wrong) - right).abs().max() > 1e-3


def test_what_a_draft_reads():
    """The first token the committed text alone, each further one those drafted before it."""
    model, anchor = target(), [5]
    drafter = tiny.eagle3(model)
    right = decoded_logits(model, drafter, anchor)
    changed = [*TOKENS[:6], 0, *TOKENS[7:]]
    differ = (decoded_logits(model, drafter, anchor, changed) != right).any(-1)
    assert differ.tolist() == [[False, False, True, True]]
    assert (trained_logits(model, drafter, anchor, changed) != right).any(-1)[0, 2:].all()


def test_masks_are_drafted_from_what_is_committed_alone():
    """P-EAGLE: no drafted token is read; the masks before are, and the committed tokens."""
    model, anchor = target(), [5]
    drafter = tiny.eagle3(model, parallel=True)
    right = trained_logits(model, drafter, anchor)
    changed = [*TOKENS[:5], 0, 0, 0, 0, *TOKENS[9:]]
    assert torch.equal(trained_logits(model, drafter, anchor, changed), right)
    changed = [*TOKENS[:2], 0, *TOKENS[3:]]
    assert (trained_logits(model, drafter, anchor, changed) != right).any(-1).all()
    assert not torch.allclose(right[0, 1], right[0, 2])  # positions, and the masks before
    with torch.no_grad():
        drafter.mask_hidden += 1
    differ = (trained_logits(model, drafter, anchor) != right).any(-1)
    assert differ.tolist() == [[False, True, True, True]]
    decoded = decoded_logits(model, drafter, ANCHORS)
    ours = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(ours, decoded, atol=1e-10, rtol=0)


def test_a_new_drafter_begins_with_what_the_target_has():
    model = target()
    drafter = eagle3.from_target(model, tiny.tokenizer(V), [0, 1, 2], text=[TOKENS])
    layer, theirs, H = drafter.layers[0], model.model.layers[3], 16
    assert torch.equal(layer.self_attn.k_proj.weight[:, H:], theirs.self_attn.k_proj.weight.float())
    assert torch.equal(layer.mlp.up_proj.weight, theirs.mlp.up_proj.weight.float())
    assert torch.equal(drafter.lm_head.weight, model.get_output_embeddings().weight.float())
    states = model.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    read = torch.cat([states[i][0, :-1] for i in (1, 2, 3)], -1).float()
    fitted = (read @ drafter.fc.weight.T - states[3][0, 1:]).square().mean()
    random = eagle3.from_target(model, tiny.tokenizer(V), [0, 1, 2])
    assert fitted < 0.5 * (read @ random.fc.weight.T - states[3][0, 1:]).square().mean()


NAMES = {
    "fc.weight": (16, 32),
    "layers.0.input_layernorm.weight": (16,),
    "layers.0.hidden_norm.weight": (16,),
    "layers.0.post_attention_layernorm.weight": (16,),
    "norm.weight": (16,),
    "lm_head.weight": (4, 16),
    "d2t": (4,),
    "t2d": (V,),
}


@pytest.fixture
def folder(tmp_path):
    drafter = tiny.eagle3(target().float(), draft_ids=torch.tensor([1, 4, 5, 9]))
    drafter.save_pretrained(tmp_path)
    return tmp_path


def test_the_format(folder):
    """Names and sizes as vLLM 0.32 reads them (`llama_eagle3.py`)."""
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    assert NAMES.items() <= shapes.items()
    assert shapes["layers.0.self_attn.q_proj.weight"][1] == 32  # an embedding and a state
    assert tensors["d2t"].tolist() == [1, 3, 3, 6]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["draft_vocab_size"] == 4
    assert config["norm_before_residual"] is True
    # The output of decoder layer i has the number i + 1.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["num_aux_hidden_states"] == 2
    again = eagle3.load(str(folder))
    assert again.target_layer_ids == (0, 2)
    assert again.draft_ids.tolist() == [1, 4, 5, 9]


def change(folder, **keys):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: x for k, x in config.items() if x is not None}))


def test_the_format_of_p_eagle(tmp_path):
    tiny.eagle3(target().float(), parallel=True).save_pretrained(tmp_path)
    shapes = {n: x.shape for n, x in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["mask_hidden"] == (1, 1, 32)
    assert json.loads((tmp_path / "config.json").read_text())["pard_token"] == V - 1
    wanted = {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 3}
    assert wanted.items() <= speculative_config(tmp_path, 3).items()
    assert eagle3.load(str(tmp_path)).parallel
    change(tmp_path, pard_token=V)
    drafter = eagle3.load(str(tmp_path))
    with pytest.raises(ValueError, match="pard_token=12"):
        Eagle3Sampler(target().float(), tiny.tokenizer(V), drafter, block_size=K)
    with pytest.raises(ValueError, match=r"parallel=true is not allowed with EAGLE-3\.1"):
        tiny.eagle3(target(), parallel=True, fc_norm=True)


def test_an_own_table_of_embeddings_is_read(folder):
    """And the layer's name of EAGLE's authors, as others' drafters have both."""
    tensors = load_file(folder / "model.safetensors")
    named = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    model = target().float()
    theirs = model.get_input_embeddings().weight.detach()
    found = {}
    for name, table in (("target's", theirs), ("own", theirs.flip(0))):
        table = {"embed_tokens.weight": table.contiguous()}
        save_file(named | table, folder / "model.safetensors", metadata={"format": "pt"})
        found[name] = decoded_logits(model, eagle3.load(str(folder)), ANCHORS)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    without = decoded_logits(model, eagle3.load(str(folder)), ANCHORS)
    assert torch.equal(found["target's"], without)
    known = without.isfinite()
    assert (found["own"] - without)[known].abs().max() > 1e-2


def test_an_absent_norm_before_residual_is_false(folder):
    change(folder, norm_before_residual=None)
    assert not eagle3.load(str(folder)).layers[0].norm_before_residual


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fc_norm": True}, "fc_norm"),  # tensors that are not there
        ({"num_hidden_layers": 2}, "it has 2 layers, and one is known"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names no eagle_aux_hidden_state_layer_ids"),
        ({"parallel_drafting": True}, "names no pard_token"),
        ({"parallel_drafting": True, "pard_token": 3}, "mask_hidden"),
    ],
)
def test_other_variants_are_refused(folder, keys, message):
    change(folder, **keys)
    with pytest.raises(ValueError, match=message):
        eagle3.load(str(folder))


def test_tokens_outside_of_the_vocabulary_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][3] += 5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"d2t points to tokens 1 to 14, .* are 0 to 11"):
        eagle3.load(str(folder))


def test_layers_that_the_target_lacks_are_refused(folder):
    change(folder, eagle_aux_hidden_state_layer_ids=[1, 9])
    drafter = eagle3.load(str(folder))
    with pytest.raises(ValueError, match="layer 8 is not there: the network has layers 0 to 3"):
        Eagle3Sampler(target().float(), tiny.tokenizer(V), drafter, block_size=K)
