"""Tiny random models saved as public ones are, and what their networks compute, written out.

The forward passes use the public names of tensors and configuration keys, and nothing of ours or of
transformers, so that they can tell whether a checkpoint was translated rightly.
"""

import json

import torch
from safetensors.torch import save_file

from tests.support import tiny
from tests.support.denoising import L, V

WIDTH, HEADS, SHARED, SIZE, DEPTH, EXPERTS = 16, 2, 1, 8, 2, 4
EPS, THETA = 1e-5, 5000.0
QWEN = {
    "vocab_size": V + 1, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "num_key_value_heads": SHARED, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": DEPTH, "use_cache": False, "mask_token_id": V, "eos_token_id": None,
    "bos_token_id": None, "torch_dtype": "float32",
}  # fmt: skip
CONFIGS = {
    "llada": {
        "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu",
        "alibi": False, "attention_layer_norm": False, "bias_for_layer_norm": False,
        "block_group_size": 1, "block_type": "llama", "d_model": WIDTH, "embedding_size": V + 1,
        "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
        "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": V,
        "max_sequence_length": 256, "mlp_hidden_size": 32, "mlp_ratio": 4,
        "multi_query_attention": None, "n_heads": HEADS, "n_kv_heads": HEADS, "n_layers": DEPTH,
        "rms_norm_eps": EPS, "rope": True, "rope_full_precision": True, "rope_theta": THETA,
        "scale_logits": False, "vocab_size": V + 1, "weight_tying": False, "eos_token_id": None,
        "torch_dtype": "float32",
    },
    "llada_moe": {
        **QWEN, "model_type": "llada", "architectures": ["LLaDAMoEModelLM"],
        "num_key_value_heads": HEADS, "qk_layernorm": True, "clip_qkv": None,
        "expert_intermediate_size": 8, "dense_intermediate_size": 32,
        "shared_expert_intermediate_size": None, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "norm_topk_prob": None, "moe_layer_freq": [0, 1], "attention_bias": False,
        "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
        "partial_rotary_factor": 1, "routed_scaling_factor": 1,
    },
    "llada2": {
        **QWEN, "model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"],
        "head_dim": SIZE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
        "norm_head": False, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "rotary_dim": SIZE // 2,
    },
    "dream": {
        **QWEN, "model_type": "Dream", "architectures": ["DreamModel"],
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig",
                     "AutoModel": "modeling_dream.DreamModel"},
    },
    "sdar": {
        **QWEN, "model_type": "sdar", "architectures": ["SDARForCausalLM"], "head_dim": SIZE,
        "block_size": L, "attention_bias": False, "attn_implementation": "flex_attention",
        "fuse_cross_entropy": False,
    },
}  # fmt: skip
SHIFTED = {"dream"}
ATTENTION = {"llada2": "block_causal", "sdar": "block_causal"}  # the others: bidirectional


def shapes(kind):
    """{public name: shape} of a checkpoint."""
    kv = HEADS if kind in ("llada", "llada_moe") else SHARED
    out = {}
    if kind == "llada":
        out["model.transformer.wte.weight"] = (V + 1, WIDTH)
        out["model.transformer.ln_f.weight"] = (WIDTH,)
        out["model.transformer.ff_out.weight"] = (V + 1, WIDTH)
        for n in range(DEPTH):
            block = f"model.transformer.blocks.{n}."
            out |= {f"{block}{x}.weight": (WIDTH,) for x in ("attn_norm", "ff_norm")}
            out |= {f"{block}{x}.weight": (WIDTH, WIDTH)
                    for x in ("q_proj", "k_proj", "v_proj", "attn_out")}  # fmt: skip
            out |= {f"{block}{x}.weight": (32, WIDTH) for x in ("ff_proj", "up_proj")}
            out[f"{block}ff_out.weight"] = (WIDTH, 32)
        return out
    out["model.word_embeddings.weight" if kind == "llada2" else "model.embed_tokens.weight"] = (
        V + 1, WIDTH,
    )  # fmt: skip
    out |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (V + 1, WIDTH)}
    for n in range(DEPTH):
        layer = f"model.layers.{n}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}{norm}.weight"] = (WIDTH,)
        if kind == "llada2":
            part = f"{layer}attention."
            out[f"{part}query_key_value.weight"] = ((HEADS + 2 * kv) * SIZE, WIDTH)
            out[f"{part}dense.weight"] = (WIDTH, HEADS * SIZE)
            out |= {f"{part}{x}_layernorm.weight": (SIZE,) for x in ("query", "key")}
        else:
            part = f"{layer}self_attn."
            for x, heads in (("q", HEADS), ("k", kv), ("v", kv)):
                out[f"{part}{x}_proj.weight"] = (heads * SIZE, WIDTH)
                if kind == "dream":
                    out[f"{part}{x}_proj.bias"] = (heads * SIZE,)
            out[f"{part}o_proj.weight"] = (WIDTH, HEADS * SIZE)
            if kind != "dream":
                out |= {f"{part}{x}_norm.weight": (SIZE,) for x in "qk"}
        out |= _mlp_shapes(kind, n)
    return out


def _mlp_shapes(kind, n):
    part = f"model.layers.{n}.mlp."
    if kind not in ("llada_moe", "llada2") or n == 0:
        return _swiglu_shapes(part, 32)
    out = {f"{part}gate.weight": (EXPERTS, WIDTH)}
    for expert in range(EXPERTS):
        out |= _swiglu_shapes(f"{part}experts.{expert}.", 8)
    if kind == "llada2":
        out |= {f"{part}gate.expert_bias": (EXPERTS,)} | _swiglu_shapes(f"{part}shared_experts.", 8)
    return out


def _swiglu_shapes(part, inner):
    out = {f"{part}{x}_proj.weight": (inner, WIDTH) for x in ("gate", "up")}
    return out | {f"{part}down_proj.weight": (WIDTH, inner)}


def save(kind, folder, seed=0, shards=1, **changed):
    """Save a tiny random checkpoint; returns its configuration and tensors."""
    torch.manual_seed(seed)
    tensors = {}
    for name, shape in shapes(kind).items():
        norm = len(shape) == 1 and not name.endswith("bias")
        scale = 0.3 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
        tensors[name] = torch.randn(shape) * scale + float(norm)
    head = "model.transformer.ff_out.weight" if kind == "llada" else "lm_head.weight"
    tensors[head][V] = 0  # the mask is never the first choice
    config = {**CONFIGS[kind], **changed}
    config = {key: value for key, value in config.items() if value != "absent"}
    config.setdefault("auto_map", {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.LM"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    files = files if shards > 1 else ["model.safetensors"]
    for n, file in enumerate(files):
        part = {name: tensors[name] for name in names[n::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index})
        )
    save_tokenizer(kind, folder)
    return config, tensors


def save_tokenizer(kind, folder):
    """The letters, and the mask; Dream's tokenizer is of a class of its own."""
    if kind != "dream":
        tiny.tokenizer(V).save_pretrained(folder)
        return
    letters = {chr(ord("a") + i): i for i in range(V)}
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    mask = {"content": "<|mask|>", "special": True, "lstrip": False, "rstrip": False,
            "normalized": False, "single_word": False}  # fmt: skip
    names = ("mask_token", "unk_token", "eos_token", "pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "DreamTokenizer", **dict.fromkeys(names, "<|mask|>"),
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(V): mask},
    }))  # fmt: skip


@torch.no_grad()
def forward(kind, t, tokens, seen):
    """Logits [W, V + 1] of tokens [W] by the public tensors t; `seen` [W, W] is the attention."""
    llada = kind == "llada"
    embedding = {"llada": "model.transformer.wte", "llada2": "model.word_embeddings"}
    x = t[embedding.get(kind, "model.embed_tokens") + ".weight"][torch.tensor(tokens)]
    for n in range(DEPTH):
        layer = f"model.transformer.blocks.{n}." if llada else f"model.layers.{n}."
        before, after = ("attn_norm", "ff_norm") if llada else (
            "input_layernorm", "post_attention_layernorm",
        )  # fmt: skip
        x = x + attend(kind, t, layer, rms(x, t[f"{layer}{before}.weight"]), seen)
        h = rms(x, t[f"{layer}{after}.weight"])
        if llada:
            inner = torch.nn.functional.silu(h @ t[f"{layer}ff_proj.weight"].T)
            x = x + (inner * (h @ t[f"{layer}up_proj.weight"].T)) @ t[f"{layer}ff_out.weight"].T
        elif f"{layer}mlp.gate.weight" in t:
            x = x + torch.stack([experts(kind, t, f"{layer}mlp.", row) for row in h])
        else:
            x = x + swiglu(t, f"{layer}mlp.", h)
    norm = "model.transformer.ln_f" if llada else "model.norm"
    head = "model.transformer.ff_out" if llada else "lm_head"
    return rms(x, t[f"{norm}.weight"]) @ t[f"{head}.weight"].T


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def swiglu(t, part, h):
    gate, up = (h @ t[f"{part}{x}_proj.weight"].T for x in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ t[f"{part}down_proj.weight"].T


def rotate(x, turned):
    """RoPE on the first `turned` numbers of each head: x [heads, W, SIZE]."""
    half = turned // 2
    angle = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:turned], x[..., turned:]
    turned_a, turned_b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.cat([turned_a, turned_b, rest], -1)


def attend(kind, t, layer, h, seen):
    kv = HEADS if kind in ("llada", "llada_moe") else SHARED
    if kind == "llada2":
        fused = h @ t[f"{layer}attention.query_key_value.weight"].T
        q, k, v = fused.split([HEADS * SIZE, kv * SIZE, kv * SIZE], -1)
        norms = [t[f"{layer}attention.{x}_layernorm.weight"] for x in ("query", "key")]
        out = t[f"{layer}attention.dense.weight"]
    else:
        part = layer if kind == "llada" else f"{layer}self_attn."
        q, k, v = (h @ t[f"{part}{x}_proj.weight"].T for x in "qkv")
        if kind == "dream":
            q, k, v = (y + t[f"{part}{x}_proj.bias"] for x, y in zip("qkv", (q, k, v)))
        norms = [t.get(f"{part}{x}_norm.weight") for x in "qk"]
        out = t[f"{part}{'attn_out' if kind == 'llada' else 'o_proj'}.weight"]
    q, k, v = (y.unflatten(-1, (-1, SIZE)).transpose(0, 1) for y in (q, k, v))
    if norms[0] is not None:
        q, k = rms(q, norms[0]), rms(k, norms[1])
    q, k = (rotate(y, SIZE // 2 if kind == "llada2" else SIZE) for y in (q, k))
    k, v = (y.repeat_interleave(HEADS // kv, 0) for y in (k, v))
    scores = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ out.T


def experts(kind, t, part, h):
    """The mixture of experts for one token h [WIDTH]."""
    scores = t[f"{part}gate.weight"] @ h
    if kind == "llada_moe":
        weights, chosen = scores.softmax(-1).topk(2)
        shared = 0
    else:
        scores = scores.sigmoid()
        biased = scores + t[f"{part}gate.expert_bias"]
        groups = biased.view(2, -1)
        best = int(groups.topk(2).values.sum(-1).argmax())
        chosen = best * groups.shape[1] + groups[best].topk(2).indices
        weights = scores[chosen] / scores[chosen].sum() * 2.5
        shared = swiglu(t, f"{part}shared_experts.", h)
    return shared + sum(
        w * swiglu(t, f"{part}experts.{e}.", h) for w, e in zip(weights, chosen.tolist())
    )
