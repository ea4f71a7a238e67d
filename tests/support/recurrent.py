"""Tiny random models of the classes with recurrent layers."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.recurrent import KNOWN

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8,
         "layer_types": ["linear_attention", "full_attention"] * 2}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2,
         "mamba_chunk_size": 8}  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}
KINDS = {
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_groups": 1},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention", "mamba", "mamba"],
                                 "num_local_experts": 0, "shared_intermediate_size": 32},
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS | {"num_dense_layers": 1},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": DELTA | SHARED,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | SHARED,
}  # fmt: skip
assert KINDS.keys() == KNOWN


def model(kind, vocabulary, **config):
    """A random model in float32 whose text depends on all of it."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": vocabulary} | KINDS[kind] | config
    found = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()
    with torch.no_grad():
        for p in found.parameters():
            if p.ndim > 1:  # the kernels of convolutions too
                p.normal_(0, 1.5 / p.shape[-1] ** 0.5)
    return found
