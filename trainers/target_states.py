"""The target's outputs that train a drafter: logits and hidden states of the clean tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.corruption.draft_blocks import STATES
from models.attention import attention_inputs
from models.hidden_states import capture
from models.masks import Layout, causal
from models.placement import input_device


class TargetStates(NamedTuple):
    """The outputs of one forward of the target over the clean tokens of a batch.

    Attributes:
        logits: [B, A, K, V] that predict every drafted token, over the drafter's vocabulary if that
            is smaller; None if not asked for.
        hidden_states: [B, S, H] of each requested layer, at all S clean tokens of a row.
    """

    logits: Tensor | None
    hidden_states: tuple[Tensor, ...]


@torch.no_grad()
def target_states(
    target: PreTrainedModel,
    batch: dict[str, Tensor],
    clean: int,
    layers: Sequence[int] = (),
    logits: bool = True,
    draft_ids: Tensor | None = None,
) -> TargetStates:
    """Run the target once over the clean tokens of a batch, without gradients.

    Args:
        target: The model.
        batch: Packed draft blocks (`data.corruption.draft_blocks`); hidden states in it are reused.
        clean: S, clean tokens of a row.
        layers: Decoder layers whose outputs are returned, 0-based (`models.hidden_states`).
        logits: Whether logits are returned, which are by far the larger.
        draft_ids: [V], the tokens whose logits are returned; None: all.
    """
    if STATES in batch:
        assert not logits  # `with_states` sees to it
        return TargetStates(None, batch[STATES].chunk(len(layers), -1))
    layout = Layout(batch["document"], batch["position_ids"], batch["block"])
    layout = layout.map(lambda t: t[:, :clean])
    network = target if logits else target.get_decoder()  # without the head
    with capture(target, layers) as hidden_states:
        output = network(
            input_ids=batch["input_ids"][:, :clean],
            position_ids=batch["position_ids"][:, :clean],
            **attention_inputs(target, causal, layout),
            use_cache=False,
        )
    # The layers of a target that is spread have devices of their own.
    states = tuple(state.to(input_device(target)) for state in hidden_states)
    if not logits:
        return TargetStates(None, states)
    found = output.logits
    # Token start + i is predicted at the position before it.
    B, _, K = batch["target"].shape
    at = batch["start"].unsqueeze(-1) + torch.arange(K, device=found.device) - 1
    rows = torch.arange(B, device=found.device)[:, None, None]
    found = found[rows, at.clamp(0, clean - 1)]
    if draft_ids is not None:
        found = found[..., draft_ids.to(found.device)]
    return TargetStates(found, states)
