import csv
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.text.tokenizer import train_tokenizer
from decoding.bench import scores
from decoding.bench.text import Bench, ends, measure, run
from decoding.bench.text_report import explain_divergence, margin, report, summary
from decoding.engine.running import Running
from tests.support import tiny
from tests.support.commands import refusal
from tests.support.lab import write_corpus


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory):
    return Bench(
        model=str(lab.runs / "deer_stage2" / "export"),
        also=(str(lab.runs / "deer_stage1" / "export"),),
        source=str(lab.corpus),
        prompts=3,
        prompt_length=8,
        max_new_tokens=12,
        ignore_eos=True,
        dtype="float32",
        out=str(tmp_path_factory.mktemp("bench")),
    )


@pytest.mark.slow
def test_table_csv_and_picture(bench, capsys):
    rows, prompts = measure(replace(bench, drawn=("traversal", "multipath")))
    report(Path(bench.out), rows, prompts, "a title", bench.seed)
    shown = capsys.readouterr().out
    assert "acceptance length" in shown
    assert "first difference" not in shown
    lines = list(csv.DictReader((Path(bench.out) / "bench.csv").open()))
    names = {(line["sampler"], line["temperature"]) for line in lines}
    assert {("plain", "0.0"), ("transformers generate", "1.0"), ("deer", "0.0")} <= names
    assert len([name for name, _ in names if name.startswith("plain")]) == 2  # one target
    assert {("deer, block", "1.0"), ("deer (deer_stage1), coupled", "1.0")} <= names
    assert {("deer, tree", "0.0"), ("deer, tree", "1.0")} <= names
    assert {("transformers prompt lookup", "0.0"), ("ngram, tree", "0.0")} <= names
    assert {("deer, traversal", "1.0"), ("deer, multipath", "1.0")} <= names
    assert ("deer, traversal", "0.0") not in names  # there they are chains
    keyed = ("deer", "deer, coupled", "deer, tree", "transformers generate")
    same = [line for line in lines if line["sampler"] in keyed and line["temperature"] == "0.0"]
    same += [line for line in lines if line["sampler"] in ("deer, coupled", "deer, tree")]
    assert len(same) == 6
    assert all(line["identical to plain"] == "3/3" for line in same)
    drawn = [line for line in lines if line["sampler"] in ("deer, block", "deer, rejection")]
    assert [line["identical to plain"] for line in drawn] == ["same distribution"] * 2
    for name in ("accepted", "speed-up"):
        assert (Path(bench.out) / f"{name}.png").stat().st_size > 5000
    plain = next(r for r in rows if r.name == "plain")
    assert summary(plain)["target passes"] == 3 * 12


def test_the_rules_that_are_asked_for(bench):
    few = replace(bench, also=(), prompts=1, prompt_lookup=0, generate=False)
    rows, _ = measure(replace(few, verify=("tree", "block")))
    assert not [r.name for r in rows if r.name.startswith("transformers")]
    ours = {(r.name, r.params.temperature) for r in rows if r.name.startswith("deer")}
    assert ours == {("deer, tree", 0.0), ("deer, tree", 1.0), ("deer, block", 1.0)}


def test_what_programs_read(bench):
    rows, prompts = measure(replace(bench, also=(), temperatures=(1.0,)))
    report(Path(bench.out), rows, prompts, "a title", bench.seed)
    found = json.loads((Path(bench.out) / "bench.json").read_text())
    assert [line["sampler"] for line in found["rows"]] == [row.name for row in rows]
    assert found["machine"]["threads"] >= 1
    assert all(ms > 0 for ms in found["rows"][-1]["ms a cycle"].values())
    for row, line in zip(rows, found["rows"]):
        if not row.drafts or row.name == "ngram, tree":  # which drafts what it expects
            continue
        passes, rates = line["target passes"], line["accepted at"]
        nodes = 16 if row.params.verify == "tree" else 4
        assert line["drafted tokens"] == passes * nodes
        assert sum(rates) == pytest.approx(3 * 12 / passes - 1, abs=1e-3)
        assert rates == sorted(rates, reverse=True)
    answers = Path(bench.out) / "spec_bench" / "deer_coupled_T=1.jsonl"
    answers = [json.loads(line) for line in answers.read_text().splitlines()]
    row = next(row for row in rows if row.name == "deer, coupled")
    assert [a["choices"][0]["turns"] for a in answers] == [[r.text] for r in row.results]
    assert {a["category"] for a in answers} == {"prompts"}  # Spec-Bench's own report needs one
    assert [a["question_id"] for a in answers] == [p["id"] for p in prompts]


def test_batches_and_an_assistant(bench, lab, tmp_path):
    lab.fit("ar_drafter")
    arguments = [
        f"model={bench.model}", f"source={bench.source}", "prompts=3", "prompt_length=8",
        "max_new_tokens=6", "dtype=float32", "temperatures=[0.0]", "batch_sizes=[1,2]",
        "ignore_eos=true",
        f"assistant={lab.runs / 'ar_drafter' / 'export'}", f"out={tmp_path}",
    ]  # fmt: skip
    run(arguments)
    lines = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert {line["identical to plain"] for line in lines} == {"3/3"}
    alone = {line["sampler"] for line in lines if line["batch"] == "1"}
    stock = {"transformers assisted", "transformers prompt lookup"}
    assert alone - {line["sampler"] for line in lines if line["batch"] == "2"} == stock
    assisted = next(line for line in lines if line["sampler"] == "transformers assisted")
    assert 1 <= float(assisted["acceptance length"]) <= 6
    plain = {line["batch"]: line for line in lines if line["sampler"] == "plain"}
    assert [plain[b]["target passes"] for b in "12"] == ["18", "18"]
    with pytest.raises(ValueError, match=r"batch_sizes=\[4\] with prompts=3 is not allowed"):
        run([*arguments, "batch_sizes=[4]"])


def test_a_batch_is_refilled(bench, monkeypatch):
    together, step = [], Running.step

    def counted(running, text=True):
        together.append(len(running))
        return step(running, text)

    monkeypatch.setattr(Running, "step", counted)
    uneven = replace(bench, prompts=5, batch_sizes=(2,), ignore_eos=False, also=())
    rows, _ = measure(replace(uneven, temperatures=(1.0,), generate=False, prompt_lookup=0))
    assert {len(row.seconds) for row in rows} == {1}  # one turn, and five prompts in it
    assert {len(row.results) for row in rows} == {5}
    assert set(together) == {1, 2}


def test_a_difference_is_reported(bench, capsys):
    rows, prompts = measure(bench)
    prompts = [p["prompt_ids"] for p in prompts]
    plain = rows[0]
    other = next(row for row in rows if row.drafts)
    other.results[1].token_ids[4] += 1
    explain_divergence(other, prompts, bench.seed)
    assert "prompt 1 at token 4" in capsys.readouterr().out
    assert margin(plain, prompts[1] + plain.results[1].token_ids[:4], bench.seed + 1) > 0
    assert summary(other)["identical to plain"] == "2/3"


def test_the_same_texts_with_several_lengths_of_context(counting, tmp_path, capsys):
    texts = [f"{n:03d}" * 38 + "999999" for n in range(300)]
    source = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    bench = of(counting, source, prompt_lengths=(30, 12), generate=False, prompt_lookup=0)
    rows, prompts = measure(replace(bench, temperatures=(0.0, 1.0)))
    assert [row.context for row in rows] == [12] * 4 + [30] * 4
    for row in rows:
        assert row.asked == [p["prompt_ids"][-row.context :] for p in prompts]
        assert row.same == "2/2"
    assert rows[0].asked[0] != prompts[0]["prompt_ids"][:12]  # the control: the beginning
    alone, _ = measure(replace(bench, prompt_lengths=(12,)))
    assert [r.token_ids for r in alone[0].results] == [r.token_ids for r in rows[0].results]
    report(tmp_path, rows, prompts, "a title", 0)
    assert [line["context"] for line in table(tmp_path)] == ["12"] * 4 + ["30"] * 4
    assert (tmp_path / "context.png").stat().st_size > 5000
    assert len([*(tmp_path / "spec_bench").iterdir()]) == len(rows)  # none over another
    assert "jacobi at T=0, 30 tokens of context: the same text" in capsys.readouterr().out
    report(tmp_path, measure(replace(bench, prompt_lengths=()))[0], prompts, "a title", 0)
    assert "context" not in table(tmp_path)[0]


def test_lengths_of_context_that_cannot_be_measured(counting, tmp_path):
    source = jsonl(tmp_path / "x.jsonl", [{"text": f"{n:03d}" * 40} for n in range(300)])
    with pytest.raises(ValueError, match=r"prompt_length=8 is not read with prompt_lengths=\[4\]"):
        of(counting, source, prompt_length=8, prompt_lengths=(4,))
    with pytest.raises(ValueError, match=r"prompt_lengths= has 200, and a prompt has 120 tokens"):
        measure(of(counting, source, prompt_lengths=(8, 200)))
    config = json.loads((counting / "config.json").read_text()) | {"max_position_embeddings": 64}
    short = tmp_path / "short"
    shutil.copytree(counting, short)
    (short / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the prompt has 60 tokens and max_new_tokens=12"):
        measure(of(short, source, prompt_lengths=(8, 60), generate=False, prompt_lookup=0))


def test_start_tokens_stay_at_the_start():
    prompts = [[1, 5, 6, 7, 8], [1, 9, 8, 7]]
    assert ends(prompts, 3, start=1) == [[1, 7, 8], [1, 8, 7]]
    assert ends(prompts, 4) == [[5, 6, 7, 8], [1, 9, 8, 7]]
    with pytest.raises(ValueError, match="at least 2 and at most 4"):
        ends(prompts, 1, start=1)


@pytest.mark.slow
def test_other_weights_are_compared_with_their_own_plain_text(tmp_path):
    corpus, tokenizer = write_corpus(tmp_path / "corpus"), train_tokenizer(["self return"], 270)
    models = [tmp_path / f"run{seed}" / "export" for seed in range(5)]
    for seed, model in enumerate(models):
        tiny.causal_lm(len(tokenizer), seed=seed).save_pretrained(model)
        tokenizer.save_pretrained(model)
    first, *others = map(str, models)
    compared = Bench(
        model=first, also=tuple(others), sampler=("method=jacobi", "block_size=4"),
        source=str(corpus), prompts=2, prompt_length=8, max_new_tokens=8, dtype="float32",
        temperatures=(0.0, 1.0), out=str(tmp_path),
    )  # fmt: skip
    rows, prompts = measure(compared)
    report(tmp_path, rows, prompts, "a title", compared.seed)
    with (tmp_path / "bench.csv").open() as file:
        lines = list(csv.DictReader(file))
    found = [line for line in lines if line["sampler"].startswith("jacobi")]
    assert len(found) == 10
    assert [line["identical to plain"] for line in found] == ["2/2"] * 10
    plain = {row.name: row for row in rows if row.plain is None and row.params.temperature == 0}
    assert [*plain] == ["plain", *(f"plain (run{seed})" for seed in range(1, 5))]
    texts = {name: [r.token_ids for r in row.results] for name, row in plain.items()}
    jacobi = next(row for row in rows if row.name == "jacobi (run1)")
    assert [r.token_ids for r in jacobi.results] == texts["plain (run1)"]
    # The plain text of the first weights is not that of the others: the comparison says so.
    assert summary(replace(jacobi, plain=plain["plain"]))["identical to plain"] == "0/2"


DIGITS = train_tokenizer([f"{n}" for n in range(10)], 300)
GSM8K = [{"question": f"{n} + {n}?", "answer": f"#### {2 * n}"} for n in range(40)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A random model that says digits only, with no end token."""
    folder = tmp_path_factory.mktemp("counting")
    model = tiny.causal_lm(len(DIGITS))
    digits = [DIGITS.convert_tokens_to_ids(str(n)) for n in range(10)]
    with torch.no_grad():
        model.lm_head.weight[digits] *= 20
    model.save_pretrained(folder)
    DIGITS.save_pretrained(folder)
    return folder


def of(model, source, **options):
    given = {"prompts": 2, "max_new_tokens": 12, "dtype": "float32", "temperatures": (0.0,)}
    sampler = ("method=jacobi", "block_size=4")
    return Bench(model=str(model), source=str(source), sampler=sampler, **(given | options))


def table(folder, command="bench.csv"):
    with (folder / command).open() as file:
        return list(csv.DictReader(file))


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_end_at_the_end_token(counting, tmp_path):
    source = jsonl(tmp_path / "x.jsonl", [{"prompt": f"say {n}"} for n in range(4)])
    whole, _ = measure(of(counting, source, prompts=4))
    assert {len(r.token_ids) for row in whole for r in row.results} == {12}  # there is none
    plain = [r.token_ids for r in whole[0].results]
    model = AutoModelForCausalLM.from_pretrained(counting)
    model.generation_config.eos_token_id = end = plain[0][2]
    model.generation_config.repetition_penalty = 9.0  # no parameter of ours, so of no row
    model.save_pretrained(tmp_path / "ends")
    DIGITS.save_pretrained(tmp_path / "ends")
    bench = of(tmp_path / "ends", source, prompts=4, batch_sizes=(1, 4), out=str(tmp_path))
    rows, prompts = measure(bench)
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in plain]
    assert len(expected[0]) <= 3
    assert {row.name for row in rows} >= {"plain", "jacobi", "transformers generate"}
    assert [[r.token_ids for r in row.results] for row in rows] == [expected] * len(rows)
    assert all((r.finish_reason == "eos") == (r.token_ids[-1] == end) for r in rows[-1].results)
    for row in rows:
        assert row.lengths == [*map(len, expected)]
        assert sum(s.target_passes for s in row.stats) <= sum(row.lengths)
    report(tmp_path, rows, prompts, "a title", 0)  # also with answers of few tokens
    assert {line["identical to plain"] for line in table(tmp_path)} == {"4/4"}
    ignoring, _ = measure(replace(bench, ignore_eos=True))
    assert [[r.token_ids for r in row.results] for row in ignoring] == [plain] * len(rows)


def test_answers_of_one_token(counting, tmp_path):
    source = jsonl(tmp_path / "x.jsonl", [{"prompt": "say 1"}])
    bench = of(counting, source, prompts=1, max_new_tokens=1, out=str(tmp_path))
    rows, prompts = measure(bench)
    report(tmp_path, rows, prompts, "a title", 0)
    lines = table(tmp_path)
    assert {line["acceptance length"] for line in lines} == {"1.0"}
    assert {line["speed-up ±"] for line in lines} == {""}


def test_an_own_file_is_measured_whole_where_no_number_is_given(counting, tmp_path, capsys):
    rows = [{"prompt": f"say {n}", "id": n} for n in range(2)]
    source = jsonl(tmp_path / "x.jsonl", rows)
    given = [
        f"model={counting}", f"source={source}", "split=train", "max_new_tokens=2",
        "dtype=float32", "temperatures=[0]", "sampler=[method=jacobi,block_size=4]",
        "generate=false", "prompt_lookup=0", f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    run(given)
    assert "2 prompts of x.jsonl, float32" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"has 2 prompts.* and 64 are asked for"):
        run([*given, "prompts=64"])
    with pytest.raises(ValueError, match=r"batch_sizes=\[4\] with prompts=2 is not allowed"):
        run([*given, "batch_sizes=[4]"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # such as matplotlib's
        run([*given, "prompts=1"])
    assert "1 prompt of x.jsonl, float32" in capsys.readouterr().out


def test_a_score_beside_the_speed(counting, tmp_path, capsys):
    source = jsonl(tmp_path / "x.jsonl", GSM8K)
    rows, prompts = measure(of(counting, source, split="test"))
    # The file is made to agree with what the model says to one of both prompts.
    said = {p["id"]: r.text for p, r in zip(prompts, rows[0].results)}
    assert all(text.isdigit() for text in said.values())
    right = int(prompts[0]["id"].rpartition(":")[2]) - 1
    GSM = [{**row, "answer": "#### none"} for row in GSM8K]
    GSM[right] = {**GSM8K[right], "answer": f"#### {rows[0].results[0].text}"}
    jsonl(source, GSM)
    run([
        f"model={counting}", f"source={source}", "split=test", "prompts=2", "max_new_tokens=12",
        "dtype=float32", "temperatures=[0]", "sampler=[method=jacobi,block_size=4]",
        f"out={tmp_path / 'out'}",
    ])  # fmt: skip
    lines = table(tmp_path / "out")
    assert {line["accuracy"] for line in lines} == {"0.5"}
    assert {float(line["accuracy ±"]) for line in lines} == {round((0.25 / 2) ** 0.5, 4)}
    assert "2 of 2 answers of plain are cut off" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert all(line["accuracy"] == 0.5 and line["new tokens"] == [12, 12] for line in found)
    answers = (tmp_path / "out" / "spec_bench" / "plain_T=0.jsonl").read_text().splitlines()
    assert [json.loads(line)["choices"][0]["right"] for line in answers] == [[True], [False]]


# The comment takes whatever digits follow, so these pass or fail by their tests alone.
HEAD = "def f():\n    return 1  # "


def human_eval(value, **others):
    test = f"def check(candidate):\n    assert candidate() == {value}\n"
    row = {"task_id": str(value), "prompt": HEAD, "test": test, "entry_point": "f"}
    return {**row, **others}


def test_programs_are_run_only_where_the_user_says_so(counting, tmp_path, capsys, monkeypatch):
    source = jsonl(tmp_path / "x.jsonl", [human_eval(1), human_eval(2), human_eval(3)])
    arguments = [
        f"model={counting}", f"source={source}", "prompts=3", "max_new_tokens=6", "dtype=float32",
        "temperatures=[0]", "sampler=[method=jacobi,block_size=4]", f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    run([*arguments, "execute=unsafe"])
    lines = table(tmp_path / "out")
    assert {line["pass@1"] for line in lines} == {str(round(1 / 3, 4))}
    assert {line["sampler"] for line in lines} >= {"plain", "jacobi", "transformers generate"}
    capsys.readouterr()
    monkeypatch.setattr(scores, "execute", lambda *given: pytest.fail("ran"))
    run(arguments)
    assert "execute=sandbox" in capsys.readouterr().out
    assert "pass@1" not in table(tmp_path / "out")[0]


def test_exports_of_different_tokenizers_are_refused(bench, tmp_path):
    tiny.causal_lm(300).save_pretrained(tmp_path / "other")
    train_tokenizer(["another text"], 300).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="different tokenizers"):
        measure(replace(bench, also=(str(tmp_path / "other"),)))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model=/no/where", "no model at '/no/where'"),
        ("modle=x", "Did you mean 'model'"),
        ("prompts=many", "prompts='many'"),
        ("max_new_tokens=0", "max_new_tokens=0 is not allowed"),
        ("verify=[trees]", "Did you mean 'tree'"),
    ],
)
def test_a_mistake_is_one_line_without_traceback(lab, argument, message, monkeypatch, capsys):
    model = f"model={lab.runs / 'deer_stage2' / 'export'}"
    arguments = [argument] if argument.startswith("mod") else [model, argument]
    assert message in refusal(run, arguments, monkeypatch, capsys)
