"""Packed rows of a training set, by what they are made from: documents or teacher answers."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.corpora.answers import read_answers, read_manifest
from data.corpora.sources import load_documents
from data.rows.packing import PackedRows
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
) -> PackedRows:
    """Rows of `length` tokens of a corpus (see `data.corpora.sources.load_documents`).

    folder: where packed rows are kept, by fingerprint; an equal request finds them again.
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

    def encoded():  # a generator: rows found on disk must not open the source again
        options = {"field": field, "streaming": streaming, "limit": limit, "subset": subset}
        for row in load_documents(source, split, **options):
            yield encode_document(tokenizer, row)

    return _build(encoded(), length, tokenizer, folder, made_from)


def answers(
    source: str,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
) -> PackedRows:
    """Rows of a collection of teacher answers (see `decoding.collect`); answers are trained.

    source: the collection's folder. split: 'train' or 'heldout', by the hash of the prompt's id.
    """
    manifest = checked_manifest(source, tokenizer)
    made_from = {"answers": manifest, "split": split, "length": length}
    return _build(read_answers(source, split), length, tokenizer, folder, made_from)


def checked_manifest(source: str, tokenizer: PreTrainedTokenizerBase) -> dict:
    """What a collection was made with; ValueError for one of another tokenizer."""
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
    # Padding is a document of its own (-1) that nothing sees: any id of the vocabulary will do.
    pad_id = tokenizer.pad_token_id or 0
    return PackedRows.build(Path(folder) / name, encoded, length, pad_id, made_from)
