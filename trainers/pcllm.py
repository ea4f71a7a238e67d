"""pcLLM: a causal LM learns to predict through its own unconverged guesses (Eq. 7-9)."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.text.tokenizer import fingerprint
from decoding.engine.sampler import Sampler
from decoding.loading import sampler_of
from models.attention import attention_mask
from models.masks import Layout, branches, clean_windows
from trainers.base import BaseModule
from trainers.losses.diffusion import soft_nll, token_nll
from trainers.losses.pcllm import divergence, progressive_consistency

MASKS = ("nc", "nc_ic")


class ProgressiveConsistency(BaseModule):
    """The module that trains noisy contexts towards clean ones, plus w times the AR loss.

    One forward of the packed sequence (prompt, then for each of N blocks of n tokens a noisy and a
    clean copy) gives both losses.

    Args:
        mask: 'nc', a noisy block sees earlier noisy blocks; 'nc_ic', clean ones of earlier windows.
        window: Blocks of a window.
        w: Weight of the AR loss, at least 0.
        sampling: The `parade` entry of the export: the method and its knobs.
        base: A model whose distribution is the label of ordinary text, in place of the text's own
            tokens (learning without forgetting, arXiv 1606.09282); it is not trained.

    Raises:
        ValueError: An unknown mask, or a negative w.
    """

    def __init__(
        self,
        *args,
        mask: str,
        window: int,
        w: float,
        sampling: dict,
        base: PreTrainedModel | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if mask not in MASKS:
            raise ValueError(f"unknown mask {mask!r}. Choose from {list(MASKS)}")
        if w < 0:
            raise ValueError(f"w={w} is not allowed: it must be at least 0")
        self.mask, self.window, self.w, self.sampling = mask, window, w, dict(sampling)
        self._base = (base,)  # in a tuple, so that it is no submodule

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for base in filter(None, self._base):
            base.to(self.device).eval()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["present"].float()

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        noisy, clean = self.logits(self.network, batch)
        L_AR = token_nll(clean, batch["target"])
        (base,) = self._base
        text = ~batch["noised"].flatten(1).any(1)  # nothing was guessed: no answer of the model's
        if base is not None and text.any():
            with torch.no_grad():
                _, before = self.logits(
                    base, {name: x[text] for name, x in batch.items() if x.ndim}
                )
            L_AR = L_AR.masked_scatter(text[:, None, None], soft_nll(clean[text], before))
        return progressive_consistency(
            noisy, clean, L_AR, batch["noised"], batch["present"], self.w
        )

    def logits(self, network: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The logits of every token, conditioned on noisy and on clean blocks.

        Args:
            network: The causal LM.
            batch: Packed rows of B prompts with N blocks of n tokens.

        Returns:
            (noisy, clean), each [B, N, n, V].
        """
        B, N, n = batch["target"].shape
        predicate = branches if self.mask == "nc" else clean_windows(self.window * n)
        layout = Layout(batch["document"], batch["index"], batch["block"])
        logits = network(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=attention_mask(predicate, layout, network.config._attn_implementation),
            use_cache=False,
            logits_to_keep=1 + 2 * N * n,
        ).logits
        # A token is predicted at the position before it; block 1's first at the prompt's last.
        first, blocks = logits[:, :1], logits[:, 1:].view(B, N, 2, n, -1)
        noisy, clean = (
            torch.cat([first, blocks[:, :, kind].flatten(1, 2)[:, :-1]], 1) for kind in (0, 1)
        )
        if self.mask == "nc_ic":  # the token before a window is a clean one
            opens = torch.arange(N * n, device=logits.device) % (self.window * n) == 0
            noisy = torch.where(opens[:, None], clean, noisy)
        return noisy.view(B, N, n, -1), clean.view(B, N, n, -1)

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The loss, its two terms, and the share of right guesses from the first wrong token on.

        Args:
            batch: Packed rows.

        Returns:
            {name: (sum, total)} with `loss`, `consistency`, `ar` and `right_guesses`.
        """
        noisy, clean = self.logits(self.network, batch)
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
