"""Layers in fewer calls: the layers' own bits, and only where the formula is theirs."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from decoding.drafting import tree
from decoding.engine.cache import CachedNetwork, RaggedCache
from decoding.loading import for_inference
from decoding.samplers.dflash import CachedDrafter
from models import few_queries, fused_layers, loops, masks, packed
from models.few_queries import bits
from models.fused_layers import FusedForward
from tests.support import families, tiny

pytestmark = pytest.mark.skipif(
    few_queries.loops() is None or not (packed.packs() or few_queries.bfloat16_loops()),
    reason="needs numba and bfloat16 products",
)


class Scaled(LlamaDecoderLayer):
    """Granite's formula under Llama's names."""

    def forward(self, hidden_states, **given):
        return hidden_states + super().forward(hidden_states, **given) / 4


@contextmanager
def left_alone():
    """No layer is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_layers, "fuse", lambda network: None)
        yield


def network(kind="llama", fused=True, **config):
    found = tiny.causal_lm(40, kind=kind, hidden=64, scale=1.0, **config).bfloat16()
    if fused:
        for_inference(found)
    else:
        with left_alone():
            for_inference(found)
    return found


def in_parts(model):
    """Let the layers take a call for each part, as with padded weights."""
    for layer in model.model.layers:
        layer.forward.stack = None


def replaced(model):
    return sum(isinstance(module.forward, FusedForward) for module in model.modules())


@torch.inference_mode()
def passes(model, rows):
    """Logits of passes of 1 to 17 tokens after ragged prompts, and what the cache holds."""
    draw = torch.Generator().manual_seed(3)
    cached, found = CachedNetwork(model, masks.causal, 80), []
    start = torch.randint(1, 9, (rows, 1), generator=draw)
    for width in (8, 1, 3, 4, 5, 17):
        tokens = torch.randint(40, (rows, width), generator=draw)
        found.append(cached(tokens, start + torch.arange(width), keep=width).logits)
        start = start + width
    return [*found, *cached.cache._memory.values()]


def left_to_torch(monkeypatch):
    """Leave attention to torch, as that of long prompts is without loops of products."""
    for module in (few_queries, fused_layers):
        monkeypatch.setattr(module, "taken", lambda *given: False)


@pytest.mark.parametrize(
    "way", ["one call", "a call each", "a call for each part", "torch's attention"]
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu", "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_it_has_the_layers_own_bits(kind, config, rows, way, monkeypatch):
    if way == "torch's attention":
        left_to_torch(monkeypatch)
    ours, stock = network(kind, **config), network(kind, fused=False, **config)
    assert (replaced(ours), replaced(stock)) == (2, 0)
    if few_queries.bfloat16_loops():
        assert len({layer.forward.stack for layer in ours.model.layers} - {None}) == 1
    if way == "a call each":
        monkeypatch.setattr(fused_layers, "FEW", 0)
    if way == "a call for each part":
        in_parts(ours)
    for found, expected in zip(passes(ours, rows), passes(stock, rows), strict=True):
        assert torch.equal(found, expected)


AT_ONCE = pytest.mark.skipif(few_queries.bfloat16_loops() is None, reason="no loops of products")


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ("rotate", "llama"),
        ("add_and_norm", "llama"),
        ("rms_norm", "llama"),
        ("gate", "llama"),
        ("rotated_attention", "llama"),
        pytest.param("layers", "llama", marks=AT_ONCE),
        pytest.param("layers", "qwen3", marks=AT_ONCE),
    ],
)
def test_a_loop_that_errs_is_seen(wrong, kind, monkeypatch):
    """Negative control: of the bits, and of the comparison before a layer is replaced."""
    ours, stock = network(kind), network(kind, fused=False)
    if wrong == "rotate":
        left_to_torch(monkeypatch)
    if wrong != "layers":
        in_parts(ours)
    expected = passes(stock, 1)
    last = -2 if wrong == "layers" else -1  # its output
    here = few_queries.bfloat16_loops() and (last < -1 or wrong == "rotated_attention")
    own = "bfloat16_loops" if here else "loops"
    kept = getattr(few_queries, own)()

    def erring(*given):
        getattr(kept, wrong)(*given)
        given[last][:] ^= 1

    found = type("Loops", (), {**vars(kept), wrong: staticmethod(erring)})
    for module in (fused_layers, few_queries):
        monkeypatch.setattr(module, own, lambda: found)
    assert not all(torch.equal(*pair) for pair in zip(passes(ours, 1), expected))
    if last == -1 and wrong != "rotated_attention":  # else of caches that the comparison lacks
        assert replaced(network(kind)) == 0


def doubled(module, given, output):
    return 2 * output


def doubled_in_place(module, given, output):
    output *= 2


def doubled_before(module, given):
    return (2 * given[0], *given[1:])


@torch.inference_mode()
@pytest.mark.parametrize("hook", [doubled, doubled_in_place, doubled_before])
def test_a_hook_changes_what_the_next_layer_reads(hook):
    ours, stock = network(layers=4), network(layers=4, fused=False)
    unchanged = passes(stock, 2)
    for model in (ours, stock):
        layers = model.model.layers
        if hook is doubled_before:
            layers[2].register_forward_pre_hook(hook)
        else:
            layers[1].register_forward_hook(hook)
    for found, expected in zip(passes(ours, 2), passes(stock, 2), strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(passes(ours, 2)[0], unchanged[0])  # negative control


@AT_ONCE
@torch.inference_mode()
@pytest.mark.parametrize("also", [None, doubled])
def test_states_are_read_without_ending_a_call(also, monkeypatch):
    here, calls = few_queries.bfloat16_loops(), []

    def counted(*given):
        calls.append(len(given[-2]))
        here.layers(*given)

    found = type("Loops", (), {**vars(here), "layers": staticmethod(counted)})
    monkeypatch.setattr(fused_layers, "bfloat16_loops", lambda: found)
    states, tokens = [], torch.arange(5)[None]
    for fused in (True, False):
        model = network(layers=4, fused=fused)
        if also is not None:  # negative control: it changes what the next layer reads
            model.model.layers[1].register_forward_hook(also)
        cached = CachedNetwork(model, masks.causal, 9, hidden_layers=(-1, 1, 3))
        states.append(cached(tokens, tokens, keep=5).hidden_states)
    assert calls == ([4] if also is None else [2, 2])
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)


@AT_ONCE
@torch.inference_mode()
@pytest.mark.parametrize("other", ["angles", "mask", "cache", "states", None])
def test_a_layer_gives_what_was_computed_from_what_it_is_given(other):
    ours, stock = network(), network(fused=False)
    draw = torch.Generator().manual_seed(0)
    size = ours.config.head_dim
    angles = [torch.randn(2, 1, 5, size, generator=draw).bfloat16().unbind() for _ in range(2)]
    hidden = torch.zeros(2, 1, 1, 5, 5).bfloat16()
    hidden[1, ..., 0] = -torch.inf
    hidden = hidden.unbind()  # an index would make another tensor each time
    states = torch.randn(1, 5, 64, generator=draw).bfloat16()

    def run(model):
        caches = [RaggedCache(9, 2) for _ in range(2)]
        for cache in caches:
            cache.place(torch.arange(5)[None], 5)

        def given(**which):
            return {
                "position_embeddings": angles[which.get("angles", 0)],
                "attention_mask": hidden[which.get("mask", 0)],
                "past_key_values": caches[which.get("cache", 0)],
            }

        first, second = model.model.layers
        found, of = first(states, **given()), given(**{other or "": 1})
        found = second(found.clone() if other == "states" else found, **of)
        return [found, *of["past_key_values"].memory([1], 1, size, states)]

    for found, expected in zip(run(ours), run(stock), strict=True):
        assert torch.equal(found, expected)
    if other is None:  # nothing is kept
        assert ours.model.layers[0].forward.stack._known == ({}, ())


TREE = tree.Tree([5, 6, 7, 8, 9], [1, 2, 1, 2, 3], [1, 3, 4, 12, 28], {})  # two branches


def tree_passes(model, sizes, padded=True, wrong=False):
    """Logits of the first nodes of TREE, so many a row, after prompts of different lengths."""
    # A text's slots are fewer than the tokens of all.
    cached, prompts = CachedNetwork(model, masks.tree, 16), torch.arange(24).view(3, 8)
    rows = torch.arange(3) if padded else torch.tensor([len(sizes) - 1])
    lengths = torch.tensor([[8], [4], [6]])[rows]
    cached(prompts[rows], torch.arange(8).expand(len(rows), -1), keep=1)
    trees = tree.batched([TREE.first(size) for size in sizes[-len(rows) :]], model.device)
    if wrong:
        trees = trees._replace(path=trees.path.where(trees.path != 1 << 4, 0))
    output = cached(
        pad(trees.token, (1, 0), value=3),
        lengths + pad(trees.depth, (1, 0)),
        keep=trees.token.shape[1] + 1,
        padding=trees.padding(),
        branch=pad(trees.path, (1, 0), value=-1),
    )
    return [logits[: size + 1] for logits, size in zip(output.logits, sizes[-len(rows) :])]


@torch.inference_mode()
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ],
)
def test_trees_of_different_sizes_have_the_bits_that_they_have_alone(kind, config, flat):
    """Without their padding, and with it where a layer is not fused."""
    model, taken = network(kind, fused=flat, **config), []
    assert CachedNetwork(model, masks.tree, 60).flat == flat
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: taken.append(args[0]))
    for sizes in ([3, 0, 5], [0, 4, 1], [5, 5, 4]):
        together = tree_passes(model, sizes)
        assert taken[-1].shape == ((1, sum(sizes) + 3) if flat else (3, max(sizes) + 1))
        for row, found in enumerate(together):
            (alone,) = tree_passes(model, sizes[: row + 1], padded=False)
            assert torch.equal(found, alone)


@torch.inference_mode()
def test_padding_that_is_read_is_seen():
    """Negative control: nodes of an empty path precede all others."""
    model = network(fused=False)
    found = zip(tree_passes(model, [3, 0, 5]), tree_passes(model, [3, 0, 5], wrong=True))
    assert not all(torch.equal(*pair) for pair in found)


def test_another_formula_is_left_as_it_is():
    model = tiny.causal_lm(40, hidden=64, scale=1.0).bfloat16()
    model.model.layers[1].__class__ = Scaled
    for_inference(model)
    assert [isinstance(m.forward, FusedForward) for m in model.model.layers] == [True, False]


@pytest.mark.parametrize(
    ("kind", "count"),
    [("mistral", 4), ("smollm3", 3), ("glm4", 0), ("phi3", 0), ("qwen3_moe", 0)],
)
def test_families(kind, count):
    """So many of four layers are replaced; SmolLM3's fourth has no rotary positions."""
    model = families.network(kind).bfloat16().eval()
    for_inference(model)
    assert replaced(model) == count


def test_without_a_cache_and_with_gradients_it_is_the_layers_own():
    ours, stock, tokens = network(), network(fused=False), torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens, use_cache=False).logits, stock(tokens).logits)
    assert torch.equal(ours(tokens).logits, stock(tokens).logits)


@torch.inference_mode()
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)),
    half=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_rotations_are_transformers_own(shape, half, seed):
    draw, (batch, length, heads) = torch.Generator().manual_seed(seed), shape
    states = torch.randn(batch, length, 2 * heads, 2 * half, generator=draw).bfloat16()
    cos, sin = torch.randn(2, batch, length, 2 * half, generator=draw).bfloat16()
    found = torch.empty(batch, heads, length, 2 * half).bfloat16()
    loops.rotate(bits(states.flatten(0, 1)), heads, bits(cos), bits(sin), bits(found))
    turned = states[:, :, heads:].transpose(1, 2)  # a part of a longer row, as of one product
    assert torch.equal(found, apply_rotary_pos_emb(turned, turned, cos, sin)[0])


@torch.inference_mode()
@pytest.mark.parametrize("context", ["shared", "layerwise"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_drafter_that_reads_its_target(kind, context):
    """A block's layers are fused; the reading of a prefix is the layers' own."""
    drafts, prefix = [], torch.arange(8)[None]
    for how in (nullcontext, left_alone):
        target = network(kind)
        stock = tiny.causal_lm(40, kind=kind, hidden=64, scale=1.0)
        drafter = tiny.dflash(stock, layout="dspark", context=context).bfloat16()
        with how():
            for_inference(drafter)
        assert bool(replaced(drafter)) == (how is nullcontext)
        cached = CachedNetwork(target, masks.causal, 40, drafter.target_layer_ids)
        states = torch.cat(cached(prefix, prefix, keep=1).hidden_states, -1)
        reader = CachedDrafter(drafter, target, 40, cached.cache if drafter.shared else None)
        states = states[:, :0] if drafter.shared else states
        missing, lengths = torch.tensor([states.shape[1]]), torch.tensor([9])
        for count in (missing, torch.zeros_like(missing)):  # with a prefix to read, and without
            given = states[:, : int(count)], count, torch.tensor([[3, 39, 39, 39]]), lengths
            drafts.append(reader(*given))
    assert torch.equal(torch.stack(drafts[:2]), torch.stack(drafts[2:]))
