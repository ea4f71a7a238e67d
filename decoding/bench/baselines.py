"""Baselines: transformers' own ways to generate, for comparison in benches."""

import torch
from transformers import GenerationConfig

from decoding.engine.params import Result, SamplingParams, Stats
from decoding.engine.sampler import Sampler


class HuggingFace:
    """`transformers.generate` of a sampler's target, with the interface of a sampler.

    Args:
        like: The sampler; its target, tokenizer and end tokens are used.
        arguments: Of `generate`, such as assistant_model= (another model drafts) or
            prompt_lookup_num_tokens= (drafts are copied from the text itself).
    """

    def __init__(self, like: Sampler, **arguments):
        self.target, self.tokenizer, self.eos = like.target, like.tokenizer, like.eos
        self.device = like.device
        self.arguments = arguments
        self._passes = 0
        self.target.register_forward_pre_hook(self._count)

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        seeds: list[int],
        at_once: int | None = None,
    ) -> list[Result]:
        """Decode prompts with transformers' own cache and loop; a batch waits for its longest.

        Args:
            prompts: Token ids.
            params: Of which the length, temperature, top_k and ignore_eos are used.
            seeds: The first one of a batch seeds torch's generator.
            at_once: Prompts of a batch; None: all.

        Returns:
            The result of each prompt; of its statistics only the target's passes.
        """
        size, found = at_once or len(prompts), []
        for start in range(0, len(prompts), size):
            torch.manual_seed(seeds[start])
            found += self._batch(prompts[start : start + size], params)
        return found

    def _batch(self, prompts: list[list[int]], params: SamplingParams) -> list[Result]:
        width, device = max(map(len, prompts)), self.device
        ids = [[0] * (width - len(p)) + p for p in prompts]
        seen = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=params.top_k,
            eos_token_id=None if params.ignore_eos else sorted(self.eos) or None,
            pad_token_id=0,
        )
        before = self._passes
        # The target's own settings would fill what is None: its end tokens, top_p, penalties.
        own, self.target.generation_config = self.target.generation_config, GenerationConfig()
        try:
            out = self.target.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(seen, device=device),
                generation_config=config,
                **self.arguments,
            )
        finally:
            self.target.generation_config = own
        passes = self._passes - before
        return [self._result(row, passes, params) for row in out[:, width:].tolist()]

    def _result(self, ids: list[int], passes: int, params: SamplingParams) -> Result:
        """The result of a row, which the longest answer of its batch has padded."""
        ended = (n for n, t in enumerate(ids, 1) if t in self.eos and not params.ignore_eos)
        end = next(ended, None)
        ids = ids[:end]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        # Each pass brings a row at least one token until it ends.
        stats = Stats(target_passes=min(passes, len(ids)))
        return Result(text, ids, "length" if end is None else "eos", stats)

    def _count(self, *_) -> None:
        self._passes += 1
