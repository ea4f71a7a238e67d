"""Tiny random models of the real classes, and plain decoding's distribution without a sampler."""

import itertools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decoding.engine.warp import preceding, warp
from models.dflash_init import from_target
from models.eagle3 import from_target as eagle3_of
from models.redrafter import from_target as redrafter_of

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def causal_lm(vocabulary, seed=0, kind="llama", layers=2, hidden=16, scale=2.0, **config):
    """A random causal LM in float64 whose logits are far from uniform."""
    configuration, network = CLASSES[kind]
    extra = {"head_dim": hidden // 2} if kind == "qwen3" else {}
    torch.manual_seed(seed)
    model = network(
        configuration(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            **{"tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None}
            | extra
            | config,
        )
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, scale / hidden**0.5)
    return model.double().eval()


def tokenizer(vocabulary, decoder=None):
    """A tokenizer whose token i is the i-th letter; no special tokens."""
    alphabet = [chr(ord("a") + i) if i < 26 else chr(0x100 + i) for i in range(vocabulary)]
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoder or decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def plain_distribution(model, prompt, params, eos=(), allowed=None):
    """The distribution {answer: probability} of plain decoding, by full forwards only.

    `allowed`, where there is one, maps an answer so far to the tokens that may follow.
    """
    distribution, frontier = {}, [((), 1.0)]
    while frontier:
        answer, weight = frontier.pop()
        if len(answer) == params.max_new_tokens or (answer and answer[-1] in eos):
            distribution[answer] = distribution.get(answer, 0.0) + weight
            continue
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = model(ids).logits[:, -1:]
        sizes = torch.tensor([[len(prompt)], [ids.shape[1]]])
        known = preceding(params, ids, *sizes, ids[:, :0], logits.shape[-1])
        excluded = {*eos} if len(answer) < params.min_tokens else set()
        if allowed is not None:
            excluded = {*range(logits.shape[-1])} - {*allowed(answer)}
        logits[..., [*excluded]] = float("-inf")
        warped = warp(logits, params, known)[0, 0]
        if params.temperature == 0:
            probs = torch.nn.functional.one_hot(warped.argmax(), len(warped)).double()
        else:
            probs = warped.softmax(-1)
        for token in probs.nonzero().flatten().tolist():
            frontier.append(((*answer, token), weight * probs[token].item()))
    return distribution


def total_variation(a, b):
    """Half the L1 distance of two distributions given as {outcome: probability}."""
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in {*a, *b})


def grid(**axes):
    """Dictionaries of every combination."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]


def dflash(target, states=1, seed=1, scale=2.0, layout="dflash", **options):
    """A random DFlash drafter for a target, in its type; the mask is the target's last token."""
    vocabulary = target.config.vocab_size
    layers = options.pop("layers", [1] if options.get("context") == "layerwise" else 2)
    network = from_target(target, tokenizer(vocabulary), layers, states, **options)
    randomize(network, seed, scale)
    network.config.dflash_config["mask_token_id"] = vocabulary - 1
    if layout == "dspark":
        network.config.dflash_config["sample_from_anchor"] = True
    return network.to(target.dtype).eval()


def eagle3(target, states=2, seed=1, scale=2.0, **options):
    """A random EAGLE-3 drafter for a target, in its type; P-EAGLE's mask is its last token."""
    network = eagle3_of(target, tokenizer(target.config.vocab_size), states, **options)
    if network.parallel:
        network.config.pard_token = target.config.vocab_size - 1
    randomize(network, seed, scale)
    return network.to(target.dtype).eval()


def redrafter(target, states=2, seed=1, scale=2.0, **options):
    """A random recurrent drafter for a target, in its type."""
    network = redrafter_of(target, tokenizer(target.config.vocab_size), states, 24, **options)
    randomize(network, seed, scale)
    return network.to(target.dtype).eval()


def randomize(network, seed, scale):
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            if p.ndim > 1:
                p.normal_(0, scale / p.shape[1] ** 0.5)
            else:
                p.uniform_(0.5, 1.5)


def logits_of(*probabilities):
    """Logits whose softmax gives these distributions: [..., V]."""
    return torch.tensor(probabilities, dtype=torch.float64).log() + 3.0  # any shift
