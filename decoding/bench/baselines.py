"""Baselines for benches: transformers' own ways to generate."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from decoding.engine.detokenize import text_after
from decoding.engine.params import Result, SamplingParams, Stats
from decoding.engine.sampler import Sampler


class HuggingFace:
    """`transformers.generate` of the target of a sampler (`like`), with a sampler's interface.

    `arguments` are those of `generate`, such as assistant_model= (another model drafts) or
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
        """Decode with transformers' own cache and loop; a batch waits for its longest answer.

        Of `params` the length, temperature, top_k and ignore_eos are used, and a batch's first
        seed. Of the statistics only the target's passes are set.
        """
        size, found = at_once or len(prompts), []
        for start in range(0, len(prompts), size):
            torch.manual_seed(seeds[start])
            found += self._batch(prompts[start : start + size], params)
        return found

    def _batch(self, prompts: list[list[int]], params: SamplingParams) -> list[Result]:
        ids = [torch.tensor(prompt, device=self.device) for prompt in prompts]
        seen = [torch.ones_like(prompt) for prompt in ids]
        ids, seen = (pad_sequence(x, batch_first=True, padding_side="left") for x in (ids, seen))
        config = GenerationConfig(
            max_new_tokens=params.most,
            do_sample=params.temperature > 0,
            temperature=params.temperature or None,
            top_k=params.top_k,
            eos_token_id=None if params.ignore_eos else sorted(self.eos) or None,
            pad_token_id=0,
        )
        before, given = self._passes, {"attention_mask": seen, "generation_config": config}
        # The target's own settings would fill what is None: its end tokens, top_p, penalties.
        own, self.target.generation_config = self.target.generation_config, GenerationConfig()
        try:
            out = self.target.generate(ids, **given, **self.arguments)
        finally:
            self.target.generation_config = own
        passes = self._passes - before
        answers = out[:, ids.shape[1] :].tolist()
        return [self._result(*row, passes, params) for row in zip(prompts, answers)]

    def _result(
        self, prompt: list[int], ids: list[int], passes: int, params: SamplingParams
    ) -> Result:
        """Return a row's result, without the padding up to the longest answer of its batch."""
        ended = (n for n, t in enumerate(ids, 1) if t in self.eos and not params.ignore_eos)
        end = next(ended, None)
        ids = ids[:end]
        text = text_after(self.tokenizer, prompt, ids)
        # Each pass brings a row at least one token until it ends.
        stats = Stats(target_passes=min(passes, len(ids)))
        return Result(text, ids, "length" if end is None else "eos", stats)

    def _count(self, *_) -> None:
        self._passes += 1
