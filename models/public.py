"""Public masked diffusion LMs, loaded into stock transformers classes without the code they bring.

A public checkpoint has its own configuration keys and tensor names, but transformers has its
network. A `PublicLayout` translates both. `config.denoising` holds what stock classes lack: mask
token, attention, block size, and whether logits are shifted.

    layout      model type, architecture        stock class  attention      block  mask
    LLaDA       llada, LLaDAModelLM             Llama        bidirectional     32  126336
    LLaDA-MoE   llada, LLaDAMoEModelLM          Qwen3-MoE    bidirectional     32  156895
    LLaDA2      llada2_moe, LLaDA2MoeModelLM    GLM-4-MoE    block-causal      32  156895
    Dream       Dream, DreamModel               Qwen2        bidirectional     32  151666, shifted
    SDAR        sdar, SDARForCausalLM           Qwen3        block-causal       4  151669
    SDAR-MoE    sdar_moe, SDARMoeForCausalLM    Qwen3-MoE    block-causal       4  151669

`mask_token_id` and `block_size` of a checkpoint's config.json replace the table's. Sources: the
config.json and the modelling files of GSAI-ML/LLaDA-8B, inclusionAI/LLaDA-MoE-7B-A1B,
inclusionAI/LLaDA2.0-mini, Dream-org/Dream-v0-7B and JetLM/SDAR-8B; SGLang's table of block sizes
and masks.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

OWN_KEYS = (  # of the public class, or of how it was trained
    "model_type", "architectures", "auto_map", "transformers_version", "attn_implementation",
    "torch_dtype", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Denoising:
    """The options with which a masked diffusion LM must be decoded.

    Attributes:
        mask_id: The mask token.
        attention: One of `models.blockwise.ATTENTION`, as in training.
        block_size: Tokens of a block; of a block-causal model, as in training.
        shifted: Whether the logits at a position predict the token after it, as a causal LM's do.
    """

    mask_id: int
    attention: str = "bidirectional"
    block_size: int = 32
    shifted: bool = False


@dataclass(frozen=True)
class PublicLayout:
    """The translation of one kind of public checkpoint.

    Attributes:
        model_type, architectures: The config.json's; any of the architectures.
        denoising: The published models' decoding options.
        stock: Makes the stock configuration of a config.json.
        renames: Patterns and replacements of tensor names; the first match is used.
        tokenizer: The stock tokenizer class, where the checkpoint's own needs remote code.
    """

    model_type: str
    architectures: tuple[str, ...]
    denoising: Denoising
    stock: Callable[[dict], PreTrainedConfig]
    renames: tuple[tuple[str, str], ...] = ()
    tokenizer: str | None = None


def layout_of(path: str) -> tuple[PublicLayout, dict] | None:
    """Return a folder's or Hub id's public layout and config.json; None for any other model."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):  # no such model: those who load it say so
        return None
    named = config.get("architectures") or []
    for layout in LAYOUTS:
        if config.get("model_type") == layout.model_type and {*layout.architectures} & {*named}:
            return layout, config
    return None


def stock_model(layout: PublicLayout, config: dict, path: str) -> dict:
    """Return 'config' and 'state_dict' for `from_pretrained(None, ...)` of a stock class.

    The tensors are memory-mapped from the files of `path`. A line on stderr says how the checkpoint
    is decoded by default.
    """
    stock = layout.stock(config)
    if dtype := config.get("torch_dtype", config.get("dtype")):
        stock.dtype = getattr(torch, dtype)
    known = asdict(layout.denoising)
    known["mask_id"] = config.get("mask_token_id") or known["mask_id"]
    known["block_size"] = config.get("block_size") or known["block_size"]
    stock.denoising = known
    told = ", ".join(f"{key}={value}" for key, value in known.items())
    print(f"{path}: a {stock.model_type!r} network, {told}", file=sys.stderr)
    named = ((renamed(name, layout.renames), tensor) for name, tensor in tensors(path))
    state = dict(piece for name, tensor in named for piece in unfused(name, tensor, stock))
    return {"config": stock, "state_dict": state}


def read_generation_config(network: PreTrainedModel, path: str) -> None:
    """Give a network its checkpoint's generation_config.json, which names its end tokens."""
    if cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False):
        network.generation_config = GenerationConfig.from_pretrained(path)


def tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a checkpoint's safetensors files."""
    whole = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    files = [whole]
    if whole is None:
        files, _ = get_checkpoint_shard_files(path, cached_file(path, SAFE_WEIGHTS_INDEX_NAME))
    for file in files:
        with safe_open(Path(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                yield name, opened.get_tensor(name)


def renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """Return the stock name of a public tensor.

    >>> renamed("model.transformer.blocks.3.ff_proj.weight", LLADA_NAMES)
    'model.layers.3.mlp.gate_proj.weight'
    """
    for pattern, replacement in renames:
        new, found = re.subn(pattern, replacement, name)
        if found:
            return new
    return name


def unfused(name: str, tensor: Tensor, config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor by its name, or the queries, keys and values that it fuses."""
    if ".qkv_proj." not in name:
        yield name, tensor
        return
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    sizes = [n * config.head_dim for n in (heads, shared, shared)]
    for letter, piece in zip("qkv", tensor.split(sizes)):
        yield name.replace("qkv_proj", f"{letter}_proj"), piece


def demand(config: dict, **allowed) -> None:
    """Raise ValueError for a key of a config.json whose value the stock class does not support."""
    for key, values in allowed.items():
        values = values if isinstance(values, tuple) else (values,)
        given = config.get(key)
        if given is not None and given not in values:
            raise ValueError(
                f"{key}={given!r} of its config.json is not supported (only "
                f"{values[0] if values else None!r}): run the code that it brings, "
                "trust_remote_code=true"
            )


def shared_keys(config: dict) -> dict:
    """Return the config.json's keys that stock classes share, RoPE in transformers 5's form."""
    dropped = {*OWN_KEYS, "rope_theta", "rope_scaling", "partial_rotary_factor"}
    kept = {key: value for key, value in config.items() if key not in dropped}
    return {"rope_parameters": rope(config), **kept}


def rope(config: dict) -> dict:
    """Return RoPE's parameters in transformers 5's form."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    found = {"rope_type": kind, "rope_theta": config.get("rope_theta") or 10000.0, **scaling}
    if config.get("partial_rotary_factor"):
        found["partial_rotary_factor"] = config["partial_rotary_factor"]
    return found


def llada(config: dict) -> LlamaConfig:
    """Return LLaDA's configuration: Llama's network, with the names of OLMo."""
    demand(
        config, block_type="llama", layer_norm_type="rms", activation_type="silu", rope=True,
        layer_norm_with_affine=True, attention_layer_norm=False, alibi=False, include_bias=False,
        include_qkv_bias=False, bias_for_layer_norm=False, scale_logits=False,
        input_emb_norm=False, multi_query_attention=False,
    )  # fmt: skip
    width, heads = config["d_model"], config["n_heads"]
    return LlamaConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        hidden_size=width,
        intermediate_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * width,
        num_hidden_layers=config["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("n_kv_heads") or heads,
        max_position_embeddings=config["max_sequence_length"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-5),
        rope_parameters=rope(config),
        tie_word_embeddings=config.get("weight_tying", False),
        **_special_tokens(config),
    )


def llada_moe(config: dict) -> Qwen3MoeConfig:
    """Return LLaDA-MoE's configuration: Qwen3-MoE's network, under other keys."""
    demand(
        config, qk_layernorm=True, moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False, routed_scaling_factor=(1, 1.0),
        partial_rotary_factor=(1, 1.0, -1), clip_qkv=(), shared_expert_intermediate_size=(),
    )  # fmt: skip
    depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
    sparse = config.get("moe_layer_freq") or [1] * depth
    expert = config["expert_intermediate_size"]
    return Qwen3MoeConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config.get("dense_intermediate_size") or expert,
        moe_intermediate_size=expert,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config["hidden_size"] // heads,
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        norm_topk_prob=False,  # whatever the key says: the published code does not normalise
        mlp_only_layers=[layer for layer, moe in enumerate(sparse) if not moe],
        attention_bias=config.get("attention_bias", False),
        hidden_act=config.get("hidden_act", "silu"),
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-5),
        rope_parameters=rope({**config, "partial_rotary_factor": None}),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **_special_tokens(config),
    )


def llada2(config: dict) -> Glm4MoeConfig:
    """Return LLaDA2's configuration: GLM-4-MoE's network with fused queries, keys, values."""
    demand(
        config, score_function="sigmoid", use_bias=False, norm_head=False, use_sliding_window=False
    )
    kept = shared_keys(config)
    kept |= {
        "n_routed_experts": kept.pop("num_experts"),
        "n_shared_experts": kept.pop("num_shared_experts", 0),
        "attention_bias": kept.pop("use_qkv_bias", False),
        "use_qk_norm": kept.get("use_qk_norm", True),
        "norm_topk_prob": config["num_experts_per_tok"] > 1,
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"partial_rotary_factor": 0.5, **rope(config)},
    }
    return Glm4MoeConfig(**kept)


def like(stock: type[PreTrainedConfig]) -> Callable[[dict], PreTrainedConfig]:
    """Return a layout's `stock` function for keys that are a stock class's own."""
    return lambda config: stock(**shared_keys(config))


def _special_tokens(config: dict) -> dict:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config.get(name) for name in names}


LLADA_LAYER = {  # public and stock names of its parts
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "([qkv])_proj": r"self_attn.\2_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
LLADA_NAMES = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    *(
        (rf"^model\.transformer\.blocks\.(\d+)\.{public}\.", rf"model.layers.\1.{stock}.")
        for public, stock in LLADA_LAYER.items()
    ),
)
LLADA2_NAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)
_QWEN = "Qwen2Tokenizer"
_DREAM = Denoising(151666, "bidirectional", shifted=True)
_SDAR = Denoising(151669, "block_causal", 4)
_MOE = ("LLaDAMoEModelLM", "LLaDAMoEModel")
_LLADA2 = Denoising(156895, "block_causal")
LAYOUTS = (
    PublicLayout("llada", ("LLaDAModelLM",), Denoising(126336), llada, LLADA_NAMES),
    PublicLayout("llada", _MOE, Denoising(156895), llada_moe),
    PublicLayout("llada2_moe", ("LLaDA2MoeModelLM",), _LLADA2, llada2, LLADA2_NAMES),
    PublicLayout("Dream", ("DreamModel", "DreamBaseModel"), _DREAM, like(Qwen2Config), (), _QWEN),
    PublicLayout("sdar", ("SDARForCausalLM",), _SDAR, like(Qwen3Config), (), _QWEN),
    PublicLayout("sdar_moe", ("SDARMoeForCausalLM",), _SDAR, like(Qwen3MoeConfig), (), _QWEN),
)
