"""pcLLM: a causal LM learns to predict through its own unconverged guesses (Eq. 7-9)."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.text.tokenizer import fingerprint
from decoding.commands.cli import unknown
from decoding.engine.sampler import Sampler
from decoding.loading import sampler_of
from models.attention import attention_mask
from models.masks import Layout, branches, clean_windows, taught
from trainers.base import BaseModule
from trainers.losses.diffusion import soft_nll, token_nll
from trainers.losses.pcllm import divergence, progressive_consistency

MASKS = ("nc", "nc_ic")
CONTEXTS = ("clean", "noisy")  # what the teacher reads before a block
SPANS = ("tokens", "outputs")  # the predictions of a block that are compared


class Outputs(NamedTuple):
    """A network's outputs on a packed row: the logits after each token, of the token that follows.

    Attributes:
        first: After the prompt, [B, 1, V].
        noisy: After every token of the noisy blocks, [B, N, n, V].
        clean: The same of the clean blocks.
    """

    first: Tensor
    noisy: Tensor
    clean: Tensor


class ProgressiveConsistency(BaseModule):
    """The module that trains noisy contexts towards clean ones, plus w times the AR loss.

    One forward of the packed sequence (prompt, then for each of N blocks of n tokens a noisy and a
    clean copy) gives both losses.

    Args:
        mask: 'nc', a noisy block sees earlier noisy blocks; 'nc_ic', clean ones of earlier windows.
        window: Blocks of a window.
        w: Weight of the AR loss, at least 0.
        teacher_context: What the teacher reads before a block: 'clean' blocks, as the authors'
            code and Figure 1b, or the student's 'noisy' ones, as Eq. 8 is printed. The latter costs
            one more forward, without gradient.
        span: Which predictions are compared. 'tokens': those of a block's own tokens from the first
            wrong one on, as Eq. 5 sums over a block's tokens. 'outputs': the outputs at those
            tokens, as the authors' code has it, which predict one token later: they leave out the
            first wrong token and reach the first token of the next block.
        sampling: The `parade` entry of the export: the method and its knobs.
        base: A model whose distribution is the label of ordinary text, in place of the text's own
            tokens (learning without forgetting, arXiv 1606.09282); it is not trained.

    Raises:
        ValueError: An unknown mask, context or span, or a negative w.
    """

    def __init__(
        self,
        *args,
        mask: str,
        window: int,
        w: float,
        sampling: dict,
        teacher_context: str = "clean",
        span: str = "tokens",
        base: PreTrainedModel | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if mask not in MASKS:
            raise ValueError(f"unknown mask {mask!r}. Choose from {list(MASKS)}")
        if teacher_context not in CONTEXTS:
            raise unknown("teacher_context", teacher_context, CONTEXTS)
        if span not in SPANS:
            raise unknown("span", span, SPANS)
        if w < 0:
            raise ValueError(f"w={w} is not allowed: it must be at least 0")
        self.mask, self.window, self.w, self.sampling = mask, window, w, dict(sampling)
        self.teacher_context, self.span = teacher_context, span
        self._base = (base,)  # in a tuple, so that it is no submodule

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for base in filter(None, self._base):
            base.to(self.device).eval()

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["present"].float()

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = self.outputs(self.network, batch)
        _, clean = self.predictions(out)
        L_AR = token_nll(clean, batch["target"])
        (base,) = self._base
        text = ~batch["noised"].flatten(1).any(1)  # nothing was guessed: no answer of the model's
        if base is not None and text.any():
            with torch.no_grad():
                _, before = self.logits(
                    base, {name: x[text] for name, x in batch.items() if x.ndim}
                )
            L_AR = L_AR.masked_scatter(text[:, None, None], soft_nll(clean[text], before))
        student, teacher, compared = self.consistency(out, batch)
        return progressive_consistency(student, teacher, L_AR, compared, batch["present"], self.w)

    def logits(self, network: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The logits of every token, conditioned on noisy and on clean blocks.

        Args:
            network: The causal LM.
            batch: Packed rows of B prompts with N blocks of n tokens.

        Returns:
            (noisy, clean), each [B, N, n, V].
        """
        return self.predictions(self.outputs(network, batch))

    def outputs(
        self, network: PreTrainedModel, batch: dict[str, Tensor], teaching: bool = False
    ) -> Outputs:
        """The outputs of one forward of packed rows.

        Args:
            network: The causal LM.
            batch: Packed rows of B prompts with N blocks of n tokens.
            teaching: Whether clean blocks attend to the student's context (`taught`).
        """
        B, N, n = batch["target"].shape
        predicate = branches if self.mask == "nc" else clean_windows(self.window * n)
        if teaching:
            predicate = taught(predicate, n)
        layout = Layout(batch["document"], batch["index"], batch["block"])
        logits = network(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=attention_mask(predicate, layout, network.config._attn_implementation),
            use_cache=False,
            logits_to_keep=1 + 2 * N * n,
        ).logits
        blocks = logits[:, 1:].view(B, N, 2, n, -1)
        return Outputs(logits[:, :1], blocks[:, :, 0], blocks[:, :, 1])

    def predictions(self, out: Outputs) -> tuple[Tensor, Tensor]:
        """The logits of every token given noisy and given clean blocks, [B, N, n, V] each."""
        # A token is predicted at the position before it; block 1's first at the prompt's last.
        noisy, clean = (
            torch.cat([out.first, x.flatten(1, 2)[:, :-1]], 1).view_as(x) for x in out[1:]
        )
        if self.mask == "nc_ic":  # the token before a window is a clean one
            N, n = noisy.shape[1:3]
            opens = torch.arange(N * n, device=noisy.device).view(N, n, 1) % (self.window * n) == 0
            noisy = torch.where(opens, clean, noisy)
        return noisy, clean

    def consistency(self, out: Outputs, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What Eq. 8 compares: the logits of student and teacher, and which of them count.

        Args:
            out: The outputs of the network that is trained.
            batch: Packed rows.

        Returns:
            (student, teacher), each [B, N, n, V], and a mask, bool [B, N, n].
        """
        noised, taught_by = batch["noised"], out.clean
        if self.teacher_context == "noisy":
            with torch.no_grad():
                taught_by = self.outputs(self.network, batch, teaching=True).clean
        if self.span == "outputs":  # the answer's last token has none after it
            follows = batch["present"].flatten(1).roll(-1, 1)
            follows[:, -1] = False
            return out.noisy, taught_by, noised & follows.view_as(noised)
        student, teacher = self.predictions(out)
        if self.teacher_context == "noisy":
            # Before a block's first token both read the same.
            teacher = torch.cat([student[:, :, :1], taught_by[:, :, :-1]], 2)
        return student, teacher, noised

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The loss, its two terms, and the share of right guesses from the first wrong token on.

        Args:
            batch: Packed rows.

        Returns:
            {name: (sum, total)} with `loss`, `consistency`, `ar` and `right_guesses`.
        """
        out = self.outputs(self.network, batch)
        noisy, clean = self.predictions(out)
        student, teacher, compared = self.consistency(out, batch)
        target, noised, present = batch["target"], batch["noised"], batch["present"]
        L_AR = token_nll(clean, target)
        loss, weight = progressive_consistency(student, teacher, L_AR, compared, present, self.w)
        right = (noisy.argmax(-1) == target) & noised
        return {
            "loss": ((loss * weight).sum(), weight.sum()),
            "consistency": ((divergence(teacher, student) * compared).sum(), compared.sum()),
            "ar": ((L_AR * present).sum(), present.sum()),
            "right_guesses": (right.sum(), noised.sum()),
        }

    def sampler(self) -> Sampler | None:
        return sampler_of(self.export_config(), self.network, self.tokenizer)

    def export_config(self) -> dict:
        return {**self.sampling, "tokenizer_fingerprint": fingerprint(self.tokenizer)}
