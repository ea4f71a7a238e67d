"""Tiny models as llama.cpp's converter writes them to gguf files: a Llama with a byte-level BPE
tokenizer, and a Gemma 3 with a sentencepiece one."""

from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from tests.support import tiny, windowed

MERGES = ["h e", "t he"]
TOKENS = [*sorted(ByteLevel.alphabet()), "he", "the", "<|end|>"]
END = TOKENS.index("<|end|>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
}  # fmt: skip
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581", *"the", "he", "the"]
GEMMA_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def network():
    """The Llama, its weights exact in bfloat16."""
    return _rounded(tiny.causal_lm(len(TOKENS), eos_token_id=END).float())


def gemma():
    """A Gemma 3 of windowed and full layers, its weights exact in bfloat16."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]  # which a file does not tell
    sizes = {"num_hidden_layers": 6, "layer_types": kinds, "query_pre_attn_scalar": 256}
    ends = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    rope = {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in {"full_attention": 1e6, "sliding_attention": 1e4}.items()
    }
    sizes |= ends | {"rope_parameters": rope}
    return _rounded(windowed.causal_lm("gemma3_text", vocabulary=len(GEMMA_TOKENS), **sizes))


def _rounded(model):
    for weight in model.parameters():  # the buffers stay as they are
        weight.data = weight.data.bfloat16().float()
    return model


def write(file, model, without=(), tensors=None, scaling=None):
    """Write the file.

    without: names of tensors (gguf's) to leave out; tensors: further ones; scaling: factor of rope.
    """
    config, is_gemma = model.config, model.config.model_type == "gemma3_text"
    writer = GGUFWriter(file, "gemma3" if is_gemma else "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if scaling is not None:
        writer.add_rope_scaling_factor(scaling)
    (_add_gemma if is_gemma else _add_llama)(writer, config)
    weights = model.state_dict() | (tensors or {})
    for name, weight in weights.items():
        for ours, theirs in (GEMMA_NAMES if is_gemma else NAMES).items():
            name = name.replace(ours, theirs)
        if name in without or (is_gemma and name == "output.weight"):  # it is the embedding
            continue
        weight = _as_stored(name, weight, config)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_llama(writer, config):
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    kinds = [TokenType.CONTROL if t == "<|end|>" else TokenType.NORMAL for t in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_chat_template(TEMPLATE)


def _add_gemma(writer, config):
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA_TOKENS)
    writer.add_token_scores([-1000.0] * len(GEMMA_TOKENS))
    kinds = [TokenType.CONTROL if t[0] == "<" else TokenType.NORMAL for t in GEMMA_TOKENS]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_unk_token_id(GEMMA_TOKENS.index("<unk>"))


def _as_stored(name, weight, config):
    """A weight as the converter writes it: Llama's heads in another order, Gemma's norms whole."""
    if config.model_type == "gemma3_text":
        return weight + 1 if "norm" in name else weight
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if part in name), 0)
    return _interleaved(weight, count) if count else weight


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head, transformers one half with the other."""
    width = weight.shape[1]
    return weight.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width)
