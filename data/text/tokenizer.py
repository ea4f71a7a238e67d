"""Tokenizers: training, the special tokens of drafters, and fingerprints to compare two."""

import copy
import hashlib
import json
from collections.abc import Iterable
from itertools import chain
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.arguments import Count
from data.corpora.answers import read_manifest
from data.corpora.sources import load_documents
from data.text.layouts import LAYOUTS, layout_of

EOS_TOKEN = "<eos>"
MASK_TOKEN = "<|mask|>"
SEPARATOR_TOKEN = "<|draft|>"
# Of draft blocks (data/corruption/draft_blocks.py).
# A byte that UTF-8 never uses, as byte-level vocabularies (GPT-2's, Llama 3's, Qwen's) write it.
UNUSED_BYTE = "ÿ"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a deterministic, lossless byte-level BPE tokenizer, trained on `texts`.

    `vocab_size`, at least 257 (256 bytes and `<eos>`), is reached unless the texts have too few
    pairs to merge. `<eos>` is id 0, and the padding token too.
    """
    alphabet, texts = pre_tokenizers.ByteLevel.alphabet(), iter(texts)
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"vocab_size={vocab_size} is too small. Choose at least {len(alphabet) + 1}: "
            f"{len(alphabet)} bytes and {EOS_TOKEN}."
        )
    if (first := next(filter(None, texts), None)) is None:
        raise ValueError("No text to train a tokenizer on: the corpus is empty.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(chain([first], texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def corpus_tokenizer(
    source: str,
    vocab_size: Annotated[int, Field(ge=1, le=10**6)],
    split: str = "train",
    subset: str | None = None,
    limit: Count | None = None,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, trained on a corpus (see `train_tokenizer`).

    The other arguments are those of `data.corpora.sources.load_documents`.
    """
    documents = load_documents(source, split, subset=subset, limit=limit)
    return train_tokenizer((row["text"] for row in documents), vocab_size)


def with_mask_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer with a mask token: its own, or one with the next free id."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


def mask_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the mask token; raise ValueError if the tokenizer has none."""
    if tokenizer.mask_token_id is None:
        raise ValueError(
            "The tokenizer has no mask token. "
            "Call data.text.tokenizer.with_mask_token(tokenizer) first."
        )
    return tokenizer.mask_token_id


def with_draft_tokens(
    tokenizer: PreTrainedTokenizerBase, layout: str = "separator", mask_token: str | None = None
) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer with the tokens that a layout's draft blocks need.

    Args:
        tokenizer: The target's; it keeps its mask token.
        layout: 'separator' adds a mask token and a separator token with ids after the whole
            vocabulary, so existing ids keep their meaning; others add nothing (`spare_token_id`).
        mask_token: A special token of the tokenizer that becomes the mask token.

    Raises:
        ValueError: For an unknown layout, a mask token that is no special token, or a tokenizer
            that has no spare token where one is needed.
    """
    separator = layout_of(layout).separator
    if mask_token is not None:
        known = {token.content for token in tokenizer.added_tokens_decoder.values()}
        if mask_token not in known:
            raise ValueError(
                f"tokenizer.mask_token={mask_token} is not allowed: it must be a special token "
                f"that the tokenizer has, one of {sorted(known)}"
            )
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.mask_token = mask_token
    if not separator:
        draft_token_ids(tokenizer, layout)
        return copy.deepcopy(tokenizer)
    tokenizer = with_mask_token(tokenizer)
    # A plain added token: `extra_special_tokens` would replace those that the tokenizer has.
    tokenizer.add_tokens([SEPARATOR_TOKEN], special_tokens=True)
    return tokenizer


def draft_token_ids(
    tokenizer: PreTrainedTokenizerBase, layout: str = "separator"
) -> tuple[int | None, int | None]:
    """Return the ids `(mask, separator)` of a layout's draft tokens; None for unused ones."""
    known = layout_of(layout)
    if not known.read:
        return None, None
    mask_id = tokenizer.mask_token_id
    separator_id = _backend(tokenizer).token_to_id(SEPARATOR_TOKEN)
    if not known.separator:
        if separator_id is not None:
            raise ValueError(
                f"layout={layout}, but the tokenizer has a {SEPARATOR_TOKEN} token: the drafter to "
                "start from was made with layout=separator. Make another, with runs= of its own"
            )
        return spare_token_id(tokenizer) if mask_id is None else mask_id, None
    if mask_id is None or separator_id is None:
        without = [name for name, other in LAYOUTS.items() if not other.separator]
        raise ValueError(
            f"The tokenizer has no mask token or no {SEPARATOR_TOKEN} token. "
            "Call data.text.tokenizer.with_draft_tokens(tokenizer) first. "
            f"(That of a drafter with layout={' or '.join(without)} has none.)"
        )
    return mask_id, separator_id


def spare_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of a token that no text has: the mask of PARD's and DFlash's drafters.

    Serving engines require exactly the target's vocabulary, so the mask is one of its tokens: a
    reserved special token, else the last unused special token, else, in a byte-level vocabulary, a
    byte that UTF-8 never uses. A tokenizer without any raises ValueError.
    """
    used = {*tokenizer.special_tokens_map.values()}
    template = str(tokenizer.chat_template or "")
    added = {id: token for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = [i for i, t in added.items() if t.content not in used and t.content not in template]
    reserved = [i for i in free if any(w in added[i].content for w in ("reserved", "unused"))]
    if free:
        return max(reserved or free)
    byte_level = "ByteLevel" in str(json.loads(_backend(tokenizer).to_str())["decoder"])
    byte = _backend(tokenizer).token_to_id(UNUSED_BYTE)
    if not byte_level or byte is None:
        raise ValueError(
            "a drafter with the target's vocabulary needs a token that no text has, and this "
            "tokenizer has no special token without a use: name one, tokenizer.mask_token=..., or "
            "train with layout=separator"
        )
    return byte


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fast tokenizer's fingerprint, 16 hex digits: equal for two that encode texts alike.

    It ignores draft tokens, so a target and its drafter agree, and padding, truncation and the chat
    template, which change no id.
    """
    backend = json.loads(_backend(tokenizer).to_str())
    vocabulary = tokenizer.get_vocab()
    content = {
        "vocabulary": sorted(
            (token, id)
            for token, id in vocabulary.items()
            if token not in (MASK_TOKEN, SEPARATOR_TOKEN)
        ),
        # Two BPE tokenizers may share a vocabulary and merge in different orders.
        "merges": backend["model"].get("merges"),
        "normalizer": backend["normalizer"],
        "pre_tokenizer": backend["pre_tokenizer"],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def checked_manifest(source: str, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the manifest of a collection; raise ValueError if another tokenizer made it."""
    manifest = read_manifest(source)
    if manifest["tokenizer"] != fingerprint(tokenizer):
        raise ValueError(
            f"{source} was collected with another tokenizer (fingerprint "
            f"{manifest['tokenizer']}, here {fingerprint(tokenizer)}): collect again with "
            f"python -m decoding.collect recipe={manifest['recipe']}, or give another source"
        )
    return manifest


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library. "
            "Load one that is: AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    return tokenizer.backend_tokenizer
