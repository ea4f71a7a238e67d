"""Block-wise masked diffusion decoding: one unmasking step per network pass, block after block.

This is the baseline that speculative decoding of such a model must reproduce; its unmasking rule is
that of the public samplers (`decoding.masked.unmasking`). With bidirectional attention the first
block begins after the prompt. With block-causal attention blocks are counted from the beginning of
the sequence, as in training, so the first one may begin with the end of the prompt. Noise is keyed
by (seed, position, step in the block).
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.batch import Batch, State
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.engine.vocabulary import check_known
from decoding.masked.block_evaluators import CachedBlocks, FrozenTexts, WholeTexts
from decoding.masked.unmasking import Unmasking, judge, next_state
from models.blockwise import is_foreign, predicate_of, told

KNOBS = {
    "mask_id": int,
    "attention": str,
    "block_size": int,
    "tokens_per_step": int,
    "threshold": float | None,
    "order": str,
    "guidance": float,
    "shifted": bool,
    "cache": str | None,
}
CACHES = {"prefix": "rest", "dual": "block"}  # and the region that they leave out


@dataclass
class DenoiseState(State):
    """The denoising state of each sequence of a batch.

    Attributes:
        given: Tokens of the prompt, [B].
        start: Position where the current block begins, [B].
        end: Position where the last block ends, [B].
        cached: Tokens in the network's cache, [B].
        block: Tokens of the current block, the mask where undecided, [B, L].
        step: Steps taken in the current block, [B].
    """

    given: Tensor
    start: Tensor
    end: Tensor
    cached: Tensor
    block: Tensor
    step: Tensor


class DenoiseSampler(Sampler):
    """Sampler of a masked diffusion LM.

    A block's tokens are emitted when its last mask is gone, so `emitted` of a result has one entry
    per pass, most of them 0. A bidirectional model attends to the masks of all max_new_tokens, so
    its answer depends on their number. Blocks after the first end-of-text token are not decoded.

    Args:
        target: The masked diffusion LM.
        tokenizer: Its tokenizer.
        mask_id: The mask token.
        attention: 'block_causal' or 'bidirectional'.
        block_size: Tokens L of a block.
        tokens_per_step: Tokens that a step decides (`Unmasking`).
        threshold: Confidence above which a step decides tokens (`Unmasking`).
        order: 'confidence' or 'random' (`Unmasking`).
        guidance: Scale of classifier-free guidance; 0 switches it off (`WholeTexts`).
        shifted: Whether the logits at a position predict the token after it (Dream).
        cache: 'prefix' or 'dual', the approximate caches of Fast-dLLM for bidirectional attention
            (`FrozenTexts`), which are lossy; None evaluates whole texts. Block-causal attention
            has an exact cache without asking.

    Raises:
        ValueError: An option is out of range or does not fit the model.
    """

    rules = ("coupled",)
    bench = "decoding.bench.denoise"
    predicts_next = False  # it predicts masked tokens, of all others

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mask_id: int,
        attention: str,
        block_size: int,
        tokens_per_step: int = 1,
        threshold: float | None = None,
        order: str = "confidence",
        guidance: float = 0.0,
        shifted: bool = False,
        cache: str | None = None,
    ):
        super().__init__(target, tokenizer)
        check_known(self.vocabulary, mask_id=mask_id)
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not allowed: it must be at least 1")
        predicate_of(attention, block_size)
        if is_foreign(target) and attention != "bidirectional":
            raise ValueError(
                f"attention={attention!r} is not allowed for a model with remote code, which takes "
                "no attention mask: only attention='bidirectional' is"
            )
        self.mask_id, self.attention, self.block_size = mask_id, attention, block_size
        self.rule = Unmasking(tokens_per_step, threshold, order)
        self.guidance, self.shifted, self.cache = guidance, shifted, cache
        if shifted and self.causal:
            raise ValueError(
                "shifted=true is for attention='bidirectional': with 'block_causal' the block "
                "before it would predict a block's first token"
            )
        self.check_cache("cache", cache)
        if cache and guidance:
            raise ValueError(
                f"cache={cache} is not supported with guidance={guidance:g}: leave one of them out"
            )

    @property
    def causal(self) -> bool:
        """Whether attention is block-causal: no block attends to a later one."""
        return self.attention == "block_causal"

    def check(self, target: PreTrainedModel) -> None:
        """Check the target, unless it has remote code, which is given no attention masks."""
        if not is_foreign(target):
            super().check(target)

    def check_cache(self, name: str, cache: str | None) -> None:
        """Check an approximate cache, given by the knob `name`.

        Raises:
            ValueError: It is unknown, or does not fit the model.
        """
        if cache is None:
            return
        if cache not in CACHES:
            raise ValueError(f"unknown {name} {cache!r}. Choose from {[*CACHES]}")
        if self.causal:
            raise ValueError(
                f"{name}={cache} is for attention='bidirectional': with 'block_causal' the cache "
                "of finished blocks is exact, and always used"
            )
        if is_foreign(self.target):
            raise ValueError(
                f"{name}={cache} needs an attention mask, which a model with remote code does not "
                "take: leave out trust_remote_code, if its layout is a known one"
            )

    def lossy(self, params: SamplingParams) -> str:
        return f"cache={self.cache}" if self.cache else ""

    def margin(self, params: SamplingParams) -> int:
        """Three blocks: the last one may reach beyond the answer, and whole blocks are written."""
        return 3 * self.block_size

    def begin(self, batch: Batch, params: SamplingParams) -> None:
        """Make the state and an empty cache; the first cycle's pass prefills the prompt."""
        L = self.block_size
        start = batch.lengths // L * L if self.causal else batch.lengths
        answer = batch.lengths + params.max_new_tokens - start
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

    def network(self, batch: Batch) -> WholeTexts | CachedBlocks | FrozenTexts:
        """The evaluator of a block's states."""
        if self.cache:
            return self.frozen(batch, CACHES[self.cache])
        if self.causal and not self.guidance:
            capacity = batch.tokens.shape[1]
            return CachedBlocks(self.target, self.block_size, self.mask_id, capacity)
        return self.whole()

    def whole(self) -> WholeTexts:
        """The evaluator of whole texts, which is exact."""
        return WholeTexts(
            self.target,
            self.attention,
            self.block_size,
            self.mask_id,
            self.guidance,
            self.shifted,
        )

    def frozen(
        self, batch: Batch, region: str, states: int = 1, always: bool = False
    ) -> FrozenTexts:
        """An evaluator with frozen tokens outside a region (`FrozenTexts`)."""
        return FrozenTexts(
            self.target,
            region,
            span=self.block_size,
            mask_id=self.mask_id,
            length=batch.tokens.shape[1],
            states=states,
            shifted=self.shifted,
            always=always,
        )

    def cycle(self, batch: Batch, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One network pass and one denoising step."""
        block = batch.state.block
        logits = batch.networks["target"].ask(batch, block[:, None])[:, 0]
        scores, confidence = self.judge(batch, logits, params)
        batch.state.block = next_state(block, scores, confidence, self.mask_id, self.rule)
        batch.state.step = batch.state.step + 1
        return self.finished(batch)

    def judge(
        self, batch: Batch, logits: Tensor, params: SamplingParams, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Scores [B, L, V] and confidence [B, L] of a block (see `unmasking.judge`).

        Args:
            batch: The unfinished requests.
            logits: [B, L, V].
            params: The request's parameters.
            ahead: Steps from the current one to that whose noise is used.
        """
        noise = None
        if self.rule.noisy(params):
            L, start, step = self.block_size, batch.state.start, batch.state.step + ahead
            positions = start[:, None] + torch.arange(L, device=start.device)
            # A block takes at most L steps, so no two (position, step) that are used share a key.
            noise = batch.randomness.gumbel(positions * L + step[:, None], logits.shape[-1] + 1)
        return judge(logits, noise, self.mask_id, self.rule, params)

    def finished(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Emit blocks without a mask, and begin the next block of their sequences.

        Returns:
            The tokens [B, L], and how many of them are emitted [B]: 0 while a mask is left.
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
        L, asked = self.block_size, params.max_new_tokens
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
        context = getattr(self.target.config, "max_sequence_length", None)  # LLaDA's name
        if context is not None and len(ids) + whole > context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and {whole} are decoded, together more than the "
                f"model's context of {context}: shorten the prompt or lower max_new_tokens"
            )
        if self.mask_id in ids:
            raise ValueError(f"the prompt contains the mask token ({self.mask_id})")
        return ids


def from_export(target, tokenizer, drafter, config: dict) -> DenoiseSampler:
    """The sampler of an exported masked diffusion LM; `config` is its `parade` entry."""
    return DenoiseSampler(target, tokenizer, **options(target, tokenizer, config))


def options(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: dict) -> dict:
    """The options of `DenoiseSampler` for an export, or for a public model, whose config has fewer.

    Args:
        target: The model.
        tokenizer: Its tokenizer.
        config: The `parade` entry of an export, or the options that a user gave.

    Raises:
        ValueError: The mask token or the kind of attention is not known.
    """
    found = told(target.config)
    trained = (getattr(target.config, "denoising", None) or {}).get("attention")
    given = {k: config[k] for k in KNOBS if k in config}
    if trained and given.get("attention", trained) != trained:
        raise ValueError(
            f"attention={given['attention']!r} is not how this model was trained: it has "
            f"attention={trained!r}. Leave attention out"
        )
    known = {"block_size": 32, **found, **given}
    if known.setdefault("mask_id", tokenizer.mask_token_id) is None:
        known.pop("mask_id")
    for key, example in (("mask_id", "126336"), ("attention", "bidirectional")):
        if known.get(key) is None:
            raise ValueError(
                f"the config of this {target.config.model_type!r} model has no {key}: give it, for "
                f"example sampler=[method=denoise,{key}={example}]"
            )
    return known
