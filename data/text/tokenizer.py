"""Tokenizers: train one for the lab, add the tokens that drafters need, tell two apart."""

import copy
import hashlib
import json
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.corpora.sources import load_documents

EOS_TOKEN = "<eos>"
MASK_TOKEN = "<|mask|>"
SEPARATOR_TOKEN = "<|draft|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: any text round-trips, and the same texts give the same tokenizer.

    `<eos>` has id 0 and also pads. The vocabulary is smaller than `vocab_size` only where the
    texts hold too few pairs to merge. Raises ValueError when `vocab_size` cannot hold the 256
    bytes and `<eos>`, or there is no text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            f"vocab_size={vocab_size} is too small. Choose at least {len(alphabet) + 1}: "
            f"{len(alphabet)} bytes and {EOS_TOKEN}."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(_not_empty(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def corpus_tokenizer(source: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """`train_tokenizer` on the training documents of a corpus of texts."""
    return train_tokenizer((row["text"] for row in load_documents(source)), vocab_size)


def _not_empty(texts: Iterable[str]) -> Iterable[str]:
    seen = False
    for text in texts:
        seen = seen or bool(text)
        yield text
    if not seen:
        raise ValueError("No text to train a tokenizer on: the corpus is empty.")


def with_mask_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` that has a mask token: its own, or a new one behind all others."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


def mask_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token. Raises ValueError for a tokenizer without one."""
    if tokenizer.mask_token_id is None:
        raise ValueError(
            "The tokenizer has no mask token. "
            "Call data.text.tokenizer.with_mask_token(tokenizer) first."
        )
    return tokenizer.mask_token_id


def with_draft_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of `tokenizer` that has a mask token and a separator token.

    The tokenizer's own mask token is kept where there is one. New tokens get the ids after the
    whole vocabulary, so every id of `tokenizer` keeps its meaning. `tokenizer` is not changed.
    """
    tokenizer = with_mask_token(tokenizer)
    # As a plain added token: the list of the tokenizer's own extra special tokens stays whole.
    tokenizer.add_tokens([SEPARATOR_TOKEN], special_tokens=True)
    return tokenizer


def draft_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """`(mask id, separator id)`. Raises ValueError for a tokenizer without them."""
    mask_id = tokenizer.mask_token_id
    separator_id = _backend(tokenizer).token_to_id(SEPARATOR_TOKEN)
    if mask_id is None or separator_id is None:
        raise ValueError(
            f"The tokenizer has no mask token or no {SEPARATOR_TOKEN} token. "
            "Call data.text.tokenizer.with_draft_tokens(tokenizer) first."
        )
    return mask_id, separator_id


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that two tokenizers share when they cut every text into the same ids.

    The draft tokens do not count, so a target and its drafter agree; neither do padding,
    truncation or the chat template, which change no id. Raises ValueError for a tokenizer that
    the `tokenizers` library does not back.
    """
    backend = json.loads(_backend(tokenizer).to_str())
    vocabulary = tokenizer.get_vocab()
    content = {
        "vocabulary": sorted(
            (token, id)
            for token, id in vocabulary.items()
            if token not in (MASK_TOKEN, SEPARATOR_TOKEN)
        ),
        # Two BPEs may share a vocabulary and still merge in another order.
        "merges": backend["model"].get("merges"),
        "normalizer": backend["normalizer"],
        "pre_tokenizer": backend["pre_tokenizer"],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library. "
            "Load one that is: AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    return tokenizer.backend_tokenizer
