"""An export that is run otherwise than it was trained is caught by its acceptance, and named."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from decoding.engine.params import SamplingParams
from decoding.loading import load
from tests.support import learned
from trainers.export import run as export_command
from trainers.publishing.bundle import write_bundle
from trainers.publishing.verify import verify
from trainers.runs.callbacks import AcceptanceLength
from trainers.runs.signals import Signals

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

PROMPTS = [f"def {name}" for name in ("area", "sum", "row", "last", "tail", "head", "left", "best")]
NEW = 24


def finished_run(root, layout):
    """A run's folder as training leaves it, with a drafter that has learned its prompts."""
    # A DFlash drafter's head is not trained, so it learns later.
    steps, method = (300, "dflash") if layout == "dflash" else (150, "deer")
    export = learned.write(root, PROMPTS, layout, NEW, steps)
    write_bundle(export, method)
    (root / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"question_id": i, "turns": [p]}) for i, p in enumerate(PROMPTS))
    )
    acceptance = {
        "source": str(root / "prompts.jsonl"),
        **dict.fromkeys(("subset", "limit", "chat", "prompt_length")),
        **{"split": "heldout", "prompts": 8, "max_new_tokens": NEW, "dtype": "float32"},
    }
    settings = {"target": str(root / "target"), "acceptance": acceptance}
    (export.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    sampler = load(str(export), dtype="float32")
    ids = [sampler.tokenizer(p).input_ids for p in PROMPTS]
    found = AcceptanceLength(ids, [0.0], NEW, Signals())._measure(sampler)
    names = [*found]
    lines = [["step", *names], [10, *(found[n] for n in names)]]
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    (export.parent / "metrics.csv").write_text(text)
    return export.parent


@pytest.fixture(scope="module", params=["separator", "pard", "dflash"])
def run(request, tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """transformers copies custom code into a cache by its folder's name: a cache for each test."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_acceptance_by_position_is_logged(run):
    header, values = (run / "metrics.csv").read_text().splitlines()
    found = dict(zip(header.split(","), map(float, values.split(","))))
    shares = [found[f"accepted_{i}_t0"] for i in range(1, 5)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3] > 0.3  # something to lose at every position
    sampler = load(str(run / "export"), dtype="float32")
    ids = [sampler.tokenizer(p).input_ids for p in PROMPTS]
    params = SamplingParams(max_new_tokens=NEW, temperature=0)
    stats = [r.stats for r in sampler.generate(ids, params)]
    whole = [n for s in stats for n in s.passes]
    assert found["accepted_2_t0"] == sum(n > 2 for n in whole) / len(whole)
    assert found["acceptance_length_t0"] == sum(sum(s.emitted) for s in stats) / len(whole)
    longer = sampler.generate(ids, replace(params, max_new_tokens=NEW + 8, ignore_eos=True))
    for s, more in zip(stats, longer):  # what the end has cut, seen with a later end
        assert s.passes == more.stats.emitted[: len(s.passes)]


def test_transformers_accepts_what_training_did(run, capsys):
    verify(run, ["transformers"])
    assert "transformers: accepts what the last validation accepted" in capsys.readouterr().out


def edit_config(export, **values):
    config = json.loads((export / "config.json").read_text())
    for key, value in values.items():
        config["parade"][key] = value
    (export / "config.json").write_text(json.dumps(config))


def mask_off_by_one(export):
    edit_config(export, mask_id=entry_of(export)["mask_id"] - 1)


def entry_of(export):
    return json.loads((export / "config.json").read_text())["parade"]


def code_of(export):
    """The file of its sampler's own code."""
    return export / "custom_generate" / f"decoding_samplers_{entry_of(export)['method']}.py"


def edit_code(export, right, wrong, name=None):
    """Edit the code of its sampler, or of another file that is there too."""
    file = code_of(export) if name is None else code_of(export).with_name(name)
    source = file.read_text()
    assert source.count(right) == 1
    file.write_text(source.replace(right, wrong))


def separator_left_out(export):
    if "sep_id" not in entry_of(export):
        pytest.skip("this layout has no separator")
    edit_code(export, "separated = self.sep_id is not None", "separated = False")


def wrong_norm(export):
    replace_norm(export, "layers.0.input_layernorm.weight")


def wrong_final_norm(export):
    """Not by a factor of all weights: that changes no order of logits, so nothing at T=0."""
    replace_norm(export, "norm.weight")


def replace_norm(export, name):
    file = export / "model.safetensors"
    tensors = load_file(file)
    (name,) = {name, f"model.{name}"} & {*tensors}
    tensors[name] = torch.linspace(-1, 2, len(tensors[name]))
    save_file(tensors, file, {"format": "pt"})


def positions_shifted(export):
    if entry_of(export)["method"] == "dflash":
        right = "clamped(positions.clamp_min(0), self._range)\n        mask"
        drafted = "(positions >= first)"
    else:
        right, drafted = "            positions.clamp_min(0),\n", "(steps >= 0)"
    edit_code(export, right, right.replace("(0)", f"(0) + {drafted}"))


def other_layer_read(export):
    config = json.loads((export / "config.json").read_text())
    if "dflash_config" not in config:
        pytest.skip("this layout reads no layers of the target")
    (layer,) = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [layer + 1]
    (export / "config.json").write_text(json.dumps(config))


def states_out_of_order(export):
    """The states of a cycle in another order than its tokens."""
    if entry_of(export)["method"] != "dflash":
        pytest.skip("this layout reads no states of the target")
    right = "batch.state.add(found[rows, path], counts)"
    wrong = "batch.state.add(found[rows, path].roll(1, 1), counts)"
    edit_code(export, right, wrong, "decoding_drafting_state_reader.py")


MISTAKES = [
    mask_off_by_one,
    separator_left_out,
    wrong_norm,
    wrong_final_norm,
    positions_shifted,
    other_layer_read,
    states_out_of_order,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_caught_and_its_position_named(run, tmp_path, mistake):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    mistake(copy / "export")
    with pytest.raises(ValueError, match=r"acceptance at position \d is .* in transformers") as e:
        verify(copy, ["transformers"], trust_remote_code=True)
    assert "\n" not in str(e.value)


def test_another_attention_is_refused(run, tmp_path):
    """It costs a drafter as short as this one little, so it is told by the export's own entry."""
    if entry_of(run / "export")["method"] != "dflash":
        pytest.skip("this layout has no such flag")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = json.loads((copy / "export" / "config.json").read_text())
    assert config["dflash_config"]["causal"] is False
    config["dflash_config"]["causal"] = True
    (copy / "export" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"cannot decode with .*causal=True") as e:
        verify(copy, ["transformers"])
    assert "\n" not in str(e.value)


def test_vllm_too_and_by_the_command(run, vllm_stub, monkeypatch, capsys):
    if entry_of(run / "export")["method"] == "dflash":
        pytest.skip("the stub of vLLM runs drafters of PARD's format alone")
    arguments = [f"run={run}", "verify=[vllm]", f"python={vllm_stub}"]
    (run / "export" / "README.md").write_text("a card\n")
    if "sep_id" in entry_of(run / "export"):
        with pytest.raises(ValueError, match="in no format that vLLM runs"):
            export_command(arguments)
        return
    export_command(arguments)
    assert "vllm: accepts what the last validation accepted" in capsys.readouterr().out
    monkeypatch.setenv("STUB_VLLM", "mask")
    with pytest.raises(ValueError, match=r"acceptance at position 2 is .* in vllm"):
        export_command(arguments)


def test_the_format_that_is_asked_for(run, tmp_path):
    config = json.loads((run / "export" / "config.json").read_text())
    pard, dflash = "pard_token" in config, "dflash_config" in config
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "export" / "README.md").write_text("A card.")
    formats = {"transformers": True, "pard": pard, "dflash": dflash, "speculators": dflash}
    for form, fits in formats.items():
        arguments = [f"run={copy}", f"format={form}", "dry_run=true"]
        if fits:
            export_command(arguments)
        else:
            with pytest.raises(ValueError, match=f"format={form} does not fit|no format that vLLM"):
                export_command(arguments)
    shutil.rmtree(copy / "export" / "custom_generate")
    with pytest.raises(ValueError, match="format=transformers does not fit"):
        export_command([f"run={copy}", "format=transformers"])
    with pytest.raises(ValueError, match=r"format 'gguf'.*'pard', 'speculators'"):
        export_command([f"run={copy}", "format=gguf"])


def test_a_checkpoint_is_not_what_the_last_validation_measured(run):
    with pytest.raises(ValueError, match="leave checkpoint= out"):
        export_command([f"run={run}", "verify=[transformers]", "checkpoint=x.ckpt"])


def test_a_run_without_figures_and_code_that_fails(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    code_of(copy / "export").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(ValueError, match=r"deer\.py|dflash\.py.* is not what this version"):
        verify(copy, ["transformers"])
    with pytest.raises(ValueError, match=r"transformers cannot decode with .*broken"):
        verify(copy, ["transformers"], trust_remote_code=True)
    (copy / "metrics.csv").write_text("step,loss\n10,2.0\n")
    with pytest.raises(ValueError, match=r"acceptance\.prompts, acceptance\.temperatures"):
        verify(copy, ["transformers"])
