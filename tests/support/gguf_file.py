"""A tiny Llama with a byte-level BPE tokenizer as llama.cpp's converter writes it: a gguf file."""

from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from tests.support import tiny

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


def network():
    """The Llama, its weights exact in bfloat16."""
    model = tiny.causal_lm(len(TOKENS), eos_token_id=END).float()
    for weight in model.parameters():  # the buffers stay as they are
        weight.data = weight.data.bfloat16().float()
    return model


def write(file, model, without=()):
    """Write the file. without: names of tensors (gguf's) to leave out."""
    config, writer = model.config, GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
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
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name in without:
            continue
        for part, count in heads.items():
            weight = _interleaved(weight, count) if part in name else weight
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head, transformers one half with the other."""
    width = weight.shape[1]
    return weight.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(-1, width)
