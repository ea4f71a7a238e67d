"""What is trained in a document: the assistant's words and their end, and nothing else."""

import pytest
from tokenizers import processors

from data.text.chat import encode_chat, encode_document, encode_prompt, encode_text

MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "add 1"},
    {"role": "assistant", "content": "return 2"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "  return 3\n"},
]
SPOKEN = ["return 2<|im_end|>", "  return 3\n<|im_end|>"]
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained_pieces(tokenizer, ids, trained):
    """The decoded runs of trained tokens."""
    pieces, run = [], []
    for id, flag in [*zip(ids, trained, strict=True), (None, False)]:
        if flag:
            run.append(id)
        elif run:
            pieces.append(tokenizer.decode(run))
            run = []
    return pieces


@pytest.mark.parametrize("template", [None, GENERATION], ids=["prefixes", "generation"])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_only_the_assistant_is_trained(chat_tokenizer, template, trim_offsets):
    # Llama's tokenizers trim white space from offsets, Qwen's do not: neither may matter.
    chat_tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(
        trim_offsets=trim_offsets
    )
    chat_tokenizer.chat_template = template or chat_tokenizer.chat_template
    ids, trained = encode_chat(chat_tokenizer, MESSAGES)
    assert ids == chat_tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert trained_pieces(chat_tokenizer, ids, trained) == SPOKEN


def test_generation_span_that_ends_in_a_space_stays_a_span(chat_tokenizer):
    # transformers' own mask runs on over the next turns here.
    chat_tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat_tokenizer.chat_template = GENERATION.replace(
        "<|im_end|>{% endgeneration %}", "<|im_end|> {% endgeneration %}"
    )
    ids, trained = encode_chat(chat_tokenizer, MESSAGES)
    spoken = [piece.rstrip() for piece in trained_pieces(chat_tokenizer, ids, trained)]
    assert spoken == SPOKEN


def test_prompt_is_the_beginning_of_the_chat(chat_tokenizer):
    ids, trained = encode_chat(chat_tokenizer, MESSAGES)
    prompt = encode_prompt(chat_tokenizer, MESSAGES[:2])
    assert ids[: len(prompt)] == prompt
    assert trained.index(True) == len(prompt)


def test_opening_assistant_is_context(chat_tokenizer):
    _, trained = encode_chat(chat_tokenizer, [{"role": "assistant", "content": "hello"}])
    assert not any(trained)


def test_turn_without_special_tokens_begins_at_its_first_token(chat_tokenizer):
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    ids, trained = encode_chat(chat_tokenizer, MESSAGES[1:3])
    [piece] = trained_pieces(chat_tokenizer, ids, trained)
    assert piece.strip() == "return 2"


def test_an_answer_that_is_rendered_otherwise_later_is_context(chat_tokenizer):
    # As Qwen3: the last answer is rendered with a thinking block, earlier ones without.
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ids, trained = encode_chat(chat_tokenizer, MESSAGES)
    said = chat_tokenizer.decode([i for i, t in zip(ids, trained, strict=True) if t])
    assert said == f"<think></think>{MESSAGES[-1]['content']}<|im_end|>"
    # Here the template renders no answer as a continuation of its prompt.
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("assistant:{%", "bot:{%")
    with pytest.raises(ValueError, match="generation"):
        encode_chat(chat_tokenizer, MESSAGES)


def test_bad_chats(tokenizer, chat_tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        encode_chat(tokenizer, MESSAGES)
    with pytest.raises(ValueError, match="messages"):
        encode_chat(chat_tokenizer, [])
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        encode_chat(chat_tokenizer, MESSAGES)


def test_text_is_trained_whole(tokenizer):
    ids, trained = encode_document(tokenizer, {"id": "a", "text": "return a"})
    assert ids == [*tokenizer("return a").input_ids, tokenizer.eos_token_id]
    assert all(trained)
    assert len(trained) == len(ids)


def test_pair_without_template_trains_the_answer(tokenizer):
    row = {"id": "a", "prompt": "def f():\n", "answer": "    return 1"}
    ids, trained = encode_document(tokenizer, row)
    assert tokenizer.decode(ids) == "def f():\n    return 1<eos>"
    assert trained_pieces(tokenizer, ids, trained) == ["    return 1<eos>"]


def test_pair_with_template_is_a_chat(chat_tokenizer):
    row = {"id": "a", "prompt": "add 1", "answer": "return 2"}
    assert encode_document(chat_tokenizer, row) == encode_chat(chat_tokenizer, MESSAGES[1:3])


def test_messages_are_a_chat(chat_tokenizer):
    assert encode_document(chat_tokenizer, {"messages": MESSAGES}) == encode_chat(
        chat_tokenizer, MESSAGES
    )


def test_start_token_comes_once_and_only_in_front(chat_tokenizer):
    chat_tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = chat_tokenizer.bos_token_id
    assert bos not in encode_text(chat_tokenizer, "a")
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    chat_tokenizer.chat_template = None
    ids, trained = encode_document(chat_tokenizer, {"prompt": "a", "answer": "b"})
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert trained == [False, False, True, True]


def test_bad_documents(tokenizer, chat_tokenizer):
    with pytest.raises(ValueError, match=r"\['id', 'prompt'\]"):
        encode_document(tokenizer, {"id": "a", "prompt": "x"})
    chat_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        encode_document(chat_tokenizer, {"text": "x"})
