"""Noise as an input: a block drafter that reads the Gumbel noise its drafts are verified with.

Under `coupled` and `tree` verification the text is argmax(log p_i + g_i) at every position i, and
the keyed noise g is known before anything is drafted. Given p, the text is a function of it: so a
drafter that reads the noise can know in one pass what independent positions cannot, the tokens that
are drafted before a position.

After some of its decoder layers the drafter reads candidates of the whole block,

    c_i = argmax(log q_i / T + g_i),    log q = log softmax(head(norm(h))),

by its own head, and the hidden state h_i of each position takes up the candidate *before* it,

    h_i <- h_i + W e(c_{i-1}),

with e the drafter's embedding, divided by its root mean square (embeddings of language models are
small beside hidden states, and W would learn slowly), and one matrix W for each such layer. The
first position of a block takes up nothing: the drafter has read the token before it. What it drafts
in the end is chosen as without: argmax(log q_i / T + g_i), with the log q of the last layer. At
temperature 0 the noise is nothing, and the candidates are those of greedy decoding.

Parallel token prediction (arXiv 2512.21323) feeds a drafter the uniform numbers of its sampling;
ours are the Gumbel noise that drafter and verifier share, and are read as the tokens they lead to.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import pad, rms_norm
from transformers import PreTrainedModel

from models.hidden_states import decoder_layer


class NoiseInput(nn.Module):
    """What a drafter reads of the noise: the matrices W, one for each layer that it is read after.

    They begin at 0, so a new one changes nothing.

    Args:
        size: H, the drafter's hidden size.
        layers: The drafter's decoder layers after which candidates are read, 0-based.
    """

    def __init__(self, size: int, layers: Sequence[int]):
        super().__init__()
        self.layers = tuple(layers)
        self.project = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in self.layers)
        for project in self.project:
            nn.init.zeros_(project.weight)

    @contextmanager
    def reading(
        self,
        network: PreTrainedModel,
        noise: Tensor,
        span: slice,
        width: int,
        ids: Tensor | None = None,
    ) -> Iterator[list[Tensor]]:
        """A context in which each forward of a drafter reads the noise of its draft blocks.

        Args:
            network: The drafter, a causal LM. The last tokens of its input are blocks of `width`.
            noise: T g, the noise times the temperature, [B, A, K, n], for A blocks of each of B
                requests; -inf for tokens that are never drafted. The rows of the input may also be
                B A, with a block each.
            span: Of a block's tokens the K whose outputs draft it.
            width: Tokens of a block.
            ids: [n], the token of each of the drafter's logits; None: token i is i.

        Yields:
            A list that after each forward has the logits [B, A, K, n] that candidates were chosen
            by, of each layer.
        """
        early: list[Tensor] = []

        def hook(project: nn.Linear):
            def read(layer: nn.Module, arguments: tuple, output: Tensor | tuple):
                hidden = output[0] if isinstance(output, tuple) else output
                changed, logits = self._read(project, network, hidden, noise, span, width, ids)
                early.append(logits)
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            return read

        with ExitStack() as stack:
            for i, project in zip(self.layers, self.project):
                handle = decoder_layer(network, i).register_forward_hook(hook(project))
                stack.callback(handle.remove)
            yield early

    def _read(
        self,
        project: nn.Linear,
        network: PreTrainedModel,
        hidden: Tensor,
        noise: Tensor,
        span: slice,
        width: int,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after a layer with the candidates' embeddings, and their logits."""
        B, A, _, n = noise.shape
        start = hidden.shape[1] - B * A * width // len(hidden)
        rest, blocks = hidden[:, :start], hidden[:, start:]
        drafted = blocks.reshape(B, A, width, -1)[:, :, span]
        logits = network.get_output_embeddings()(network.get_decoder().norm(drafted))
        logits = logits[..., :n]
        candidates = (logits.detach() + noise).argmax(-1)[:, :, :-1]
        if ids is not None:
            candidates = ids[candidates]
        embedded = network.get_input_embeddings()(candidates).to(project.weight.dtype)
        read = project(rms_norm(embedded, embedded.shape[-1:])).to(hidden.dtype)
        before, _, _ = span.indices(width)
        read = pad(read, (0, 0, before + 1, width - before - 1 - read.shape[2]))
        return torch.cat([rest, blocks + read.reshape(blocks.shape)], 1), logits


def posterior_gumbel(probs: Tensor, token: Tensor, generator: Generator) -> Tensor:
    """Gumbel noise given what was chosen with it: g ~ P(g | argmax_v(log p_v + g_v) = x).

    The top-down construction of Maddison et al. (arXiv 1411.0030), in exponential variables: e^-g_v
    ~ Exp(1), and e^-g_v / p_v is an arrival time of rate p_v. The first arrival, E_0 ~ Exp(1), is
    x's, and by memorylessness every other token arrives as much later as it would have after 0:

        e^-g_x = p_x E_0,    e^-g_v = p_v E_0 + E_v,    E_v ~ Exp(1).

    Args:
        probs: p, [..., V].
        token: x, int64 [...]; -1 where another token was chosen than these V.
        generator: What the noise is drawn with; it is of the tensors' device.

    Returns:
        g [..., V]; where x is drawn from p, its distribution is that of unconditional noise.
    """
    first = probs.new_empty(*token.shape, 1).exponential_(generator=generator)
    later = torch.empty_like(probs).exponential_(generator=generator)
    chosen = token.unsqueeze(-1)
    known = later.gather(-1, chosen.clamp_min(0)) * (chosen < 0)
    later.scatter_(-1, chosen.clamp_min(0), known)
    arrival = later.addcmul_(probs, first)
    return arrival.clamp_min_(torch.finfo(probs.dtype).tiny).log_().neg_()
