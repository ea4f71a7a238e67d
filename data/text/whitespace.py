"""All whitespace of a text as tokens, for tokenizers that know single spaces only (XLNet's).

Source: AS-ARM (arXiv 2504.20456), appendix E.7. Four special tokens that have no use in code take
the place of whitespace. The mapping is made part of the tokenizer itself, so whatever encodes
maps, whatever decodes undoes it, and an export carries it in its tokenizer.json.
"""

import json

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

WHITESPACE = {"\n": "<cls>", "\t": "<sep>", "  ": "<unk>", "   ": "<pad>"}
SPACE = "▁"  # how a SentencePiece vocabulary writes a space


def with_whitespace(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    r"""A copy of a SentencePiece tokenizer that keeps every space, tab and line break.

    A token of `WHITESPACE` keeps its id and is now called what it stands for, so the text '<cls>'
    is text. A run of spaces is cut into threes from the left. As published, a piece of text gets
    the space that the vocabulary's words begin with, and decoding drops it again; a piece that
    begins with a space of its own gets one more, so that no text is lost. Pairs of quotes stay
    what they are in code. A character that the vocabulary lacks becomes two spaces: <unk> is.

    Example: 'if a:\n    b' is ['▁if', '▁a:', '\n', '   ', '▁', '▁b'].

    Errors: a tokenizer without these tokens.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if missing := sorted({*WHITESPACE.values()} - tokenizer.get_vocab().keys()):
        raise ValueError(
            f"the tokenizer has no {', '.join(missing)}: whitespace is mapped for tokenizers such "
            "as xlnet/xlnet-base-cased; a byte-level one keeps it without"
        )
    named = {token: text for text, token in WHITESPACE.items()}
    for piece in backend["model"]["vocab"]:
        piece[0] = named.get(piece[0], piece[0])
    for token in backend["added_tokens"]:
        if token["content"] in named:
            token |= {"content": named[token["content"]], "special": False, "normalized": False}
    # XLNet's replacements are of quotes and of runs of spaces.
    kept = [n for n in backend["normalizer"]["normalizers"] if n["type"] != "Replace"]
    own_space = {"type": "Replace", "pattern": {"Regex": r"\A "}, "content": 2 * SPACE}
    backend["normalizer"]["normalizers"] = [*kept, own_space]
    backend["post_processor"] = None  # it would end every text with <sep> <cls>
    mapped = Tokenizer.from_str(json.dumps(backend))
    mapped.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    mapped.decoder = decoders.Sequence(
        [
            decoders.Fuse(),
            # The space of a first word: at the beginning, or behind whitespace that is a token.
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
