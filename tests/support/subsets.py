"""Reference for any-subset samplers and joint densities: one position at a time."""

import itertools

import torch
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetTokenizer

from decoding.engine.warp import fit_vocabulary, preceding, warp
from tests.support import tiny


def patterns(N):
    """Every choice of given positions with at least one hole."""
    return [p for p in itertools.product([True, False], repeat=N) if not all(p)]


def template(tokens, given):
    return [t if g else None for t, g in zip(tokens, given)]


def network(vocabulary, seed=0, **config):
    """A two-stream network over `vocabulary` tokens and the mask, whose id is `vocabulary`."""
    return tiny.causal_lm(vocabulary + 1, seed=seed, **config)


class XLNet64(XLNetLMHeadModel):
    """XLNet that runs in float64: transformers makes its positional encoding in float32."""

    def __init__(self, config):
        super().__init__(config)
        encode = self.transformer.relative_positional_encoding
        self.transformer.relative_positional_encoding = lambda *a, **k: encode(*a, **k).double()


def xlnet(vocabulary, seed=0):
    torch.manual_seed(seed)
    model = XLNet64(
        XLNetConfig(vocab_size=vocabulary + 1, d_model=16, n_layer=2, n_head=2, d_inner=32)
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:  # not so large that attention rounds a token away altogether
                p.normal_(0, 0.3)
    return model.double().eval()


def one_position(model, prompt, generated, position):
    """Logits [V] about `position`, conditioned on two lists of (position, token) only.

    A mask written out entry by entry; no order, no layout, no cache and no second query.
    """
    if model.config.model_type == "xlnet":
        return one_position_xlnet(model, prompt, generated, position)
    tokens = [*prompt, *generated, (position, model.config.vocab_size - 1)]
    n, m = len(tokens), len(prompt)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            mask[i, j] = j < m or (i >= m and j <= i)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([[t for _, t in tokens]]),
            position_ids=torch.tensor([[p for p, _ in tokens]]),
            attention_mask=mask[None, None],
        ).logits[0, -1]


def one_position_xlnet(model, prompt, generated, position):
    N = 1 + max(p for p, _ in [*prompt, *generated, (position, 0)])
    ids, hidden = torch.zeros(1, N, dtype=torch.long), torch.ones(1, N, N).double()
    for p, t in [*prompt, *generated]:
        ids[0, p] = t
    for i, (p, _) in enumerate([*prompt, *generated, (position, 0)]):
        seen = range(len(prompt)) if i < len(prompt) else range(i)
        for j in seen:
            hidden[0, p, [*prompt, *generated][j][0]] = 0
    target = torch.zeros(1, 1, N).double()
    target[0, 0, position] = 1
    with torch.no_grad():
        return model(ids, perm_mask=hidden, target_mapping=target, use_mems=False).logits[0, -1]


def infill_distribution(model, prompt, params):
    """The distribution {filled tokens: probability} of filling one by one, without a sampler."""
    given = [(p, t) for p, t in enumerate(prompt) if t is not None]
    holes = [p for p, t in enumerate(prompt) if t is None]
    V = model.config.vocab_size
    distribution, frontier = {}, [((), 1.0)]
    while frontier:
        answer, weight = frontier.pop()
        if len(answer) == len(holes):
            distribution[answer] = weight
            continue
        filled = list(zip(holes, answer))
        logits = one_position(model, given, filled, holes[len(answer)])[None, None]
        logits = fit_vocabulary(logits, V, (V - 1,))
        ids = torch.tensor([[t for _, t in [*given, *filled]]], dtype=torch.long)
        sizes = torch.tensor([[0], [ids.shape[1]]])
        warped = warp(logits, params, preceding(params, ids, *sizes, ids[:, :0], V))[0, 0]
        if params.temperature == 0:
            probs = torch.nn.functional.one_hot(warped.argmax(), V).double()
        else:
            probs = warped.softmax(-1)
        for token in probs.nonzero().flatten().tolist():
            frontier.append(((*answer, token), weight * probs[token].item()))
    return distribution


def xlnet_tokenizer():
    """transformers' XLNetTokenizer with the public one's special tokens and a few words."""
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    words = ["▁def", "▁return", "▁f", "▁a", "▁u", "▁if"]
    letters = "abcdefghijklmnopqrstuvwxyz'\"<>():=0123456789_+.,-"
    scores = dict.fromkeys(special, 0.0) | {"▁": -3.0}
    scores |= dict.fromkeys(words, -4.0) | dict.fromkeys(letters, -5.0)
    return XLNetTokenizer(vocab=list(scores.items()))
