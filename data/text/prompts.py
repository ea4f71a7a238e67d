"""Prompt sets for benches, validation and collection: deterministic, the same on every machine."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.corpora.answers import is_collection, read_answers, read_manifest
from data.corpora.benchmarks import (
    SHARED_COLUMNS,
    Problem,
    instruction,
    is_benchmark,
    read_benchmark,
)
from data.corpora.sources import INSTALLED, load_documents
from data.corpora.stdlib import is_held_out
from data.spool import Spool
from data.text.chat import encode_prompt, encode_text, start_ids
from data.text.tokenizer import fingerprint

WINDOW = 64  # tokens of a text where no length is given


def heldout_prompts(*args, **options) -> list[dict]:
    """The prompts of `prompt_set` (whose arguments these are), in memory."""
    return list(prompt_set(*args, **options))


def prompt_set(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    length: int | None = None,
    *,
    split: str = "heldout",
    chat: bool | None = None,
    subset: str | None = None,
    limit: int | None = None,
    where: str | None = None,
    **options,
) -> Spool:
    """A deterministic set of prompts from a corpus or a benchmark.

    A prompt is, of a text, a window of exactly `length` tokens (windows do not overlap, their
    offsets are a hash of the document's id, and they come from as many documents as possible); of
    a chat or a prompt-answer pair, everything before the first answer, cut to its last `length`
    tokens.

    Of a benchmark's problems (`data.corpora.benchmarks`) the first turns are used, asked with the
    benchmark's instruction in a chat, and verbatim otherwise. A benchmark has no splits, except
    that GSM8K's training set looks like its test set: its rows are split like any pairs, and
    split='test' takes them all. A .jsonl file with `text` has splits, and each text is one prompt.

    Of a collection (`python -m decoding.collect`) the prompts are those of the split's answers, as
    they were asked: what a run that is trained on the collection is validated on.

    Args:
        source: a corpus as in `data.corpora.sources.load_documents`, or a benchmark as in
            `data.corpora.benchmarks.read_benchmark`, or a collection's folder.
        tokenizer: encodes the prompts.
        count: number of prompts; None: all that there are.
        length: tokens per prompt: exactly (windows) or at most (whole prompts, which lose their
            beginning). None: `WINDOW` of a text, and all of a question.
        split: 'heldout' or 'train'; ignored for a benchmark (GSM8K's: see above).
        chat: whether to ask problems and the prompts of pairs in the tokenizer's chat template;
            None: if it has one. Texts are never, chats always rendered by it.
        subset: one of a benchmark's categories, or the configuration of a Hub data set.
        limit: read at most so many documents.
        where: read only rows that meet these conditions, as in `load_documents`; of a collection as
            in `data.corpora.answers.read_answers`.
        **options: further arguments of `data.corpora.sources.load_documents`.

    Returns:
        `count` prompts `{"id": str, "prompt_ids": list[int], "text": str}`, on disk; those of a
        benchmark also have its `category` (without any, the benchmark's name).

    Raises:
        ValueError: as `load_documents` and `read_benchmark` do, for `chat` without a chat
            template or of a text, for a subset or a condition of what has none, for a collection
            of another tokenizer, and if the source has fewer than `count` prompts.
    """
    for name, value in (("count", count), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} makes no prompt set. Choose at least 1.")
    options |= {"limit": limit, "where": where}
    if is_collection(source):
        found = _collected(source, tokenizer, split, length, subset, **options)
        return _chosen(found, tokenizer, count, source, split, length)
    in_chat = asks_in_chat(tokenizer, chat)
    if is_benchmark(source):
        documents = _shuffled(_problem_documents(source, split, in_chat, subset, **options))
    else:
        _check_subset(source, subset)
        documents = _shuffled(load_documents(source, split, subset=subset, **options))
    text = len(documents) > 0 and "text" in documents[0]
    if text and chat:
        raise ValueError(
            f"chat=true, but source={source!r} holds texts, which are no questions. Give a "
            "benchmark, chats or prompt-answer pairs, or leave chat out."
        )
    if text:
        length = length or WINDOW
    if text and not source.endswith(".jsonl"):
        found = _windows(documents, tokenizer, length)
    else:
        found = _whole_prompts(documents, tokenizer, length, in_chat)
    return _chosen(found, tokenizer, count, source, split, length)


def _chosen(
    found: Iterator[dict],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    source: str,
    split: str,
    length: int | None,
) -> Spool:
    """The first `count` prompts of those found; ValueError for fewer, or for none."""
    prompts = Spool(
        prompt | {"text": tokenizer.decode(prompt["prompt_ids"])} for prompt in islice(found, count)
    )
    if len(prompts) < (1 if count is None else count):
        of, lower = (f" of length={length}", " or length") if length else ("", "")
        raise ValueError(
            f"source={source!r} has {len(prompts)} prompts{of} in split={split!r}, "
            f"but count={count}. Lower count{lower}, or give a larger source."
        )
    return prompts


def _collected(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    length: int | None,
    subset: str | None,
    where: str | None = None,
    limit: int | None = None,
    **options,
) -> Iterator[dict]:
    """The prompts of a collection's split, each once, in the order of a hash of their ids."""
    del options  # how a corpus is read
    _check_subset(source, subset)
    manifest = read_manifest(source)
    if manifest["tokenizer"] != fingerprint(tokenizer):
        raise ValueError(
            f"{source} was collected with another tokenizer (fingerprint {manifest['tokenizer']}, "
            f"here {fingerprint(tokenizer)}): give another source"
        )
    prompts = {}
    for answer in read_answers(source, split, where):
        size = len(answer.trained) - sum(answer.trained)
        prompts.setdefault(answer.prompt, answer.ids[:size][-(length or 0) :])
        if len(prompts) == limit:
            break
    for id in sorted(prompts, key=_hash):
        yield {"id": id, "prompt_ids": prompts[id]}


def asks_in_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether problems are asked in the tokenizer's chat template.

    Args:
        tokenizer: the model's own.
        chat: what the user says; None: if there is a template.

    Raises:
        ValueError: for chat=True without a template.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError(
            f"chat=true needs a chat template, and the tokenizer {tokenizer.name_or_path!r} has "
            "none. Leave chat out, or give a chat model."
        )
    return bool(tokenizer.chat_template) if chat is None else chat


def problem_ids(problem: Problem, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    """The token ids of a problem's first turn: its instruction in a chat, or the text as it stands.

    Args:
        problem: of a benchmark.
        tokenizer: encodes it.
        chat: see `asks_in_chat`.
    """
    return _prompt_ids({"prompt": instruction(problem, raw=not chat)}, tokenizer, chat)


def _check_subset(source: str, subset: str | None) -> None:
    local = source in INSTALLED or Path(source).expanduser().exists()
    if local and subset is not None:
        raise ValueError(
            f"source={source!r} has no problem with subset={subset!r}: only a benchmark's file or "
            "a Hub data set has subsets. Leave it out."
        )


def _problem_documents(
    source: str,
    split: str,
    chat: bool,
    subset: str | None,
    limit: int | None = None,
    where: str | None = None,
    **options,
) -> list[dict]:
    del options  # how a corpus is read
    if where is not None:
        raise ValueError(
            f"where={where!r} is not allowed: source={source!r} is a benchmark, which is measured "
            "whole, or by subset="
        )
    problems = read_benchmark(source, subset=subset, limit=limit)
    if problems[0].benchmark in SHARED_COLUMNS and split != "test":
        held_out = split == "heldout"
        problems = [p for p in problems if is_held_out(p.id) == held_out]
    return [
        {"id": p.id, "prompt": instruction(p, raw=not chat), "category": p.category or p.benchmark}
        for p in problems
    ]


def _whole_prompts(
    documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase, length: int | None, chat: bool
) -> Iterator[dict]:
    for document in documents:
        ids = _prompt_ids(document, tokenizer, chat)[-(length or 0) :]
        if ids:
            more = {key: document[key] for key in ("category",) if key in document}
            yield {"id": document["id"], "prompt_ids": ids, **more}


def _prompt_ids(document: dict, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    if "text" in document:
        return encode_text(tokenizer, document["text"])
    if "messages" in document:
        return encode_prompt(tokenizer, _before_answer(document["messages"]))
    if chat:
        return encode_prompt(tokenizer, [{"role": "user", "content": document["prompt"]}])
    return encode_text(tokenizer, document["prompt"])


def _before_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    roles = [message["role"] for message in messages]
    # If the assistant opens the chat, the first answer is the one after the first user turn.
    asked = roles.index("user") if "user" in roles else 0
    answered = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    return messages[:answered]


def _windows(
    documents: Sequence[dict], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict]:
    """Windows in rounds: the first window of each document, then the second of each, and so on."""
    remaining, turn = [*range(len(documents))], 0
    while remaining:
        left = []
        for i in remaining:  # a document is read and tokenized when one of its windows is needed
            windows = _document_windows(documents[i], tokenizer, length)
            window = next(islice(windows, turn, None), None)
            if window is not None:
                yield window
                left.append(i)
        remaining, turn = left, turn + 1


def _document_windows(
    document: dict, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict]:
    """The disjoint windows of a document; their order and offset are a hash of its id."""
    id, start = document["id"], start_ids(tokenizer)
    width = length - len(start)
    if width < 1:
        return
    ids = tokenizer(document["text"], add_special_tokens=False).input_ids
    slots = len(ids) // width
    shift = _hash(id) % (len(ids) - slots * width + 1)
    for slot in sorted(range(slots), key=lambda slot: _hash(f"{id}:{slot}")):
        offset = shift + slot * width
        yield {"id": f"{id}@{offset}", "prompt_ids": start + ids[offset : offset + width]}


def _shuffled(documents: Iterable[dict]) -> Spool:
    """The documents in the order of a hash of their ids: any first few are then a fair sample."""
    found = Spool(documents)
    order = sorted((_hash(document["id"]), i) for i, document in enumerate(found))
    return Spool(found[i] for _, i in order)


def _hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)
