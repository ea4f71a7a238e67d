"""Tokenizers of the kinds that models have, trained on a few words."""

import json
import string

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = "def f(x): return Paris and Rome user"
SPACE = "▁"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llama2(before="<s> ", after="", kind="strip"):
    """A vocabulary of SentencePiece with byte fallback, whose decoder strips a text's first space.

    `before` and `after` are the special tokens around every text; `kind` is 'strip' (Llama 2) or
    'metaspace' (a decoder of that name, without byte fallback), both with a prefixed space.
    """
    backend = Tokenizer(models.BPE(byte_fallback=kind == "strip", fuse_unk=True, unk_token="<unk>"))
    if kind == "strip":
        parts = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        backend.normalizer = normalizers.Sequence(parts)
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", split=False)
        backend.decoder = decoders.Metaspace(SPACE, "always")
    own = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    # Only ASCII has tokens of its own: all else is spelled in bytes.
    data = [*TEXT.split(), *string.ascii_lowercase, "\n", " ", ":"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*own, *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(data, trainer)
    # Only the first ones are special tokens; bytes are text.
    backend = _with_text_bytes(backend, own)
    ends = [(t, backend.token_to_id(t)) for t in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{before}$A{after}", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=own[3:],
        clean_up_tokenization_spaces=False,
    )


def _with_text_bytes(backend, special):
    content = json.loads(backend.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in special]
    return Tokenizer.from_str(json.dumps(content))


def spelled_bytes(template=None):
    """A tokenizer of single bytes, whose last token ends an answer, with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer
