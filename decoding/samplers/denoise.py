"""Block-wise masked diffusion decoding: one step of unmasking a network pass, block after block.

The plain counterpart of every speculation on such a model, and the rule of the public samplers
(see `decoding.masked.unmasking`). Blocks follow the prompt of a bidirectional model; those of a
block-causal one are counted from the text's beginning, as in training, so the first may begin with
the prompt's end. Noise is keyed by (seed, place, step in the block).
"""

import warnings
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Rows, Sampler
from decoding.masked.block_evaluators import CachedBlocks, WholeTexts
from decoding.masked.unmasking import Unmasking, judge, next_state
from models.blockwise import PUBLIC, is_foreign, predicate_of

KNOBS = {
    "mask_id": int,
    "attention": str,
    "block_size": int,
    "tokens_per_step": int,
    "threshold": float | None,
    "order": str,
    "guidance": float,
}


class DenoiseSampler(Sampler):
    """Decodes with a masked diffusion LM; a result's `emitted` has one entry a pass, 0 in most.

    mask_id: the model's mask token. attention: 'block_causal' or 'bidirectional'. block_size: L.
    tokens_per_step, threshold, order: see `Unmasking`. guidance: see `WholeTexts`.

    A bidirectional model sees the masks of all max_new_tokens, so its answer depends on how many
    they are. An answer ends with its first end token; blocks behind it are not decoded.
    """

    rules = ("coupled",)
    bench = "decoding.bench.denoise"

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
    ):
        super().__init__(target, tokenizer)
        if not 0 <= mask_id < self.vocabulary:
            raise ValueError(
                f"mask_id={mask_id} is outside the model's vocabulary of {self.vocabulary}"
            )
        if block_size < 1:
            raise ValueError(f"block_size={block_size} is not allowed: it must be at least 1")
        predicate_of(attention, block_size)
        if is_foreign(target) and attention != "bidirectional":
            raise ValueError(
                f"attention={attention!r} cannot be given to a model of remote code, which has its "
                "own: only bidirectional ones are decoded here"
            )
        self.mask_id, self.attention, self.block_size = mask_id, attention, block_size
        self.rule = Unmasking(tokens_per_step, threshold, order)
        self.guidance = guidance

    @property
    def causal(self) -> bool:
        """Whether no block sees a later one."""
        return self.attention == "block_causal"

    def check(self, target: PreTrainedModel) -> None:
        """See `Sampler`; a foreign model is given no masks."""
        if not is_foreign(target):
            super().check(target)

    def margin(self, params: SamplingParams) -> int:
        """The last block may reach beyond the answer, and a commit writes a whole one."""
        return 3 * self.block_size

    def begin(self, rows: Rows, params: SamplingParams) -> None:
        """No pass of its own: the first one brings the prompt."""
        L = self.block_size
        start = rows.lengths // L * L if self.causal else rows.lengths
        answer = rows.lengths + params.max_new_tokens - start
        rows.state |= {
            "given": rows.lengths,
            "start": start,
            "end": start + -(-answer // L) * L,
            "cached": torch.zeros_like(start),
        }
        places = start[:, None] + torch.arange(L, device=start.device)
        block = rows.tokens.gather(1, places).where(places < rows.lengths[:, None], self.mask_id)
        rows.state |= {"block": block, "step": torch.zeros_like(start)}
        rows.networks["target"] = self.network(rows)

    def network(self, rows: Rows) -> WholeTexts | CachedBlocks:
        """What evaluates a block's state."""
        if self.causal and not self.guidance:
            return CachedBlocks(self.target, self.block_size, rows.tokens.shape[1])
        return WholeTexts(self.target, self.attention, self.block_size, self.mask_id, self.guidance)

    def cycle(self, rows: Rows, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """One pass, one step."""
        block = rows.state["block"]
        logits = rows.networks["target"].ask(rows, block[:, None])[:, 0]
        scores, confidence = self.judge(rows, logits, params)
        rows.state["block"] = next_state(block, scores, confidence, self.mask_id, self.rule)
        rows.state["step"] = rows.state["step"] + 1
        return self.finished(rows)

    def judge(
        self, rows: Rows, logits: Tensor, params: SamplingParams, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Scores and confidence of a block's logits [B, L, V], by the noise of each row's present
        step, or of one so many steps ahead.
        """
        noise = None
        if self.rule.noisy(params):
            L, start, step = self.block_size, rows.state["start"], rows.state["step"] + ahead
            places = start[:, None] + torch.arange(L, device=start.device)
            # A block takes at most L steps, so no two of (place, step) that count share a key.
            noise = rows.randomness.gumbel(places * L + step[:, None], logits.shape[-1] + 1)
        return judge(logits, noise, self.mask_id, self.rule, params)

    def finished(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] of the blocks without a mask, and how many are new; these rows go on."""
        block, L = rows.state["block"], self.block_size
        done = (block != self.mask_id).all(1)
        begun = rows.lengths - rows.state["start"]
        at = (begun[:, None] + torch.arange(L, device=begun.device)).clamp_max(L - 1)
        tokens, counts = block.gather(1, at), (L - begun) * done
        if done.any():
            step = rows.state["step"] * ~done
            start = rows.state["start"] + L * done
            rows.state["block"] = block.masked_fill(done[:, None], self.mask_id)
            rows.state["start"], rows.state["step"] = start, step
        return tokens, counts

    def _encode(self, prompt: str | list[int], params: SamplingParams) -> list[int]:
        L, asked = self.block_size, params.max_new_tokens
        if params.block_size not in (None, L):
            raise ValueError(
                f"block_size={params.block_size} is not allowed in a request: this model is "
                f"decoded in blocks of {L} (sampler=[block_size=...] changes it)"
            )
        if params.repetition_penalty != 1:
            raise ValueError(
                f"repetition_penalty={params.repetition_penalty} is not offered by masked "
                "diffusion decoding: leave it at 1"
            )
        whole = -(-asked // L) * L
        if whole != asked:
            warnings.warn(
                f"max_new_tokens={asked} is no multiple of block_size={L}: {whole} tokens are "
                f"decoded, of which the first {asked} are the answer",
                stacklevel=2,
            )
        ids = super()._encode(prompt, replace(params, max_new_tokens=whole))
        context = getattr(self.target.config, "max_sequence_length", None)  # LLaDA's name
        if context is not None and len(ids) + whole > context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and {whole} are decoded, together more than the "
                f"model's context of {context}: shorten one of them"
            )
        if self.mask_id in ids:
            raise ValueError(f"the prompt contains the mask token ({self.mask_id})")
        return ids


def from_export(target, tokenizer, drafter, config: dict) -> DenoiseSampler:
    """The sampler of a masked diffusion LM; config: the `parade` entry of its export."""
    return DenoiseSampler(target, tokenizer, **options(target, tokenizer, config))


def options(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: dict) -> dict:
    """What `DenoiseSampler` takes, of an export or of a public model, which says less.

    Errors: a mask token or an attention kind that nothing tells.
    """
    known = {"block_size": 32, **{k: config[k] for k in KNOBS if k in config}}
    tells = (getattr(target.config, "mask_token_id", None), tokenizer.mask_token_id)
    known.setdefault("mask_id", next((t for t in tells if t is not None), None))
    known.setdefault("attention", PUBLIC.get(target.config.model_type))
    for key, example in (("mask_id", "126336"), ("attention", "bidirectional")):
        if known[key] is None:
            raise ValueError(
                f"this {target.config.model_type!r} model does not tell its {key}: say it, "
                f"sampler=[method=denoise,{key}={example}]"
            )
    return known
