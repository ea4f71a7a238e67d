"""LoRA: what is trained, what is exported and how it loads, and what is refused beforehand."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from data.text.tokenizer import draft_token_ids, train_tokenizer, with_draft_tokens
from decoding.engine.params import SamplingParams
from decoding.loading import load, load_tokenizer, parade_config
from models.diffusion import from_causal_lm
from recipes.compose import compose
from tests.support import tiny
from tests.support.refused import refused
from tests.support.results import as_plain
from tests.support.runs import same, weights
from trainers.fit import build_module
from trainers.lora import add_lora, to_export
from trainers.publishing import hub
from trainers.strategies import with_weights, without_weights

PLAIN = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["all-linear"], "merge": True}
IDS = torch.arange(200, 260)[None]  # the draft tokens among them


@pytest.fixture(scope="module")
def tokenizer():
    return with_draft_tokens(train_tokenizer(["return value"], 258))


@pytest.fixture
def base(tmp_path, tokenizer):
    """Folders of tiny networks, by whether their head is tied."""

    def write(tied=False, dtype=torch.float32):
        network = tiny.causal_lm(len(tokenizer), tie_word_embeddings=tied).to(dtype)
        network.save_pretrained(tmp_path / "base")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)

    return write


@torch.no_grad()
def trained(network):
    """As after some steps: every trained parameter has moved."""
    torch.manual_seed(1)
    for p in network.parameters():
        if p.requires_grad:
            p += 0.1 * torch.randn_like(p)
    return network


@torch.no_grad()
def logits(network, ids=IDS):
    return network.eval()(ids % network.config.vocab_size).logits


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_starts_as_it_was(base, tokenizer, tied):
    network = base(tied)
    before = logits(network)
    add_lora(network, tokenizer, **PLAIN)
    assert torch.equal(logits(network), before)
    # Negative control: the adapters and the tokens do count.
    assert (logits(trained(network)) - before).abs().max() > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_copy_is_the_trained_network(base, tokenizer, tied):
    plain = base(tied)
    network = trained(add_lora(base(tied), tokenizer, **PLAIN))
    weights = {name: x.clone() for name, x in network.state_dict().items()}
    merged = to_export(network, merge=True)
    difference = (logits(merged) - logits(network)).abs().max()
    assert difference <= 1e-5 * logits(network).abs().max()
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    # The trainer's own network stays as it was.
    assert all(torch.equal(x, weights[name]) for name, x in network.state_dict().items())
    # Negative control: without the adapters the logits are others.
    assert (logits(plain) - logits(network)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kept_copy_loads_beside_its_base(base, tokenizer, tmp_path, dtype):
    network = trained(add_lora(base(True, dtype), tokenizer, **{**PLAIN, "merge": False}))
    assert {p.dtype for p in network.parameters() if p.requires_grad} == {torch.float32}
    kept = to_export(network, merge=False)
    kept.save_pretrained(tmp_path / "kept")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype=dtype)
    assert torch.equal(logits(again), logits(kept))
    if dtype == torch.float32:
        assert torch.equal(logits(kept), logits(network))
    assert not torch.equal(logits(kept), logits(base(True, dtype)))  # negative control


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_network_is_made_whole_again(base, tokenizer, tied):
    """As after FSDP2 and DeepSpeed, which do not gather a tied weight twice."""
    network = add_lora(base(tied), tokenizer, **PLAIN)
    skeleton = without_weights(network)
    weights = {name: x.detach().clone() for name, x in trained(network).named_parameters()}
    whole = with_weights(skeleton, weights, torch.device("cpu"))
    assert torch.equal(logits(whole), logits(network))
    assert torch.equal(logits(to_export(whole, True)), logits(to_export(network, True)))


def test_training_goes_on_from_a_kept_export(base, tokenizer, tmp_path):
    network = trained(add_lora(base(), tokenizer, **{**PLAIN, "merge": False}))
    to_export(network, merge=False).save_pretrained(tmp_path / "kept")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    again = add_lora(again, tokenizer, **{**PLAIN, "rank": 0})
    assert again.state_dict().keys() == base().state_dict().keys()
    assert all(p.requires_grad for p in again.parameters())
    difference = (logits(again) - logits(network)).abs().max()
    assert difference <= 1e-5 * logits(network).abs().max()
    # Its weights are in no folder any more, so no other adapter can be kept beside them.
    with pytest.raises(ValueError, match=r"lora\.merge=true"):
        add_lora(again, tokenizer, **{**PLAIN, "merge": False})


class TestRefusals:
    def refused(self, network, tokenizer, **values):
        before = network.state_dict().keys()
        message = refused(add_lora, network, tokenizer, **{**PLAIN, **values})
        assert network.state_dict().keys() == before
        return message

    def test_targets_that_are_not_there(self, base, tokenizer):
        message = self.refused(base(), tokenizer, targets=["q_proj", "v_prj"])
        assert "'v_prj'" in message
        assert "'v_proj'" in message
        assert "'down_proj'" in message

    def test_a_head_that_is_the_embedding(self, base, tokenizer):
        assert "lora.targets=lm_head" in self.refused(base(True), tokenizer, targets=["lm_head"])
        add_lora(base(False), tokenizer, **{**PLAIN, "targets": ["lm_head"]})

    def test_an_adapter_to_a_base_that_is_not_on_disk(self, base, tokenizer):
        new = tiny.causal_lm(len(tokenizer))
        assert "lora.merge=true" in self.refused(new, tokenizer, merge=False)
        shallow = from_causal_lm(base(), tokenizer, layers=[1])
        message = self.refused(shallow, tokenizer, merge=False)
        assert "1 layers" in message
        assert "has 2" in message
        # Negative control: the same network whole.
        whole = from_causal_lm(base(), tokenizer)
        assert hasattr(add_lora(whole, tokenizer, **{**PLAIN, "merge": False}), "peft_config")


def changed(before, after):
    """(names of the tensors that differ, rows of the embedding that differ)."""
    names = {name for name in after if not torch.equal(after[name], before[name])}
    rows = (after[EMBEDDING] != before[EMBEDDING]).any(1).nonzero().flatten()
    return names, {*rows.tolist()}


EMBEDDING = "model.embed_tokens.weight"
LORA = ("lora.rank=4", "lora.alpha=8")
WITH_DROPOUT = (*LORA, "lora.dropout=0.3", "optimization.lr=0.02")


@pytest.fixture(scope="module")
def merged(lab):
    return lab.fit("deer_stage1", "name=lora", *WITH_DROPOUT)


@pytest.fixture(scope="module")
def kept(lab):
    return lab.fit("deer_stage1", "name=lora_kept", *WITH_DROPOUT, "lora.merge=false")


def trainer_s_network(lab, name, *overrides):
    """The network of a run's last checkpoint, with its adapters."""
    module = build_module(compose(lab.arguments("deer_stage1", f"name={name}", *overrides), "fit"))
    file = lab.runs / "deer_stage1" / name / "checkpoints" / "step-4.ckpt"
    module.load_state_dict(torch.load(file, weights_only=False)["state_dict"])
    return module.network


def test_only_linear_layers_and_the_draft_tokens_change(lab, merged):
    start = weights(lab.runs / "diffusion_adapt" / "export")
    names, rows = changed(start, weights(merged))
    assert rows == {*draft_token_ids(load_tokenizer(str(merged)))}
    assert names == {n for n in start if "_proj." in n} | {EMBEDDING}
    # Negative control: without LoRA everything changes.
    names, rows = changed(start, weights(lab.runs / "deer_stage1" / "export"))
    assert names == start.keys()
    assert len(rows) > 2


def test_a_merged_export_is_an_ordinary_one(lab, merged):
    whole = lab.runs / "deer_stage1" / "export"
    assert weights(merged).keys() == weights(whole).keys()
    assert {p.name for p in merged.iterdir()} == {p.name for p in whole.iterdir()}
    again = AutoModelForCausalLM.from_pretrained(merged)
    assert not hasattr(again, "peft_config")
    expected = logits(trainer_s_network(lab, "lora", *WITH_DROPOUT))
    assert (logits(again) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_new_drafter_s_tokens_are_trained(lab):
    """The rank may be a reference."""
    export = lab.fit("diffusion_adapt", "name=lora", "seed=4", "lora.rank=${seed}")
    untrained = lab.fit("diffusion_adapt", "name=still", *LORA, "seed=4", "optimization.lr=1.0e-20")
    names, rows = changed(weights(untrained), weights(export))
    assert rows == {*draft_token_ids(load_tokenizer(str(export)))}
    assert all("_proj." in n for n in names - {EMBEDDING})
    assert len(names) == 1 + 2 * 7  # two layers


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(lab, merged):
    """Dropout included."""
    middle = merged.parent / "checkpoints" / "step-2.ckpt"
    resumed = lab.fit("deer_stage1", "name=lora_resumed", *WITH_DROPOUT, f"resume={middle}")
    assert same(weights(resumed), weights(merged))
    # Negative control: dropout is drawn, and another rate is another run.
    rate = ("lora.dropout=0.2", "name=lora_other")
    other = lab.fit("deer_stage1", *WITH_DROPOUT, *rate, f"resume={middle}")
    assert not same(weights(other), weights(merged))


def test_a_kept_export_is_the_adapter_and_loads_its_base(lab, kept):
    files = {p.name for p in kept.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "parade_export.json"} <= files
    assert not {"config.json", "model.safetensors", "custom_generate"} & files
    config = json.loads((kept / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(lab.runs / "diffusion_adapt" / "export")
    again = AutoModelForCausalLM.from_pretrained(kept)
    network = trainer_s_network(lab, "lora_kept", *WITH_DROPOUT, "lora.merge=false")
    assert torch.equal(logits(again), logits(network))
    # Negative control.
    start = AutoModelForCausalLM.from_pretrained(lab.runs / "diffusion_adapt" / "export")
    assert not torch.equal(logits(again), logits(start))


def test_a_kept_drafter_gives_the_text_of_plain_decoding(kept):
    sampler = load(str(kept), dtype="float32")
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
    as_plain(sampler, ["self return", "def class print list"], params)
    assert hasattr(sampler.drafter, "peft_config")


def test_a_kept_export_is_done_and_can_be_merged_later(lab, merged, kept, capsys):
    kept_run = ("deer_stage1", "name=lora_kept", *WITH_DROPOUT)
    lab.fit(*kept_run, "lora.merge=false")
    assert "is there already" in capsys.readouterr().out
    aside = kept.with_name("kept")
    kept.rename(aside)
    try:
        again = lab.fit(*kept_run, "lora.merge=true")
        assert same(weights(again), weights(merged))
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        aside.rename(kept)


def test_the_card_says_it(merged, kept):
    cards = [(export / "README.md").read_text() for export in (merged, kept)]
    kinds = ("merged into the weights", "kept: peft adds it to the base model")
    for card, kind in zip(cards, kinds):
        assert f"- LoRA: rank 4, alpha 8, dropout 0.3, targets all-linear; {kind}" in card
    metadata = [yaml.safe_load(card.split("---\n")[1]) for card in cards]
    assert [m["library_name"] for m in metadata] == ["transformers", "peft"]
    assert "custom_generate" in metadata[0]["tags"]
    assert "custom_generate" not in metadata[1]["tags"]


def test_without_peft_an_adapter_is_refused_in_a_line(kept, merged, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft") as error:
        load(str(kept))
    assert "\n" not in str(error.value)
    load(str(merged))


def test_an_adapter_on_the_hub_is_found(kept, monkeypatch):
    from huggingface_hub.errors import EntryNotFoundError

    def download(repo, name):
        if not (kept / name).is_file():
            raise EntryNotFoundError(name)
        return kept / name

    monkeypatch.setattr("decoding.loading.hf_hub_download", download)
    assert parade_config("org/name") == parade_config(str(kept))
    assert parade_config("org/name")["method"] == "deer"


def test_mistakes_are_refused_before_training(lab):
    for recipe, *overrides, words in (
        ("deer_stage1", "lora.targets=[q_prj]", "q_prj.*'q_proj'"),
        ("ar_target", "lora.merge=false", "lora.merge=true"),
        ("ar_target", "lora.alpha=0", "lora.alpha=0 is not allowed"),
        ("ar_target", "lora.dropout=1.0", "lora.dropout=1.0 is not allowed"),
        ("ar_target", "lora.targets=[]", "lora.targets=.. is not allowed"),
    ):
        with pytest.raises(ValueError, match=words):
            lab.fit(recipe, "name=mistake", "lora.rank=4", *overrides)
        assert not (lab.runs / recipe / "mistake" / "config.yaml").exists()


def test_a_push_takes_the_adapter_along(kept):
    files, others = hub.uploads(kept)
    assert {"adapter_config.json", "adapter_model.safetensors", "parade_export.json"} <= {*files}
    assert not others


def test_a_network_without_embeddings_is_refused_in_one_line(tokenizer):
    class Heads(PreTrainedModel):
        config_class = PreTrainedConfig

    network = Heads(PreTrainedConfig())
    with pytest.raises(ValueError, match=r"lora\.rank=2 .* a Heads has no embeddings") as error:
        add_lora(
            network, tokenizer, rank=2, alpha=4, dropout=0.0, targets=["all-linear"], merge=True
        )
    assert "\n" not in str(error.value)
