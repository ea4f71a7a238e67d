"""`DrafterModule`, the Lightning module that every block drafter's module extends."""

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.arguments import BlockSize
from data.rows.states import RowsWithStates
from data.text.layouts import layout_of
from data.text.tokenizer import draft_token_ids, fingerprint
from decoding.drafting.block_sampler import BlockSampler
from decoding.engine import vocabulary
from decoding.loading import load_drafter, loads_drafter, sampler_of, target_fingerprint
from models import diffusion
from models.head import freeze_embeddings, silence_others
from models.masks import drafter_attention
from models.sizes import Rank
from models.windows import windows_of
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, BaseModule, Optimization
from trainers.draft_vocabulary import in_draft_vocabulary
from trainers.heads import AuxiliaryHead, auxiliary_heads
from trainers.publishing import export_check
from trainers.runs.stored_states import store_states
from trainers.target_states import TargetStates, target_states


class DrafterModule(BaseModule):
    """The module of a drafter that predicts a block of tokens in one pass.

    It trains on packed draft blocks (`data.corruption.draft_blocks`): B rows of S clean tokens,
    each followed by A blocks of K tokens to draft. A method overrides `block_weight` and
    `block_losses`, and never `weight`; a drafter that reads the target's hidden states names their
    layers in `target_layers` and overrides `draft_logits`. V is the drafter's vocabulary, H the
    target's hidden size.

    Args:
        network: The drafter.
        tokenizer: The target's tokenizer, with the layout's draft tokens.
        optimization: The settings of the optimizer and its schedule.
        target: The model that it drafts for; None if nothing of it is needed.
        method: The sampler that decodes with the drafter, a module of `decoding/samplers/`.
        block_size: Tokens drafted per cycle.
        target_name: The folder or Hub id that the export names as its target.
        draft_ids: [V], the target's tokens that are drafted, whose logits alone are computed; None:
            all of them, and padding. Other tokens have weight 0 in training.
        attention: One of `models.masks.DRAFTERS`: 'prefix_causal', or 'bidirectional' as in
            masked-diffusion models such as open-dCoder. The latter cannot share a prefix: a step
            runs the row once for each of its A blocks, and decoding has no drafter cache.
        shifted: Whether the output at a position predicts the token after it, as in a causal LM
            and open-dCoder: the separator then drafts the first token of a block.
        layout: Layout of draft blocks, one of `layouts` (`data.text.layouts`). With 'pard' and
            `draft_ids`, the head's other rows are set to 0, so that an engine which computes all
            logits hardly ever drafts them.
        train_embeddings: Whether embeddings and head are trained. Frozen ones are the target's,
            and a step of a small drafter costs much less.
        markov_rank: Rank of a head that conditions each drafted token on the one before it
            (`models.markov`), or None. The drafter relies on it, so it drafts worse without.
        train_drafter: Whether the drafter is trained; False: its auxiliary heads alone, so
            `network` must be a trained drafter.

    Attributes:
        layouts: Names of the layouts that the module can train.
        target_layers: The target's decoder layers whose hidden states the drafter reads, 0-based
            (`models.hidden_states`).
    """

    layouts: tuple[str, ...] = ("separator", "pard")
    target_layers: tuple[int, ...] = ()
    stored_states: RowsWithStates | None = None  # training's rows, where states are read from disk
    states_engine: dict | None = None  # what makes them, with its options; None: this process

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # It would count tokens that a reduced vocabulary lacks: wrong without a sign.
        if "weight" in vars(cls):
            raise TypeError(f"{cls.__name__} overrides `weight`: override `block_weight` instead")

    def __init__(
        self,
        network: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimization: Optimization,
        target: PreTrainedModel | None = None,
        *,
        method: str,
        block_size: BlockSize,
        target_name: str,
        draft_ids: Tensor | None = None,
        attention: str = "prefix_causal",
        shifted: bool = False,
        layout: str = "separator",
        train_embeddings: bool = True,
        markov_rank: Rank | None = None,
        train_drafter: bool = True,
    ):
        super().__init__(network, tokenizer, optimization)
        self.method, self.block_size, self.target_name = method, block_size, target_name
        self.draft_ids = None if draft_ids is None else torch.as_tensor(draft_ids)
        self.layout, self.shifted = layout_of(layout, self.layouts), shifted
        self.attention = self.layout.resolve_attention(attention, shifted)
        self.mask_id, self.sep_id = draft_token_ids(tokenizer, layout)
        self.attach_target(target)
        self._prepare_network()
        if not train_embeddings:
            freeze_embeddings(network)
        heads = auxiliary_heads(network, self.draft_ids, markov_rank)
        self._head_keys = [head.key for head in heads]
        for head in heads:
            self._add_head(head, train_drafter)
        if not train_drafter:
            self._freeze_drafter()

    def attach_target(self, target: PreTrainedModel | None) -> None:
        super().attach_target(target)
        if target is None:
            return
        _ = self.target_fingerprint  # of the weights as they are now, not when training ends
        config, known = self.network.config, target.config.get_text_config().vocab_size
        own = getattr(config, "vocab_size", None)
        vocabulary.check_vocabulary(own, known, self.draft_ids)
        if own is not None:
            self.layout.check_vocabulary(own, known)

    def _prepare_network(self) -> None:
        """Write the layout's settings into the network; warn if its attention changes."""
        drafter_attention(self.attention)
        config = self.network.config
        found, width = windows_of(config), self.layout.width(self.block_size)
        if found is not None and found.narrowest < width:
            raise ValueError(
                f"block_size={self.block_size} is not allowed: a draft block of {width} tokens "
                f"does not fit into the window of {found.narrowest} tokens that layers of the "
                f"drafter have: give at most {self.block_size - width + found.narrowest}"
            )
        entry = getattr(config, "parade", None) or {}
        before = entry.get("attention", self.attention)
        if before != self.attention:
            warnings.warn(
                f"the drafter to start from was trained with attention={before}, and is now "
                f"trained with module.attention={self.attention}",
                stacklevel=4,
            )
        if self.layout.mask_key is not None:
            setattr(config, self.layout.mask_key, self.mask_id)
            if self.draft_ids is not None:
                silence_others(self.network, self.draft_ids)

    def _add_head(self, head: AuxiliaryHead, train_drafter: bool) -> None:
        if self.optimization.ema is not None:
            raise ValueError(
                f"optimization.ema={self.optimization.ema} is not allowed with {head.option}, of "
                "which no average is kept"
            )
        if train_drafter and self.layout.served:
            warnings.warn(
                f"engines that serve layout={self.layout.name} draft without the Markov head, and "
                "a drafter that is trained with one relies on it: for them give a finished "
                "drafter its head, module.train_drafter=false",
                stacklevel=4,
            )
        self.add_module(head.key, head)

    def _freeze_drafter(self) -> None:
        """Train the heads alone; ValueError without heads or with an untrained drafter."""
        refused = "module.train_drafter=false is not allowed: "
        if not (alone := self.auxiliary()):
            raise ValueError(f"{refused}nothing is left to train without a markov_rank")
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
        for p in alone:
            p.requires_grad_(True)

    def auxiliary(self) -> list[nn.Parameter]:
        named = [getattr(self, key) for key in self._head_keys]
        return [p for head in named for p in head.parameters()]

    def is_trained(self) -> bool:
        """Return whether the network to start from is a trained drafter of this method."""
        entry = getattr(self.network.config, "parade", None) or {}
        return entry.get("method") == self.method

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.stored_states is not None:
            store_states(self, self.stored_states)

    @property
    def heads(self) -> tuple[AuxiliaryHead, ...]:
        """The auxiliary heads (`trainers.heads`); each is a submodule by its key."""
        return tuple(getattr(self, key) for key in self._head_keys)

    @property
    def trained(self) -> dict[str, nn.Module]:
        return {**super().trained, **{head.key: head for head in self.heads}}

    @property
    def needs_target(self) -> frozenset[str]:
        """HIDDEN_STATES, if `target_layers` names any layer."""
        return frozenset([HIDDEN_STATES] if self.target_layers else [])

    def block_weight(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the weights [B, A, K] of `block_losses`, on the same batch, without a forward."""
        raise NotImplementedError

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self.block_weight(self.in_draft_vocabulary(batch))

    def in_draft_vocabulary(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch whose targets are indices of the drafter's logits."""
        return in_draft_vocabulary(batch, self.draft_ids)

    def block_losses(
        self, logits: Tensor, batch: dict[str, Tensor], states: TargetStates | None
    ) -> tuple[Tensor, Tensor]:
        """Return the unreduced loss and weight of every drafted token, each [B, A, K].

        Args:
            logits: [B, A, K, V], the drafter's.
            batch: Packed draft blocks, their targets as indices of the drafter's logits.
            states: The outputs of the target that `needs_target` names; None if it names none.
        """
        raise NotImplementedError

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        """Return the drafter's logits [B, A, K, V] of every token of packed draft blocks.

        `states` are the outputs of the target that `needs_target` names; None if it names none.
        """
        return diffusion.draft_logits(
            self.network, batch, self.draft_ids, self.attention, self.shifted
        )

    def forward_pass(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [B, A, K, V], loss and weight [B, A, K], with at most one target forward.

        The batch comes from `in_draft_vocabulary`; a Markov head reads the batch's own tokens.
        """
        states, needs = None, self.needs_target
        if needs:
            states = self.target_states(batch, self.target_layers, DISTRIBUTIONS in needs)
        logits = self.draft_logits(batch, states)
        for head in self.heads:
            logits = logits + head.added_logits(batch)
        return logits, *self.block_losses(logits, batch, states)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        _, loss, weight = self.forward_pass(self.in_draft_vocabulary(batch))
        return loss, weight

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss` and the teacher-forced `accuracy_<i>` at each position of a block."""
        known = self.in_draft_vocabulary(batch)
        logits, loss, weight = self.forward_pass(known)
        right = (logits.argmax(-1) == known["target"]) & known["masked"]
        metrics = {"loss": ((loss * weight).sum(), weight.sum())}
        for i in range(min(self.block_size, right.shape[-1])):
            metrics[f"accuracy_{i + 1}"] = (right[..., i].sum(), batch["masked"][..., i].sum())
        return metrics

    def target_states(
        self, batch: dict[str, Tensor], layers: Sequence[int] = (), logits: bool = True
    ) -> TargetStates:
        """Run the target once over the clean tokens of packed draft blocks (`target_states`)."""
        assert self.target is not None
        _, A, K = batch["target"].shape
        clean = batch["input_ids"].shape[1] - A * self.layout.width(K)
        return target_states(self.target, batch, clean, layers, logits, self.draft_ids)

    def sampler(self) -> BlockSampler | None:
        if self.target is None:
            return None
        parts = {head.argument: head for head in self.heads}
        if self.draft_ids is not None:
            parts["draft_ids"] = self.draft_ids
        entry = self.export_config()
        sampler = sampler_of(entry, self.target, self.tokenizer, self.network, **parts)
        assert isinstance(sampler, BlockSampler)
        return sampler

    @cached_property
    def target_fingerprint(self) -> str | None:
        """The fingerprint of the target's weights; None where they are not on this machine."""
        return target_fingerprint(self.target_name)

    def export_config(self) -> dict:
        known = self.target_fingerprint
        return {
            "method": self.method,
            "target": self.target_name,
            **({} if known is None else {"target_fingerprint": known}),
            "tokenizer_fingerprint": fingerprint(self.tokenizer),
            "attention": self.attention,
            **({"shifted": True} if self.shifted else {}),
            "block_size": self.block_size,
            **({} if self.mask_id is None else {"mask_id": self.mask_id}),
            **({} if self.sep_id is None else {"sep_id": self.sep_id}),
            **({} if self.draft_ids is None else {vocabulary.KEY: vocabulary.FILE}),
            **{head.key: True for head in self.heads},
        }

    def export_files(self) -> dict[str, str | bytes]:
        files: dict[str, str | bytes] = {head.file: head.stored() for head in self.heads}
        if self.draft_ids is not None:
            files[vocabulary.FILE] = vocabulary.stored(self.draft_ids)
        return files

    def check_vocabulary(self, network: PreTrainedModel) -> None:
        """Check the network against the tokenizer, unless it has a vocabulary of its own, or none.

        That it fits the target was checked when this was attached.
        """
        if getattr(network.config, "vocab_size", None) is not None and self.draft_ids is None:
            super().check_vocabulary(network)

    def check_export(self, folder: Path, network: PreTrainedModel) -> None:
        entry = self.export_config()
        if loads_drafter(entry):  # a class of the sampler's own
            export_check.check_tokenizer(self.tokenizer, folder, network.config.model_type)
        else:
            super().check_export(folder, network)
        again = load_drafter(entry, str(folder), network.dtype).to(network.device).eval()
        export_check.check_weights(network, again)
        for head in self.heads:
            export_check.check_weights(head, head.read(folder, network.device))
        if (sampler := self.sampler()) is not None:
            export_check.check_drafts(sampler, network, again)
