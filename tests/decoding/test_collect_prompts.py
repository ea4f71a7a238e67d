"""Prompts of a collection: left out, asked later, dated, and added by a larger count."""

import json
import shutil
from collections import Counter
from datetime import date

import pyarrow.parquet as parquet
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.corpora import answers
from data.corpora.answers import read_answers, read_manifest, shard_path
from data.corpora.sources import load_documents
from data.text.chat import encode_prompt
from data.text.prompts import heldout_prompts
from data.text.tokenizer import train_tokenizer
from decoding import collect as module
from decoding.collectors import chats as chats_module
from decoding.collectors.answers import TeacherAnswers
from recipes.compose import compose
from tests.support import tiny
from tests.support.files import write_jsonl
from tests.support.runs import rows
from tests.support.tokenizers import CHATML

CONTEXT = 256
LONG = "self value name " * 300  # tokens enough for more than the context


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = train_tokenizer(["self value name " * 9], 300)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    network = tiny.causal_lm(len(tokenizer), eos_token_id=0)
    network.config.max_position_embeddings = CONTEXT
    network.float().save_pretrained(folder)
    return folder


@pytest.fixture
def collect(teacher, tmp_path):
    """Collect the answers to documents; a chat template makes them chats."""

    def collect(name, documents, *more, template=None, recipe="deer_answers"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
        own = tmp_path / "chat"
        if template:
            own.mkdir(exist_ok=True)
            for file in teacher.iterdir():
                (own / file.name).write_bytes(file.read_bytes())
            (own / "chat_template.jinja").write_text(template)
        given = [f"recipe={recipe}", f"name={name}", f"runs={tmp_path / 'runs'}",
                 f"target={own if template else teacher}", f"prompts.source={source}",
                 "prompts.length=null", "collector.max_new_tokens=4",
                 *(["collector.number=1"] if recipe == "deer_answers" else []),
                 "collector.dtype=float32", "shard_size=4", *more]  # fmt: skip
        return module.collect(compose(given, "collect"))

    return collect


def pairs(count, bad=()):
    return [
        {"id": f"r{i}", "prompt": f"{LONG if i in bad else 'self'} {i}", "answer": "name"}
        for i in range(count)
    ]


def ids(folder):
    return {row["id"] for row in rows(folder)}


def test_a_prompt_that_is_too_long_is_left_out_and_named(collect, tmp_path, capsys):
    folder = collect("some", pairs(40, bad=[7, 21]))
    kept = ids(folder)
    everyone = {d["id"] for d in load_documents(str(tmp_path / "some.jsonl"), "train")}
    left = everyone - kept
    assert left == {"r7", "r21"} & everyone
    assert left
    noted = json.loads((folder / "manifest.json").read_text())["left_out"]
    assert noted["count"] == len(left)
    assert all(
        f"more than the target's context of {CONTEXT}" in why for why in noted["named"].values()
    )
    assert {json.loads(name) for name in noted["named"]} == left
    assert f"{len(left)} of {len(everyone)} prompts" in capsys.readouterr().out
    assert {a.prompt for a in read_answers(folder, "train")} <= kept
    # It goes on, and says so again.
    shard_path(folder, 1).unlink()
    assert collect("some", pairs(40, bad=[7, 21])) == folder
    assert ids(folder) == kept
    assert "are left out" in capsys.readouterr().out


def test_a_shard_without_answers_is_passed_over(collect):
    folder = collect("empty", pairs(40, bad=[7, 21]), "shard_size=1")
    assert len(rows(folder)) == len([*read_answers(folder, "train")]) + len(
        [*read_answers(folder, "heldout")]
    )
    assert not {"r7", "r21"} & ids(folder)


def test_too_many_end_the_collection_at_each_start(collect):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"prompts cannot be answered.* the target's context"):
            collect("many", pairs(60, bad=range(0, 60, 3)))
    with pytest.raises(ValueError, match=r"(\d) of \1 prompts cannot be answered"):
        collect("none", pairs(3, bad=range(3)))


def chats(count=6):
    found = []
    for i in range(count):
        turns = [f"one {i}", "data says", "two", "data says more", "three"]
        roles = ("user", "assistant", "user", "assistant", "user")
        messages = [{"role": r, "content": text} for r, text in zip(roles, turns)]
        found.append({"id": f"c{i}", "messages": messages[: 5 if i % 2 else 2]})
    return found


def test_every_question_is_asked_after_the_models_own_answers(collect, capsys):
    folder = collect("turns", chats(), template=CHATML)
    found = {(row["id"], row["turn"]): row for row in rows(folder)}
    asked = {id: max(turn for other, turn in found if other == id) for id, _ in found}
    assert {turn for id, turn in asked.items() if int(id[1:]) % 2} == {2}
    assert {turn for id, turn in asked.items() if not int(id[1:]) % 2} == {0}
    odd = sum(turn == 2 for turn in asked.values())
    assert f"{2 * odd} later questions" in capsys.readouterr().out
    tokenizer = module.build(compose_target(folder)).tokenizer
    for (id, turn), row in found.items():
        if turn:
            before = found[id, turn - 1]
            own = tokenizer.decode(before["answer_ids"], skip_special_tokens=True)
            said = tokenizer.decode(row["prompt_ids"])
            assert said.startswith(tokenizer.decode(before["prompt_ids"]) + own + "<|im_end|>")
            assert "data says" not in said
            assert said.count("<|im_start|>user") == turn + 1


def compose_target(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    given = ["recipe=deer_answers", f"target={manifest['teacher']}"]
    return compose(given, "collect").collector


def test_first_and_last_are_one_question_each(collect):
    first = rows(collect("first", chats(), "+prompts.turns=first", template=CHATML))
    last = rows(collect("last", chats(), "+prompts.turns=last", template=CHATML))
    assert {row["turn"] for row in [*first, *last]} == {0}
    assert len(first) == len(last)
    ends = {row["id"]: len(row["prompt_ids"]) for row in first}
    longer = {row["id"] for row in last if len(row["prompt_ids"]) > ends[row["id"]]}
    assert longer == {id for id in ends if int(id[1:]) % 2}


def test_a_collection_of_first_questions_goes_on_only_with_them(collect):
    folder = collect("old", chats(), "+prompts.turns=first", template=CHATML)
    assert collect("old", chats(), "+prompts.turns=first", template=CHATML) == folder
    with pytest.raises(ValueError, match=r"prompts\.turns=first to go on"):
        collect("old", chats(), template=CHATML)


def test_a_tools_reply_stays_with_the_call_of_the_data(collect):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "reply"},
        {"role": "assistant", "content": "so"},
    ]
    first, *others = messages
    documents = [
        {"id": f"c{i}", "messages": [{**first, "content": f"one {i}"}, *others]} for i in range(4)
    ]
    folder = collect("tools", documents, template=CHATML)
    tokenizer = module.build(compose_target(folder)).tokenizer
    later = [row for row in rows(folder) if row["turn"]]
    assert later
    for row in later:
        assert "assistant\ncall<|im_end|>" in tokenizer.decode(row["prompt_ids"])


def test_a_template_that_reads_the_clock_has_the_day_of_the_collection(collect, monkeypatch):
    class Day(date):
        now = "2001-02-03"

        @classmethod
        def today(cls):
            return cls.fromisoformat(cls.now)

    monkeypatch.setattr(module, "date", Day)
    template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    folder = collect("clock", chats(), "shard_size=2", template=template)
    before = {(row["id"], row["turn"]): row["prompt_ids"] for row in rows(folder)}
    tokenizer = module.build(compose_target(folder)).tokenizer
    assert all(tokenizer.decode(x).startswith("03 Feb 2001") for x in before.values())
    shard_path(folder, 0).unlink()
    monkeypatch.setattr(Day, "now", "2001-02-04")
    assert collect("clock", chats(), "shard_size=2", template=template) == folder
    assert before == {(row["id"], row["turn"]): row["prompt_ids"] for row in rows(folder)}
    other = rows(collect("clock2", chats(), template=template))  # one that is begun on that day
    assert all(tokenizer.decode(row["prompt_ids"]).startswith("04 Feb 2001") for row in other)
    plain = collect("plain", chats(), template=CHATML)
    assert "date" not in json.loads((plain / "manifest.json").read_text())


TWICE = ("collector.number=2", "collector.top_k=2", "shard_size=3")


def size(count):
    return f"prompts.count={count}"


@pytest.fixture
def killed(monkeypatch):
    """Kill a collection once it has written some shards."""

    def killed(after, collect, *given, **options):
        write, written = module._write_shard, []

        def watched(*args):
            if len(written) == after:
                raise KeyboardInterrupt
            written.append(args)
            write(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_write_shard", watched)
            with pytest.raises(KeyboardInterrupt):
                collect(*given, **options)

    return killed


def test_a_collection_that_grows_is_the_one_that_was_collected_at_once(collect, killed, capsys):
    """With shards that are partly full, kills, later turns, and another shard_size on the way."""
    texts = [d | {"id": f"d{i}"} for i, d in enumerate(chats(20))]
    texts[3]["messages"][0]["content"] = LONG  # which is left out
    whole = collect("once", texts, *TWICE, size(13), template=CHATML)
    some = rows(collect("part", texts, *TWICE, size(4), template=CHATML))
    assert some != rows(whole)
    capsys.readouterr()
    killed(1, collect, "part", texts, *TWICE, size(8), template=CHATML)
    assert not (whole.with_name("part") / "complete.json").exists()
    collect("part", texts, *TWICE, size(8), "shard_size=5", template=CHATML)
    assert "has 4 prompts, and grows to 8" in capsys.readouterr().out
    killed(1, collect, "part", texts, *TWICE, size(13), template=CHATML)
    part = collect("part", texts, *TWICE, size(13), "collector.at_once=2", template=CHATML)
    assert rows(part) == rows(whole)
    assert {row["temperature"] for row in rows(part)} == {0.0, 1.0}
    assert {row["turn"] for row in rows(part)} == {0, 1, 2}
    a, b = (json.loads((f / "manifest.json").read_text()) for f in (part, whole))
    assert a | {"prompts": None} == b | {"prompts": None}
    other = collect("other", texts, *TWICE, size(13), "seed=1", template=CHATML)
    assert rows(other) != rows(whole)  # the negative control


@pytest.mark.parametrize("twice", [False, True])
def test_trajectories_grow_too(collect, twice):
    given = {"recipe": "pcllm_trajectories"}
    block = ("collector.block_size=2", "shard_size=3")
    whole = collect("once", pairs(30), *block, size(8), **given)
    for count in (2, 5, 8) if twice else (4, 8):
        part = collect("part", pairs(30), *block, size(count), **given)
    assert rows(part) == rows(whole)


def asked(folder):
    return [a.ids for split in ("train", "heldout") for a in read_answers(folder, split)]


def test_a_smaller_count_reads_a_part_until_more_is_asked(collect, capsys):
    few = collect("few", pairs(30, bad=[7]), *TWICE, size(5))
    folder = collect("more", pairs(30, bad=[7]), *TWICE, size(11))
    whole, kept = asked(folder), rows(folder)
    assert len(asked(few)) < len(whole)
    capsys.readouterr()
    for count in (5, 6):  # one within a shard, and one at its end
        collect("more", pairs(30, bad=[7]), *TWICE, size(count))
        assert f"the first {count} prompts are read" in capsys.readouterr().out
        assert rows(folder) == kept  # nothing is lost
        assert asked(folder) == (asked(few) if count == 5 else asked(folder))
        assert len(asked(folder)) < len(whole)
    answers._say_what_is_read.cache_clear()
    read_manifest(folder)
    assert "the first 6 prompts are read" in capsys.readouterr().out
    collect("more", pairs(30, bad=[7]), *TWICE, size(11))
    assert asked(folder) == whole
    read_manifest(folder)
    assert "are read" not in capsys.readouterr().out
    complete = folder / "complete.json"
    assert json.loads(complete.read_text()) == {"shards": 4}
    complete.write_text('{"shards": 2, "prompts": 6, "in_last": null}')
    with pytest.raises(ValueError, match=r"complete\.json is damaged"):
        asked(folder)


def test_more_than_an_own_file_has_is_all_of_it(collect, capsys, monkeypatch):
    everything = rows(collect("all", pairs(9)))
    assert rows(collect("much", pairs(9), size(2048))) == everything
    assert f"prompts.count=2048: all {len(everything)} prompts of" in capsys.readouterr().out
    monkeypatch.setattr(module, "is_own", lambda source: False)  # the negative control
    with pytest.raises(ValueError, match=r"and 2048 are asked for. Ask for fewer"):
        collect("installed", pairs(9), size(2048))


def test_all_of_an_own_file_is_the_default(tmp_path):
    own = write_jsonl(tmp_path / "own.jsonl", pairs(3))
    for recipe in ("deer_answers", "pcllm_trajectories"):
        count = {
            given: compose([f"recipe={recipe}", "scale=small", *given], "collect").prompts.count
            for given in [
                (f"prompts.source={own}",),
                (f"prompts.source={own}", "prompts.count=2"),
                ("prompts.source=docstrings",),
                (),
            ]
        }
        default = {"deer_answers": 2048, "pcllm_trajectories": 512}[recipe]
        assert [*count.values()] == [None, 2, default, default]


def test_other_answers_or_prompts_are_no_growth(collect):
    folder = collect("own", pairs(30), size(5))
    for key, said in (("seed=1", "seed"), ("collector.max_new_tokens=3", "max_new_tokens")):
        with pytest.raises(ValueError, match=rf"other settings \({said}: "):
            collect("own", pairs(30), size(9), key)
    changed = [d | {"prompt": f"value {d['prompt']}"} for d in pairs(30)]
    with pytest.raises(ValueError, match=r"other settings \(prompt_ids: "):
        collect("own", changed, size(9))
    assert json.loads((folder / "complete.json").read_text()) == {"shards": 2}


@pytest.mark.parametrize("count", [None, 7])
def test_a_collection_of_an_earlier_version_grows(collect, count):
    """It has no note of its prompts, no turns, and null for all of them."""
    texts = pairs(30) if count else pairs(7)
    old = collect("old", texts, *TWICE, *([size(count)] if count else []))
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["prompts"]["count"] = count
    (old / "manifest.json").write_text(json.dumps(manifest))
    for file in (old / "shards").iterdir():
        table = parquet.read_table(file).drop_columns(["turn"]).replace_schema_metadata(None)
        parquet.write_table(table, file)
    before = {file: file.read_bytes() for file in old.rglob("*.*") if file.is_file()}
    collect("old", texts, *TWICE, *([size(count)] if count else []))
    assert {file: file.read_bytes() for file in before} == before
    assert [*read_answers(old, "train", "turn==0")]
    part, few = (collect(name, texts, *TWICE, size(4)) for name in ("old", "few"))
    assert asked(part) == asked(few)
    if count:
        whole = rows(collect("once", texts, *TWICE, size(11)))
        grown = [{"turn": 0} | row for row in rows(collect("old", texts, *TWICE, size(11)))]
        assert grown == whole


@pytest.fixture
def slow(monkeypatch):
    """Give every prompt a second of the clock that a collection's minutes are counted by."""
    clock, own = [0.0], TeacherAnswers.collect

    def collect(self, prompts, first=0):
        clock[0] += len(prompts)
        return own(self, prompts, first)

    monkeypatch.setattr(TeacherAnswers, "collect", collect)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])


def test_minutes_end_a_collection_and_more_of_them_grow_it(collect, slow, capsys):
    whole = collect("once", pairs(60), *TWICE, size(40), "shard_size=16")
    given = ("part", pairs(60), *TWICE, size(40), "shard_size=16")
    part = collect(*given, "minutes=0.5")
    assert f"{part}: the first 30 prompts are read" in capsys.readouterr().out
    few = collect("few", pairs(60), *TWICE, size(30), "shard_size=16")
    assert asked(part) == asked(few)
    assert rows(part) == rows(few)
    collect(*given, "minutes=0.01")  # a job at the least
    assert f"{part}: the first 32 prompts are read" in capsys.readouterr().out
    collect(*given, "minutes=5")  # and no more than prompts.count
    assert rows(part) == rows(whole)
    assert json.loads((part / "complete.json").read_text()) == {"shards": 3}


def test_several_processes_take_no_minutes(collect, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"minutes=3 with 2 processes .*prompts\.count="):
        collect("two", pairs(9), "minutes=3")


@pytest.fixture
def ending(teacher, tmp_path):
    """Another teacher, whose texts end soon."""
    folder = tmp_path / "ending"
    shutil.copytree(teacher, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        network.lm_head.weight[0] *= 12
    network.save_pretrained(folder)
    return folder


@pytest.fixture
def ask_itself(ending, tmp_path):
    def ask_itself(name, *more, recipe="deer_answers"):
        given = [f"recipe={recipe}", f"name={name}", f"runs={tmp_path / 'runs'}",
                 f"target={ending}", "prompts.source=itself", "prompts.count=8",
                 "prompts.length=null", "collector.max_new_tokens=16", "collector.dtype=float32",
                 *more]  # fmt: skip
        return module.collect(compose(given, "collect"))

    return ask_itself


def test_a_model_answers_questions_that_it_asks_itself(ask_itself, ending):
    found = rows(ask_itself("whole", "collector.number=2"))
    tokenizer = AutoTokenizer.from_pretrained(ending)
    asked = {}
    for row in found:
        said = tokenizer.decode(row["prompt_ids"]).removeprefix("<|im_start|>user\n")
        said = said.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert said.strip() == said != ""
        assert row["prompt_ids"] == encode_prompt(tokenizer, [{"role": "user", "content": said}])
        asked.setdefault(row["id"], set()).add(said)
    assert len(asked) == 8
    assert all(len(said) == 1 for said in asked.values())  # both answers are to the same question
    assert len({*map(tuple, asked.values())}) > 2  # questions differ
    # Nothing depends on the shards, nor on where a collection was stopped.
    again = rows(ask_itself("parts", "collector.number=2", "shard_size=3"))
    by_key = sorted(found, key=lambda row: (row["id"], row["answer"]))
    assert sorted(again, key=lambda row: (row["id"], row["answer"])) == by_key
    other = rows(ask_itself("other", "collector.number=2", "seed=1"))  # negative control
    assert {r["id"]: r["prompt_ids"] for r in other} != {r["id"]: r["prompt_ids"] for r in found}
    trajectories = rows(ask_itself("jacobi", "collector.block_size=4", recipe="pcllm_trajectories"))
    asked = {row["id"]: row["prompt_ids"] for row in found}
    assert {row["id"]: row["prompt_ids"] for row in trajectories} == asked


def test_sources_are_asked_in_turn_at_all_temperatures(ask_itself, tmp_path):
    source = write_jsonl(tmp_path / "some.jsonl", pairs(40))
    found = rows(ask_itself("mixed", f"prompts.source=[{source},itself]", "collector.number=1"))
    kinds = Counter((row["id"].startswith("itself/"), row["temperature"]) for row in found)
    assert kinds == {(own, t): 2 for own in (True, False) for t in (0.0, 1.0)}
    with pytest.raises(ValueError, match=r"has the id 'r\d+' more than once"):
        ask_itself("twice", f"prompts.source=[{source},{source}]")
    # One with fewer prompts gives all that it has.
    few = write_jsonl(tmp_path / "few.jsonl", pairs(2))
    asked = rows(ask_itself("few", f"prompts.source=[itself,{few}]", "collector.number=1"))
    assert sum(row["id"].startswith("itself/") for row in asked) == 4
    assert 4 < len(asked) < 8


def test_where_a_model_cannot_ask_itself(ask_itself, collect, ending, monkeypatch):
    with pytest.raises(ValueError, match="itself has no end: give prompts"):
        ask_itself("endless", "prompts.count=null")
    with pytest.raises(ValueError, match="has no chat template"):
        collect("raw", pairs(2), "prompts.source=itself", "prompts.count=2")
    with pytest.raises(ValueError, match="source=itself is for a collection"):
        heldout_prompts("itself", AutoTokenizer.from_pretrained(ending), 2)
    monkeypatch.setattr(chats_module, "TRIES", 1)
    with pytest.raises(ValueError, match="the model asks nothing that ends within 1 tokens"):
        ask_itself("silent", "collector.max_new_tokens=1")
