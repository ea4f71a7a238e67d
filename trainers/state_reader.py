"""`StateReaderModule`, the module of drafters that read the target's hidden states."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from decoding.engine import vocabulary
from trainers.soft_targets import SoftTargetModule
from trainers.target_states import TargetStates


class StateReaderModule(SoftTargetModule):
    """The module of a drafter that reads the target's states and has their embeddings or head.

    Its network (`models.draft_head`) names the layers that it reads, and the tokens that its own
    head covers. A method overrides `block_weight` and `draft_states`.

    Args:
        network: The drafter.
        *args, **kwargs: See `SoftTargetModule`.
    """

    def __init__(self, network, *args, **kwargs):
        super().__init__(network, *args, draft_ids=network.draft_ids, **kwargs)
        self.target_layers = network.target_layer_ids

    @abstractmethod
    def draft_states(self, batch: dict[str, Tensor], states: Sequence[Tensor]) -> Tensor:
        """Return last hidden states [B, A, K, H] of all drafted tokens of a batch.

        `states` is [B, S, H] for each layer that the drafter reads.
        """

    def attach_target(self, target) -> None:
        if target is not None:
            self.network.check_fits(target)
        super().attach_target(target)

    def draft_logits(self, batch: dict[str, Tensor], states: TargetStates | None) -> Tensor:
        assert states is not None
        hidden = self.draft_states(batch, states.hidden_states)
        return self.network.logits(hidden, self.target)

    def export_config(self) -> dict:
        entry = super().export_config()
        entry.pop(vocabulary.KEY, None)  # the weights hold it (`d2t`)
        return entry

    def export_files(self) -> dict[str, str | bytes]:
        files = super().export_files()
        files.pop(vocabulary.FILE, None)
        return files
