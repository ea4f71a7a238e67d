"""pcLLM: a causal LM learns to predict through its own unconverged guesses (Eq. 7-9)."""

from typing import Annotated, Literal, TypedDict

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from data.arguments import BlockSize, Share, Small, Weight
from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import sampler_of
from models.attention import attention_inputs
from models.masks import Layout, branches, clean_windows
from trainers.base import BaseModule
from trainers.losses.diffusion import soft_nll, token_nll
from trainers.losses.pcllm import divergence, progressive_consistency


class Sampling(TypedDict, total=False):
    """The method of an export, and its knobs."""

    method: str
    block_size: BlockSize
    blocks: BlockSize
    spawn_ratio: Share
    pool_size: Annotated[int, Field(ge=0, le=1024)]


class ProgressiveConsistency(BaseModule):
    """The module that trains noisy contexts towards clean ones, plus w times the AR loss.

    One forward of the packed sequence (prompt, then for each of N blocks of n tokens a noisy and a
    clean copy) gives both losses.

    Args:
        mask: 'nc', a noisy block sees earlier noisy blocks; 'nc_ic', clean ones of earlier windows.
        window: Blocks per window.
        w: Weight of the AR loss, at least 0.
        sampling: The `parade` entry of the export: the method and its knobs.
        base: A frozen model whose distribution replaces the tokens of ordinary text as labels
            (learning without forgetting, arXiv 1606.09282).
    """

    def __init__(
        self,
        *args,
        mask: Literal["nc", "nc_ic"],
        window: Small,
        w: Weight,
        sampling: Sampling,
        base: PreTrainedModel | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.mask, self.window, self.w, self.sampling = mask, window, w, dict(sampling)
        self._base = (base,)  # in a tuple, so that it is no submodule

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for base in filter(None, self._base):
            base.to(self.device).eval()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["present"].float()

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        noisy, clean = self.predictions(self.network, batch)
        L_AR = token_nll(clean, batch["target"])
        (base,) = self._base
        text = ~batch["noised"].flatten(1).any(1)  # nothing was guessed: no answer of the model's
        if base is not None and text.any():
            rows = {name: x[text] for name, x in batch.items() if x.ndim}
            with torch.no_grad():
                _, before = self.predictions(base, rows)
            L_AR = L_AR.masked_scatter(text[:, None, None], soft_nll(clean[text], before))
        noised, present = batch["noised"], batch["present"]
        return progressive_consistency(noisy, clean, L_AR, noised, present, self.w)

    def predictions(
        self, network: PreTrainedModel, batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return a network's logits of a packed row's tokens, given noisy and given clean blocks.

        Each is [B, N, n, V].
        """
        B, N, n = batch["target"].shape
        predicate = branches if self.mask == "nc" else clean_windows(self.window * n)
        positions = batch["position_ids"]
        layout = Layout(batch["document"], batch["index"], batch["block"], positions)
        logits = network(
            input_ids=batch["input_ids"],
            position_ids=positions,
            **attention_inputs(network, predicate, layout),
            use_cache=False,
            logits_to_keep=1 + 2 * N * n,
        ).logits
        # A token is predicted at the position before it; block 1's first at the prompt's last.
        first, copies = logits[:, :1], logits[:, 1:].view(B, N, 2, n, -1)
        noisy, clean = (
            torch.cat([first, x.flatten(1, 2)[:, :-1]], 1).view_as(x) for x in copies.unbind(2)
        )
        if self.mask == "nc_ic":  # the token before a window is a clean one
            opens = torch.arange(N * n, device=noisy.device).view(N, n, 1) % (self.window * n) == 0
            noisy = torch.where(opens, clean, noisy)
        return noisy, clean

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return loss, `consistency`, `ar` and `right_guesses` from the first wrong token on."""
        noisy, clean = self.predictions(self.network, batch)
        target, noised, present = batch["target"], batch["noised"], batch["present"]
        L_AR = token_nll(clean, target)
        loss, weight = progressive_consistency(noisy, clean, L_AR, noised, present, self.w)
        right = (noisy.argmax(-1) == target) & noised
        return {
            "loss": ((loss * weight).sum(), weight.sum()),
            "consistency": ((divergence(clean, noisy) * noised).sum(), noised.sum()),
            "ar": ((L_AR * present).sum(), present.sum()),
            "right_guesses": (right.sum(), noised.sum()),
        }

    def sampler(self) -> Sampler | None:
        return sampler_of(self.export_config(), self.network, self.tokenizer)

    def export_config(self) -> dict:
        return {**self.sampling, "tokenizer_fingerprint": fingerprint(self.tokenizer)}
