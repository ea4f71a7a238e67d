"""Tiny random models of every causal LM that transformers has, and what parade does with each."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import date
from itertools import chain
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.loading import load
from decoding.samplers.deer import DeerSampler
from decoding.samplers.jacobi import JacobiSampler
from models import causal
from models.diffusion import from_causal_lm
from tests.support import recurrent, tiny
from tests.support.results import ids

V, NEW, WINDOW = 64, 24, 16
PROMPTS = [[5, 9, 31, 7, 22, 40, 13, 55, 8, 17], [33, 6, 12], [50, 4, 21, 21, 60, 11, 3, 44]]
BLOCK = 4  # tokens that are drafted
MOST = 4_000_000  # weights: a model that is larger is not tiny

# Keys of configurations, by the names that families give them. A family's own are added to these.
SIZES = {
    "vocab_size": V,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim"), 32),
    "embedding_size": 32,
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 2),
    "num_key_value_heads": 1,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("sliding_window_pattern", "full_attention_interval"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    # Of images and sound.
    **dict.fromkeys(("depth", "num_mel_bins"), 2),
    **dict.fromkeys(("image_size", "projector_hidden_size", "out_hidden_size"), 32),
    **dict.fromkeys(("patch_size", "temporal_patch_size"), 2),
    **dict.fromkeys(
        ("image_token_id", "image_token_index", "video_token_id", "audio_token_id"), V - 1
    ),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"head_dim": 8, "num_key_value_heads": 2}  # attention with latent keys and values
UNTRIED = "no tiny model"
WINDOWED = "texts end at its sliding window"
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
DECODER = {"is_decoder": True}
GEMMA4 = {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8,
          "global_head_dim": 32, "num_kv_shared_layers": 2,
          "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
GEMMA3N = {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
           "num_kv_shared_layers": 2,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
OWN: dict[str, dict] = {
    **recurrent.KINDS,
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "youtu"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "axk2"), LATENT),
    "longcat_flash": LATENT | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "electra"), DECODER),
    **dict.fromkeys(("ernie", "megatron-bert", "rembert", "roberta", "roc_bert"), DECODER),
    **dict.fromkeys(("roformer", "xlm-roberta", "xlm-roberta-xl", "data2vec-text"), DECODER),
    **dict.fromkeys(("roberta-prelayernorm", "reformer", "xmod"), DECODER),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), MROPE),
    **dict.fromkeys(("gemma4_text", "gemma4_assistant_text"), GEMMA4),
    "gemma4": dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), V),
    "gemma4_vision": {"position_embedding_size": 16},
    "gemma4_audio": {"subsampling_conv_channels": (4, 4), "output_proj_dims": 32},
    "gemma3n_text": GEMMA3N,
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "bailing_hybrid": LATENT
    | {
        "layer_group_size": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots1": {"num_key_value_heads": 1, "n_shared_experts": 1},
    "glm4v_text": MROPE,
    "kimi_linear": LATENT
    | {
        "num_experts_per_tok": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "diffllama": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "llama4_vision_model": {
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def configuration(kind: str, window: int = WINDOW) -> PreTrainedConfig:
    """Return a tiny configuration of a model type, with sliding windows of so many tokens."""
    of = CONFIG_MAPPING[kind]
    default = of()
    parts = {
        key: configuration(part.model_type, window).to_dict()
        for key in of.sub_configs
        if isinstance(part := getattr(default, key, None), PreTrainedConfig)
        and part.model_type in CONFIG_MAPPING
    }
    known = default.to_dict()
    sizes = SIZES | {"sliding_window": window}
    shared = {key: value for key, value in sizes.items() if key in known}
    return of(**shared | OWN.get(kind, {}) | parts)


def network(kind: str, window: int = WINDOW, seed: int = 0, scale: float = 0.05) -> PreTrainedModel:
    """Return a tiny random model of a type, whose logits are far from uniform.

    Raises ValueError where it would not be tiny, or whatever its class raises for its keys.

    Args:
        kind: A type of causal LM, or of a model that reads images or sound, too.
        window: Tokens of its sliding windows.
        seed: Of its weights.
        scale: Of its embeddings' weights, relative to the others': with large ones a head that is
            tied to them repeats the last token.
    """
    config, auto = configuration(kind, window), auto_class(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"the keys of `tests.support.families` make a model of {size:,} weights")
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 2 / 32**0.5)
            else:  # norms, biases, sinks
                p.add_(torch.empty_like(p).uniform_(-0.3, 0.3))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.mul_(scale)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no token ends a text
    return model


@dataclass
class Outcome:
    """Results of a model type, by way: each is 'yes', '' if it was not tried, or names a fault."""

    family: str
    plain: str = ""
    jacobi: str = ""
    chain: str = ""
    tree: str = ""
    batch: str = ""
    copied: str = ""  # whether a drafter of its layers can be made
    reason: str = ""  # the line of a refusal, or why nothing was tried

    @property
    def result(self) -> str:
        """The result in a word or two; 'defect' where a text was wrong, or a command broke."""
        if any("DEFECT" in str(getattr(self, f.name)) for f in fields(self)):
            return "defect"
        if self.reason.startswith(UNTRIED):
            return "not tried"
        ways = self.plain, self.jacobi, self.chain, self.batch
        if any(way != "yes" for way in ways):
            return "refused"
        return "works" if self.tree == "yes" else "chains only"


def attempt(kind: str, folder: Path) -> Outcome:
    """Make a tiny model of a type in a folder, and decode with it in every way."""
    try:
        expected = varied(kind, folder)
    except Exception as error:  # each class has its own
        return Outcome(kind, reason=f"{UNTRIED}: {line(error)}")
    found = decode(kind, folder, expected)
    if f"context of {WINDOW}" in found.reason:
        found = decode(kind, folder, varied(kind, folder, 8 * WINDOW))
        found.reason = found.reason or WINDOWED
    return found


def auto_class(kind: str) -> type:
    """Return transformers' auto class that makes models of a type."""
    composite = "text_config" in CONFIG_MAPPING[kind].sub_configs
    return AutoModelForMultimodalLM if composite else AutoModelForCausalLM


def varied(kind: str, folder: Path, window: int = WINDOW) -> list[list[int]]:
    """Make a tiny model whose texts have several tokens; return transformers' own texts."""
    for seed, scale in enumerate((0.05, 1.0, 0.3, 0.05, 1.0)):
        network(kind, window, seed, scale).save_pretrained(folder)
        texts = stock_texts(kind, folder)
        if len({*chain(*texts)}) >= 6:
            return texts
    raise ValueError("its texts are a few tokens only, which proves nothing")


def stock_texts(kind: str, folder: Path) -> list[list[int]]:
    """Return transformers' own greedy texts of the prompts, each alone."""
    model = auto_class(kind).from_pretrained(folder).eval()
    texts = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def decode(kind: str, folder: Path, expected: list[list[int]]) -> Outcome:
    """Compare every way of decoding with transformers' texts."""
    tiny.tokenizer(V).save_pretrained(folder)
    outcome = Outcome(kind)
    try:
        plain = load(str(folder), dtype="float32")
    except ValueError as error:
        outcome.reason = line(error)
        return outcome
    target, tokenizer = plain.target, plain.tokenizer
    drafter, outcome.copied = _drafter(folder)
    known = drafter.config.get_text_config().vocab_size
    special = {"mask_id": known - 2, "sep_id": known - 1}
    make: dict[str, Callable[[], Sampler]] = {
        "plain": lambda: plain,
        "jacobi": lambda: JacobiSampler(target, tokenizer, block_size=BLOCK),
        "chain": lambda: DeerSampler(target, tokenizer, drafter, block_size=BLOCK, **special),
        "tree": lambda: DeerSampler(target, tokenizer, drafter, block_size=BLOCK, **special),
    }
    together = []
    for way, sampler in make.items():
        rule = "tree" if way == "tree" else "coupled"
        try:
            result, batch = _compare(sampler(), expected, rule)
        except ValueError as error:
            result, batch = f"refused: {line(error)}", ""
            outcome.reason = outcome.reason or line(error)
        except Exception as error:
            result, batch = f"DEFECT {type(error).__name__}: {line(error)}", ""
        setattr(outcome, way, result)
        together += [batch] if batch else []
    outcome.batch = next((b for b in together if b != "yes"), "yes" if together else "")
    return outcome


def _compare(sampler: Sampler, expected: list[list[int]], rule: str) -> tuple[str, str]:
    greedy = SamplingParams(max_new_tokens=NEW, temperature=0, verify=rule)
    batch = ids(sampler.generate(PROMPTS, greedy))
    if batch == expected:
        return "yes", "yes"
    alone = [ids(sampler.generate([prompt], greedy))[0] for prompt in PROMPTS]
    result = "yes" if alone == expected else f"DEFECT text {alone} for {expected}"
    return result, "yes" if batch == alone else f"DEFECT batch {batch} for {alone}"


def _drafter(folder: Path) -> tuple[PreTrainedModel, str]:
    """Return a drafter of layers of the target, or, with the reason, of another family."""
    with_marks = tiny.tokenizer(V + 2)
    try:
        source = causal.load(str(folder))
        depth = source.config.get_text_config().num_hidden_layers
        return from_causal_lm(source, with_marks, [0, depth - 1]), "yes"
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"DEFECT {type(error).__name__}: "
        return tiny.causal_lm(V + 2).float(), kind + line(error)


def line(error: Exception) -> str:
    """Return an error's message as one line, without the temporary folder."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"^cannot load a model from '[^']*': ", "", text)
    return text.replace(tempfile.gettempdir(), "")[:300]


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "model_families.md"
COMPOSITES = (
    "aria", "aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "glm4v", "idefics3", "internvl",
    "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "ovis2", "paligemma",
    "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral",
)  # fmt: skip
# Models that many people know, by the family that their config.json names.
KNOWN = {
    "Llama 2, 3.x": "llama",
    "Llama 4": "llama4",
    "Qwen 2, 2.5": "qwen2",
    "Qwen 3": "qwen3",
    "Qwen 3 MoE": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen 3.5": "qwen3_5",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl",
    "Gemma 2": "gemma2",
    "Gemma 3, text": "gemma3_text",
    "Gemma 3": "gemma3",
    "Gemma 3n, text": "gemma3n_text",
    "Gemma 4": "gemma4",
    "Mistral 7B": "mistral",
    "Mistral Small 3.1": "mistral3",
    "Mixtral": "mixtral",
    "Phi 2": "phi",
    "Phi 3, 3.5, 4": "phi3",
    "gpt-oss": "gpt_oss",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3, R1": "deepseek_v3",
    "GLM 4": "glm4",
    "GLM 4.5 to 4.7": "glm4_moe",
    "SmolLM 1, 2": "llama",
    "SmolLM 3": "smollm3",
    "SmolVLM": "smolvlm",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "Granite 3": "granite",
    "Granite 4": "granitemoehybrid",
    "LFM 2": "lfm2",
    "GPT-2": "gpt2",
}
INTRO = """# Families of models

What `model=` and `target=` do with each family that transformers has, by the `model_type` in
config.json: made on {date} with transformers {version}, by `python -m tests.families`, from tiny
random models of the families' own classes. A text is right if it is that of transformers' greedy
`generate`, token for token, in float32.

*works*: plain decoding, Jacobi decoding, and a drafter's chains and trees all give that text,
also in a batch of prompts of three lengths; the last column says where texts must end. *chains
only*: trees are refused. *refused*: the last column has the line that a user gets. *not tried*:
no tiny model of the class could be made, so nothing is known. "Its layers" says whether a
drafter can be made of layers of the model (`models.diffusion.from_causal_lm`); for the others
the drafter here is a Llama of the same vocabulary. Of a model that reads images or sound, its
text part is taken.

"""
TITLES = {
    "family": "Family",
    "result": "Result",
    "plain": "Plain",
    "jacobi": "Jacobi",
    "chain": "Chain",
    "tree": "Tree",
    "batch": "Batch",
    "copied": "Its layers",
    "reason": "Because",
}


def kinds() -> list[str]:
    """Return all types that are tried."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *COMPOSITES})


def page(found: dict[str, Outcome]) -> str:
    """Return the page of the documentation."""
    intro = INTRO.format(date=date.today(), version=transformers.__version__)
    known = [
        f"| {name} | {kind} | {found[kind].result} |"
        for name, kind in KNOWN.items()
        if kind in found
    ]
    results = Counter(outcome.result for outcome in found.values())
    counts = ", ".join(f"{count} {result}" for result, count in results.most_common())
    rows = [f"| {' | '.join(_cells(found[kind]))} |" for kind in sorted(found)]
    head = [f"| {' | '.join(TITLES.values())} |", "|---" * len(TITLES) + "|"]
    parts = [
        "## Well-known models\n\n| Models | Family | Result |\n|---|---|---|",
        *known,
        f"\n## All {len(found)} families\n\n{counts[:1].upper()}{counts[1:]}.\n",
        *head,
        *rows,
    ]
    return intro + "\n".join(parts) + "\n"


def _cells(outcome: Outcome) -> list[str]:
    """Return a row of the table."""
    found = []
    for key in TITLES:
        value = getattr(outcome, key)
        if key not in ("family", "result", "reason") and value not in ("yes", ""):
            value = "no"
        found.append(value.replace("|", "/").replace("<", "&lt;"))
    return found


def read_page() -> dict[str, Outcome]:
    """Return the outcomes that the page tells; a fault is 'no'."""
    text = PAGE.read_text().partition("## All ")[2]
    rows = [re.split(r"\s*\|\s*", row)[1:-1] for row in text.splitlines() if row.startswith("| ")]
    named = [dict(zip(TITLES, row)) for row in rows[1:]]
    for row in named:
        row["reason"] = row["reason"].replace("&lt;", "<")
        if row.pop("result") == "defect":
            row["plain"] = f"DEFECT {row['plain']}"
    return {row["family"]: Outcome(**row) for row in named}
