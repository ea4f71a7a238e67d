"""What is trained in a document: the assistant's words and their end, and nothing else."""

import pytest
from tokenizers import processors

from data.rows.documents import documents
from data.text.chat import (
    encode_chat,
    encode_document,
    encode_documents,
    encode_prompt,
    encode_text,
    question_start,
)
from data.text.prompts import prompt_set
from tests.support.files import write_jsonl
from tests.support.tokenizers import CHATML

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


# As Qwen3: the last answer is rendered with a thinking block, earlier ones without.
REWRITES = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% SPAN %}"
    "{% if loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>{% endSPAN %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("block", ["generation", ""])
@pytest.mark.parametrize("end", [[], [{"role": "user", "content": "and?"}]], ids=["", "question"])
def test_an_answer_is_trained_as_it_was_rendered_when_it_was_last(chat_tokenizer, block, end):
    template = REWRITES.replace("SPAN", block)
    for empty in ("{%  %}", "{% end %}"):
        template = template.replace(empty, "")
    chat_tokenizer.chat_template = template
    said = [f"<think></think>{MESSAGES[i]['content']}<|im_end|>" for i in (4, 2)]
    found = encode_documents(chat_tokenizer, {"messages": MESSAGES + end})
    assert [trained_pieces(chat_tokenizer, *one) for one in found] == [[text] for text in said]
    for (ids, _), stop in zip(found, (5, 3), strict=True):
        last = chat_tokenizer.apply_chat_template(MESSAGES[:stop], return_dict=False)
        assert ids == last
    assert encode_chat(chat_tokenizer, MESSAGES + end) == found[0]


def test_answers_that_stay_are_one_sequence(chat_tokenizer):
    [found] = encode_documents(chat_tokenizer, {"messages": [*MESSAGES, MESSAGES[1]]})
    assert trained_pieces(chat_tokenizer, *found) == SPOKEN
    # One alone is rewritten, as the template drops its thought.
    chat_tokenizer.chat_template = READS_ALL.replace(
        "m.reasoning_content %}(", "m.reasoning_content and loop.last %}("
    )
    thought = [m | {"reasoning_content": "hm"} if i == 2 else m for i, m in enumerate(MESSAGES)]
    found = encode_documents(chat_tokenizer, {"messages": thought})
    pieces = [trained_pieces(chat_tokenizer, *one) for one in found]
    assert pieces == [SPOKEN[1:], [f"(hm){SPOKEN[0]}"]]


def test_an_answer_that_does_not_continue_its_prompt_is_left_out(chat_tokenizer):
    chat_tokenizer.chat_template = CHATML.replace(
        "<|im_start|>assistant\n",
        "{{ 'bot: ' if messages | length < 3 else '<|im_start|>assistant\n' }}",
    )
    first, second = encode_documents(chat_tokenizer, {"messages": MESSAGES})
    assert trained_pieces(chat_tokenizer, *first) == SPOKEN[1:]
    assert not any(second[1])  # which packing counts
    # Of this one no answer does.
    chat_tokenizer.chat_template = CHATML.replace("prompt %}<|im_start|>", "prompt %}bot: ")
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


READS_ALL = (
    "{% if tools %}TOOLS {{ tools[0].name }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, GENERATION], ids=["prefixes", "generation"])
@pytest.mark.parametrize("left_out", [{"train": False}, {"content": ""}])
def test_some_answers_are_not_trained(chat_tokenizer, template, left_out):
    chat_tokenizer.chat_template = template or chat_tokenizer.chat_template
    for which, kept in ((2, SPOKEN[1:]), (4, SPOKEN[:1])):
        messages = [m | left_out if i == which else m for i, m in enumerate(MESSAGES)]
        ids, trained = encode_document(chat_tokenizer, {"messages": messages})
        assert trained_pieces(chat_tokenizer, ids, trained) == kept


def test_thoughts_and_tools_are_rendered_or_refused(chat_tokenizer):
    asked, said = MESSAGES[1:3]
    row = {"id": "x", "messages": [asked, said | {"thinking": "hm"}], "options": {"tools": [
        {"name": "f"}]}}  # fmt: skip
    with pytest.raises(ValueError, match=r"x: the chat template .* does not read 'thinking'"):
        encode_document(chat_tokenizer, row)
    with pytest.raises(ValueError, match="does not read 'tools'"):
        encode_document(chat_tokenizer, {**row, "messages": [asked, said]})
    chat_tokenizer.chat_template = READS_ALL
    ids, trained = encode_document(chat_tokenizer, row)
    assert chat_tokenizer.decode(ids).startswith("TOOLS f\n")
    assert trained_pieces(chat_tokenizer, ids, trained) == ["(hm)return 2<|im_end|>"]
    with pytest.raises(ValueError, match="'seconds'"):
        encode_document(chat_tokenizer, {**row, "options": {"seconds": 10**6}})


def test_a_refusal_of_the_template_names_file_and_row(chat_tokenizer, tmp_path):
    chat_tokenizer.chat_template = (
        "{{ raise_exception('no system prompts') if messages[0].role == 'system' else '' }}"
        + CHATML
    )
    rows = [{"id": f"r{i}", "messages": MESSAGES[0 if i == 6 else 1 :]} for i in range(9)]
    source = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(ValueError, match=r"d\.jsonl, line 7: .*no system prompts") as caught:
        documents(source, 32, chat_tokenizer, str(tmp_path / "rows"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"d\.jsonl, line 7: .*no system prompts"):
        prompt_set(source, chat_tokenizer, 9, split="train")
    assert len(documents(source, 32, chat_tokenizer, str(tmp_path / "rows"), limit=6))


def test_where_a_users_turn_begins(chat_tokenizer):
    assert chat_tokenizer.decode(question_start(chat_tokenizer)) == "<|im_start|>user\n"
    chat_tokenizer.chat_template = "{{ 'Be kind.\n' }}" + CHATML
    assert chat_tokenizer.decode(question_start(chat_tokenizer)) == "Be kind.\n<|im_start|>user\n"
    chat_tokenizer.chat_template = "{{ messages[0]['content'] }}: "
    with pytest.raises(ValueError, match="writes nothing before a user's words"):
        question_start(chat_tokenizer)
    chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        question_start(chat_tokenizer)
