"""Tokenizers: training, the special tokens of drafters, and fingerprints to compare two."""

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
# Of draft blocks (data/corruption/draft_blocks.py).
LAYOUTS = ("separator", "pard", "dflash", "dspark")
# A byte that UTF-8 never uses, as byte-level vocabularies (GPT-2's, Llama 3's, Qwen's) write it.
UNUSED_BYTE = "ÿ"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on `texts`: deterministic, and lossless on any text.

    Args:
        texts: the training texts.
        vocab_size: size of the vocabulary; it comes out smaller only if the texts have too few
            pairs to merge.

    Returns:
        The tokenizer, with `<eos>` as id 0, which is the padding token too.

    Raises:
        ValueError: if `vocab_size` is below 257 (256 bytes and `<eos>`), or there is no text.
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


def corpus_tokenizer(
    source: str,
    vocab_size: int,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer trained on a corpus of texts (see `train_tokenizer`).

    Args:
        source: as in `data.corpora.sources.load_documents`, like split, subset and limit.
        vocab_size: number of tokens.
    """
    documents = load_documents(source, split, subset=subset, limit=limit)
    return train_tokenizer((row["text"] for row in documents), vocab_size)


def _not_empty(texts: Iterable[str]) -> Iterable[str]:
    seen = False
    for text in texts:
        seen = seen or bool(text)
        yield text
    if not seen:
        raise ValueError("No text to train a tokenizer on: the corpus is empty.")


def with_mask_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with a mask token: its own, or a new one with the next free id."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


def mask_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token.

    Raises:
        ValueError: for a tokenizer without one.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            "The tokenizer has no mask token. "
            "Call data.text.tokenizer.with_mask_token(tokenizer) first."
        )
    return tokenizer.mask_token_id


def with_draft_tokens(
    tokenizer: PreTrainedTokenizerBase, layout: str = "separator", mask_token: str | None = None
) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with what draft blocks of a layout need.

    Args:
        tokenizer: the target's. A mask token that it has is kept.
        layout: 'separator' adds a mask token and a separator token, with ids after the whole
            vocabulary, so every existing id keeps its meaning; the others add nothing: see
            `spare_token_id`.
        mask_token: a special token of the tokenizer that becomes the mask token.

    Raises:
        ValueError: for an unknown layout, a mask token that is no special token, or, with another
            layout than 'separator', a tokenizer without a spare token.
    """
    _check_layout(layout)
    if mask_token is not None:
        known = {token.content for token in tokenizer.added_tokens_decoder.values()}
        if mask_token not in known:
            raise ValueError(
                f"tokenizer.mask_token={mask_token} is not allowed: it must be a special token "
                f"that the tokenizer has, one of {sorted(known)}"
            )
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.mask_token = mask_token
    if layout != "separator":
        draft_token_ids(tokenizer, layout)
        return copy.deepcopy(tokenizer)
    tokenizer = with_mask_token(tokenizer)
    # A plain added token: `extra_special_tokens` would replace those that the tokenizer has.
    tokenizer.add_tokens([SEPARATOR_TOKEN], special_tokens=True)
    return tokenizer


def draft_token_ids(
    tokenizer: PreTrainedTokenizerBase, layout: str = "separator"
) -> tuple[int, int | None]:
    """The ids `(mask, separator)` of the draft tokens; only 'separator' has the latter.

    Raises:
        ValueError: for a tokenizer without them, or of another layout; see `with_draft_tokens`.
    """
    _check_layout(layout)
    mask_id = tokenizer.mask_token_id
    separator_id = _backend(tokenizer).token_to_id(SEPARATOR_TOKEN)
    if layout != "separator":
        if separator_id is not None:
            raise ValueError(
                f"layout={layout}, but the tokenizer has a {SEPARATOR_TOKEN} token: the drafter to "
                "start from was made with layout=separator. Make another, with runs= of its own"
            )
        return spare_token_id(tokenizer) if mask_id is None else mask_id, None
    if mask_id is None or separator_id is None:
        raise ValueError(
            f"The tokenizer has no mask token or no {SEPARATOR_TOKEN} token. "
            "Call data.text.tokenizer.with_draft_tokens(tokenizer) first. "
            f"(That of a drafter with layout={' or '.join(LAYOUTS[1:])} has none.)"
        )
    return mask_id, separator_id


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}. Choose from {list(LAYOUTS)}")


def spare_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of a token that no text has: what drafters of PARD and DFlash read as the mask.

    Serving engines demand that a drafter has exactly the target's vocabulary, so the mask must be
    in it: a reserved special token, else the last special token without a use, else, of a
    byte-level vocabulary, a byte that UTF-8 never uses.

    Raises:
        ValueError: for a tokenizer without any.
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
    """Fingerprint of a tokenizer, 16 hex digits: equal for two that encode texts to the same ids.

    Draft tokens are left out, so that a target and its drafter agree; so are padding, truncation
    and the chat template, which change no id.

    Raises:
        ValueError: for a slow tokenizer, one without a backend of the `tokenizers` library.
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


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library. "
            "Load one that is: AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    return tokenizer.backend_tokenizer
