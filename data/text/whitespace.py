"""Whitespace tokens for tokenizers that keep only single spaces (XLNet's).

Source: AS-ARM (arXiv 2504.20456), appendix E.7. Four special tokens that code never uses become
whitespace. The mapping is part of the tokenizer: encoding applies it, decoding inverts it, and
exports have it in tokenizer.json.
"""

import json

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WHITESPACE = {"\n": "<cls>", "\t": "<sep>", "  ": "<unk>", "   ": "<pad>"}
SPACE = "▁"  # how a SentencePiece vocabulary writes a space


def with_whitespace(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    r"""Return a copy of a SentencePiece tokenizer that keeps every space, tab and line break.

    Each token of `WHITESPACE` keeps its id and is renamed to the whitespace that it encodes, so
    '<cls>' is ordinary text. A run of spaces is split into threes from the left. As published, each
    piece of text is encoded with the leading space of the vocabulary's words, which decoding
    removes; a piece that begins with a space gets a second one, so decoding is lossless. Pairs of
    quotes are not normalised. Known loss: characters outside the vocabulary become <unk>, which
    decodes to two spaces.

    Example: 'if a:\n    b' is ['▁if', '▁a:', '\n', '   ', '▁', '▁b'].
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if missing := sorted({*WHITESPACE.values()} - tokenizer.get_vocab().keys()):
        raise ValueError(
            f"the tokenizer has no {', '.join(missing)}: whitespace tokens are for tokenizers "
            "such as xlnet/xlnet-base-cased; a byte-level one keeps whitespace anyway"
        )
    renamed = {token: text for text, token in WHITESPACE.items()}
    for piece in backend["model"]["vocab"]:
        piece[0] = renamed.get(piece[0], piece[0])
    for token in backend["added_tokens"]:
        if token["content"] in renamed:
            token |= {"content": renamed[token["content"]], "special": False, "normalized": False}
    # XLNet's normalizer replaces quotes and runs of spaces: drop both replacements.
    kept = [n for n in backend["normalizer"]["normalizers"] if n["type"] != "Replace"]
    own_space = {"type": "Replace", "pattern": {"Regex": r"\A "}, "content": 2 * SPACE}
    backend["normalizer"]["normalizers"] = [*kept, own_space]
    backend["post_processor"] = None  # it would end every text with <sep> <cls>
    mapped = Tokenizer.from_str(json.dumps(backend))
    mapped.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    mapped.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            # The leading space of a piece: at the beginning, or after a whitespace token.
            decoders.Replace(Regex(rf"(?<![^\n\t ]){SPACE}"), ""),
            decoders.Replace(SPACE, " "),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=mapped,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        mask_token=tokenizer.mask_token,
        clean_up_tokenization_spaces=False,
    )
