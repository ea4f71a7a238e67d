"""Autoregressive training: a causal LM from scratch, or fine-tuned."""

from torch import Tensor

from models.attention import attention_inputs
from models.masks import Layout, causal
from trainers.base import BaseModule
from trainers.losses.ar import next_token, next_token_weight


class Autoregressive(BaseModule):
    """The module of causal LMs: next-token loss, without attention across documents."""

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return next_token_weight(batch["document"], batch["trained"])

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        document = batch["document"]
        layout = Layout(document, batch["position"], document)
        logits = self.network(
            input_ids=batch["input_ids"],
            position_ids=batch["position"],
            **attention_inputs(self.network, causal, layout),
            use_cache=False,
        ).logits
        return next_token(logits, batch["input_ids"], document, batch["trained"])
