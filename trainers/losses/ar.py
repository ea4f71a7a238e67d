"""Next-token loss of an autoregressive model on packed rows."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def next_token(
    logits: Tensor, input_ids: Tensor, document: Tensor, trained: Tensor
) -> tuple[Tensor, Tensor]:
    """-log p(x_{i+1} | x_{<=i}) and its weight, both [B, S-1].

    logits [B, S, V]; input_ids, document, trained [B, S]. The weight is 1 where token i + 1 is
    trained and continues the document of token i.
    """
    return token_nll(logits[:, :-1], input_ids[:, 1:]), next_token_weight(document, trained)


def next_token_weight(document: Tensor, trained: Tensor) -> Tensor:
    """The weight of `next_token`: [B, S-1]."""
    same = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
    return (same & trained[:, 1:].bool()).float()
