"""Calibration measures real trees, and leaves the best one's shape in the export."""

import csv
import json
import shutil
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from decoding import calibrate
from decoding.calibrate import run
from decoding.drafting import markov
from decoding.engine.params import VERIFY, Result, SamplingParams, Stats
from decoding.loading import load, load_tokenizer
from models.markov import MarkovHead
from tests.support import recurrent

RATES = ("tokens/s", "tokens/s, T=0", "tokens/s, T=1", *calibrate.PARTS)


@pytest.fixture
def export(lab, tmp_path):
    return shutil.copytree(lab.runs / "deer_stage2" / "export", tmp_path / "run" / "export")


def arguments(lab, export, *more):
    return [
        f"model={export}", f"target={lab.runs / 'ar_target' / 'export'}", f"source={lab.corpus}",
        "prompts=2", "fit_prompts=3", "prompt_length=8", "max_new_tokens=8", "dtype=float32", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_fastest_shape_is_kept(lab, export):
    assert load(str(export)).tree.nodes == {1: 16}
    run(arguments(lab, export, "nodes=[3,5]", "sharpness=[0.5,1.0]"))
    lines = list(csv.DictReader((export.parent / "calibration" / "calibration.csv").open()))
    assert len(lines) == 4
    best = max(lines, key=lambda line: float(line["tokens/s"]))
    served = load(str(export))
    assert served.tree.nodes == {1: int(best["nodes"])}
    sharpness = config_of(export)["sharpness"]
    assert sorted(sharpness) == ["0", "1"]
    assert {len(depths) for depths in sharpness.values()} == {served.block_size}
    # The factor is in it: twice as sure is twice the number.
    run(
        arguments(
            lab, export, f"nodes=[{best['nodes']}]", f"sharpness=[{2 * float(best['sharpness'])}]"
        )
    )
    for temperature, depths in config_of(export)["sharpness"].items():
        assert depths == pytest.approx([2 * s for s in sharpness[temperature]], abs=0.03)
    assert all(float(line["acceptance length, T=1"]) >= 1 for line in lines)


def test_a_markov_head_ranks_the_trees_that_are_tried_and_stays(lab, export, monkeypatch):
    known = load(str(export)).drafter.config.vocab_size
    head = MarkovHead(known, known, 2)
    (export / markov.FILE).write_bytes(markov.stored(head))
    config = json.loads((export / "config.json").read_text())
    config["parade"]["markov_head"] = True
    (export / "config.json").write_text(json.dumps(config))
    tried = []
    measure = calibrate.measure

    def measured(c, ways, *more):
        drafting = [sampler for name, (sampler, _) in ways.items() if name != 0]
        tried.extend(sampler.markov for sampler in drafting)
        return measure(c, ways, *more)

    monkeypatch.setattr(calibrate, "measure", measured)
    run(arguments(lab, export, "nodes=[3]", "sharpness=[1.0]", "lengths=[]"))
    assert None not in tried
    assert len(tried) >= 2  # a tree, a chain
    assert config_of(export)["markov_head"] is True
    assert torch.equal(load(str(export)).markov.head.markov_w2.weight, head.markov_w2.weight)


def test_bigrams_come_into_the_export_if_they_are_faster(lab, export, monkeypatch):
    """And they leave it when they are not; a request may leave them out."""
    answers, shape = f"answers={lab.runs / 'deer_answers'}", ("nodes=[5]", "sharpness=[1.0]")

    def heeding_is(faster):
        def measured(c, ways, prompts, batch):
            return {
                name: dict.fromkeys(
                    RATES, float((name != 0 and sampler.bigrams is not None) == faster)
                )
                for name, (sampler, _) in ways.items()
            }

        monkeypatch.setattr(calibrate, "measure", measured)
        run(arguments(lab, export, answers, *shape))
        lines = list(csv.DictReader((export.parent / "calibration" / "calibration.csv").open()))
        assert [line["bigrams"] for line in lines] == ["False", "True"]
        return load(str(export))

    assert heeding_is(faster=False).bigrams is None
    assert not (export / "bigrams.tensors").exists()
    served = heeding_is(faster=True)
    assert served.bigrams.vocabulary == served.vocabulary
    assert {len(depths) for depths in config_of(export)["bigrams"].values()} == {served.block_size}
    params = SamplingParams(12, 1.0, seed=1)
    prompts = [[1, 2, 3], [4, 5]]
    plain = load(str(export), sampler=["method=plain"]).generate(prompts, params)
    drafted = served.generate(prompts, replace(params, verify="tree"))
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert load(str(export), sampler=["bigrams=false"]).bigrams is None
    with pytest.raises(ValueError, match="bigrams=true is not allowed"):
        load(str(export), sampler=["bigrams=true"])
    (export / "bigrams.tensors").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*bigrams\.tensors"):
        load(str(export))
    assert heeding_is(faster=True).bigrams is not None
    assert heeding_is(faster=False).bigrams is None
    assert not (export / "bigrams.tensors").exists()


@pytest.mark.slow
def test_what_is_fastest_for_each_batch_and_temperature_is_kept(lab, export, monkeypatch):
    """Drafts that are no tree take its length, unless a request asks for another."""
    lengths = {1: {"tokens/s, T=0": 3, "tokens/s, T=1": 2}, 3: dict.fromkeys(RATES[1:], 1)}
    nodes = {1: 5, 3: 2}

    def measured(c, ways, prompts, batch):
        return {
            name: dict.fromkeys(RATES, 0.5 * (name[1] == nodes[batch]))
            if isinstance(name, tuple)
            else dict.fromkeys(RATES, 1.0)
            | {rate: float(name == k) for rate, k in lengths[batch].items()}
            for name in ways
        }

    monkeypatch.setattr(calibrate, "measure", measured)
    tried = ("nodes=[2,5]", "sharpness=[1.0]", "lengths=[1,2,3]", "batch_sizes=[1,3]", "prompts=3")
    run(arguments(lab, export, *tried))
    lines = list(csv.DictReader((export.parent / "calibration" / "lengths.csv").open()))
    served, plain = load(str(export)), load(str(export), sampler=["method=plain"])
    assert [(line["batch"], int(line["drafted"])) for line in lines] == [
        (batch, k) for batch in "13" for k in (0, 1, 2, 3, served.block_size)
    ]
    assert served.tree.nodes == {1: 5, 3: 2}
    assert served.fastest == {key: {0.0: "chain", 1.0: "chain"} for key in (1, 3)}
    drafted = {}
    for temperature, verify, block_size in product((0.0, 0.4, 1.0), VERIFY, (None, 1)):
        params = SamplingParams(9, temperature, seed=1, verify=verify, block_size=block_size)
        (alone,) = served.generate([[1, 2, 3]], params)
        drafted[temperature, verify, block_size] = alone.stats.drafted / alone.stats.target_passes
        if params.keyed:
            prompts = [[1, 2, 3], [4, 5], [6]]
            together = served.generate(prompts, params)
            wanted = plain.generate(prompts, SamplingParams(9, temperature, seed=1))
            assert [r.token_ids for r in together] == [r.token_ids for r in wanted]
        else:  # what is drawn must not depend on how many rows there are
            seeds = [5, 6, 7]
            together = served.generate([[1, 2, 3], [4, 5], [6]], params, seeds=seeds)
            for prompt, seed, row in zip(([1, 2, 3], [4, 5], [6]), seeds, together):
                (by_itself,) = served.generate([prompt], params, seeds=[seed])
                assert by_itself.token_ids == row.token_ids
    for verify, k in (("coupled", 1), ("tree", 2)):  # three rows that end together
        together = served.generate([[1, 2, 3]] * 3, SamplingParams(9, 0.0, verify=verify))
        assert {r.stats.drafted / r.stats.target_passes for r in together} == {k}
    for verify in ("coupled", "rejection", "block"):
        assert [drafted[t, verify, None] for t in (0.0, 0.4, 1.0)] == [3, 3, 2]
        assert drafted[1.0, verify, 1] == 1
    assert drafted[1.0, "tree", None] == 5


def config_of(export):
    return json.loads((export / "config.json").read_text())["parade"]


def test_a_drafter_of_images_is_refused(lab, export, monkeypatch):
    monkeypatch.setattr(calibrate, "load", lambda *args, **options: SimpleNamespace(drafter=1))
    with pytest.raises(ValueError, match="drafts trees"):
        run(arguments(lab, export))


def test_prompts_are_repeated_to_fill_a_batch():
    """Fewer prompts than a batch takes, as a file of few chats has, are a load all the same."""
    asked = []

    class Asked:
        def generate(self, prompts, params):
            asked.append([*prompts])
            stats = Stats(emitted=[1, 2], target_s=1.0)
            return [Result("", [1], "eos", stats) for _ in prompts]

    c = calibrate.Calibrate(model="x", source="y", temperatures=(0.0,))
    figures = calibrate.measure(c, {"way": (Asked(), {})}, [[1], [2], [3]], 4)
    assert asked == [[[1], [2], [3], [1]]] * 2  # a warm-up first
    assert figures["way"]["acceptance length, T=0"] == 1.5
    asked.clear()
    calibrate.measure(c, {"way": (Asked(), {})}, [[1], [2], [3]], 2)
    assert asked[1:] == [[[1], [2]], [[3], [1]]]


def test_a_target_with_recurrent_layers_has_lengths_and_no_trees(lab, export, tmp_path):
    tokenizer = load_tokenizer(str(export))
    target = load(str(lab.runs / "ar_target" / "export")).target
    recurrent.model("lfm2", target.config.vocab_size).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    given = arguments(lab, export, f"target={tmp_path / 'target'}", "lengths=[2]")
    run([argument for argument in given if not argument.startswith(f"target={lab.runs}")])
    entry = config_of(export)
    assert {*entry["lengths"]["1"]} == {*entry["fastest"]["1"]} == {"0", "1"}
    assert {*entry["fastest"]["1"].values()} <= {"plain", "chain"}
    assert "nodes" not in entry


def test_mistakes(lab, export):
    before = (export / "config.json").read_text()
    with pytest.raises(ValueError, match="drafts trees"):
        run(arguments(lab, lab.runs / "ar_target" / "export"))
    with pytest.raises(ValueError, match="is no folder of an export"):
        run(arguments(lab, "org/drafter"))
    for values, message in (
        ("nodes=[64]", "nodes=64"), ("sharpness=[0.0]", "sharpness="), ("prompts=0", "prompts=0"),
        ("sharpness=[nan]", "sharpness="), ("sharpness=[inf]", "sharpness="),
        ("temperatures=[]", "temperatures="), ("nodes=[]", "nodes="),
        ("batch_sizes=[1,0]", r"batch_sizes=\[1,0\]"),
        ("lengths=[4,0]", r"lengths=\[4,0\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{message}.* is not allowed"):
            run(arguments(lab, export, values))
    with pytest.raises(ValueError, match="no collection at nowhere"):
        run(arguments(lab, export, "answers=nowhere"))
    assert (export / "config.json").read_text() == before
    assert "nodes" not in json.loads(before)["parade"]


def test_what_is_fastest_is_decoded(lab, export, monkeypatch):
    """The text is plain decoding's either way, and who asks for a length gets a chain."""

    def measured(c, ways, prompts, batch):  # a tree at T=0, at T=1 plain decoding
        rates = dict.fromkeys(ways, (1, 1, 1, 1, 1))
        rates |= {name: (1, 2, 0.5, 1, 1) for name in ways if isinstance(name, tuple)}
        rates |= {0: (1, 1, 1.5, 1, 1)}
        return {name: dict(zip(RATES, rates[name])) for name in ways}

    monkeypatch.setattr(calibrate, "measure", measured)
    run(arguments(lab, export, "nodes=[5]", "sharpness=[1.0]", "lengths=[2]"))
    served, plain = load(str(export)), load(str(export), sampler=["method=plain"])
    for temperature, verify, block_size in product((0.0, 0.2, 1.0), VERIFY, (None, 2)):
        params = SamplingParams(9, temperature, seed=1, verify=verify, block_size=block_size)
        usual = "plain" if temperature == 1 else "tree" if params.keyed else "chain"
        wanted = "tree" if verify == "tree" else "chain" if block_size else usual
        assert served.way(1, params) == wanted
        (found,) = served.generate([[1, 2, 3]], params)
        assert (found.stats.drafted == 0) == (wanted == "plain")
        if params.keyed:
            (alone,) = plain.generate([[1, 2, 3]], SamplingParams(9, temperature, seed=1))
            assert found.token_ids == alone.token_ids
    chains = load(str(export), sampler=["fastest=chain"])
    assert {chains.way(1, SamplingParams(9, t)) for t in (0.0, 1.0)} == {"chain"}
    with pytest.raises(ValueError, match="fastest"):
        load(str(export), sampler=["fastest=quick"])
