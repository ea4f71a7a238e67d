"""A toy drafter that reads one hidden state of its target, and has no embedding of its own."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class ReaderConfig(PreTrainedConfig):
    """hidden_size: of the target. draft_size: Vd, tokens that it knows. block_size: K."""

    model_type = "toy_reader"

    def __init__(self, hidden_size: int = 8, draft_size: int = 4, block_size: int = 2, **kwargs):
        self.hidden_size, self.draft_size, self.block_size = hidden_size, draft_size, block_size
        super().__init__(**kwargs)


class Reader(PreTrainedModel):
    """Logits of the next K tokens from the state before the last committed token."""

    config_class = ReaderConfig
    base_model_prefix = ""
    main_input_name = "states"

    def __init__(self, config: ReaderConfig):
        super().__init__(config)
        self.position = nn.Embedding(config.block_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.draft_size, bias=False)
        self.post_init()

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """One state: what an export is compared with."""
        return {"states": torch.linspace(-1, 1, self.config.hidden_size)[None]}

    def forward(self, states: Tensor) -> Tensor:
        """states [..., H] -> logits [..., K, Vd]."""
        return self.head(torch.tanh(states.unsqueeze(-2) + self.position.weight))


def reader(target: str, draft_size: int, block_size: int, tokenizer) -> Reader:
    """A new one, of the width of a target."""
    from transformers import AutoConfig

    width = AutoConfig.from_pretrained(target).hidden_size
    return Reader(ReaderConfig(width, draft_size, block_size))
