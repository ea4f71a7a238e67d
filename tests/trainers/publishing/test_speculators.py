"""The entry of the package `speculators`: its keys, and that the drafter stays what it was."""

import json

import pytest
import torch
from safetensors.torch import load_file

from data.text.tokenizer import fingerprint
from decoding.loading import load
from models import dflash, eagle3, speculators
from tests.support import tiny
from trainers.export import run as export_command
from trainers.publishing.export_check import first_draft

V, K = 26, 3
KEYS = {  # of speculators 0.9.0, that its classes and vLLM 0.32 read, for the drafter of `run`
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "TARGET", "architectures": ["LlamaForCausalLM"]},
    },
    "block_size": 4,
    "aux_hidden_state_layer_ids": [1, 3],  # layers 0 and 2
    "mask_token_id": 25,
    "draft_vocab_size": 26,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
}
LAYER = {  # of transformer_layer_config, what the weights' shapes and positions depend on
    "model_type": "qwen3", "vocab_size": 26, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "hidden_act": "silu", "rms_norm_eps": 1e-06, "attention_bias": False,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


def write(root, make=tiny.dflash, **options):
    """A run with a random drafter for a tiny target."""
    target = tiny.causal_lm(V, layers=4).float()
    target.save_pretrained(root / "target")
    tiny.tokenizer(V).save_pretrained(root / "target")
    drafter = make(target, **{"states": [0, 2], **options})
    drafter.config.block_size = 1 + K
    drafter.config.parade = {
        "method": make.__name__,
        "target": str(root / "target"),
        "tokenizer_fingerprint": fingerprint(tiny.tokenizer(V)),
        "block_size": K,
        "mask_id": V - 1,
    }
    drafter.save_pretrained(root / "run" / "export")
    tiny.tokenizer(V).save_pretrained(root / "run" / "export")
    (root / "run" / "export" / "README.md").write_text("A card.\n")
    return root / "run"


@pytest.fixture
def run(tmp_path):
    return write(tmp_path)


def config_of(run):
    return json.loads((run / "export" / "config.json").read_text())


def fits(run, target):
    """Whether an export has the keys of the table."""
    config = config_of(run)
    named = json.loads(json.dumps(KEYS).replace("TARGET", str(target)))
    layer = config.get("transformer_layer_config", {})
    return named.items() <= config.items() and LAYER.items() <= layer.items()


def ask(run, *more):
    export_command([f"run={run}", "format=speculators", *more])


def test_the_keys_are_those_of_the_package(run, tmp_path):
    before = config_of(run)
    assert not fits(run, tmp_path / "target")
    ask(run)
    assert fits(run, tmp_path / "target")
    assert str(run) not in json.dumps(config_of(run))  # a folder of this machine
    added = config_of(run).keys() - before.keys()
    assert added == {*speculators.KEYS, *dflash.SPECULATORS, "draft_vocab_size"}
    assert {k: v for k, v in config_of(run).items() if k not in added} == before
    written = config_of(run)
    ask(run)  # once more
    assert config_of(run) == written


@pytest.mark.parametrize("other", [{"states": [1, 2]}, {"draft_ids": torch.arange(9)}])
def test_another_drafter_has_others(tmp_path, other):
    run = write(tmp_path, **other)
    ask(run)
    assert not fits(run, tmp_path / "target")


def test_a_dspark_drafter_s_keys(tmp_path):
    run = write(tmp_path, layout="dspark", markov_rank=2)
    ask(run)
    config = config_of(run)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    assert (config["sample_from_anchor"], config["markov_rank"]) == (True, 2)
    assert config.items() >= dflash.HEADS.items()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("eagle3", {}),
        ("eagle3", {"fc_norm": True, "norm_output": True}),
        ("peagle", {"parallel": True}),
    ],
)
def test_an_eagle_drafter_s_keys(tmp_path, kind, given):
    run = write(tmp_path, tiny.eagle3, **given)
    before = first_draft(load(str(run / "export")), [3, 1, 4, 1, 5])
    ask(run)
    config = config_of(run)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config.get("mask_token_id") == (V - 1 if kind == "peagle" else None)
    after = first_draft(load(str(run / "export")), [3, 1, 4, 1, 5])
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    again = eagle3.load(str(run / "export")).config.to_dict()
    assert not {*speculators.KEYS, "mask_token_id"} & {*again}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"draft_ids": torch.tensor([2, 5, 7, 11])},
        {"layout": "dspark", "markov_rank": 2, "draft_ids": torch.tensor([2, 5, 7, 11])},
    ],
)
def test_the_drafter_stays_what_it_was(tmp_path, given):
    run, draft_ids = write(tmp_path, **given), given.get("draft_ids")
    file = run / "export" / "model.safetensors"
    before, drafted = load_file(file), first_draft(load(str(run / "export")), [3, 1, 4, 1, 5])
    (run / "export" / "custom_generate").mkdir()
    (run / "export" / "custom_generate" / "old.py").write_text("")
    ask(run)
    after = load_file(file)
    chosen = after.pop("t2d", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    if draft_ids is None:
        assert chosen is None
    else:
        assert chosen.dtype == torch.bool
        assert chosen.nonzero().flatten().tolist() == draft_ids.tolist()
    assert torch.equal(first_draft(load(str(run / "export")), [3, 1, 4, 1, 5]), drafted)
    assert not torch.equal(first_draft(load(str(run / "export")), [3, 1, 4, 1, 6]), drafted)
    code = {p.name for p in (run / "export" / "custom_generate").iterdir()}
    assert "generate.py" in code
    assert "old.py" not in code


def test_a_drafter_that_is_trained_from_it_has_no_stale_entry(run, tmp_path):
    ask(run)
    dflash.load(str(run / "export")).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    keys = {*speculators.KEYS, *dflash.SPECULATORS}
    assert not keys & {*again}
    assert keys <= {*config_of(run)}


def test_another_name_of_the_target_is_in_both(run):
    ask(run, "dry_run=true")
    assert "speculators_config" not in config_of(run)
    (run / "metrics.csv").write_text("step,val_loss\n1,2.0\n")
    (run / "provenance.json").write_text(json.dumps(STORY))
    (run / "config.yaml").write_text(json.dumps(SETTINGS))
    ask(run, "target=org/base")
    config = config_of(run)
    assert config["parade"]["target"] == "org/base"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/base"
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


STORY = {
    "command": "x", "git_commit": "c0ffee", "git_dirty": False, "packages": {}, "python": "3.11",
    "data": {}, "inputs": {}, "hardware": {"gpus": [], "processor": "x86_64"},
    "trainer": {"world_size": 1, "strategy": "ddp", "precision": "32-true"},
}  # fmt: skip
SETTINGS = {
    "recipe": "dflash", "scale": "lab", "seed": 0, "network": {},
    "data": {"train": {"_target_": "x"}}, "trainer": {"max_steps": 1, "batch_size": 1},
    "acceptance": {}, "lora": {"rank": 0},
}  # fmt: skip


def test_what_the_layout_has_no_place_for(tmp_path):
    run = write(tmp_path / "head", draft_ids=torch.arange(V))
    before = config_of(run)
    with pytest.raises(ValueError, match="a head of its own for all 26 tokens") as error:
        ask(run)
    assert "\n" not in str(error.value)
    assert config_of(run) == before
    run = write(tmp_path / "lost")
    (tmp_path / "lost" / "target" / "config.json").unlink()
    with pytest.raises(OSError, match=r"target/config\.json"):
        ask(run)


@pytest.mark.parametrize("draft_ids", [None, torch.tensor([2, 5, 7, 11])])
@pytest.mark.parametrize("kind", [{}, {"layout": "dspark", "markov_rank": 2}])
def test_the_package_itself_reads_it(tmp_path, kind, draft_ids):
    package = pytest.importorskip("speculators")
    run = write(tmp_path, **kind, draft_ids=draft_ids)
    ask(run)
    folder = str(run / "export")
    config = package.SpeculatorModelConfig.from_pretrained(folder)
    assert type(config).__name__ == f"{'DSpark' if kind else 'DFlash'}SpeculatorConfig"
    assert (config.block_size, config.aux_hidden_state_layer_ids) == (4, [1, 3])
    assert config.speculators_config.verifier.name_or_path == str(tmp_path / "target")
    assert config.speculators_config.proposal_methods[0].speculative_tokens == (4 if kind else 3)
    model = package.SpeculatorModel.from_pretrained(folder)
    theirs, ours = model.state_dict(), load_file(run / "export" / "model.safetensors")
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert not any(x.isnan().any() for x in theirs.values())
    assert len(model.lm_head.weight) == (V if draft_ids is None else 4)
