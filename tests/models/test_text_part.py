"""The text part of tiny models that read images too is an ordinary causal LM."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.corruption.draft_blocks import DraftBlocks, UniformNoise
from decoding import SamplingParams, load
from decoding.loading import load_tokenizer
from models import causal
from models.diffusion import from_causal_lm
from recipes.settings import Optimization
from tests.support import families, tiny
from tests.support.families import NEW, PROMPTS, V
from tests.support.results import as_plain, ids
from trainers.diffusion import MaskedDiffusion
from trainers.publishing.export_check import check_drafts, check_weights
from trainers.publishing.export_folder import _write_weights

GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)
CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "llava": "LlamaForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl": "Qwen3ForCausalLM",
}


def saved(kind, folder, window=8 * families.WINDOW):
    """A tiny whole model with its tokenizer, and transformers' own texts."""
    texts = families.varied(kind, folder, window)
    tiny.tokenizer(V).save_pretrained(folder)
    return texts


def rename(folder, change):
    """Rename the tensors of a folder; None drops one."""
    file = folder / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    tensors.pop(None, None)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", CLASSES)
def test_its_texts_are_those_of_the_whole(kind, tmp_path):
    expected = saved(kind, tmp_path)
    sampler = load(str(tmp_path), dtype="float32")
    assert type(sampler.target).__name__ == CLASSES[kind]
    assert ids(sampler.generate(PROMPTS, GREEDY)) == expected
    own = sampler.target.num_parameters()
    assert own < families.network(kind).num_parameters()  # nothing of the other parts is loaded


NEW_NAMES = {  # a saved model has the names of its first files; other files have these
    "llava": lambda name: name.replace("language_model.lm_head.", "lm_head.").replace(
        "language_model.model.", "model.language_model."
    ),
    "qwen2_5_vl": lambda name: (
        name.replace("visual.", "model.visual.")
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model.")
    ),
}


@pytest.mark.parametrize("kind", NEW_NAMES)
def test_files_with_other_names(kind, tmp_path):
    expected = saved(kind, tmp_path)
    before = {*load_file(tmp_path / "model.safetensors")}
    rename(tmp_path, NEW_NAMES[kind])
    after = {*load_file(tmp_path / "model.safetensors")}
    assert not {name for name in before & after if "embed_tokens" in name}
    sampler = load(str(tmp_path), dtype="float32")
    assert ids(sampler.generate(PROMPTS, GREEDY)) == expected


def test_a_head_of_its_own_is_read(tmp_path):
    """The whole says whether the head is tied, whatever the text part's configuration says."""
    expected = saved("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    sampler = load(str(tmp_path), dtype="float32")
    assert ids(sampler.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda n: None if n.endswith("layers.1.mlp.up_proj.weight") else n,
        lambda n: n.replace("layers.1.mlp.up", "layers.1.mlp.upper"),
        lambda n: n.replace("layers.3.", "layers.4."),
    ],
)
def test_a_text_part_that_is_not_whole_is_refused(change, tmp_path):
    saved("llava", tmp_path)
    rename(tmp_path, change)
    with pytest.raises(ValueError, match="lacks tensors"):
        causal.load(str(tmp_path))


def test_a_tensor_too_many_of_the_text_part_is_refused(tmp_path):
    """Another part's is not: the right input has many."""
    saved("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["language_model.model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has tensors that the network does not have"):
        causal.load(str(tmp_path))


def test_a_text_part_without_a_class_is_one_line(tmp_path):
    families.configuration("glm4v").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no causal LM for the text part .*'glm4v'") as caught:
        causal.load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_drafter_of_its_layers_is_trained_exported_and_decodes(tmp_path):
    whole, export = tmp_path / "whole", tmp_path / "export"
    expected = saved("llava", whole)
    target, tokenizer = causal.load(str(whole)), load_tokenizer(str(whole))
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(V - 1)
    tokenizer.save_pretrained(whole)
    tokenizer = load_tokenizer(str(whole))
    network = from_causal_lm(target, tokenizer, [0, 3])
    before = copy.deepcopy(network)
    module = MaskedDiffusion(
        network, tokenizer, Optimization(lr=1e-2), target,
        method="deer", block_size=3, target_name=str(whole), layout="pard",
    )  # fmt: skip
    row = {
        "input_ids": torch.arange(1, 15),
        "document": torch.zeros(14, dtype=torch.long),
        "position": torch.arange(14),
        "trained": torch.ones(14, dtype=torch.long),
    }
    sample = DraftBlocks(4, 3, UniformNoise(), tokenizer, "pard")(row, torch.Generator())
    optimizer = torch.optim.SGD(module.network.parameters(), lr=0.1)
    for _ in range(2):
        loss, weight = module.losses({name: x[None] for name, x in sample.items()})
        optimizer.zero_grad()
        (loss * weight).sum().backward()
        optimizer.step()
    weights = zip(network.parameters(), before.parameters())
    assert any(not torch.equal(new, old) for new, old in weights)
    _write_weights(module, network.eval(), export)
    again = causal.load(str(export))
    check_weights(network, again)
    check_drafts(module.sampler(), network, again)
    sampler = load(str(export), dtype="float32")
    assert type(sampler.drafter).__name__ == CLASSES["llava"]
    for verify in ("coupled", "tree"):
        found = as_plain(
            sampler, PROMPTS, SamplingParams(max_new_tokens=NEW, verify=verify, seed=1)
        )
        assert sum(result.stats.drafted for result in found)
    assert ids(sampler.generate(PROMPTS, GREEDY)) == expected


def test_prompts_that_attend_to_later_tokens_are_refused(tmp_path):
    families.configuration("paligemma").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'paligemma' model is not decoded with: tokens of its"):
        causal.load(str(tmp_path))
