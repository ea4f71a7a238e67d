"""A drafter in another engine accepts what it accepts in our sampler, or one line says where."""

import csv
import itertools
import json

import pytest

from decoding.bench.engine import EngineBench, Way, agreement, measure, run
from decoding.external.vllm_engine import Vllm
from tests.support import learned

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

PROMPTS = [f"def {name}" for name in ("area", "sum", "row", "last", "tail", "head", "left", "best")]


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    root = tmp_path_factory.mktemp("pard")
    (root / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"question_id": i, "turns": [p]}) for i, p in enumerate(PROMPTS))
    )
    return learned.write(root, PROMPTS)


AWAKE = 0.0


@pytest.fixture(autouse=True)
def _a_stub_does_not_wait_awake(monkeypatch):
    monkeypatch.setattr("decoding.bench.engine.AWAKE", AWAKE)


def answers(way):
    return [result.token_ids for result in way.results]


def arguments(export, vllm_stub, **more):
    return {
        "model": str(export),
        "source": str(export.parents[1] / "prompts.jsonl"),
        "python": vllm_stub,
        "prompts": len(PROMPTS),
        "max_new_tokens": 24,
        "dtype": "float32",
        **more,
    }


def test_the_command(export, vllm_stub, capsys):
    run([f"{key}={value}" for key, value in arguments(export, vllm_stub).items()])
    shown = capsys.readouterr().out
    assert "ours and vllm within two standard errors" in shown
    with (export.parent / "bench_vllm" / "engine.csv").open() as file:
        lines = {line["engine"]: line for line in csv.DictReader(file)}
    assert [*lines] == ["ours, plain", "ours", "vllm, plain", "vllm, ngram", "vllm"]
    assert all(line["identical to its plain"] == "8/8" for line in lines.values())
    assert float(lines["ours"]["at 4"]) > 0.3  # the drafter has something to lose
    assert float(lines["vllm"]["acceptance length"]) > 2
    assert lines["vllm, plain"]["at 1"] == ""


@pytest.mark.parametrize("mistake", ["mask", "shift"])
def test_a_mistake_is_caught_and_named(export, vllm_stub, monkeypatch, mistake):
    """The texts stay right, acceptance does not: what nobody sees without this bench."""
    monkeypatch.setenv("STUB_VLLM", mistake)
    ways = measure(EngineBench(**arguments(export, vllm_stub, ngram=0)))
    ours, plain, theirs = ways[1:]
    assert answers(theirs) == answers(plain) == answers(ours)
    first = 1 if mistake == "shift" else 2
    assert f"at position {first} (ours" in agreement(ours, theirs)


def test_agreement_is_within_two_standard_errors():
    def way(name, shares):
        accepted = [[round(100 * (s + d)) for s in shares] for d in (-0.05, 0, 0.05, 0)]
        return Way(name, drafts=[100] * 4, accepted=accepted)

    ours = way("ours", [0.8, 0.5])
    assert "within two" in agreement(ours, way("x", [0.81, 0.49]))
    apart = agreement(ours, way("x", [0.8, 0.3]))
    assert "position 2 (ours 0.500, x 0.300)" in apart
    assert "position 1" not in apart


@pytest.mark.parametrize("lookup", ["ngram", "suffix", None])
def test_an_ordinary_model_in_batches(export, vllm_stub, lookup):
    target = export.parents[1] / "target"
    more = {"ngram": 4 * (lookup == "ngram"), "suffix": lookup == "suffix"}
    given = arguments(export, vllm_stub, batch_size=3, **more) | {"model": str(target)}
    ours, *theirs = measure(EngineBench(**given))
    if lookup == "suffix":  # beside our own
        ngrams = theirs.pop(0)
        assert ngrams.name == "ours, ngram"
        assert answers(ngrams) == answers(ours)
        emitted = sum(ngrams.passes) + sum(map(sum, ngrams.accepted))
        assert emitted >= sum(map(len, answers(ngrams)))
    assert [way.name for way in theirs] == ["vllm, plain", f"vllm, {lookup}"][: 1 + bool(lookup)]
    assert all(answers(way) == answers(ours) for way in theirs)
    if lookup:  # a pass of the target without a draft is a pass too
        way = theirs[1]
        assert all(n > m if lookup == "suffix" else n == m for n, m in zip(way.passes, way.drafts))
        emitted = sum(way.passes) + sum(map(sum, way.accepted))
        assert emitted >= sum(len(answer) - 1 for answer in answers(way))
        assert way.line(0)["acceptance length"] == round(emitted / sum(way.passes), 2)
    assert len(ours.results) == len(PROMPTS)
    assert len(ours.rates) == len(ours.seconds) == 3  # batches
    run([f"{key}={value}" for key, value in given.items()])


def test_an_engine_that_has_answered_is_let_wait(export, vllm_stub, monkeypatch):
    """For a second it waits on a core, so nobody has a turn before that; the warm-up too."""
    happened, generate = [], Vllm.generate

    def answered(*args, **options):
        happened.append("answer")
        return generate(*args, **options)

    monkeypatch.setattr(Vllm, "generate", answered)
    monkeypatch.setattr("decoding.bench.engine.time.sleep", happened.append)
    decode = Way.decode
    monkeypatch.setattr(Way, "decode", lambda *args: happened.append("ours") or decode(*args))
    measure(EngineBench(**arguments(export, vllm_stub)))
    assert happened.count("answer") > happened.count("ours") / 2 > 0
    assert {now for last, now in itertools.pairwise(happened) if last == "answer"} == {AWAKE}


def test_bad_input(export, vllm_stub, tmp_path):
    (tmp_path / "config.json").write_text('{"parade": {"method": "spiffy"}}')
    with pytest.raises(ValueError, match=r"is no drafter \(it names no target\), and no ordinary"):
        measure(EngineBench(**arguments(tmp_path, vllm_stub)))
