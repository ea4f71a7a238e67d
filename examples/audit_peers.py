"""Other projects' speculative decoding, as programs that `python -m decoding.audit` takes.

python -m decoding.audit examples.audit_peers:assisted_generation
"""

import tempfile
from functools import partial

import torch

from decoding.auditing.reference import DRAFTER, tiny_model
from decoding.engine.params import SamplingParams
from decoding.external.vllm_engine import ON_CPU, Vllm

DRAFTED = 2  # tokens a cycle


def generate(model, prompt, *, seed, max_new_tokens, temperature, **ways) -> list[int]:
    """Decode with transformers' own sampling, one token per pass."""
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    ways |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, **ways)
    return found[0].tolist()


def assisted_generation(model, prompt, *, seed, max_new_tokens, temperature) -> list[int]:
    """Decode with transformers' assisted generation, where another model drafts."""
    assistant = tiny_model(DRAFTER)
    assistant.generation_config.num_assistant_tokens = DRAFTED
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    options = {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": temperature}
    return generate(model, prompt, assistant_model=assistant, **options)


prompt_lookup = partial(generate, prompt_lookup_num_tokens=DRAFTED)  # copies from the text


def vllm_generate(
    path, prompt, *, seeds, max_new_tokens, temperature, speculative: dict | None = None
) -> list[list[int] | None]:
    """Decode with vLLM, one token per pass or with a `speculative_config`."""
    options: dict = {} if speculative is None else {"speculative_config": speculative}
    options |= {"dtype": "float32", "skip_tokenizer_init": True, **ON_CPU}
    params = SamplingParams(max_new_tokens, temperature, ignore_eos=True)
    with Vllm(path, threads=1, max_model_len=64, max_num_seqs=64, **options) as engine:
        prompts = [list(prompt)] * len(seeds)
        return engine.generate(prompts, params, seeds=seeds).token_ids


NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 2}
vllm_ngram = partial(vllm_generate, speculative=NGRAM)


def vllm_draft_model(path, prompt, *, seeds, max_new_tokens, temperature) -> list[list[int] | None]:
    """Decode with vLLM and a draft model."""
    options = {"seeds": seeds, "max_new_tokens": max_new_tokens, "temperature": temperature}
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(DRAFTER).save_pretrained(folder)
        drafter = {"method": "draft_model", "model": folder, "num_speculative_tokens": DRAFTED}
        return vllm_generate(path, prompt, speculative=drafter, **options)
