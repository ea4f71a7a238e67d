"""The bench of batches: both ways decode the same texts, and one waits for nobody."""

import csv

import pytest

from decoding.bench.batching import run


def test_both_ways_have_one_text(lab, tmp_path, capsys):
    export = lab.fit("deer_stage1")
    arguments = [
        f"model={export}", f"source={lab.corpus}", "prompts=6", "prompt_length=8", "at_once=2",
        "max_new_tokens=8", "shortest=2", "dtype=float32", "repeats=2", f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    run(arguments)
    rows = [*csv.DictReader((tmp_path / "out" / "batching.csv").open())]
    assert [(r["sampler"], r["T"]) for r in rows] == [
        ("plain", "0.0"), ("deer, tree", "0.0"), ("plain", "1.0"), ("deer, tree", "1.0"),
    ]  # fmt: skip
    assert {r["same text"] for r in rows} == {"6/6"}
    assert "without waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("at_once=0", "at_once=0 is not allowed"),
        ("verify=block", "unknown verify 'block'"),
        ("shortest=999", "shortest=999 is not allowed: at most max_new_tokens"),
    ],
)
def test_mistakes_are_one_line(argument, message):
    with pytest.raises(ValueError, match=message) as error:
        run(["model=x", argument])
    assert "\n" not in str(error.value)
