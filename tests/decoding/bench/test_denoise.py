import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest

from decoding import loading
from decoding.bench import denoise as denoising
from decoding.bench.denoise import (
    DenoiseBench,
    Watch,
    WatchedRow,
    accepted,
    measure,
    report,
)
from decoding.engine.params import SamplingParams
from decoding.masked.draft_graph import graph_of
from tests.support.denoising import KINDS, L, denoise, network, spiffy

GRAPH = graph_of(L, 1, [[(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 1), (2, 1), (3, 1)]])


@pytest.mark.parametrize("attention", KINDS)
def test_watching_counts_passes_and_changes_nothing(attention):
    params, prompt = SamplingParams(max_new_tokens=12, temperature=0), [[2, 7, 1, 8, 3]]
    (plain,) = denoise(network(), attention).generate(prompt, params)
    sampler = spiffy(network(), attention, GRAPH)
    watch = Watch(sampler)
    (result,) = sampler.generate(prompt, params)
    assert result.token_ids == plain.token_ids
    assert len(watch.taken) == result.stats.target_passes
    assert sum(watch.taken) == (12 if attention == "bidirectional" else 15)  # a step a mask
    assert max(watch.taken) > 1
    assert min(watch.taken) >= 1
    assert {*watch.seconds} == {"drafts", "verify", "rank"}
    watch.taken.clear()
    sampler.generate(prompt, params)
    assert len(watch.taken) == result.stats.target_passes


def test_acceptances_by_hand():
    row = WatchedRow(
        "spiffy", params=SamplingParams(), watch=SimpleNamespace(taken=[1, 3, 2, 2, 4])
    )
    levels = accepted(row, 5)
    assert [levels[f"level {n}"] for n in range(1, 5)] == [4 / 5, 2 / 5, 1 / 5, 0]


def test_the_report(lab, tmp_path, capsys):
    lab.fit("dllm_block")
    export = lab.fit("spiffy_calibrate")
    bench = DenoiseBench(
        model=str(export),
        source=str(lab.corpus),
        prompts=3,
        prompt_length=8,
        max_new_tokens=12,
        temperatures=(0.0, 1.0),
        judge=str(lab.fit("ar_target")),
        dtype="float32",
        out=str(tmp_path),
    )
    report(bench, measure(bench), tmp_path)
    assert "NFE: network passes" in capsys.readouterr().out
    lines = list(csv.DictReader((tmp_path / "denoise.csv").open()))
    assert [line["sampler"] for line in lines] == ["denoise", "spiffy (spiffy_calibrate)"] * 2
    assert {line["identical"] for line in lines} == {"3/3"}
    rated = [line["perplexity"] for line in lines]
    assert rated[0] == rated[1] != rated[2] == rated[3]  # by temperature
    assert lines[0]["NFE speed-up"] == "1.0"
    assert float(lines[1]["NFE speed-up"]) > 1
    levels = list(csv.DictReader((tmp_path / "accepted.csv").open()))
    assert [line["temperature"] for line in levels] == ["0.0", "1.0"]
    assert 0 < float(levels[0]["level 1"]) <= 1
    assert (tmp_path / "graph.png").stat().st_size > 5000


def test_knobs_of_drafts_are_for_those_who_draft(lab, tmp_path):
    lab.fit("dllm_block")
    bench = DenoiseBench(
        model=str(lab.fit("spiffy_calibrate")), source=str(lab.corpus), prompts=3, prompt_length=8,
        max_new_tokens=24, ignore_eos=True, dtype="float32", out=str(tmp_path),
    )  # fmt: skip
    plain, drafted = measure(bench)
    again, alone = measure(replace(bench, sampler=("next_block=false",)))
    assert again.nfe == plain.nfe
    assert drafted.nfe < alone.nfe < plain.nfe
    with pytest.raises(ValueError, match="unknown knob"):
        measure(replace(bench, sampler=("next_blok=false",)))


def test_answers_end_at_the_end_token(lab, tmp_path, monkeypatch):
    lab.fit("dllm_block")
    bench = DenoiseBench(
        model=str(lab.fit("spiffy_calibrate")), source=str(lab.corpus), prompts=3, prompt_length=8,
        max_new_tokens=12, ignore_eos=True, dtype="float32", out=str(tmp_path),
    )  # fmt: skip
    whole = measure(bench)[0].results
    assert {len(r.token_ids) for r in whole} == {12}
    end = whole[0].token_ids[1]

    def load(*given, **options):
        sampler = loading.load(*given, **options)
        sampler.target.generation_config.eos_token_id = end
        return sampler

    monkeypatch.setattr(denoising, "load", load)
    rows = measure(replace(bench, ignore_eos=False))
    texts = [r.token_ids for r in whole]
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in texts]
    assert [[r.token_ids for r in row.results] for row in rows] == [expected] * 2
    assert rows[0].nfe < measure(bench)[0].nfe
    report(bench, rows, tmp_path)


def test_the_bench_of_causal_models_refuses_it(lab):
    from decoding.bench.text import Bench
    from decoding.bench.text import measure as measure_causal

    with pytest.raises(ValueError, match=r"python -m decoding\.bench\.denoise"):
        measure_causal(Bench(model=str(lab.fit("dllm_block"))))


def test_a_model_without_a_graph_is_refused(lab):
    model = lab.fit("dllm_block")
    with pytest.raises(ValueError, match=r"recipe=spiffy_calibrate"):
        measure(DenoiseBench(model=str(model)))
