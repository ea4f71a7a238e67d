"""Tiny random models of the classes whose layers have windows of `WINDOW` tokens."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import tiny

V, WINDOW = 24, 8
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SIZES = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {
    "cohere2": MIXED,
    "gemma2": MIXED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                       "query_pre_attn_scalar": 5},
    "gemma3_text": MIXED | {"query_pre_attn_scalar": 5, "rope_parameters": {
        "full_attention": ROPE | {"rope_theta": 1e6},
        "sliding_attention": ROPE | {"rope_theta": 10.0}}},
    "gpt_oss": MIXED | EXPERTS | {"rope_parameters": ROPE},
    "llama4_text": EXPERTS | {"attention_chunk_size": WINDOW, "num_experts_per_tok": 1,
                              "intermediate_size_mlp": 24, "attn_temperature_tuning": False,
                              "no_rope_layers": [1, 0, 1]},
    "mistral": {},
    "mixtral": EXPERTS,
    "olmo3": MIXED,
    "phi3": {},
    "qwen2": MIXED | {"use_sliding_window": True},
    "qwen3": MIXED | {"use_sliding_window": True},
    "qwen3_moe": EXPERTS | {"use_sliding_window": True, "moe_intermediate_size": 12},
    "starcoder2": {},
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [9] * 6]
LENGTH = 44  # tokens of a text: several windows


def causal_lm(kind, seed=0, vocabulary=V, **config):
    """A random model in float32 whose texts do not repeat at once."""
    sizes = SIZES | KINDS[kind] | config | {"vocab_size": vocabulary}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or "sinks" in name:
                p.normal_(0, 0.6)
    return model.eval()


def tokenizer(vocabulary=V):
    return tiny.tokenizer(vocabulary)
