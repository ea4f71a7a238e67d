"""Calibration on public models, which bring code of their own: the export only refers to them."""

import csv
import json
import re

import pytest
import torch

from decoding import generate
from decoding.bench.denoise import DenoiseBench, measure, report
from decoding.engine.params import SamplingParams
from decoding.loading import load, parade_config
from decoding.masked.block_evaluators import WholeTexts
from recipes.compose import compose
from tests.support.denoising import L, V
from tests.support.files import write_jsonl
from tests.support.lab import SMALL
from tests.support.public import public_model
from tests.support.public_layouts import save
from tests.support.runs import cut
from trainers import export as export_command
from trainers.fit import fit
from trainers.runs.checkpoint_files import checkpoint_files

GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [9, 9, 2, 1]]


class Public:
    """A tiny public model, prompts for it, and calibrations on it."""

    def __init__(self, kind, root, monkeypatch, code=True):
        if not code:
            self.folder = root / "model"
            save(kind, self.folder)
        else:
            self.folder, self.inside = public_model(kind, root, monkeypatch)
        self.runs, self.prompts = root / "runs", root / "prompts.jsonl"
        rows = [{"id": str(i), "prompt": f"ab{chr(97 + i % V)}{chr(97 + i * i % V)}"}
                for i in range(24)]  # fmt: skip
        write_jsonl(self.prompts, rows)

    def calibrate(self, *overrides):
        rows = [
            f"data.{s}.{key}"
            for s in ("train", "validation")
            for key in (f"source={self.prompts}", "subset=null", "count=16", "length=4")
        ]
        return fit(
            compose(
                ["recipe=spiffy_calibrate", "scale=paper", f"model={self.folder}",
                 f"runs={self.runs}", "+module.sampling.block_size=4", "module.nodes=4",
                 "module.max_new_tokens=8", "module.objective=replay", *SMALL, *rows, *overrides],
                "fit",
            )
        )  # fmt: skip


@pytest.fixture(scope="module", params=["llada", "Dream"])
def public(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Public(request.param, tmp_path_factory.mktemp("public"), monkeypatch)


@pytest.fixture(scope="module")
def export(public):
    return public.calibrate("trust_remote_code=true", "name=whole")


def opened(path, *knobs):
    return load(str(path), sampler=knobs, dtype="float64", trust_remote_code=True)


def test_the_export_serves_the_public_model_without_a_copy_of_it(public, export):
    assert {f.name for f in export.iterdir()} == {
        "config.json", "parade_graph.json", "README.md", "parade_config.yaml",
        "parade_provenance.json",
    }  # fmt: skip
    entry = parade_config(str(export))
    assert (entry["method"], entry["target"]) == ("spiffy", str(public.folder))
    assert (entry["mask_id"], entry["attention"], entry["block_size"]) == (V, "bidirectional", L)
    plain = opened(public.folder, "method=denoise", f"block_size={L}").generate(PROMPTS, GREEDY)
    graph = f"graph={export / 'parade_graph.json'}"
    for sampler in (
        opened(export),
        opened(public.folder, "method=spiffy", f"block_size={L}", graph),
        load(str(export), target=str(public.folder), dtype="float64", trust_remote_code=True),
    ):
        found = sampler.generate(PROMPTS, GREEDY)
        assert [r.token_ids for r in found] == [r.token_ids for r in plain]
        assert max(r.stats.target_passes for r in found) < 12
    again = opened(export, "method=denoise").generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in again] == [r.token_ids for r in plain]
    assert {r.stats.target_passes for r in again} == {12}


def test_its_commands(public, export, capsys, tmp_path):
    card = (export / "README.md").read_text()
    assert "generate model=<this folder or repository> trust_remote_code=true prompt=" in card
    generate.run([f"model={export}", "trust_remote_code=true", "prompt=abc", "max_new_tokens=8",
                  "temperature=0"])  # fmt: skip
    assert "target passes" in capsys.readouterr().out
    small = public.calibrate("trust_remote_code=true", "name=small", "module.nodes=1")
    bench = DenoiseBench(
        model=str(export), also=(str(small),), source=str(public.prompts), prompts=3,
        prompt_length=4, max_new_tokens=8, dtype="float64", out=str(tmp_path),
        trust_remote_code=True,
    )  # fmt: skip
    report(bench, measure(bench), tmp_path)
    assert (tmp_path / "graph.png").is_file()
    rows = [*csv.DictReader((tmp_path / "denoise.csv").open())]
    assert [row["sampler"] for row in rows] == ["denoise", "spiffy (whole)", "spiffy (small)"]
    assert {row["identical"] for row in rows} == {"3/3"}
    pushed = [f"run={export.parent}", "push=org/graph", "dry_run=true"]
    with pytest.raises(ValueError, match="a folder of this machine"):
        export_command.run(pushed)
    export_command.run([*pushed, "target=org/model"])
    assert "would push" in capsys.readouterr().out


def test_its_code_must_be_allowed(public, export):
    for unwanted in (
        lambda: public.calibrate("name=refused"),
        lambda: load(str(export)),
    ):
        with pytest.raises(ValueError, match="trust_remote_code") as error:
            unwanted()
        assert "\n" not in str(error.value)


def test_a_checkpoint_holds_the_traces_and_a_stopped_run_goes_on(public, export):
    last = checkpoint_files(export.parent / "checkpoints")[-1]
    state = torch.load(last, weights_only=False)["state_dict"]
    assert {*state} == {"traces"}
    assert sum(len(t) for t in state["traces"]) == 16
    stopped = cut(export.parent, "stopped", 2)
    again = public.calibrate("trust_remote_code=true", "name=stopped")
    assert json.loads((stopped / "provenance.json").read_text())["resumed"][0]["step"] == 2
    assert parade_config(str(again)) == parade_config(str(export))
    arguments = [f"run={stopped}", f"checkpoint={stopped / 'checkpoints' / last.name}"]
    with pytest.raises(ValueError, match="asks to run code that a model brings"):
        export_command.run(arguments)
    export_command.run([*arguments, "trust_remote_code=true"])
    assert parade_config(str(stopped / "export-step-4")) == parade_config(str(export))


def test_another_graph_decodes_nothing(public, export, monkeypatch):
    monkeypatch.setattr(WholeTexts, "ask", lambda *arguments: pytest.fail("decoded"))
    again = public.calibrate(
        "trust_remote_code=true", "name=other", "module.objective=degree0", "module.nodes=2"
    )
    assert len(parade_config(str(again))["graph"]["nodes"]) == 2


def test_what_a_configuration_does_not_tell_is_asked_for(tmp_path, monkeypatch):
    unknown = Public("unheard_of", tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=re.escape("+module.sampling.mask_id=")) as error:
        unknown.calibrate("trust_remote_code=true")
    assert "\n" not in str(error.value)
    told = ["+module.sampling.attention=bidirectional", f"+module.sampling.mask_id={V}"]
    export = unknown.calibrate("trust_remote_code=true", "resume=never", *told)
    assert opened(export).attention == "bidirectional"


@pytest.mark.parametrize("kind", ["dream", "sdar"])
def test_a_known_layout_is_calibrated_without_its_code(kind, tmp_path, monkeypatch):
    public = Public(kind, tmp_path, monkeypatch, code=False)
    export = public.calibrate("name=whole")
    assert not [*export.glob("*.safetensors")]
    assert "trust_remote_code" not in (export / "README.md").read_text()
    entry = parade_config(str(export))
    assert (entry["target"], entry["shifted"]) == (str(public.folder), kind == "dream")
    plain = load(str(export), sampler=("method=denoise",), dtype="float32")
    expected = plain.generate(PROMPTS, GREEDY)
    sampler = load(str(export), dtype="float32")
    assert sampler.causal == (kind == "sdar")
    found = sampler.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    totals = [sum(r.stats.target_passes for r in results) for results in (found, expected)]
    assert totals[0] < totals[1]
