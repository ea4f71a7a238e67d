"""The lab tokenizer, the draft tokens, and the fingerprint that target and drafter share."""

import copy
import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.text.tokenizer import draft_token_ids, fingerprint, train_tokenizer, with_draft_tokens
from tests.support import tiny

TEXTS = ["def add(a, b):\n    return a + b\n", "the adder adds and the tree is there"]


@pytest.fixture(scope="module")
def masked():
    """A tokenizer that came with a mask token of its own."""
    tokenizer = train_tokenizer(TEXTS, 280)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


@pytest.mark.parametrize("text", ["def  f( x ) :\n\t\treturn 'x' , 1 .", "naïve 漢字 🎉", " a", ""])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_eos_is_id_zero_and_pads(tokenizer):
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<eos>", 0, 0)
    assert len(tokenizer) <= 300


def test_training_is_deterministic():
    assert fingerprint(train_tokenizer(TEXTS, 290)) == fingerprint(train_tokenizer(TEXTS, 290))
    assert fingerprint(train_tokenizer(TEXTS, 290)) != fingerprint(train_tokenizer(TEXTS, 280))


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [(TEXTS, 256, "vocab_size=256.*257"), ([], 300, "No text"), ([""], 300, "No text")],
)
def test_bad_training_inputs(texts, size, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, size)


def test_draft_tokens_come_after_the_vocabulary(tokenizer):
    drafting = with_draft_tokens(tokenizer)
    assert draft_token_ids(drafting) == (len(tokenizer), len(tokenizer) + 1)
    assert tokenizer.get_vocab().items() < drafting.get_vocab().items()
    assert tokenizer.mask_token is None
    assert drafting("return a").input_ids == tokenizer("return a").input_ids
    assert drafting.decode([*draft_token_ids(drafting)], skip_special_tokens=True) == ""


def test_own_mask_token_is_kept(masked):
    drafting = with_draft_tokens(masked)
    assert draft_token_ids(drafting) == (masked.mask_token_id, len(masked))


def test_own_extra_special_tokens_stay(tokenizer, tmp_path):
    tokenizer = with_draft_tokens(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<fim>"]})
    drafting = with_draft_tokens(tokenizer)
    assert drafting.extra_special_tokens == ["<fim>"]
    assert draft_token_ids(drafting) == draft_token_ids(tokenizer)


def test_draft_tokens_are_missed_by_name(tokenizer, masked):
    for plain in (tokenizer, masked):
        with pytest.raises(ValueError, match="with_draft_tokens"):
            draft_token_ids(plain)


def test_a_spare_token_is_one_that_no_text_has(tokenizer):
    """Serving engines want the target's own vocabulary, so PARD's mask is one of its tokens."""
    with_draft_tokens(tokenizer, "pard")
    mask_id, separator_id = draft_token_ids(tokenizer, "pard")
    assert separator_id is None
    assert 0 <= mask_id < len(tokenizer)
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    assert mask_id not in tokenizer(every).input_ids
    reserved = copy.deepcopy(tokenizer)
    reserved.add_tokens(["<|reserved_1|>", "<|tool|>", "<|used|>"], special_tokens=True)
    assert draft_token_ids(reserved, "pard") == (len(tokenizer), None)
    named = with_draft_tokens(reserved, "pard", mask_token="<|tool|>")
    assert draft_token_ids(named, "pard") == (len(tokenizer) + 1, None)
    used = copy.deepcopy(tokenizer)
    used.add_tokens(["<|a|>", "<|b|>"], special_tokens=True)
    used.chat_template = "{{ '<|b|>' }}"
    assert draft_token_ids(used, "pard") == (len(tokenizer), None)


def test_no_spare_token_and_unknown_ones(tokenizer):
    with pytest.raises(ValueError, match="needs a token that no text has"):
        draft_token_ids(tiny.tokenizer(5), "pard")
    with pytest.raises(ValueError, match=r"tokenizer.mask_token=return.*<eos>"):
        with_draft_tokens(tokenizer, "pard", mask_token="return")
    with pytest.raises(ValueError, match=r"layout 'other'.*'separator', 'pard'"):
        with_draft_tokens(tokenizer, "other")
    with pytest.raises(ValueError, match="layout 'other'"):  # not the other one in silence
        draft_token_ids(with_draft_tokens(tokenizer), "other")


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("name", ["tokenizer", "masked"])
def test_fingerprint_survives_the_disk(name, drafting, tmp_path, request):
    plain = request.getfixturevalue(name)
    saved = with_draft_tokens(plain) if drafting else plain
    saved.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert fingerprint(loaded) == fingerprint(saved) == fingerprint(plain)
    if drafting:
        assert draft_token_ids(loaded) == draft_token_ids(saved)


def test_fingerprint_ignores_padding_and_chat_template(tokenizer):
    before = fingerprint(tokenizer)
    other = with_draft_tokens(tokenizer)
    other.chat_template = "{{ messages }}"
    other(["a", "longer text"], padding=True, truncation=True, max_length=4)
    assert fingerprint(other) == before


def test_fingerprint_tells_other_merges_of_one_vocabulary():
    content = json.loads(train_tokenizer(TEXTS, 290).backend_tokenizer.to_str())
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    swapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<eos>"
    )
    original = train_tokenizer(TEXTS, 290)
    assert swapped.get_vocab() == original.get_vocab()
    assert fingerprint(swapped) != fingerprint(original)


def test_fingerprint_tells_another_pre_tokenizer(tokenizer):
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"]["add_prefix_space"] = True
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    assert fingerprint(other) != fingerprint(tokenizer)
