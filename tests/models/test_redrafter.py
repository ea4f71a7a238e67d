"""Recurrent drafters: training's forward is decoding's, and exports are what was trained."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.redrafter import RedrafterSampler
from models import redrafter
from models.hidden_states import capture
from tests.support import tiny

V, K = 12, 4
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 7]
ANCHORS = [2, 3, 5, 7]


def target(kind="llama"):
    return tiny.causal_lm(V, kind=kind, layers=4)


@torch.no_grad()
def trained_logits(model, drafter, anchors, tokens=TOKENS, change=lambda x: x):
    """Logits [A, K, V] of training's forward at some anchors."""
    blocks = DraftBlocks(len(anchors), K, SuffixNoise(K), tiny.tokenizer(V), "none")
    S = len(tokens)
    row = {
        "input_ids": torch.tensor(tokens),
        "document": torch.zeros(S, dtype=torch.long),
        "position": torch.arange(S),
        "trained": torch.ones(S, dtype=torch.bool),
    }
    noise = SuffixNoise(K)(len(anchors), K, torch.Generator())
    batch = {k: x[None] for k, x in blocks.lay_out(row, torch.tensor(anchors), noise).items()}
    with capture(model, drafter.target_layer_ids) as states:
        model(torch.tensor([tokens]))
    given = batch, change([*states])
    return drafter.logits(redrafter.draft_states(drafter, model, *given), model)[0]


@torch.no_grad()
def decoded_logits(model, drafter, lengths, tokens=TOKENS):
    """Logits [A, K, V] of decoding's passes after prefixes of a text, as one ragged batch."""
    sampler = RedrafterSampler(model, tiny.tokenizer(V), drafter, block_size=K)
    prompts = [tokens[:n] for n in lengths]
    batch = Batch(prompts, 32, KeyedRandomness([0] * len(lengths)), "cpu")
    sampler.begin(batch, SamplingParams(max_new_tokens=1, temperature=0))
    drafted = torch.tensor([tokens[n : n + K] for n in lengths])
    return sampler.forced_pass(batch, drafted, SamplingParams(max_new_tokens=1, temperature=0))


@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_training_computes_what_decoding_does(kind):
    model = target(kind)
    drafter = tiny.redrafter(model)
    ours = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(ours, decoded_logits(model, drafter, ANCHORS), atol=1e-10, rtol=0)


def shifted(states):
    return [s.roll(1, 1) for s in states]


def swapped(states):
    return [*states][::-1]


@pytest.mark.parametrize("wrong", [shifted, swapped])
def test_wrong_states_change_what_is_drafted(wrong):
    """Positions off by one, layers exchanged: negative controls."""
    model = target()
    drafter = tiny.redrafter(model)
    right = trained_logits(model, drafter, ANCHORS)
    assert (trained_logits(model, drafter, ANCHORS, change=wrong) - right).abs().max() > 1e-3


def test_what_a_draft_reads():
    """The first token the committed text alone, each further one those drafted before it."""
    model, anchor = target(), [5]
    drafter = tiny.redrafter(model)
    changed = [*TOKENS[:6], 0, *TOKENS[7:]]
    for logits in (decoded_logits, trained_logits):
        differ = logits(model, drafter, anchor, changed) != logits(model, drafter, anchor)
        assert differ.any(-1).tolist() == [[False, False, True, True]]


def test_only_some_tokens_are_drafted():
    model, ids = target(), torch.tensor([1, 4, 5, 9])
    drafter = tiny.redrafter(model, draft_ids=ids)
    assert drafter.draft_ids.tolist() == ids.tolist()
    found = decoded_logits(model, drafter, ANCHORS)
    assert found.isfinite().any(1).any(0).nonzero().flatten().tolist() == ids.tolist()
    ours = trained_logits(model, drafter, ANCHORS)
    torch.testing.assert_close(ours, found[..., ids], atol=1e-10, rtol=0)


def test_a_new_drafter_begins_as_the_target_s_head():
    """On the last layer's state, it says the token that was drawn from it: the one it reads."""
    model = target().float()
    drafter = redrafter.from_target(model, tiny.tokenizer(V), 2)
    assert drafter.target_layer_ids == (1, 3)
    found = trained_logits(model, drafter, ANCHORS)[:, 0]
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    expected = theirs[[n - 2 for n in ANCHORS]]
    assert torch.equal(found.argsort(-1), expected.argsort(-1))
    torch.testing.assert_close(found, expected, rtol=0.3, atol=0.3)


@pytest.fixture
def folder(tmp_path):
    tiny.redrafter(target().float(), draft_ids=torch.tensor([1, 4, 5, 9])).save_pretrained(tmp_path)
    return tmp_path


def change(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_an_export_is_loaded(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Redrafter"]
    assert config["target_layer_ids"] == [1, 3]
    again = redrafter.load(str(folder))
    drafter = tiny.redrafter(target().float(), draft_ids=torch.tensor([1, 4, 5, 9]))
    assert all(
        torch.equal(*pair)
        for pair in zip(again.state_dict().values(), drafter.state_dict().values())
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_layer_ids": []}, "names no target_layer_ids"),
        ({"target_layer_ids": [1, "2"]}, "names no target_layer_ids"),
        ({"target_layer_ids": [1, 2, 3]}, "of different sizes"),
        ({"hidden_size": 2**20}, "recurrent drafter"),
    ],
)
def test_a_config_that_is_not_the_weights_is_refused(folder, keys, message):
    change(folder, **keys)
    with pytest.raises(ValueError, match=message):
        redrafter.load(str(folder))


def test_damaged_tensors_are_refused(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": tensors["d2t"] + 99}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="its d2t points to tokens 100 to 108, and the target's"):
        redrafter.load(str(folder))
    save_file(
        {k: x for k, x in tensors.items() if k != "norm.weight"}, file, metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=r"lacks tensors of the network: norm\.weight"):
        redrafter.load(str(folder))


def test_another_target_is_refused():
    drafter = tiny.redrafter(target())
    with pytest.raises(ValueError, match="vocab_size=12, and this one has 9"):
        drafter.check_fits(tiny.causal_lm(9, layers=4))
    with pytest.raises(ValueError, match="layer 3 is not there"):
        drafter.check_fits(tiny.causal_lm(V, layers=3))


@pytest.mark.parametrize("states", [0, 5, 99])
def test_as_many_states_as_the_target_has_layers(states):
    model, tokenizer = target(), tiny.tokenizer(V)
    assert redrafter.from_target(model, tokenizer, 4).target_layer_ids == (0, 1, 2, 3)
    with pytest.raises(ValueError, match=f"states={states} is not allowed: the model has 4 layers"):
        redrafter.from_target(model, tokenizer, states)
