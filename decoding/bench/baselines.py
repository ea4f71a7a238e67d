"""Baselines: transformers' own ways to generate, for comparison in benches."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from decoding.engine.params import Result, SamplingParams, Stats


class HuggingFace:
    """`transformers.generate` of a target, with the interface of a sampler.

    Args:
        target: The target.
        arguments: Of `generate`, such as assistant_model= (another model drafts) or
            prompt_lookup_num_tokens= (drafts are copied from the text itself).
    """

    def __init__(self, target: PreTrainedModel, **arguments):
        self.target, self.arguments = target, arguments
        self._passes = 0
        target.register_forward_pre_hook(self._count)

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, *, seeds: list[int]
    ) -> list[Result]:
        """Decode a batch with transformers' own cache and loop; end tokens are ignored.

        Args:
            prompts: Token ids.
            params: Of which the length, temperature and top_k are used.
            seeds: The first one seeds torch's generator.

        Returns:
            Token ids and target passes of each prompt, without text.
        """
        torch.manual_seed(seeds[0])
        width, device = max(map(len, prompts)), self.target.device
        ids = [[0] * (width - len(p)) + p for p in prompts]
        seen = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=params.top_k,
            eos_token_id=None,
            pad_token_id=0,
        )
        before = self._passes
        out = self.target.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(seen, device=device),
            generation_config=config,
            **self.arguments,
        )
        stats = Stats(target_passes=self._passes - before)
        return [Result("", row, "length", stats) for row in out[:, width:].tolist()]

    def _count(self, *_) -> None:
        self._passes += 1
