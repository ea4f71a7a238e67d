"""The calibrating recipe: traces, graph, export, and a run that is stopped on the way."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from decoding.engine.params import SamplingParams
from decoding.loading import load, parade_config
from decoding.masked.block_evaluators import CachedBlocks
from recipes.compose import compose
from tests.support.runs import curve, cut
from trainers.fit import build_module

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def model(lab):
    return lab.fit("dllm_block")


@pytest.fixture(scope="module")
def export(lab, model):
    return lab.fit("spiffy_calibrate", "name=whole")


def test_the_export_speculates_and_says_what_denoise_says(export, model):
    config = parade_config(str(export))
    assert config["method"] == "spiffy"
    assert 1 <= len(config["graph"]["nodes"]) <= 3
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    prompts = ["def ", "class value self", "return"]
    found = load(str(export), dtype="float32").generate(prompts, params)
    plain = load(str(model), dtype="float32").generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(len(r.stats.emitted) for r in found) < sum(len(r.stats.emitted) for r in plain)


def test_the_curve_tells_passes_and_the_validation_their_quotient(export):
    assert {*curve(export.parent)} == {1, 2, 3, 4}
    (loss,) = curve(export.parent, "val_loss").values()
    (speedup,) = curve(export.parent, "val_nfe_speedup").values()
    assert loss < 1 < speedup
    assert loss * speedup == pytest.approx(1, rel=1e-4)


class Decoded(Exception):
    """The network was asked."""


@pytest.fixture
def no_network(monkeypatch):
    def ask(*arguments):
        raise Decoded

    monkeypatch.setattr(CachedBlocks, "ask", ask)


def test_another_graph_of_the_same_traces_decodes_nothing(lab, export, no_network):
    wants = ["module.objective=degree1", "module.top=3", "module.nodes=2", "module.lookahead=2"]
    again = lab.fit("spiffy_calibrate", "name=shared", *wants)
    assert len(parade_config(str(again))["graph"]["nodes"]) == 2
    # Traces are shared by prompt, so it does not matter which prompts share a batch.
    lab.fit("spiffy_calibrate", "name=halves", "trainer.micro_batch_size=2")


OTHERS = ["seed=1", "+module.sampling.tokens_per_step=2", "module.temperature=1", "module.width=3",
          "module.max_new_tokens=4", "data.train.length=9", "network.dtype=bfloat16"]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_decode_is_decoded(lab, export, no_network, other):
    with pytest.raises(Decoded):
        lab.fit("spiffy_calibrate", "name=others", "resume=never", other)


def test_another_model_is_decoded_and_a_damaged_trace_named(lab, export, no_network, tmp_path):
    retrained = shutil.copytree(lab.runs / "dllm_block" / "export", tmp_path / "retrained")
    weights = load_file(retrained / "model.safetensors")
    name = min(weights)
    weights[name] = weights[name] + 1e-3
    save_file(weights, retrained / "model.safetensors", {"format": "pt"})
    with pytest.raises(Decoded):
        lab.fit("spiffy_calibrate", "name=retrained", f"model={retrained}")
    traces = shutil.copytree(lab.runs / "traces", tmp_path / "traces")
    for file in traces.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=re.escape(str(traces)) + r".*\.npz"):
        lab.fit("spiffy_calibrate", "name=damaged", f"module.traces={traces}")


def test_a_stopped_run_goes_on_to_the_same_graph(lab, export, capsys, tmp_path):
    stopped = cut(export.parent, "stopped", 2)
    config = (stopped / "config.yaml").read_text()
    before = f"traces: {lab.runs}/traces"
    assert before in config
    (stopped / "config.yaml").write_text(config.replace(before, f"traces: {tmp_path}"))
    again = lab.fit("spiffy_calibrate", "name=stopped", f"module.traces={tmp_path}")
    assert json.loads((stopped / "provenance.json").read_text())["resumed"][0]["step"] == 2
    assert parade_config(str(again)) == parade_config(str(export))
    said = capsys.readouterr().out
    assert re.search(r"replay: \d+ of \d+ candidates, value \d+, .* proved optimal", said)
    assert "passes for" in said


def test_a_graph_for_a_threshold_by_another_objective(lab, model):
    overrides = ["name=threshold", "+module.sampling.threshold=0.5", "module.objective=degree1"]
    config = parade_config(str(lab.fit("spiffy_calibrate", *overrides)))
    assert config["threshold"] == 0.5
    assert config["graph"]["tokens_per_step"] is None
    json.dumps(config)


MISTAKES = [
    ("module.nodes=0", "module.nodes=0 "),
    ("module.objective=best", "objective 'best'"),
    ("+module.sampling.threshold=1.5", "threshold=1.5 "),
    ("+module.sampling.treshold=0.9", "'treshold'. Did you mean 'threshold'"),
    ("data.train.count=0", "count=0 "),
]


@pytest.mark.parametrize(("override", "named"), MISTAKES)
def test_a_mistake_is_one_line(lab, model, override, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        lab.fit("spiffy_calibrate", "name=mistake", "resume=never", override)
    assert "\n" not in str(error.value)


def test_a_causal_lm_is_refused(lab):
    config = compose(lab.arguments("spiffy_calibrate", f"model={lab.runs}/ar_target/export"), "fit")
    with pytest.raises(ValueError, match=r"recipe=dllm_block.*module\.sampling\.attention"):
        build_module(config)


def test_the_paper_scale_calibrates_on_small_inputs(lab, model, tmp_path):
    small = [f"model={model}", "trainer.checkpoint_every=4", "trainer.validate_every=4"]
    small.append(f"module.traces={tmp_path}")  # in bfloat16, which is another decode
    small += ["data.train.subset=null", "data.validation.subset=null"]
    export = lab.fit("spiffy_calibrate", "name=paper", "scale=paper", *small)
    assert parade_config(str(export))["graph"]["nodes"]


@pytest.mark.processes
def test_two_processes_make_the_graph_of_one(lab, export, tmp_path):
    two = ["name=two", "trainer.devices=2", "strategy=ddp", "trainer.micro_batch_size=2"]
    two.append(f"module.traces={tmp_path}")
    process = lab.start("spiffy_calibrate", *two)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert parade_config(str(export.parent.parent / "two" / "export")) == parade_config(str(export))
    assert said.count("passes for") == 1
