"""Block-wise masked diffusion decoding: one unmasking step per network pass, block after block.

This is the baseline that speculative decoding of such a model must reproduce, with the rule of the
public samplers (`decoding.masked.unmasking`). With bidirectional attention the first block begins
after the prompt; with block-causal attention blocks are counted from the beginning of the sequence,
as in training. Noise is keyed by (seed, position, step in the block).
"""

import warnings
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.batch import Batch, State
from decoding.engine.params import USUAL, SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.vocabulary import check_known
from decoding.masked.block_evaluators import CachedBlocks, WholeTexts
from decoding.masked.unmasking import Unmasking, judge, next_state
from decoding.method import Amount, Count, Method, Text, TokenId
from models.blockwise import is_foreign, predicate_of, told


@dataclass
class DenoiseState(State):
    """The denoising state of each sequence of a batch."""

    given: Tensor  # tokens of the prompt, [B]
    start: Tensor  # position where the current block begins, [B]
    end: Tensor  # position where the last block ends, [B]
    cached: Tensor  # tokens in the network's cache, [B]
    block: Tensor  # tokens of the current block, the mask where undecided, [B, L]
    step: Tensor  # steps taken in the current block, [B]


class DenoiseSampler(Sampler):
    """Sampler of a masked diffusion LM.

    A block's tokens are emitted when its last mask is gone, so `emitted` of a result has one entry
    per pass, most of them 0. A bidirectional model attends to the masks of all max_new_tokens, so
    its answer depends on their number. Blocks after the first end-of-text token are not decoded.

    Args:
        target, tokenizer, mask_id: The masked diffusion LM, its tokenizer and mask token.
        attention: 'block_causal' or 'bidirectional'.
        block_size: Tokens L of a block.
        tokens_per_step, threshold, order: The unmasking rule (`Unmasking`).
        guidance: Scale of classifier-free guidance; 0 switches it off (`WholeTexts`).
        shifted: Whether the logits at a position predict the token after it (Dream).

    Raises:
        ValueError: An option does not fit the model, or another option.
    """

    rules = ("coupled",)
    bench = "decoding.bench.denoise"
    predicts_next = False  # it predicts masked tokens, of all others
    states = 1  # of a block that a pass evaluates, at most

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask_id: TokenId,
        attention: Text,
        block_size: Count,
        tokens_per_step: Count = 1,
        threshold: Annotated[float, Field(gt=0, le=1)] | None = None,
        order: Literal["confidence", "random"] = "confidence",
        guidance: Amount = 0.0,
        shifted: bool = False,
    ):
        super().__init__(target, tokenizer)
        check_known(self.vocabulary, mask_id=mask_id)
        predicate_of(attention, block_size)
        if is_foreign(target) and attention != "bidirectional":
            raise ValueError(
                f"attention={attention!r} is not allowed for a model with remote code, which takes "
                "no attention mask: only attention='bidirectional' is"
            )
        self.mask_id, self.attention, self.block_size = mask_id, attention, block_size
        self.rule = Unmasking(tokens_per_step, threshold, order)
        self.guidance, self.shifted = guidance, shifted
        if shifted and self.causal:
            raise ValueError(
                "shifted=true is for attention='bidirectional': with 'block_causal' the block "
                "before it would predict a block's first token"
            )

    @property
    def causal(self) -> bool:
        """Return whether attention is block-causal: no block attends to a later one."""
        return self.attention == "block_causal"

    def check(self, target: PreTrainedModel) -> None:
        if not is_foreign(target):  # remote code is given no attention masks
            super().check(target)

    def margin(self, params: SamplingParams) -> int:
        """Count three blocks: the last may reach beyond the answer; whole blocks are written."""
        return 3 * self.block_size

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        L = self.block_size
        start = batch.lengths // L * L if self.causal else batch.lengths
        answer = batch.lengths + params.most - start
        positions = start[:, None] + torch.arange(L, device=start.device)
        given = positions < batch.lengths[:, None]
        block = batch.tokens.gather(1, positions).where(given, self.mask_id)
        batch.state = DenoiseState(
            given=batch.lengths,
            start=start,
            end=start + -(-answer // L) * L,
            cached=torch.zeros_like(start),
            block=block,
            step=torch.zeros_like(start),
        )
        batch.networks["target"] = self.network(batch)

    def network(self, batch: Batch) -> WholeTexts | CachedBlocks:
        """Make the evaluator of a block's states; the first cycle's pass prefills the prompt."""
        L, mask = self.block_size, self.mask_id
        if self.causal and not self.guidance:
            capacity = batch.tokens.shape[1] + (self.states - 1) * L
            return CachedBlocks(self.target, L, mask, capacity)
        return WholeTexts(self.target, self.attention, L, mask, self.guidance, self.shifted)

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        block = batch.state.block
        logits = batch.networks["target"].ask(batch, block[:, None])[:, 0]
        scores, confidence = self.judge(batch, logits, params)
        batch.state.block = next_state(block, scores, confidence, self.mask_id, self.rule)
        batch.state.step = batch.state.step + 1
        return self.finished(batch)

    def judge(
        self, batch: Batch, logits: Tensor, params: SamplingParams, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return scores [B, L, V] and confidence [B, L], with the noise `ahead` steps from now."""
        noise = None
        if self.rule.noisy(params):
            L, start, step = self.block_size, batch.state.start, batch.state.step + ahead
            positions = start[:, None] + torch.arange(L, device=start.device)
            # A block takes at most L steps, so no two (position, step) that are used share a key.
            noise = batch.randomness.gumbel(positions * L + step[:, None], logits.shape[-1] + 1)
        return judge(logits, noise, self.mask_id, self.rule, params)

    def finished(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Emit blocks without a mask, and begin the next block of their sequences.

        Returns the tokens [B, L], and how many of them are emitted [B]: 0 while a mask is left.
        """
        block, L = batch.state.block, self.block_size
        done = (block != self.mask_id).all(1)
        begun = batch.lengths - batch.state.start
        at = (begun[:, None] + torch.arange(L, device=begun.device)).clamp_max(L - 1)
        tokens, counts = block.gather(1, at), (L - begun) * done
        if done.any():
            step = batch.state.step * ~done
            start = batch.state.start + L * done
            batch.state.block = block.masked_fill(done[:, None], self.mask_id)
            batch.state.start, batch.state.step = start, step
        return tokens, counts

    def shared(self, params: SamplingParams) -> SamplingParams:
        # A bidirectional model sees the masks of the whole answer.
        return replace(super().shared(params), max_new_tokens=params.max_new_tokens)

    def encode(self, prompt: str | list[int], params: SamplingParams) -> list[int]:
        L = self.block_size
        asked = L if params.max_new_tokens is None else params.max_new_tokens
        if params.block_size not in (None, L):
            raise ValueError(
                f"block_size={params.block_size} is not allowed in a request: this model decodes "
                f"with block_size={L} (sampler=[block_size=...] changes it)"
            )
        if params.repetition_penalty != 1:
            raise ValueError(
                f"repetition_penalty={params.repetition_penalty} is not supported by masked "
                "diffusion decoding: leave it at 1"
            )
        whole = -(-asked // L) * L
        if whole != asked:
            warnings.warn(
                f"max_new_tokens={asked} is not a multiple of block_size={L}: {whole} tokens are "
                f"decoded, and the first {asked} returned",
                stacklevel=2,
            )
        ids = super().encode(prompt, replace(params, max_new_tokens=whole))
        if self.mask_id in ids:
            raise ValueError(f"the prompt contains the mask token ({self.mask_id})")
        return ids

    def with_room(
        self, prompt: Any, params: SamplingParams, usual: int = USUAL, longest: int | None = None
    ) -> SamplingParams:
        found = super().with_room(prompt, params, usual, longest)
        if params.max_new_tokens is not None:
            return found
        L, most = self.block_size, found.most
        return replace(found, max_new_tokens=most // L * L or most)  # whole blocks are decoded


class DenoiseMethod(Method):
    """A method for masked diffusion LMs, with public ones, whose config tells less."""

    def arguments(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, entry: dict
    ) -> dict[str, Any]:
        given = super().arguments(target, tokenizer, entry)
        trained = (getattr(target.config, "denoising", None) or {}).get("attention")
        if trained and given.get("attention", trained) != trained:
            raise ValueError(
                f"attention={given['attention']!r} is not how this model was trained: it has "
                f"attention={trained!r}. Leave attention out"
            )
        known = {"block_size": 32, "mask_id": tokenizer.mask_token_id}
        known |= {k: v for k, v in told(target.config).items() if k in self.types} | given
        for key, example in (("mask_id", "126336"), ("attention", "bidirectional")):
            if known.get(key) is None:
                raise ValueError(
                    f"the config of this {target.config.model_type!r} model has no {key}: give it, "
                    f"for example sampler=[method=denoise,{key}={example}]"
                )
        self.check(known)
        return known


METHOD = DenoiseMethod(DenoiseSampler)
