"""DEER: a diffusion drafter drafts a block in one pass, the target verifies it in one pass.

Source: arXiv 2512.15176, section 3.2 and Algorithm 1 (a rejection ends the block: the p's
after it were conditioned on the rejected token).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.drafting import block_sampler
from decoding.drafting import noise as noise_file
from decoding.drafting.block_sampler import BlockSampler
from decoding.drafting.prompt_lookup import Lookup
from decoding.engine.batch import Batch, State
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.engine.vocabulary import check_known
from models.diffusion import drafting
from models.masks import block_width, drafter_attention
from models.noise import NoiseInput

KNOBS = block_sampler.KNOBS | {"noise_input": bool}
ARTEFACTS = (*block_sampler.ARTEFACTS, noise_file.FILE)
NEEDED = block_sampler.NEEDED


@dataclass
class DeerState(State):
    """What a batch keeps between cycles.

    drafter_cached: [B], committed tokens whose keys and values the drafter's cache holds; always 0
        for a drafter with `bidirectional` attention, which reads the whole prefix in every pass.
    lookups: the prompt lookup of each request; None where trees do not use it.
    """

    drafter_cached: Tensor
    lookups: list[Lookup] | None = None


class DeerSampler(BlockSampler):
    """Speculative decoding with a block-diffusion drafter.

    Args:
        target, tokenizer: See `Sampler`.
        drafter: A diffusion LM over the target's tokens.
        mask_id: The token that the drafter reads in place of those it drafts.
        sep_id: The drafter's separator token; None with 'causal' attention, which has none.
        attention: The drafter's, as it was trained, one of `models.masks.DRAFTERS`. With
            'prefix_causal' its cache is exact; 'bidirectional' has none: each draft pass runs the
            whole prefix. 'causal' is PARD's: an ordinary causal LM, whose outputs at the last
            committed token and k - 1 masks draft the k tokens after them.
        shifted: Whether the drafter's output at a position predicts the token after it, as a causal
            LM's does, and not that position's own.
        noise: What the drafter reads keyed noise with (`models.noise`), which it does under
            `coupled` and `tree`; None: it does not.
        knobs: See `BlockSampler`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: PreTrainedModel,
        *,
        mask_id: int,
        sep_id: int | None = None,
        attention: str = "prefix_causal",
        shifted: bool = False,
        noise: NoiseInput | None = None,
        **knobs,
    ):
        super().__init__(target, tokenizer, **knobs)
        self.drafter, self.draft_predicate = drafter.eval(), drafter_attention(attention)
        if (sep_id is None) != (attention == "causal"):
            raise ValueError(
                f"a drafter with attention={attention} and sep_id={sep_id} is not allowed: with "
                "attention='causal' there is no separator, otherwise there is one"
            )
        known = drafter.config.get_text_config().vocab_size
        check_known(known, mask_id=mask_id, sep_id=sep_id)
        self.drafter_caches, self.shifted = attention != "bidirectional", shifted
        self.attention, self.mask_id, self.sep_id = attention, mask_id, sep_id
        self.never = [mask_id] if sep_id is None else [mask_id, sep_id]
        self.noise_input = None if noise is None else noise.to(self.device)

    def begin_drafting(self, batch: Batch, states: tuple[Tensor, ...]) -> None:
        capacity = batch.tokens.shape[1]
        drafter = CachedNetwork(self.drafter, self.draft_predicate, capacity, ids=self.draft_ids)
        batch.networks["drafter"] = drafter
        batch.state = DeerState(drafter_cached=torch.zeros_like(batch.lengths))
        if self.drafter_caches:
            self.prefill(batch, "drafter", drafter)
            batch.state.drafter_cached = batch.lengths - 1

    def draft_logits(self, batch: Batch, k: int) -> Tensor:
        """Drafter logits [B, k, V] at the next k positions, independent given the prefix.

        One pass over the tokens committed since the last one (without a cache over all of them),
        the separator and k masks; without a separator k - 1 masks, as the last committed token
        drafts the first. Rows that have fewer are padded on the left, so the block is last in every
        row.
        """
        n = batch.lengths[:, None]
        width = int((batch.lengths - batch.state.drafter_cached).max())
        separated = self.sep_id is not None
        steps = torch.arange(-width, k + 1 if separated else k - 1, device=n.device)
        positions = n + steps
        padding = positions < batch.state.drafter_cached[:, None]
        tokens = batch.tokens.gather(1, positions.clamp_min(0))
        tokens[:, width:] = self.mask_id
        if separated:
            tokens[:, width] = self.sep_id
        logits = batch.networks["drafter"](
            tokens,
            positions.clamp_min(0),
            keep=k + self.shifted,
            block_start=batch.lengths if separated else None,
            padding=padding if padding.any() else None,
        ).logits[:, :k]
        if self.drafter_caches:
            batch.state.drafter_cached = batch.lengths
        return self.fitted(logits, self.never)

    def reading_noise(
        self, batch: Batch, k: int, noise: Tensor | None, params: SamplingParams
    ) -> AbstractContextManager:
        if self.noise_input is None or not params.keyed:
            return nullcontext()
        ids = self.draft_ids
        tokens = self.drafter.config.vocab_size if ids is None else len(ids)
        shape = len(batch.requests), k, tokens
        read = noise_file.for_drafter(
            noise, params.temperature, shape, ids, self.never, self.device
        )
        span = drafting(k, self.attention, self.shifted)
        width = block_width(self.attention, k)
        return self.noise_input.reading(self.drafter, read, span, width, ids)


def from_export(target, tokenizer, drafter, config: dict) -> DeerSampler:
    """The sampler of an exported drafter; config: its `parade` entry."""
    knobs = block_sampler.knobs_of(config, "mask_id", "sep_id", "attention", "shifted", "noise")
    return DeerSampler(target, tokenizer, drafter, **knobs)


def read_artefacts(fetch: Callable[[str], Path], config: dict) -> dict:
    """What lies beside a drafter's weights (`block_sampler.read_artefacts`), and {'noise': ...}."""
    found = block_sampler.read_artefacts(fetch, config)
    if config.get("noise_input"):
        found["noise"] = noise_file.read(fetch(noise_file.FILE))
    return found
