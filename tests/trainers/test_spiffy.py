"""The calibrating recipe: traces, graph, export, and a run that is stopped on the way."""

import json
import re

import pytest

from decoding.compose import compose
from decoding.load import load, parade_config
from decoding.params import SamplingParams
from tests.support.runs import curve, cut
from trainers.fit import build_module


@pytest.fixture(scope="module")
def model(lab):
    return lab.fit("dllm_block")


@pytest.fixture(scope="module")
def export(lab, model):
    return lab.fit("spiffy_calibrate")


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


def test_a_stopped_run_goes_on_to_the_same_graph(lab, export, capsys):
    cut(export.parent, "stopped", 2)
    again = lab.fit("spiffy_calibrate", "name=stopped")
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
    ("module.nodes=0", "module.nodes=0 is not allowed"),
    ("module.objective=best", "unknown objective 'best'. Choose from"),
    ("+module.sampling.threshold=1.5", "threshold=1.5 is not allowed"),
    (
        "+module.sampling.treshold=0.9",
        "unknown knob of spiffy 'treshold'. Did you mean 'threshold'",
    ),
    ("data.train.count=0", "count=0 makes no prompt set"),
]


@pytest.mark.parametrize(("override", "named"), MISTAKES)
def test_a_mistake_is_one_line(lab, model, override, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        lab.fit("spiffy_calibrate", "name=mistake", "resume=never", override)
    assert "\n" not in str(error.value)


def test_a_causal_lm_is_refused(lab):
    config = compose(lab.arguments("spiffy_calibrate", f"model={lab.runs}/ar_target/export"), "fit")
    with pytest.raises(ValueError, match="is no masked diffusion LM with a known attention"):
        build_module(config)


def test_the_paper_scale_calibrates_on_small_inputs(lab, model):
    small = ["trainer.checkpoint_every=4", "trainer.validate_every=4"]
    export = lab.fit("spiffy_calibrate", "name=paper", "scale=paper", *small)
    assert parade_config(str(export))["graph"]["nodes"]


def test_two_processes_make_the_graph_of_one(lab, export):
    two = ["name=two", "trainer.devices=2", "strategy=ddp", "trainer.micro_batch_size=2"]
    process = lab.start("spiffy_calibrate", *two)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert parade_config(str(export.parent / "two" / "export")) == parade_config(str(export))
    assert said.count("passes for") == 1
