"""Prompt sets for benches, validation and collection: deterministic, the same on every machine."""

import hashlib
import json
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from data.arguments import Count, Several, Tokens
from data.corpora.answers import is_collection, read_answers
from data.corpora.benchmarks import (
    SHARED_COLUMNS,
    instruction,
    is_benchmark,
    read_benchmark,
)
from data.corpora.sources import INSTALLED, is_own, load_documents, one_document
from data.corpora.stdlib import is_held_out
from data.text.chat import chat_of, encode_prompt, encode_text, located, question_start, start_ids
from data.text.special import encode, quoted
from data.text.tokenizer import checked_manifest

WINDOW = 64  # tokens of a text where no length is given
ITSELF = "itself"  # the source of questions that a model asks itself, for a collection


class TooFewPrompts(ValueError):
    """An error for a source that has fewer prompts than are asked for: those that it has."""

    def __init__(self, message: str, prompts: Sequence[dict]):
        super().__init__(message)
        self.prompts = prompts


class Spool(Sequence):
    """A sequence of JSON values in a temporary file, read by number or by slice.

    The file has no name and disappears with the sequence; memory holds eight bytes per value.

    >>> Spool({"id": i} for i in range(5))[1:3]
    [{'id': 1}, {'id': 2}]
    """

    def __init__(self, values: Iterable):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it is gone with the sequence)
        self._starts = array("Q")
        for value in values:
            self._starts.append(self._file.tell())
            self._file.write(json.dumps(value).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, which):
        if isinstance(which, slice):
            return [self[i] for i in range(len(self))[which]]
        self._file.seek(self._starts[which])
        return json.loads(self._file.readline())


def heldout_prompts(source: str, *args, fewer: bool = False, **options) -> list[dict]:
    """Return the prompts of `prompt_set`, with its arguments, in memory.

    With `fewer`, a file or folder of the user may have fewer than are asked for.
    """
    if source == ITSELF:
        raise ValueError(
            f"source={ITSELF} is for a collection (python -m decoding.collect): give the folder of "
            "one, or another source"
        )
    try:
        return list(prompt_set(source, *args, **options))
    except TooFewPrompts as error:
        if not (fewer and error.prompts and is_own(source)):
            raise
        _say(f"{source}: {len(error.prompts)} held-out prompts, all that it has")
        return list(error.prompts)


def prompt_set(
    source: str | Several[str],
    tokenizer: PreTrainedTokenizerBase,
    count: Count | None,
    length: Tokens | None = None,
    *,
    split: str = "heldout",
    chat: bool | None = None,
    subset: str | None = None,
    limit: Count | None = None,
    where: str | None = None,
    turns: Literal["first", "last", "all"] = "first",
    **options,
) -> Spool:
    """Return a deterministic set of prompts from a corpus, a benchmark or a collection, on disk.

    A text gives windows of exactly `length` tokens, disjoint, from as many documents as possible,
    at offsets from a hash of the document's id. A chat or pair gives everything before its first
    answer (see `turns`), cut to the last `length` tokens.

    A benchmark's problem (`data.corpora.benchmarks`) gives its first turn: with the benchmark's
    instruction in a chat, else verbatim. Benchmarks have no splits, except GSM8K, whose training
    set looks like its test set: its rows are split like any pairs, and split='test' takes them all.
    A .jsonl file with `text` has splits, and each text is one prompt.

    A collection (`python -m decoding.collect`) gives the prompts of the split's answers. 'itself'
    gives the beginning of a user's turn, `begun`, for the model of a collection to go on.

    Args:
        source: A corpus as in `data.corpora.sources.load_documents`, a benchmark as in
            `data.corpora.benchmarks.read_benchmark`, a collection's folder, or 'itself'. Of
            several each gives the same share of `count`, in turn.
        tokenizer: Encodes the prompts.
        count: Number of prompts; None for all.
        length: Tokens per prompt: exactly (windows) or at most (whole prompts, which lose their
            beginning). None: `WINDOW` for texts, unlimited for questions.
        split: 'heldout' or 'train'; ignored for a benchmark (GSM8K's: see above).
        chat: Render problems and pairs' prompts with the tokenizer's chat template; None: if it has
            one. Texts are never rendered, chats always.
        subset: A benchmark's category, or the configuration of a Hub data set.
        limit: Maximum number of documents to read.
        where: Conditions on rows, as in `load_documents` or `data.corpora.answers.read_answers`.
        turns: Of chats with several questions: the 'first', the 'last' after the turns before it,
            or 'all': the first, with what `next_prompt` needs for the others in `later`.
        **options: Further arguments of `load_documents`.

    Returns:
        `count` prompts `{"id": str, "prompt_ids": list[int], "text": str}`; those of a benchmark
        also have its `category` (without any, the benchmark's name).

    Raises:
        ValueError: As `load_documents` and `read_benchmark` do, for options that the source does
            not support, or for a collection of another tokenizer.
        TooFewPrompts: For fewer than `count` prompts, or none.
    """
    options |= {"limit": limit, "where": where}
    if not isinstance(source, str):
        asked = {"split": split, "chat": chat, "subset": subset, "turns": turns, **options}
        return _in_turn(source, tokenizer, count, length, **asked)
    if source == ITSELF:
        if count is None:
            raise ValueError(f"source={ITSELF} has no end: give prompts.count=")
        ids = question_start(tokenizer)
        begun = {"prompt_ids": ids, "text": tokenizer.decode(ids), "begun": True}
        return Spool({"id": f"{ITSELF}/{n}", **begun} for n in range(count))
    if is_collection(source):
        found = _collected(source, tokenizer, split, subset, **options)
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
    length = length or (WINDOW if text else None)
    if text and length and not source.endswith(".jsonl"):
        if (count or 2) > 1 and (told := one_document(source)):
            _say(f"{source}: its prompts are windows of {length} tokens.{told}")
        found = _windows(documents, tokenizer, length)
    else:
        found = _whole_prompts(documents, tokenizer, length, in_chat, turns)
    return _chosen(found, tokenizer, count, source, split, length)


@cache
def _say(line: str) -> None:
    """Print a line once, to stderr: commands print their results to stdout."""
    print(line, file=sys.stderr)


def _chosen(
    found: Iterator[dict],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    source: str,
    split: str,
    length: int | None,
) -> Spool:
    """Return the first `count` prompts found, cut to the last `length` tokens.

    Raises:
        TooFewPrompts: For fewer prompts, or none.
    """
    cut = 0

    def read(prompt: dict) -> dict:
        nonlocal cut
        ids = prompt["prompt_ids"]
        if length and len(ids) > length:
            cut, ids = cut + 1, ids[-length:]
        return prompt | {"prompt_ids": ids, "text": tokenizer.decode(ids)}

    prompts = Spool(map(read, islice(found, count)))
    if cut:
        _say(
            f"{cut} of {len(prompts)} prompts were longer than {length} tokens and lost their "
            "beginning"
        )
    if len(prompts) < (count or 1):
        of, shorter = (f" of length={length}", " or shorter ones") if length else ("", "")
        raise TooFewPrompts(
            f"source={source!r} has {len(prompts)} prompts{of} in split={split!r}, and "
            f"{count or 'some'} are asked for. Ask for fewer{shorter} (prompts=, in a training "
            f"acceptance.prompts=, in a collection prompts.count=), or give a larger source."
            f"{one_document(source)}",
            prompts,
        )
    return prompts


def _in_turn(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    count: int | None,
    length: int | None,
    **options,
) -> Spool:
    """Return prompts of several sources in turn; files and folders of the user may have fewer."""
    share = count and -(-count // len(sources))
    found: list[Sequence[dict]] = []
    for source in sources:
        try:
            found.append(prompt_set(source, tokenizer, share, length, **options))
        except TooFewPrompts as error:
            if not (error.prompts and is_own(source)):
                raise
            found.append(error.prompts)
    turns = enumerate(zip_longest(*found))
    # Another one is first in each turn, since a collection's temperatures are taken in turn too.
    first = ((n % len(sources), turn) for n, turn in turns)
    mixed = chain.from_iterable(turn[at:] + turn[:at] for at, turn in first)
    prompts = Spool(islice(filter(None, mixed), count))
    names = ", ".join(sources)
    twice = [id for id, n in Counter(p["id"] for p in prompts).items() if n > 1]
    if twice:
        raise ValueError(
            f"source=[{names}] has the id {twice[0]!r} more than once: give their rows other ids, "
            "or collect the sources one by one"
        )
    if len(prompts) < (count or 1):
        raise TooFewPrompts(f"source=[{names}] has {len(prompts)} prompts, not {count}", prompts)
    return prompts


def _collected(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    subset: str | None,
    where: str | None = None,
    limit: int | None = None,
    **options,
) -> Iterator[dict]:
    """Yield the prompts of a collection's split, each once, in the order of a hash of their ids."""
    del options  # how a corpus is read
    _check_subset(source, subset)
    checked_manifest(source, tokenizer)
    prompts: dict[str, list[int]] = {}
    for answer in read_answers(source, split, where):
        size = len(answer.trained) - sum(answer.trained)
        prompts.setdefault(answer.prompt, answer.ids[:size])
        if len(prompts) == limit:
            break
    for id in sorted(prompts, key=_hash):
        yield {"id": id, "prompt_ids": prompts[id]}


def asks_in_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Return whether problems are asked in the chat template; `chat=None`: if there is one."""
    if chat and not tokenizer.chat_template:
        raise ValueError(
            f"chat=true needs a chat template, and the tokenizer {tokenizer.name_or_path!r} has "
            "none. Leave chat out, or give a chat model."
        )
    return bool(tokenizer.chat_template) if chat is None else chat


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
    documents: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    length: int | None,
    chat: bool,
    turns: str,
) -> Iterator[dict]:
    for document in documents:
        more = {key: document[key] for key in ("category",) if key in document}
        with located(document):
            if "messages" in document:
                messages, options = chat_of(tokenizer, document)
                at, *later = _asked(messages, turns)
                ids = encode_prompt(tokenizer, messages[:at], options)
                if later:
                    more["later"] = {"messages": messages, "options": options, "at": [at, *later]}
                    more["later"]["length"] = length
            else:
                ids = _prompt_ids(document, tokenizer, chat)
        if ids:
            yield {"id": document["id"], "prompt_ids": ids, **more}


def _prompt_ids(document: dict, tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[int]:
    if "text" in document:
        return encode_text(tokenizer, quoted(tokenizer, document["text"]))
    if chat:
        return encode_prompt(tokenizer, [{"role": "user", "content": document["prompt"]}])
    return encode_text(tokenizer, quoted(tokenizer, document["prompt"]))


def _asked(messages: list[dict], turns: str) -> list[int]:
    """Return how many turns of a chat come before each answer that is asked for."""
    roles = [message["role"] for message in messages]
    # If the assistant opens the chat, the first answer is the one after the first user turn.
    asked = roles.index("user") if "user" in roles else 0
    first = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)
    # The last question may have no answer yet. Two turns of the assistant are one answer.
    wanted = [m["role"] == "assistant" and m.get("train") is not False for m in messages] + [True]
    later = [
        at for at in range(first + 1, len(roles) + 1) if wanted[at] and roles[at - 1] != "assistant"
    ]
    return {"first": [first], "last": [first, *later][-1:], "all": [first, *later]}[turns]


def next_prompt(prompt: dict, tokenizer: PreTrainedTokenizerBase, answer: list[int]) -> dict:
    """Return the prompt of a chat's next question (`later`), after the model's own answer.

    A tool's reply is that to the call of the data, so such a call stays.

    Args:
        prompt: As of `prompt_set` with turns='all'; its `turn` counts the questions before it.
        tokenizer: Encodes the prompt.
        answer: The token ids of the answer to the prompt.
    """
    chat = prompt["later"]
    (at, following, *rest), messages = chat["at"], [*chat["messages"]]
    if messages[at + 1]["role"] != "tool":
        said = tokenizer.decode(answer, skip_special_tokens=True)
        messages[at] = {"role": "assistant", "content": said}
    ids = encode_prompt(tokenizer, messages[:following], chat["options"])
    later = {**chat, "messages": messages, "at": [following, *rest]} if rest else None
    return {
        **prompt,
        "prompt_ids": ids[-(chat["length"] or 0) :],
        "turn": prompt.get("turn", 0) + 1,
        "later": later,
    }


def _windows(
    documents: Sequence[dict], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict]:
    """Yield windows in rounds: the first of each document, then the second of each, and so on."""
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
    """Yield the disjoint windows of a document; their order and offset are a hash of its id."""
    id, start = document["id"], start_ids(tokenizer)
    width = length - len(start)
    if width < 1:
        return
    ids = encode(tokenizer, quoted(tokenizer, document["text"]))
    slots = len(ids) // width
    shift = _hash(id) % (len(ids) - slots * width + 1)
    for slot in sorted(range(slots), key=lambda slot: _hash(f"{id}:{slot}")):
        offset = shift + slot * width
        yield {"id": f"{id}@{offset}", "prompt_ids": start + ids[offset : offset + width]}


def _shuffled(documents: Iterable[dict]) -> Spool:
    """Return the documents in the order of a hash of their ids: any first few are a fair sample."""
    found = Spool({"where": getattr(d, "where", None), **d} for d in documents)
    order = sorted((_hash(document["id"]), i) for i, document in enumerate(found))
    return Spool(found[i] for _, i in order)


def _hash(text: str) -> int:
    return int(hashlib.sha1(text.encode()).hexdigest(), 16)
