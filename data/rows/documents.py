"""Training sets of packed rows, made from the documents of a corpus or from teacher answers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.corpora.answers import TEMPERATURE, AnsweredPrompt, read_answers, read_manifest
from data.corpora.sources import load_documents
from data.rows.packing import PackedRows, pack
from data.text.chat import encode_document
from data.text.tokenizer import fingerprint


def documents(
    source: str,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
    limit: int | None = None,
    streaming: bool = False,
    subset: str | None = None,
    field: str = "text",
    where: str | None = None,
) -> PackedRows:
    """Packed rows of a corpus.

    Args:
        source: as in `data.corpora.sources.load_documents`, like the arguments after `folder`.
        length: tokens per row.
        tokenizer: encodes the documents.
        folder: cache of packed rows, by a hash of all other arguments.
        split: as in `load_documents`.
        limit: as in `load_documents`.
        streaming: as in `load_documents`.
        subset: as in `load_documents`.
        field: as in `load_documents`.
        where: as in `load_documents`.

    Raises:
        ValueError: as `load_documents` and `PackedRows.build` do.
    """
    made_from = {
        "source": source,
        "split": split,
        "limit": limit,
        "subset": subset,
        "field": field,
        "length": length,
        "tokenizer": fingerprint(tokenizer),
    }
    if where is not None:
        made_from["where"] = where

    def encoded():  # a generator, so that the source is not opened if the rows are on disk
        options = {"field": field, "streaming": streaming, "limit": limit, "subset": subset}
        options["where"] = where
        for row in load_documents(source, split, **options):
            yield encode_document(tokenizer, row)

    return _build(encoded(), length, tokenizer, folder, made_from)


def packed_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    split: str = "heldout",
    subset: str | None = None,
    limit: int | None = None,
) -> list[list[int]]:
    """The first windows of a corpus that is packed as for training: short documents share one.

    Args:
        source: as in `data.corpora.sources.load_documents`, like `split` and `subset`.
        tokenizer: encodes the documents, each with its end-of-text token.
        count: windows.
        length: tokens of a window, at least 2.

    Returns:
        `count` lists of `length` token ids.

    Raises:
        ValueError: as `load_documents` does, and for a source of fewer windows.
    """
    rows = load_documents(source, split, subset=subset, limit=limit)
    packed = pack((encode_document(tokenizer, row) for row in rows), length, 0)
    whole = (row["input_ids"] for row in packed if row["document"][-1] >= 0)
    windows = list(islice(whole, count))
    if len(windows) < count:
        raise ValueError(
            f"source={source!r} has {len(windows)} packed windows of length={length} in "
            f"split={split!r}, but {count} are asked for: lower samples= or length="
        )
    return windows


def answers(
    source: str | Sequence[str],
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
    prompts: int | None = None,
    where: str | None = None,
) -> PackedRows:
    """Packed rows of a collection of teacher answers, trained on the answers only.

    Args:
        source: the collection's folder (`python -m decoding.collect`), or several, whose answers
            are taken in turn.
        length: tokens per row.
        tokenizer: the one that the collection was made with.
        folder: cache of packed rows.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        prompts: take the answers to this many prompts of the split, the first ones; None: all.
        where: take only the answers that meet these conditions, as in
            `data.corpora.answers.read_answers`.

    Raises:
        ValueError: for a missing collection, one of another tokenizer, or fewer prompts.
    """
    sources = [source] if isinstance(source, str) else list(source)
    manifests = [checked_manifest(s, tokenizer) for s in sources]
    made_from = {"answers": manifests if len(sources) > 1 else manifests[0], "split": split}
    made_from |= {"length": length, "columns": [TEMPERATURE]}
    for name, value in (("prompts", prompts), ("where", where)):
        if value is not None:
            made_from[name] = value
    found = _in_turn([read_answers(s, split, where) for s in sources])
    return _build(_first(prompts, found, sources, split), length, tokenizer, folder, made_from)


def _in_turn(
    collections: list[Iterator[AnsweredPrompt]],
) -> Iterator[tuple[int, AnsweredPrompt]]:
    """The answers of several collections, one of each in turn, with the collection's number."""
    left = dict(enumerate(collections))
    while left:
        for number, answers in list(left.items()):
            if (answer := next(answers, None)) is None:
                del left[number]
            else:
                yield number, answer


def _first(
    prompts: int | None,
    answers: Iterator[tuple[int, AnsweredPrompt]],
    sources: list[str],
    split: str,
) -> Iterator[AnsweredPrompt]:
    """The answers to the first so many prompts."""
    taken: set[tuple[int, str]] = set()
    for number, answer in answers:
        prompt = (number, answer.prompt)
        if prompt in taken or prompts is None or len(taken) < prompts:
            taken.add(prompt)
            yield answer
    if prompts is not None and len(taken) < prompts:
        raise ValueError(
            f"{', '.join(sources)} has answers to {len(taken)} prompts of split={split!r}, but "
            f"prompts={prompts} are asked for: collect more with prompts.count"
        )


def checked_manifest(source: str, tokenizer: PreTrainedTokenizerBase) -> dict:
    """The manifest of a collection, checked against a tokenizer.

    Raises:
        ValueError: for a missing collection, or one of another tokenizer.
    """
    manifest = read_manifest(source)
    if manifest["tokenizer"] != fingerprint(tokenizer):
        raise ValueError(
            f"{source} was collected with another tokenizer (fingerprint "
            f"{manifest['tokenizer']}, here {fingerprint(tokenizer)}): collect again with "
            f"python -m decoding.collect recipe={manifest['recipe']}"
        )
    return manifest


def _build(
    encoded: Iterable[tuple[list[int], list[bool]]],
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    made_from: dict,
) -> PackedRows:
    name = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    # No token attends to padding (document -1), so any id of the vocabulary will do.
    pad_id = tokenizer.pad_token_id or 0
    return PackedRows.build(Path(folder) / name, encoded, length, pad_id, made_from)
