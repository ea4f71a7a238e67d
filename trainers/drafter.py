"""`DrafterModule`, the Lightning module that every block drafter's module extends."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corruption.draft_blocks import STATES, block_width
from data.rows.states import RowsWithStates
from data.text.tokenizer import draft_token_ids, fingerprint
from decoding.drafting import markov as markov_file
from decoding.drafting import noise as noise_file
from decoding.engine import vocabulary
from decoding.engine.sampler import Sampler
from decoding.loading import load_drafter, loads_drafter, sampler_of
from models import diffusion
from models.attention import attention_mask
from models.head import freeze_embeddings, silence_others
from models.hidden_states import capture, check_layers
from models.markov import MarkovHead
from models.masks import Layout, causal, drafter_attention
from models.noise import NoiseInput
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, BaseModule, Optimization
from trainers.publishing import export_check
from trainers.runs.stored_states import store_states

PREVIOUS = "previous"  # of a batch: the token before each drafted one, in the drafter's vocabulary


class TargetStates(NamedTuple):
    """The outputs of one forward of the target over the clean tokens of a batch.

    Attributes:
        logits: [B, A, K, V] that predict every drafted token, over the drafter's vocabulary where
            that is a smaller one; None where they were not asked for.
        hidden_states: [B, S, H] of each layer that was asked for, at all S clean tokens of a row.
    """

    logits: Tensor | None
    hidden_states: tuple[Tensor, ...]


class DrafterModule(BaseModule):
    """The module of a drafter that predicts a block of tokens in one pass.

    It trains on packed draft blocks (`data.corruption.draft_blocks`): B rows of S clean tokens,
    each followed by A blocks of K tokens to draft. A method overrides `block_weight` and
    `block_losses`; a drafter that reads the target's hidden states names their layers in
    `target_layers` and overrides `draft_logits`. V is the drafter's vocabulary, H the target's
    hidden size.

    Args:
        network: The drafter.
        tokenizer: The target's tokenizer, with the drafter's mask and separator tokens.
        optimization: The settings of the optimizer and its schedule.
        target: The model that it drafts for; None where nothing of it is needed.
        method: The sampler that decodes with the drafter, a module of `decoding/samplers/`.
        block_size: Tokens drafted a cycle.
        target_name: The folder or Hub id that the export names as its target.
        draft_ids: [V], the target's tokens that are drafted; None: all of them, and padding. A
            drafter with a head for all computes only their logits. Other tokens have weight 0 in
            training.
        attention: The drafter's, one of `models.masks.DRAFTERS`: 'prefix_causal', or
            'bidirectional' as masked-diffusion models such as open-dCoder have it. The latter
            cannot share a prefix, so a step costs a forward of the row for each of its A blocks,
            and decoding has no cache of the drafter.
        shifted: Whether the drafter's output at a position predicts the token after it, as a causal
            LM's and open-dCoder's does: the separator then drafts the first token of a block.
        layout: Of draft blocks (`data.corruption.draft_blocks`). With 'pard' the drafter is a
            causal LM with exactly the target's vocabulary, which serving engines run: attention and
            outputs are a causal LM's, and where `draft_ids` names some tokens, the head's other
            rows are set to 0, so that an engine which computes all logits drafts them hardly ever.
        train_embeddings: Whether embeddings and head are trained with the layers. Frozen ones are
            the target's, and a step of a small drafter costs much less.
        markov_rank: Of a head that conditions each drafted token on the one before it
            (`models.markov`), trained on the answers' own tokens; None: there is none. The network
            then leaves to it what the token before tells, so it drafts worse without. It is in
            every process whole, so strategies that shard are refused.
        noise_layers: The drafter's decoder layers, 0-based, after which it reads candidates that
            are chosen with the noise of decoding (`models.noise`); None: it reads none. The
            matrices that take them up are in every process whole, too.
        train_drafter: Whether the drafter is trained; False: its Markov head and what it reads
            noise with alone, so `network` must be a trained drafter.

    Attributes:
        markov_head: The Markov head, or None.
        noise_input: What the drafter reads noise with, or None.
        beside: The settings of what is trained beside the network, {name: value}.
        knows_noise: Whether training knows the noise that its texts were chosen with (`noise_of`).
        target_layers: The target's decoder layers whose hidden states the drafter reads, 0-based
            (`models.hidden_states`).
        served_layouts: Layouts of draft blocks that serving engines run, without a Markov head.
    """

    target_layers: tuple[int, ...] = ()
    served_layouts: tuple[str, ...] = ("pard",)
    knows_noise = False
    stored_states: RowsWithStates | None = None  # training's rows, where states are read from disk

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.stored_states is not None:
            store_states(self, self.stored_states)

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimization: Optimization,
        target: PreTrainedModel | None = None,
        *,
        method: str,
        block_size: int,
        target_name: str,
        draft_ids: Tensor | None = None,
        attention: str = "prefix_causal",
        shifted: bool = False,
        layout: str = "separator",
        train_embeddings: bool = True,
        markov_rank: int | None = None,
        noise_layers: Sequence[int] | None = None,
        train_drafter: bool = True,
    ):
        super().__init__(network, tokenizer, optimization, target)
        self.layout = layout
        self.mask_id, self.sep_id = draft_token_ids(tokenizer, layout)
        if draft_ids is not None:
            draft_ids = torch.as_tensor(draft_ids)
            if target is not None:
                known = target.config.get_text_config().vocab_size
                vocabulary.check_vocabulary(None, known, draft_ids)
        if layout == "pard":
            if attention != "prefix_causal" or shifted:
                raise ValueError(
                    f"module.attention={attention} and module.shifted={shifted} are not allowed "
                    "with layout=pard, whose attention and outputs are a causal LM's"
                )
            if target is not None:
                _check_as_many(network, target)
            attention, network.config.pard_token = "causal", self.mask_id  # what vLLM reads
            if draft_ids is not None:
                silence_others(network, draft_ids)
        drafter_attention(attention)
        entry = getattr(network.config, "parade", None) or {}
        for key, name, begins in (
            ("markov_head", "a Markov head", "one of module.markov_rank"),
            ("noise_input", "a noise input", "one of module.noise_layers"),
        ):
            if entry.get(key):
                warnings.warn(
                    f"the drafter to start from has {name}, which is left behind: {begins} begins "
                    "anew",
                    stacklevel=2,
                )
        before = entry.get("attention", attention)
        if before != attention:
            warnings.warn(
                f"the drafter to start from was trained with attention={before}, and is now "
                f"trained with module.attention={attention}",
                stacklevel=2,
            )
        self.attention, self.shifted = attention, shifted
        self.draft_ids = draft_ids
        if not train_embeddings:
            freeze_embeddings(network)
        self.method, self.block_size, self.target_name = method, block_size, target_name
        self.markov_head = self.noise_input = None
        if markov_rank is not None:
            size = network.config.vocab_size if draft_ids is None else len(draft_ids)
            self.markov_head = MarkovHead(size, markov_rank)
            if train_drafter and layout in self.served_layouts:
                warnings.warn(
                    f"engines that serve layout={layout} draft without the Markov head, and a "
                    "drafter that is trained with one relies on it: for them give a finished "
                    "drafter its head, module.train_drafter=false",
                    stacklevel=2,
                )
        if noise_layers is not None:
            self.noise_input = self._new_noise_input(noise_layers)
        given = {"module.markov_rank": markov_rank, "module.noise_layers": noise_layers}
        self.beside = {name: value for name, value in given.items() if value is not None}
        if self.beside and optimization.ema is not None:
            values = " and ".join(f"{name}={value}" for name, value in self.beside.items())
            raise ValueError(
                f"optimization.ema={optimization.ema} is not allowed with {values}, of which no "
                "average is kept"
            )
        if not train_drafter:
            self._freeze_drafter()

    @property
    def hooked(self) -> bool:
        """Whether hooks of each step change the network's forward: those that read noise."""
        return self.noise_input is not None

    def _new_noise_input(self, layers: Sequence[int]) -> NoiseInput:
        given = f"module.noise_layers={list(layers)} is not allowed: "
        depth = self.network.config.num_hidden_layers
        if not self.knows_noise:
            raise ValueError(
                f"{given}{type(self).__name__} trains on texts whose noise it does not know, so it "
                "must be null"
            )
        # The last layer's own candidates are what is drafted.
        if not layers or [*layers] != sorted({*layers} & {*range(depth - 1)}):
            raise ValueError(
                f"{given}give layers of the drafter in their order, from 0 to {depth - 2}"
            )
        check_layers(self.network, layers)
        return NoiseInput(self.network.config.hidden_size, layers)

    def _freeze_drafter(self) -> None:
        """Train what is beside it alone; ValueError where that is nothing, or it is untrained."""
        refused = "module.train_drafter=false is not allowed: "
        if not self.beside:
            raise ValueError(
                f"{refused}nothing is left to train without module.markov_rank or "
                "module.noise_layers"
            )
        if hasattr(self.network, "peft_config"):
            raise ValueError(
                f"{refused}lora.rank adds adapters to the drafter, so give lora.rank=0"
            )
        if not self.is_trained():
            raise ValueError(
                f"{refused}the network to start from is no trained drafter of "
                f"method={self.method}; give the folder of one's export"
            )
        self.network.requires_grad_(False)

    def is_trained(self) -> bool:
        """Whether the network to start from is a trained drafter of this method."""
        entry = getattr(self.network.config, "parade", None) or {}
        return entry.get("method") == self.method

    def configure_model(self) -> None:
        if self.beside and hasattr(self.trainer.strategy, "shard"):
            raise ValueError(
                f"what {' and '.join(self.beside)} train beside the drafter must be whole in every "
                "process: give strategy=ddp, or null for them"
            )
        super().configure_model()

    @property
    def needs_target(self) -> frozenset[str]:
        """What training reads of the target: hidden states, where `target_layers` names any."""
        return frozenset([HIDDEN_STATES] if self.target_layers else [])

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The weights that `block_losses` returns, computed without a forward.

        Args:
            batch: Packed draft blocks, their targets as indices of the drafter's logits.

        Returns:
            [B, A, K].
        """
        raise NotImplementedError

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self.block_weight(self.in_draft_vocabulary(batch))

    def in_draft_vocabulary(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch whose targets are indices of the drafter's logits.

        Args:
            batch: Packed draft blocks, `target` [B, A, K] in the target's token ids.

        Returns:
            The batch with `target` mapped; a token that the drafter does not have becomes 0 and is
            not in `masked` [B, A, K], so it has no weight. Of stored distributions the
            probability of such a token becomes 0. Added is `previous` [B, A, K], the drafted token
            before each; -1 for the first, and for one that the drafter does not have.
        """
        if self.draft_ids is None:
            return {**batch, PREVIOUS: _before(batch["target"])}
        target, known = self._mapped(batch["target"])
        mapped = {**batch, "target": target, "masked": batch["masked"] & known}
        mapped[PREVIOUS] = _before(target.masked_fill(~known, -1))
        if "teacher_ids" in batch:
            ids, known = self._mapped(batch["teacher_ids"])
            mapped |= {"teacher_ids": ids, "teacher_probs": batch["teacher_probs"] * known}
        return mapped

    def _mapped(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of the drafter's logits of tokens, and which of them it has (others become 0)."""
        ids, row = self.draft_ids.to(tokens.device).sort()
        at = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
        known = ids[at] == tokens
        return row[at] * known, known

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        """The unreduced loss and weight of every drafted token.

        Args:
            logits: [B, A, K, V], the drafter's.
            batch: Packed draft blocks, their targets as indices of the drafter's logits.
            states: The outputs of the target that `needs_target` names; None if it names none.

        Returns:
            (loss, weight), each [B, A, K].
        """
        raise NotImplementedError

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        """The drafter's logits of every drafted token.

        Args:
            batch: Packed draft blocks.
            states: The outputs of the target that `needs_target` names; None if it names none.

        Returns:
            [B, A, K, V].
        """
        return diffusion.draft_logits(
            self.network, batch, self.draft_ids, self.attention, self.shifted
        )

    def forward_pass(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The drafter's logits and their loss, after one forward of the target at most.

        Args:
            batch: What `in_draft_vocabulary` returned.

        Returns:
            (logits [B, A, K, V], loss [B, A, K], weight [B, A, K]); with a Markov head the logits
            are conditioned on the batch's own tokens. Of a drafter that reads noise the loss is the
            sum of the last layer's and of those of all layers that candidates are read after.
        """
        states, needs = None, self.needs_target
        if needs:
            states = self.target_states(batch, self.target_layers, DISTRIBUTIONS in needs)
        with self._reading_noise(batch, states) as early:
            logits = self.draft_logits(batch, states)
        if self.markov_head is not None:
            logits = logits + self.markov_head(batch[PREVIOUS])
        loss, weight = self.block_losses(logits, batch, states)
        for read in early:
            loss = loss + self.block_losses(read, batch, states)[0]
        return logits, loss, weight

    @contextmanager
    def _reading_noise(
        self, batch: dict[str, Tensor], states: TargetStates | None
    ) -> Iterator[list[Tensor]]:
        """A context in which the drafter reads the noise of a batch (`NoiseInput.reading`)."""
        if self.noise_input is None:
            yield []
            return
        noise = self.noise_of(batch, states)
        K = noise.shape[2]
        span = diffusion.drafting(K, self.attention, self.shifted)
        ids = None if self.draft_ids is None else self.draft_ids.to(noise.device)
        form = span, block_width(self.layout, K), ids
        with self.noise_input.reading(self.network, noise, *form) as early:
            yield early

    def noise_of(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        """Noise that the target may have chosen a batch's tokens with, times their temperatures.

        Args:
            batch: What `in_draft_vocabulary` returned.
            states: The outputs of the target that `needs_target` names.

        Returns:
            [B, A, K, V], -inf for tokens that are never drafted.
        """
        raise NotImplementedError

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        _, loss, weight = self.forward_pass(self.in_draft_vocabulary(batch))
        return loss, weight

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The loss, and the teacher-forced accuracy at each position of a block.

        Args:
            batch: Packed draft blocks.

        Returns:
            {name: (sum, total)} with `loss` and `accuracy_1` to `accuracy_<block_size>`; a token
            that the drafter does not have counts as a wrong one.
        """
        known = self.in_draft_vocabulary(batch)
        logits, loss, weight = self.forward_pass(known)
        right = (logits.argmax(-1) == known["target"]) & known["masked"]
        metrics = {"loss": ((loss * weight).sum(), weight.sum())}
        for i in range(min(self.block_size, right.shape[-1])):
            metrics[f"accuracy_{i + 1}"] = (right[..., i].sum(), batch["masked"][..., i].sum())
        return metrics

    def teacher_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """The target's logits for every drafted token, conditioned on the clean tokens before it.

        Args:
            batch: Packed draft blocks.

        Returns:
            [B, A, K, V], over the drafter's vocabulary.
        """
        logits = self.target_states(batch).logits
        assert logits is not None
        return logits

    @torch.no_grad()
    def target_states(
        self, batch: dict[str, Tensor], layers: Sequence[int] = (), logits: bool = True
    ) -> TargetStates:
        """The outputs of one forward of the target over the clean tokens, without gradients.

        Args:
            batch: Packed draft blocks.
            layers: Decoder layers whose outputs are returned, 0-based (`models.hidden_states`).
            logits: Whether logits are returned, which are by far the larger.

        Returns:
            The logits at the drafted positions, or None, and a tensor for each layer. States that
            the batch has are taken from it.
        """
        assert self.target is not None
        if STATES in batch:
            assert not logits  # `with_states` sees to it
            return TargetStates(None, batch[STATES].chunk(len(layers), -1))
        B, A, K = batch["target"].shape
        S = batch["input_ids"].shape[1] - A * block_width(self.layout, K)
        layout = Layout(batch["document"], batch["position_ids"], batch["block"])
        layout = layout.map(lambda t: t[:, :S])
        kind = self.target.config._attn_implementation
        with capture(self.target, layers) as hidden_states:
            found = self.target(
                input_ids=batch["input_ids"][:, :S],
                position_ids=batch["position_ids"][:, :S],
                attention_mask=attention_mask(causal, layout, kind),
                use_cache=False,
                logits_to_keep=0 if logits else 1,  # 0: of all tokens
            ).logits
        # Of a target that is spread, layers have devices of their own.
        states = tuple(state.to(found.device) for state in hidden_states)
        if not logits:
            return TargetStates(None, states)
        # Token start + i is predicted at the position before it.
        at = batch["start"].unsqueeze(-1) + torch.arange(K, device=found.device) - 1
        rows = torch.arange(B, device=found.device)[:, None, None]
        found = found[rows, at.clamp(0, S - 1)]
        if self.draft_ids is not None:
            found = found[..., self.draft_ids.to(found.device)]
        return TargetStates(found, states)

    def sampler(self) -> Sampler | None:
        if self.target is None:
            return None
        entry = self.export_config()
        if self.draft_ids is not None:
            entry["draft_ids"] = self.draft_ids
        if self.markov_head is not None:
            entry["markov"] = self.markov_head
        if self.noise_input is not None:
            entry["noise"] = self.noise_input
        return sampler_of(entry, self.target, self.tokenizer, self.network)

    def export_config(self) -> dict:
        return {
            "method": self.method,
            "target": self.target_name,
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "attention": self.attention,
            **({"shifted": True} if self.shifted else {}),
            "block_size": self.block_size,
            "mask_id": self.mask_id,
            **({} if self.sep_id is None else {"sep_id": self.sep_id}),
            **({} if self.draft_ids is None else {vocabulary.KEY: vocabulary.FILE}),
            **({} if self.markov_head is None else {"markov_head": True}),
            **({} if self.noise_input is None else {"noise_input": True}),
        }

    def export_files(self) -> dict[str, str | bytes]:
        files = {}
        if self.draft_ids is not None:
            files[vocabulary.FILE] = vocabulary.stored(self.draft_ids)
        if self.markov_head is not None:
            files[markov_file.FILE] = markov_file.stored(self.markov_head)
        if self.noise_input is not None:
            files[noise_file.FILE] = noise_file.stored(self.noise_input)
        return files

    def check_vocabulary(self, network: PreTrainedModel) -> None:
        """Check the network's vocabulary against the target's.

        The tokenizer is checked too unless the drafter has a vocabulary of its own, or none.
        """
        size = getattr(network.config, "vocab_size", None)
        if size is not None and self.draft_ids is None:
            super().check_vocabulary(network)
        if self.target is not None:
            theirs = self.target.config.get_text_config().vocab_size
            vocabulary.check_vocabulary(size, theirs, self.draft_ids)

    def check_export(self, folder: Path, network: PreTrainedModel) -> None:
        entry = self.export_config()
        if loads_drafter(entry):  # a class of the sampler's own
            export_check.check_tokenizer(self.tokenizer, folder, network.config.model_type)
        else:
            super().check_export(folder, network)
        again = load_drafter(entry, str(folder), network.dtype).to(network.device).eval()
        export_check.check_weights(network, again)
        if self.markov_head is not None:
            head = markov_file.read(folder / markov_file.FILE).to(network.device)
            export_check.check_weights(self.markov_head, head)
        if self.noise_input is not None:
            read = noise_file.read(folder / noise_file.FILE).to(network.device)
            export_check.check_weights(self.noise_input, read)
        if (sampler := self.sampler()) is not None:
            export_check.check_drafts(sampler, network, again)


def _before(tokens: Tensor) -> Tensor:
    """The token before each of a block's tokens [..., K]; -1 for the first."""
    return pad(tokens, (1, -1), value=-1)


def _check_as_many(network: PreTrainedModel, target: PreTrainedModel) -> None:
    """Refuse a PARD drafter without exactly its target's vocabulary: no engine would run it."""
    ours, theirs = (n.config.get_text_config().vocab_size for n in (network, target))
    if ours != theirs:
        raise ValueError(
            f"layout=pard: the drafter has {ours} tokens and its target {theirs}, and engines want "
            "as many: begin with layers of the target, recipe=diffusion_adapt layout=pard"
        )
