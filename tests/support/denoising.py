"""Tiny masked diffusion LMs, and a straightforward block-wise sampler without any of ours."""

import torch

from decoding.masked.draft_graph import graph_of
from decoding.samplers.denoise import DenoiseSampler
from decoding.samplers.spiffy import SpiffySampler
from tests.support import tiny

V = 12  # tokens; the mask is number V
L = 4  # tokens of a block
KINDS = ("block_causal", "bidirectional")
PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [11, 10, 2]]
SEEDS = [5, 71, 3, 900]
PAPER = graph_of(  # the Spiffy paper, Fig. 2
    L, 1, [[(1, 1)], [(2, 1)], [(1, 1), (2, 1)], [(1, 1), (3, 1)], [(1, 1), (2, 1), (3, 1)]]
)


def network(seed=0, scale=3.0, **config):
    """A random network in float64 whose mask is never its first choice."""
    model = tiny.causal_lm(V + 1, seed=seed, scale=scale, **config)
    with torch.no_grad():
        model.lm_head.weight[V] = 0
    return model


def denoise(model, attention, cls=DenoiseSampler, **options):
    options = {"mask_id": V, "attention": attention, "block_size": L, **options}
    return cls(model, tiny.tokenizer(V), **options)


def spiffy(model, attention, graph, **options):
    return denoise(model, attention, SpiffySampler, graph=graph, **options)


def sees(attention, length, span):
    """What each of `length` tokens sees, by the words of the definition."""
    seen = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        for k in range(length):
            seen[q, k] = attention == "bidirectional" or k // span <= q // span
    return seen


@torch.no_grad()
def reference(
    model,
    prompt,
    new,
    attention,
    *,
    S=1,
    threshold=None,
    guidance=0.0,
    span=L,
    shifted=False,
):
    """Greedy low-confidence unmasking as the public samplers do it: one text, full forwards.

    A block-causal text ends with its present block.
    """
    causal = attention == "block_causal"
    x = list(prompt) + [V] * new
    begin = len(prompt) // span * span if causal else len(prompt)
    while len(x) < begin or (len(x) - begin) % span:
        x.append(V)
    for start in range(begin, len(x), span):
        end = start + span
        while V in x[start:end]:
            text = x[:end] if causal else x
            seen = sees(attention, len(text), span)[None, None]
            logits = model(torch.tensor([text]), attention_mask=seen).logits[0]
            if guidance:
                bare = [V] * len(prompt) + text[len(prompt) :]
                other = model(torch.tensor([bare]), attention_mask=seen).logits[0]
                logits = other + (guidance + 1) * (logits - other)
            found = []
            for position in range(start, end):
                if x[position] == V:
                    p = logits[position - shifted].softmax(-1)
                    token = int(p[:V].argmax())  # never the mask
                    found.append((float(p[token]), position, token))
            found.sort(reverse=True)
            count = S if threshold is None else max(1, sum(p >= threshold for p, _, _ in found))
            for _, position, token in found[:count]:
                x[position] = token
    return x[len(prompt) : len(prompt) + new]
