"""Tokenizer and chat template say what ends a text, and what a prompt's ids are."""

import pytest

from data.text.chat import encode_text, start_ids, text_ends
from tests.support.tokenizers import CHATML, llama2

END = "<|im_end|>"
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "chatml": (CHATML, END),
    "gemma": (GEMMA, END),
    # Phi-3's ends the whole chat once more.
    "phi": (CHATML + "{% if not add_generation_prompt %}</s>{% endif %}", END),
    # Qwen3's puts a thought before the answer.
    "thought": (CHATML.replace("{{ m.content }}", "<|im_start|>\n\n{{ m.content }}"), END),
    "llama": ("{% for m in messages %}[{{ m.content }}] {{ eos_token }}{% endfor %}", "</s>"),
    "none": ("{% for m in messages %}[{{ m.content }}]{% endfor %}", None),
    "refuses": ("{{ raise_exception('no') }}", None),
    "no template": (None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_s_end_of_turn_ends_a_text(name):
    tokenizer = llama2()
    tokenizer.chat_template, end = TEMPLATES[name]
    known = {"</s>", end} - {None}
    assert {*tokenizer.convert_ids_to_tokens(text_ends(tokenizer))} == known


def test_without_an_end_token_the_template_s_is_left():
    tokenizer = llama2()
    tokenizer.chat_template, tokenizer.eos_token = CHATML, None
    assert text_ends(tokenizer) == [tokenizer.convert_tokens_to_ids(END)]
    tokenizer.chat_template = None
    assert text_ends(tokenizer) == []


@pytest.mark.parametrize(
    ("before", "after", "start"),
    [
        ("<s> ", "", ["<s>"]),
        ("<s> ", " </s>", ["<s>"]),
        ("", " </s>", []),
        ("</s> <s> ", " </s>", ["</s>", "<s>"]),  # as GLM's [gMASK] <sop>
    ],
)
def test_no_end_token_stands_between_prompt_and_answer(before, after, start):
    tokenizer = llama2(before, after)
    text = tokenizer("Paris", add_special_tokens=False).input_ids
    start = tokenizer.convert_tokens_to_ids(start)
    assert start_ids(tokenizer) == start
    assert encode_text(tokenizer, "Paris") == start + text
    whole = tokenizer("Paris").input_ids  # as commands had them
    assert (whole == start + text) == (not after)


def test_a_text_that_has_its_start_token_gets_no_second_one():
    tokenizer = llama2()
    assert encode_text(tokenizer, "<s>Paris").count(tokenizer.bos_token_id) == 1
    assert tokenizer("<s>Paris").input_ids.count(tokenizer.bos_token_id) == 2  # as it was
