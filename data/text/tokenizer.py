"""Tokenizers: training, the special tokens of drafters, and fingerprints to compare two."""

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Annotated

from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from data.arguments import Count
from data.corpora.answers import UnfitCollection, read_manifest
from data.corpora.chats import chat_texts
from data.corpora.sources import load_documents
from data.text.chat import start_ids
from data.text.layouts import LAYOUTS, layout_of
from data.text.special import DRAFTING, MASK_TOKEN, SEPARATOR_TOKEN

EOS_TOKEN = "<eos>"
# Of draft blocks (data/corruption/draft_blocks.py).
# A byte that UTF-8 never uses, as byte-level vocabularies (GPT-2's, Llama 3's, Qwen's) write it.
UNUSED_BYTE = "ÿ"
VERSION = "v2-"  # how fingerprints begin; the first ones had no such mark


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
    return train_tokenizer(chat_texts(documents), vocab_size)


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
    """Return a fast tokenizer's fingerprint, equal for two that encode every text alike.

    It covers all that changes an id: the model with its options and merges, the added tokens with
    their flags, the normalizer, the pre-tokenizer, the post-processor, and the start token. It
    ignores draft tokens, so a target and its drafter agree, and padding, truncation and the chat
    template.
    """
    backend = json.loads(_backend(tokenizer).to_str())
    model = backend["model"]
    content = {
        "vocabulary": sorted(x for x in tokenizer.get_vocab().items() if x[0] not in DRAFTING),
        # An option that is off is as one that an older file does not have. 0 is an id.
        "model": {k: v for k, v in model.items() if v or (type(v) is int and k != "dropout")},
        "added_tokens": [t for t in backend["added_tokens"] if t["content"] not in DRAFTING],
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "start": start_ids(tokenizer),
        **{part: backend[part] for part in ("normalizer", "pre_tokenizer", "post_processor")},
    }
    return VERSION + _digest(content)


def encoding_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of all that `data.text.chat` makes token ids with: the key of a cache.

    Beside what `fingerprint` covers these are the draft tokens, the chat template with the special
    tokens that it is given, and the end of a text.
    """
    backend = json.loads(_backend(tokenizer).to_str())
    content = {
        "backend": {k: v for k, v in backend.items() if k not in ("padding", "truncation")},
        "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        "start": start_ids(tokenizer),
        "end": tokenizer.eos_token_id,
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }
    return _digest(content)


def same_tokenizer(tokenizer: PreTrainedTokenizerBase, stored: str) -> bool:
    """Return whether a stored fingerprint is that of a tokenizer.

    Exports and collections made before `VERSION` have one of the vocabulary, merges, normalizer and
    pre-tokenizer alone, and are checked by it.
    """
    if stored.startswith(VERSION):
        return stored == fingerprint(tokenizer)
    backend = json.loads(_backend(tokenizer).to_str())
    content = {
        "vocabulary": sorted(x for x in tokenizer.get_vocab().items() if x[0] not in DRAFTING),
        "merges": backend["model"].get("merges"),
        "normalizer": backend["normalizer"],
        "pre_tokenizer": backend["pre_tokenizer"],
    }
    return stored == _digest(content)


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def harmless(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make a loaded tokenizer deterministic, and its panics ValueErrors; return it.

    A tokenizer.json may ask for BPE dropout, which is for training a model: with it a text has
    other ids at each call. Raises ValueError for a SentencePiece model that samples.
    """
    if (getattr(tokenizer, "sp_model_kwargs", None) or {}).get("enable_sampling"):
        raise ValueError("its sp_model_kwargs ask to sample tokens: take enable_sampling out")
    if tokenizer.is_fast:
        model = _backend(tokenizer).model
        if getattr(model, "dropout", None):
            model.dropout = None
        kind: type = type(tokenizer)
        tokenizer.__class__ = _harmless_class(kind)
    return tokenizer


@contextmanager
def no_panic() -> Iterator[None]:
    """Turn the errors that the tokenizers library has for a damaged tokenizer into ValueErrors.

    A panic of Rust is a BaseException, which nothing else catches: a regular expression that goes
    back too often, a replacement of nothing. Others are of the bare class Exception.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and type(error) is not Exception:
            raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the tokenizer is damaged, and cannot go on: {reason}") from None


@cache
def _harmless_class(kind: type) -> type:
    """Return a subclass of a fast tokenizer's class, by its name, without panics."""

    class Harmless(kind):  # type: ignore[valid-type, misc]
        def _encode_plus(self, text, *args, **options):
            try:
                with no_panic():
                    return super()._encode_plus(text, *args, **options)
            except (TypeError, AttributeError, LookupError, OverflowError) as error:
                _check_text(text)
                if not all(isinstance(t, str) for t in ([text] if isinstance(text, str) else text)):
                    raise
                raise ValueError(
                    f"the tokenizer is damaged, and encodes nothing: {error}"
                ) from None

        def _decode(self, *args, **options):
            with no_panic():
                return super()._decode(*args, **options)

        def __reduce__(self):  # as it is no attribute of a module
            return _remade, (kind,), self.__dict__

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Harmless, name, getattr(kind, name))
    return Harmless


def _check_text(text: object) -> None:
    """Raise ValueError for a text with half a surrogate pair, which is none in UTF-8."""
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"the text is not UTF-8: it has half a surrogate pair, {half!a}, at character "
            f"{error.start}"
        ) from None


def _remade(kind: type) -> PreTrainedTokenizerBase:
    return object.__new__(_harmless_class(kind))


def checked_manifest(source: str, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the manifest of a collection; raise ValueError if another tokenizer made it."""
    manifest = read_manifest(source)
    if not same_tokenizer(tokenizer, str(manifest["tokenizer"])):
        raise UnfitCollection(
            source,
            f"another tokenizer (fingerprint {manifest['tokenizer']}, here "
            f"{fingerprint(tokenizer)})",
        )
    return manifest


def _backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library. "
            "Load one that is: AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    return tokenizer.backend_tokenizer
