"""Speculative decoding of others, as programs that `python -m decoding.audit` takes.

python -m decoding.audit decoding.auditing.peers:assisted_generation
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from decoding.auditing.reference import DRAFTER, save, tiny_model
from decoding.engine.params import SamplingParams
from decoding.external.vllm_engine import ON_CPU, Vllm

DRAFTED = 2  # tokens a cycle


def generate(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    seed: int,
    max_new_tokens: int,
    temperature: float,
    **ways,
) -> list[int]:
    """transformers' own sampling: one token a pass."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=max_new_tokens,
        **ways,
    )
    return found[0].tolist()


def assisted_generation(model, prompt, *, seed, max_new_tokens, temperature) -> list[int]:
    """transformers' assisted generation: another model drafts."""
    assistant = tiny_model(DRAFTER)
    assistant.generation_config.num_assistant_tokens = DRAFTED
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    options = {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": temperature}
    return generate(model, prompt, assistant_model=assistant, **options)


def prompt_lookup(model, prompt, *, seed, max_new_tokens, temperature) -> list[int]:
    """transformers' prompt lookup: drafts are copied from the text."""
    options = {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": temperature}
    return generate(model, prompt, prompt_lookup_num_tokens=DRAFTED, **options)


def vllm_generate(path, prompt, *, seeds, max_new_tokens, temperature) -> list[list[int]]:
    """vLLM's own sampling: one token a pass."""
    return _vllm(path, prompt, seeds, max_new_tokens, temperature, None)


def vllm_ngram(path, prompt, *, seeds, max_new_tokens, temperature) -> list[list[int]]:
    """vLLM's prompt lookup."""
    config = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 2}
    return _vllm(path, prompt, seeds, max_new_tokens, temperature, config)


def vllm_draft_model(path, prompt, *, seeds, max_new_tokens, temperature) -> list[list[int]]:
    """vLLM with a draft model."""
    with tempfile.TemporaryDirectory() as folder:
        drafter = save(tiny_model(DRAFTER), Path(folder))
        config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": DRAFTED}
        return _vllm(path, prompt, seeds, max_new_tokens, temperature, config)


def _vllm(path, prompt, seeds, new: int, temperature: float, speculative: dict | None):
    options = {} if speculative is None else {"speculative_config": speculative}
    options |= {"dtype": "float32", "skip_tokenizer_init": True, **ON_CPU}
    params = SamplingParams(max_new_tokens=new, temperature=temperature, ignore_eos=True)
    with Vllm(path, threads=1, max_model_len=64, max_num_seqs=64, **options) as engine:
        prompts = [list(prompt)] * len(seeds)
        return engine.generate(prompts, params, seeds=seeds).token_ids
