"""Tokenizers of strangers: the same ids always, a fingerprint that tells, and one line."""

import copy
import json
import pickle
from contextlib import suppress

import pytest
from transformers import AutoTokenizer

from data.text.chat import encode_chat
from data.text.tokenizer import fingerprint, same_tokenizer, train_tokenizer, with_draft_tokens
from decoding.generate import run as generate
from decoding.loading import check_tokenizers, load_tokenizer
from tests.support import tiny
from tests.support.commands import refusal
from tests.support.refused import refused

TEXT = "return value of self, and self again <x> for names"
ADDED = {"content": "<x>", "single_word": False, "lstrip": False, "rstrip": False}
ADDED |= {"normalized": False, "special": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An export with a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = train_tokenizer([TEXT] * 9, 290)
    tokenizer.save_pretrained(folder)
    tiny.causal_lm(300, eos_token_id=0).float().save_pretrained(folder)
    return folder


@pytest.fixture
def theirs(made, tmp_path):
    """A copy of the export; a function that changes its tokenizer.json, and returns the folder."""
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def change(model=None, **parts):
        file = tmp_path / "tokenizer.json"
        whole = json.loads(file.read_text())
        whole["model"] |= model or {}
        whole |= parts
        file.write_text(json.dumps(whole))
        return str(tmp_path)

    return change


@pytest.mark.parametrize("dropout", [0.5, 1.0])
def test_dropout_is_off(made, theirs, dropout):
    folder = theirs({"dropout": dropout})
    raw = AutoTokenizer.from_pretrained(folder)
    plain, loaded = load_tokenizer(str(made)), load_tokenizer(folder)
    assert {*map(str, (raw(TEXT).input_ids for _ in range(20)))} != {str(plain(TEXT).input_ids)}
    assert all(loaded(TEXT).input_ids == plain(TEXT).input_ids for _ in range(20))
    assert fingerprint(loaded) == fingerprint(plain) != fingerprint(raw)


def test_sampling_of_sentencepiece_is_refused(theirs, monkeypatch):
    folder = theirs()
    load_tokenizer(folder)
    from transformers import PreTrainedTokenizerFast as Fast

    monkeypatch.setattr(Fast, "sp_model_kwargs", {"enable_sampling": True}, raising=False)
    assert "enable_sampling" in refused(load_tokenizer, folder)


EOS = {**ADDED, "id": 0, "content": "<eos>", "special": True}
WITH = [EOS, {"id": 290, **ADDED}]
CHANGES = {
    **{f"added token {k}": {"added_tokens": [EOS, WITH[1] | {k: True}]} for k in (
        "lstrip", "rstrip", "single_word", "normalized", "special")},
    "no added token": {"added_tokens": [EOS]},
    "dropout": {"model": {"dropout": 0.1}},
    "ignore_merges": {"model": {"ignore_merges": True}},
    "byte_fallback": {"model": {"byte_fallback": True}},
    "unk_token": {"model": {"unk_token": "a"}},
    "suffix": {"model": {"end_of_word_suffix": "e"}},
    "normalizer": {"normalizer": {"type": "Lowercase"}},
    "pre-tokenizer": {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    "post-processor": {"post_processor": {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [0], "tokens": ["<eos>"]}},
    }},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_fingerprint_tells(theirs, change):
    folder = theirs(added_tokens=WITH)
    before = fingerprint(AutoTokenizer.from_pretrained(folder))
    assert fingerprint(load_tokenizer(folder)) == before
    assert fingerprint(AutoTokenizer.from_pretrained(theirs(**change))) != before


def test_split_special_tokens_changes_the_fingerprint(theirs):
    tokenizer = load_tokenizer(theirs())
    before = fingerprint(tokenizer)
    tokenizer.split_special_tokens = True
    assert fingerprint(tokenizer) != before


def test_options_that_are_off_change_nothing(theirs):
    before = fingerprint(load_tokenizer(theirs()))
    off = {"dropout": 0.0, "continuing_subword_prefix": "", "unk_token": None}
    assert fingerprint(AutoTokenizer.from_pretrained(theirs(off))) == before
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<eos>"}
    assert fingerprint(load_tokenizer(theirs(padding=padding))) == before


@pytest.mark.parametrize("layout", ["separator", "none"])
def test_a_drafter_agrees_with_its_target(theirs, tmp_path, layout):
    target = load_tokenizer(theirs(added_tokens=WITH))
    ours = with_draft_tokens(target, layout)
    ours.save_pretrained(tmp_path / "drafter")
    for drafter in (ours, load_tokenizer(str(tmp_path / "drafter"))):
        assert fingerprint(drafter) == fingerprint(target)
        assert drafter(TEXT).input_ids == target(TEXT).input_ids


def test_a_fingerprint_of_an_older_version_is_checked():
    """Exports and collections keep the one that was written."""
    tokenizer = train_tokenizer(["abc abc abd"] * 3, 260)
    first = "762fe7f47a3f3c98"
    assert same_tokenizer(tokenizer, first)
    assert same_tokenizer(tokenizer, fingerprint(tokenizer))
    check_tokenizers(tokenizer, first, "target", "drafter")
    other = train_tokenizer(["abc abc abd"] * 3, 259)
    assert not same_tokenizer(other, first)
    assert "different tokenizers" in refused(check_tokenizers, other, first, "a", "b")


SPLIT = {"type": "Split", "pattern": {"Regex": "(a|a?)+(a|aa)+b$"}, "behavior": "Isolated"}
PANICS = {
    "a regular expression": {"pre_tokenizer": {
        "type": "Sequence", "pretokenizers": [SPLIT | {"invert": False}, BYTES]}},
    "a replacement of nothing": {"normalizer": {
        "type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "no unknown token": {
        "model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "?"},
        "pre_tokenizer": None},
}  # fmt: skip


@pytest.mark.parametrize("change", PANICS.values(), ids=PANICS.keys())
def test_a_panic_is_one_line(theirs, change, monkeypatch, capsys):
    asked = [f"model={theirs()}", "prompt=" + "a" * 60, "max_new_tokens=2", "dtype=float32"]
    generate(asked)
    if "model" in change:
        change = change | {"model": {"merges": None, **change["model"]}}
    theirs(**change)
    line = refusal(generate, asked, monkeypatch, capsys)
    assert line.startswith("error: ")
    assert "token" in line


def test_a_panic_of_a_decoder_is_one_line(theirs):
    decoder = {"type": "Replace", "pattern": {"Regex": "(a|a?)+(a|aa)+b$"}, "content": ""}
    parts = [{"type": "Fuse"}, decoder]
    tokenizer = load_tokenizer(theirs(decoder={"type": "Sequence", "decoders": parts}))
    letter = tokenizer.convert_tokens_to_ids("a")
    assert tokenizer.decode([letter]) == "a"
    assert "the tokenizer is damaged" in refused(tokenizer.decode, [letter] * 60)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_are_harmless_too(theirs, copied):
    folder = theirs(**PANICS["a regular expression"])
    tokenizer = copied(load_tokenizer(folder))
    assert tokenizer(TEXT).input_ids
    assert "the tokenizer is damaged" in refused(tokenizer, "a" * 60)


def test_a_loaded_tokenizer_is_saved_by_its_own_class(theirs, tmp_path):
    tokenizer = load_tokenizer(theirs())
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert type(again).__name__ == type(tokenizer).__name__
    assert isinstance(tokenizer, type(again))
    assert again(TEXT).input_ids == tokenizer(TEXT).input_ids


def test_half_a_surrogate_pair_is_no_text(theirs):
    tokenizer = load_tokenizer(theirs())
    assert tokenizer("\U0001f600").input_ids
    assert r"half a surrogate pair, '\ud83d', at character 1" in refused(tokenizer, "a\ud83d")
    with pytest.raises(TypeError):
        tokenizer([("a", 1)])


def test_an_odd_value_that_encoding_reads_is_one_line(theirs, tmp_path):
    folder = theirs()
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_max_length": "x"}))
    assert "the tokenizer is damaged" in refused(load_tokenizer(folder), TEXT)


@pytest.mark.parametrize(
    "eos", [1.5, "1", True, [1, "2"], [[1]], {"a": 1}, -1, 10**30, [None]], ids=str
)
def test_an_odd_end_token_is_one_line(theirs, eos, monkeypatch, capsys, tmp_path):
    asked = [f"model={theirs()}", "prompt=a", "max_new_tokens=2", "dtype=float32"]
    for good in (0, [0, 1], [], None):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": good}))
        generate(asked)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    line = refusal(generate, asked, monkeypatch, capsys)
    assert len(line) < 400


OTHERS = {
    "bos_token_id": [1.5, "a", [[1]], {"a": 1}],
    "pad_token_id": [1.5, "a", [1]],
    "max_length": ["a", -1, 1.5, None],
    "temperature": ["a", -1, None, [1]],
    "do_sample": ["a", 5, None],
    "transformers_version": [5, None],
    "cache_implementation": ["a", 5],
    "watermarking_config": [5, "a", {"a": 1}],
    "stop_strings": [5, {"a": 1}],
    "compile_config": [5, {"a": 1}],
}


@pytest.mark.parametrize("key", OTHERS)
def test_odd_values_of_a_generation_config_are_ignored_or_one_line(theirs, key, tmp_path):
    asked = [f"model={theirs()}", "prompt=a", "max_new_tokens=2", "dtype=float32"]
    for value in OTHERS[key]:
        (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
        with suppress(ValueError):  # whose text a command prints in one line
            generate(asked)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "content", ['{"a":' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "[]", "5"]
)
def test_odd_json_beside_a_model_is_one_line(theirs, name, content, monkeypatch, capsys, tmp_path):
    asked = [f"model={theirs()}", "prompt=a", "max_new_tokens=2", "dtype=float32"]
    (tmp_path / name).write_text(content)
    line = refusal(generate, asked, monkeypatch, capsys)
    assert str(tmp_path) in line


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}",
        "{{ 'a' * 10**12 }}",
        "{{ messages.x.y }}",
        "{% for %}",
        "{{ 5 | nope }}",
        "{{ [1].sort(key=1) }}",
        "{{ 'a' | center(10**12) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_raises_is_one_line(theirs, template):
    tokenizer = load_tokenizer(theirs())
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert encode_chat(tokenizer, chat)[1][-1]
    tokenizer.chat_template = template
    assert "rejected a chat" in refused(encode_chat, tokenizer, chat)


@pytest.mark.parametrize("name", ["tokenizer_file", "vocab_file", "added_tokens_file"])
def test_a_tokenizer_is_read_from_its_own_folder(tmp_path, name):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder, text in ((theirs, "some words of theirs"), (ours, "SECRET SECRET SECRET")):
        train_tokenizer([text] * 9, 270).save_pretrained(folder)
    assert "SECRET" in load_tokenizer(str(ours)).get_vocab()  # the negative control
    config = json.loads((theirs / "tokenizer_config.json").read_text())
    file = ours / "tokenizer.json"
    if name == "added_tokens_file":
        file = ours / "added_tokens.json"
        file.write_text(json.dumps({"SECRET": 0}))
    (theirs / "tokenizer_config.json").write_text(json.dumps(config | {name: str(file)}))
    assert "SECRET" not in load_tokenizer(str(theirs)).get_vocab()
