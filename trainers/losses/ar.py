"""Next-token loss of autoregressive models on packed rows."""

from torch import Tensor

from trainers.losses.diffusion import token_nll


def next_token(
    logits: Tensor, input_ids: Tensor, document: Tensor, trained: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the next-token loss -log p(x_{i+1} | x_{<=i}) and its weight, each [B, S-1].

    The weight is 1 where token i + 1 is trained and belongs to the document of token i, else 0.

    Args:
        logits: [B, S, V].
        input_ids: [B, S].
        document: [B, S], number of the document of each token, -1 for padding.
        trained: [B, S], 1 where a token is a training target.
    """
    return token_nll(logits[:, :-1], input_ids[:, 1:]), next_token_weight(document, trained)


def next_token_weight(document: Tensor, trained: Tensor) -> Tensor:
    """Compute the weight of `next_token`, [B, S-1], without logits."""
    same = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
    return (same & trained[:, 1:].bool()).float()
