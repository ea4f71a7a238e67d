"""Training sets of packed rows, made from the documents of a corpus or from teacher answers."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.arguments import Count, Several, Split, Tokens
from data.corpora.answers import AnsweredPrompt, read_answers
from data.corpora.fingerprints import input_fingerprint
from data.corpora.sources import content_fingerprint, load_documents
from data.rows.packing import Encoded, PackedRows, pack
from data.text.chat import encode_document, encode_documents
from data.text.special import quoted
from data.text.tokenizer import checked_manifest, encoding_fingerprint

# Of what this code makes of the same inputs: a change of packing or encoding raises it.
FORMAT = 3


def documents(
    source: str,
    length: Tokens,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: str = "train",
    limit: Count | None = None,
    streaming: bool = False,
    subset: str | None = None,
    field: str = "text",
    where: str | None = None,
) -> PackedRows:
    """Return packed rows of a corpus; chats and pairs stay whole (`data.rows.packing.pack`).

    Args:
        source: As in `data.corpora.sources.load_documents`, like the arguments after `folder`.
        length: Tokens per row.
        tokenizer: Encodes the documents.
        folder: Cache of packed rows, keyed by a hash of the source's content, of all that the
            tokenizer makes token ids with, and of the other arguments.
    """
    made_from = {
        "format": FORMAT,
        "content": content_fingerprint(source, folder),
        "split": split,
        "limit": limit,
        "subset": subset,
        "field": field,
        "length": length,
        "tokenizer": encoding_fingerprint(tokenizer),
        "where": where,
    }

    def encoded():  # a generator, so that the source is not opened if the rows are on disk
        options = {"field": field, "streaming": streaming, "limit": limit, "subset": subset}
        spelled = 0
        for row in load_documents(source, split, **options, where=where):
            text = row.get("text", "")
            spelled += quoted(tokenizer, text) != text
            yield from encode_documents(tokenizer, row)
        if spelled:
            print(
                f"{spelled} texts of {source} spell special tokens, which are read as text: chats "
                "that are rendered already are to be given as 'messages'"
            )

    return _build(encoded(), length, tokenizer, folder, made_from, limit)


def packed_windows(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    length: int,
    split: str = "heldout",
    subset: str | None = None,
    limit: int | None = None,
) -> list[list[int]]:
    """Return `count` windows [length] of a corpus, packed as running text: short texts share one.

    The length is at least 2. The other arguments are those of
    `data.corpora.sources.load_documents`.
    """
    rows = load_documents(source, split, subset=subset, limit=limit)
    encoded = (encode_document(tokenizer, row)[0] for row in rows)
    packed = pack(((ids, [True] * len(ids)) for ids in encoded), length, 0)  # chats, cut like texts
    whole = (row["input_ids"] for row in packed if row["document"][-1] >= 0)
    windows = list(islice(whole, count))
    if len(windows) < count:
        raise ValueError(
            f"source={source!r} has {len(windows)} packed windows of length={length} in "
            f"split={split!r}, but {count} are asked for: lower samples= or length="
        )
    return windows


def answers(
    source: str | Several[str],
    length: Tokens,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    split: Split = "train",
    prompts: Count | None = None,
    where: str | None = None,
) -> PackedRows:
    """Return packed rows of a collection of teacher answers, trained on the answers only.

    Args:
        source: The collection's folder (`python -m decoding.collect`), or several, whose answers
            alternate.
        length: Tokens per row.
        tokenizer: The collection's.
        folder: Cache of packed rows, keyed by the collections' content and the other arguments.
        split: 'train' or 'heldout', by a hash of the prompt's id.
        prompts: Use only the answers to the first `prompts` prompts of the split; None for all.
        where: As in `data.corpora.answers.read_answers`.
    """
    sources = [source] if isinstance(source, str) else list(source)
    manifests = [checked_manifest(s, tokenizer) for s in sources]
    made_from = {"format": FORMAT, "answers": manifests, "split": split, "length": length}
    made_from["content"] = [input_fingerprint(s) for s in sources]
    made_from |= {"prompts": prompts, "where": where}
    found = _in_turn(sources, split, where, prompts)
    return _build(found, length, tokenizer, folder, made_from)


def _in_turn(
    sources: list[str], split: str, where: str | None, prompts: int | None
) -> Iterator[AnsweredPrompt]:
    """Yield the answers to the first `prompts` prompts, alternating between the collections."""
    taken: set[tuple[int, str]] = set()
    for turn in zip_longest(*(read_answers(source, split, where) for source in sources)):
        for number, answer in enumerate(turn):
            if answer is None:
                continue
            prompt = (number, answer.prompt)
            if prompt in taken or prompts is None or len(taken) < prompts:
                taken.add(prompt)
                yield answer
    if not taken:
        raise ValueError(
            f"{', '.join(sources)} has no answer in split={split!r}"
            f"{'' if where is None else f' with where={where!r}'}: collect more with prompts.count"
        )
    if prompts is not None and len(taken) < prompts:
        raise ValueError(
            f"{', '.join(sources)} has answers to {len(taken)} prompts of split={split!r}, but "
            f"prompts={prompts} are asked for: collect more with prompts.count"
        )


def _build(
    encoded: Iterable[Encoded],
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    made_from: dict,
    total: int | None = None,
) -> PackedRows:
    name = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    # No token attends to padding (document -1), so any id of the vocabulary will do.
    pad_id = tokenizer.pad_token_id or 0
    return PackedRows.build(Path(folder) / name, encoded, length, pad_id, made_from, total)
