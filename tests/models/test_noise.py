"""Noise as an input: the posterior of Gumbel noise, and candidates that later layers see."""

import pytest
import torch
from scipy import stats

from models.noise import NoiseInput, posterior_gumbel
from tests.support import tiny

N = 20000
P = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()


def drawn(token=None, p=P, n=N):
    """Texts x ~ p (or always one token), and their noise."""
    draw = torch.Generator().manual_seed(3)
    x = torch.multinomial(p, n, True, generator=draw)
    x = x if token is None else torch.full_like(x, token)
    return x, posterior_gumbel(p.expand(n, -1), x, draw)


@pytest.mark.parametrize("token", [None, 0, 1, 2, 3])
def test_the_text_is_what_the_noise_chooses(token):
    x, g = drawn(token)
    assert torch.equal((P.log() + g).argmax(-1), x)


def test_over_texts_it_is_unconditional_noise():
    """Each token's noise is standard Gumbel, and that of two tokens is independent."""
    _, g = drawn()
    for v in range(len(P)):
        assert stats.kstest(g[:, v].numpy(), "gumbel_r").pvalue > 1e-3
    correlation = torch.corrcoef(g.T) - torch.eye(len(P))
    assert correlation.abs().max() < 4 / N**0.5


def test_given_a_token_it_is_the_accepted_part_of_unconditional_noise():
    """By rejection: unconditional noise, of which what chooses another token is thrown away."""
    draw = torch.Generator().manual_seed(4)
    free = -torch.empty(20 * N, len(P)).double().exponential_(generator=draw).log()
    chosen = (P.log() + free).argmax(-1)
    for token in (0, 3):
        kept = free[chosen == token]
        _, g = drawn(token)
        for v in range(len(P)):
            assert stats.ks_2samp(g[:, v].numpy(), kept[:, v].numpy()).pvalue > 1e-3


def test_other_noise_fails_these_tests():
    """Negative controls: noise that knows no text, and the text of one token as if it were all."""
    x, g = drawn()
    free = g[torch.randperm(N, generator=torch.Generator().manual_seed(5))]
    assert ((P.log() + free).argmax(-1) == x).double().mean() < 0.5
    _, always = drawn(3)
    assert stats.kstest(always[:, 3].numpy(), "gumbel_r").pvalue < 1e-9


def test_a_token_that_is_not_there_chooses_none():
    """Of a drafter without the token, p is of its own tokens: all arrive after the chosen one."""
    draw = torch.Generator().manual_seed(6)
    p = 0.4 * P.expand(N, -1)
    g = posterior_gumbel(p, torch.full((N,), -1), draw)
    free = -torch.empty(3 * N, 5).double().exponential_(generator=draw).log()
    all_of_them = torch.cat([0.4 * P, torch.tensor([0.6]).double()]).log()
    kept = free[(all_of_them + free).argmax(-1) == 4]
    for v in range(len(P)):
        assert stats.ks_2samp(g[:, v].numpy(), kept[:, v].numpy()).pvalue > 1e-3


def test_it_is_finite_where_p_is_0():
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    g = posterior_gumbel(p, torch.tensor([0, 1]), torch.Generator().manual_seed(0))
    assert g.isfinite().all()
    assert g[1, 1] > 80  # what an impossible choice takes: the largest there is


V, K, H = 7, 3, 16


def logits(noise_input=None, noise=None, span=slice(1, 1 + K), width=1 + K, ids=None):
    """Of a bidirectional drafter of two blocks of a row, in a row each as in decoding."""
    network = tiny.causal_lm(V, layers=3, hidden=H)
    tokens = torch.tensor([[1, 2, 5, 6, 6, 6], [3, 2, 5, 6, 6, 6]])
    run = {"input_ids": tokens, "use_cache": False}
    run["attention_mask"] = torch.ones(2, 1, 6, 6).bool()
    with torch.no_grad():
        if noise_input is None:
            return network(**run).logits[:, -width:][:, span], []
        with noise_input.reading(network, noise, span, width, ids) as early:
            return network(**run).logits[:, -width:][:, span], early


def filled(layers, seed=0):
    noise_input = NoiseInput(H, layers).double()
    draw = torch.Generator().manual_seed(seed)
    for project in noise_input.project:
        torch.nn.init.normal_(project.weight, std=0.5, generator=draw)
    return noise_input


def gumbel(seed=1):
    draw = torch.Generator().manual_seed(seed)
    return -torch.empty(2, 1, K, V).double().exponential_(generator=draw).log()


def test_a_new_one_changes_nothing_and_learns():
    new = NoiseInput(H, [0, 1]).double()
    found, early = logits(new, gumbel())
    assert torch.equal(found, logits()[0])
    assert [x.shape for x in early] == [(2, 1, K, V)] * 2
    network = tiny.causal_lm(V, layers=3, hidden=H)
    with new.reading(network, gumbel()[:1], slice(1, 1 + K), 1 + K):
        network(torch.arange(6)[None]).logits.log_softmax(-1)[..., 0].sum().backward()
    assert all(project.weight.grad.abs().sum() > 0 for project in new.project)


def test_the_candidates_are_the_choices_by_hand():
    """After layer 0: argmax(logits + noise), whose embedding the *next* position takes up."""
    noise_input, noise = filled([0]), gumbel()
    found, (early,) = logits(noise_input, noise)
    network = tiny.causal_lm(V, layers=3, hidden=H)
    candidates = (early[:, 0] + noise[:, 0]).argmax(-1)

    def by_hand(shift):
        def hook(layer, arguments, hidden):
            hidden = hidden.clone()
            expected = network.lm_head(network.model.norm(hidden[:, -K:]))
            torch.testing.assert_close(early[:, 0], expected)
            for i in range(1, K):
                read = network.model.embed_tokens.weight[candidates[:, i - shift]]
                read = read / read.pow(2).mean(-1, keepdim=True).sqrt()
                hidden[:, 3 + i] += read @ noise_input.project[0].weight.T
            return hidden

        handle = network.model.layers[0].register_forward_hook(hook)
        tokens = torch.tensor([[1, 2, 5, 6, 6, 6], [3, 2, 5, 6, 6, 6]])
        with torch.no_grad():
            out = network(tokens, attention_mask=torch.ones(2, 1, 6, 6).bool(), use_cache=False)
        handle.remove()
        return out.logits[:, -K:]

    torch.testing.assert_close(found, by_hand(1))
    assert (found - by_hand(0)).abs().max() > 1e-2  # a position's own candidate
    assert (found - logits()[0]).abs().max() > 1e-2


def test_a_block_reads_its_own_noise():
    noise_input, noise = filled([0, 1]), gumbel()
    whole, _ = logits(noise_input, noise)
    other = noise.clone()
    other[1] = gumbel(9)[1]
    changed, _ = logits(noise_input, other)
    assert torch.equal(changed[0], whole[0])
    assert (changed[1] - whole[1]).abs().max() > 1e-2
    rows, _ = logits(noise_input, noise.view(1, 2, K, V))  # two blocks of one request, in rows
    assert torch.equal(rows, whole)


def test_a_smaller_vocabulary_reads_the_tokens_that_it_names():
    """Of logits of some tokens, in another order, the same candidates."""
    noise_input, noise, ids = filled([1]), gumbel(), torch.arange(V).flip(0)
    network = tiny.causal_lm(V, layers=3, hidden=H)
    with torch.no_grad():
        network.lm_head.weight.copy_(network.lm_head.weight[ids])
        run = {"input_ids": torch.tensor([[1, 2, 5, 6, 6, 6], [3, 2, 5, 6, 6, 6]])}
        run["attention_mask"] = torch.ones(2, 1, 6, 6).bool()
        form = noise.flip(-1), slice(1, 1 + K), 1 + K, ids
        with noise_input.reading(network, *form):
            found = network(**run, use_cache=False).logits[:, -K:]
        with noise_input.reading(network, *form[:-1]):
            wrong = network(**run, use_cache=False).logits[:, -K:]
    expected, _ = logits(noise_input, noise)
    torch.testing.assert_close(found.flip(-1), expected)
    assert (wrong.flip(-1) - expected).abs().max() > 1e-2
