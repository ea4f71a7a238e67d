"""DFlash drafters: training's forward is decoding's, and the format is that of engines."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.dflash import DFlashSampler
from models import dflash
from models.dflash import draft_states
from models.dflash_init import from_target
from models.hidden_states import capture
from recipes.compose import build, compose
from tests.support import tiny
from trainers.base import Optimization
from trainers.draft_vocabulary import PREVIOUS, in_draft_vocabulary

V, K = 12, 3
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def target(kind="llama"):
    return tiny.causal_lm(V, kind=kind, layers=4)


def sampler(model, drafter, k=K):
    return DFlashSampler(model, tiny.tokenizer(V), drafter, mask_id=V - 1, block_size=k)


def trained_logits(model, drafter, anchors, document=None, context=None):
    """Logits [A, K, V] of training's packed forward at some anchors of TOKENS."""
    layout = "dspark" if drafter.samples_from_anchor else "dflash"
    blocks = DraftBlocks(len(anchors), K, SuffixNoise(K), tokenizer_with_mask(), layout)
    S = len(TOKENS)
    row = {
        "input_ids": torch.tensor(TOKENS),
        "document": torch.zeros(S, dtype=torch.long) if document is None else document,
        "position": torch.arange(S),
        "trained": torch.ones(S, dtype=torch.bool),
    }
    noise = SuffixNoise(K)(len(anchors), K, torch.Generator())
    sample = blocks.lay_out(row, torch.tensor(anchors), noise)
    batch = {name: x[None] for name, x in sample.items()}
    with torch.no_grad(), capture(model, drafter.target_layer_ids) as states:
        model(torch.tensor([TOKENS]))
    hidden = draft_states(drafter, model, batch, states if context is None else context(states))
    logits = drafter.logits(hidden, model)
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_head(in_draft_vocabulary(batch, None)[PREVIOUS])
    return logits[0]


def tokenizer_with_mask():
    tokenizer = tiny.tokenizer(V)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(V - 1)
    return tokenizer


@torch.no_grad()
def decoded_logits(model, drafter, lengths):
    """Logits [A, K, V] of decoding's draft pass after prefixes of TOKENS, as one ragged batch.

    A tail reads the tokens that follow in TOKENS.
    """
    decoder = sampler(model, drafter)
    batch = Batch([TOKENS[:n] for n in lengths], 32, KeyedRandomness([0] * len(lengths)), "cpu")
    params = SamplingParams(max_new_tokens=1, temperature=0)
    decoder.begin(batch, params)
    return decoder.forced_pass(batch, torch.tensor([TOKENS[n : n + K] for n in lengths]), params)


BLOCKS = tiny.grid(
    layout=["dflash", "dspark"], causal=[False, True], context=["fused", "layerwise"]
)
TAILS = tiny.grid(
    layout=["dspark"], context=["fused", "layerwise"], layers=[[0, 1, 3]], tail=[1, 3]
)


DSPARK = tiny.grid(layout=["dflash", "dspark"], markov_rank=[2])


@pytest.mark.parametrize("blocks", BLOCKS + TAILS + DSPARK)
@pytest.mark.parametrize("kind", tiny.CLASSES)
def test_training_computes_what_decoding_does(kind, blocks):
    model = target(kind)
    drafter = tiny.dflash(model, 2, **blocks)
    anchors = [1, 2, 4, 7]
    ours, theirs = trained_logits(model, drafter, anchors), decoded_logits(model, drafter, anchors)
    known = theirs.isfinite()  # the mask is never drafted
    assert known.sum() == known.numel() * (V - 1) / V
    torch.testing.assert_close(ours[known], theirs[known], atol=1e-10, rtol=0)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_the_tokens_of_a_block_see(blocks, monkeypatch):
    """All of the block, or what comes before: seen by what a changed last mask changes."""
    model = target()
    drafter, anchors = tiny.dflash(model, 2, **blocks), [4, 7]
    right = trained_logits(model, drafter, anchors)
    lay_out = DraftBlocks.lay_out

    def last_changed(self, *given):
        sample = lay_out(self, *given)
        sample["input_ids"][-1] = 0
        return sample

    monkeypatch.setattr(DraftBlocks, "lay_out", last_changed)
    changed = (trained_logits(model, drafter, anchors) != right).any(-1)
    assert changed.tolist() == [[False] * K, [not blocks["causal"]] * (K - 1) + [True]]


@pytest.mark.parametrize("blocks", TAILS)
def test_what_a_tail_reads(blocks):
    """The tokens drafted before, and a new one with parallel layers does not yet read them."""
    model, anchors = target(), [4]
    drafter = tiny.dflash(model, 2, **blocks)
    right = decoded_logits(model, drafter, anchors)
    changed = [*TOKENS[:5], 7, *TOKENS[6:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TOKENS", changed)
        assert (decoded_logits(model, drafter, anchors) != right).any(-1).tolist() == [
            [False, False, True]
        ]
    new = from_target(model, tokenizer_with_mask(), [1, 2, 3], 2, tail=blocks["tail"])
    assert hasattr(new, "token_before") == (blocks["tail"] < 3)
    if blocks["tail"] < 3:
        assert not new.token_before.weight.any()


def test_layouts_differ_in_the_token_that_drafts_first():
    """Causal blocks read the same in both; by layout=dspark all draft one token earlier."""
    model = target("qwen3")
    found = {}
    for layout in ("dflash", "dspark"):
        drafter = tiny.dflash(model, 2, layout=layout, causal=True)
        found[layout] = trained_logits(model, drafter, [4, 7])
    torch.testing.assert_close(found["dflash"][:, : K - 1], found["dspark"][:, 1:])
    assert (found["dflash"][:, 0] - found["dspark"][:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("blocks", [*BLOCKS, {"mixed": True}])
def test_a_window_in_training_and_decoding(blocks):
    """The layers attend to so many last tokens, in both; another window gives other numbers."""
    mixed, model = blocks.pop("mixed", False), target()
    drafter, anchors = tiny.dflash(model, 2, window=4, **blocks), [1, 2, 4, 7]
    if mixed:  # as in published drafters
        drafter.config.layer_types[0] = "full_attention"
    ours, theirs = trained_logits(model, drafter, anchors), decoded_logits(model, drafter, anchors)
    known = theirs.isfinite()
    torch.testing.assert_close(ours[known], theirs[known], atol=1e-10, rtol=0)
    drafter.config.sliding_window = 5  # the control
    wider = trained_logits(model, drafter, anchors)
    same = [torch.equal(a, b) for a, b in zip(wider, ours)]
    # The first block has no context, and the second, with a mask less, ends within both.
    assert same == [True, drafter.samples_from_anchor, False, False]
    drafter.config.sliding_window = 512  # all that the drafter's class reads
    free = trained_logits(model, tiny.dflash(model, 2, **blocks), anchors)
    assert torch.equal(trained_logits(model, drafter, anchors), free)


def test_a_window_s_first_token():
    """Token i of a block after n tokens stands at n - 1 + i: its window of 5 begins at n - 5 + i.

    States of the first tokens are changed one by one: a layer of its own reads no other.
    """
    model, anchor = target(), 7
    drafter = tiny.dflash(model, 2, window=5, context="layerwise")
    right = trained_logits(model, drafter, [anchor])[0]
    assert len(drafter.layers) == 1
    seen = []
    for at in range(anchor - 1):

        def changed(states, at=at):
            found = [s.clone() for s in states]
            for s in found:
                s[:, at] += 1
            return found

        other = trained_logits(model, drafter, [anchor], context=changed)[0]
        seen.append((other != right).any(-1).tolist())
    # Rows: tokens 0 to 5; columns: the masks at 7, 8 and 9.
    assert seen == [[False] * 3] * 3 + [[True, False, False], [True, True, False], [True] * 3]


def shifted(states):
    return [s.roll(1, 1) for s in states]


def swapped(states):
    return [*states][::-1]


def all_normed(states):
    return [torch.nn.functional.layer_norm(s, s.shape[-1:]) for s in states]


@pytest.mark.parametrize("wrong", [shifted, swapped, all_normed])
def test_wrong_states_change_what_is_drafted(wrong):
    """Positions off by one, layers exchanged, a norm too many: the negative controls."""
    model = target()
    drafter = tiny.dflash(model, 2)
    right = trained_logits(model, drafter, [4, 7])
    assert (trained_logits(model, drafter, [4, 7], context=wrong) - right).abs().max() > 1e-3


def test_a_block_reads_nothing_of_what_it_drafts():
    """Neither states of the last committed token nor later ones, but all those before it."""
    model = target()
    drafter, anchor = tiny.dflash(model, 2), 4
    right = trained_logits(model, drafter, [anchor])

    def changed(position):
        def context(states):
            found = [s.clone() for s in states]
            for s in found:
                s[:, position] += 1
            return found

        return (trained_logits(model, drafter, [anchor], context=context) - right).abs().max()

    assert [changed(p).item() > 0 for p in range(6)] == [True] * (anchor - 1) + [False] * 3


def test_another_document_is_not_read():
    model = target()
    drafter = tiny.dflash(model, 2)
    document = torch.tensor([0] * 3 + [1] * 7)
    alone = trained_logits(model, drafter, [7], document)

    def changed(states):
        return [torch.cat([s[:, :3] + 1, s[:, 3:]], 1) for s in states]

    assert torch.equal(trained_logits(model, drafter, [7], document, changed), alone)


def test_a_head_of_its_own_gives_the_target_s_logits_of_its_tokens():
    model = target()
    ids = torch.tensor([7, 2, 5])
    drafter = tiny.dflash(model, 2, draft_ids=ids)
    drafter.lm_head.weight.data.copy_(model.lm_head.weight[ids.sort().values])
    borrowing = tiny.dflash(model, 2)
    assert drafter.draft_ids.tolist() == [2, 5, 7]
    found = trained_logits(model, drafter, [4, 7])
    torch.testing.assert_close(found, trained_logits(model, borrowing, [4, 7])[..., [2, 5, 7]])
    theirs = decoded_logits(model, drafter, [4, 7])
    assert theirs.isfinite().any((0, 1)).nonzero().flatten().tolist() == [2, 5, 7]
    torch.testing.assert_close(found, theirs[..., [2, 5, 7]])


def test_the_folder_is_in_the_format_of_engines(tmp_path):
    drafter = tiny.dflash(target("qwen3"), states=[0, 2], draft_ids=torch.tensor([1, 4]))
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert (config["num_target_layers"], config["draft_vocab_size"]) == (4, 2)
    expected = {"mask_token_id": V - 1, "target_layer_ids": [0, 2], "causal": False}
    assert config["dflash_config"] == expected
    assert type(AutoConfig.from_pretrained(tmp_path)) is Qwen3Config
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {*file.keys()}
    layer = ["input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{x}_proj" for x in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    expected = {f"layers.{i}.{x}.weight" for i in (0, 1) for x in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight", "d2t",
                                "lm_head.weight"}  # fmt: skip
    again = dflash.load(str(tmp_path))
    assert all(torch.equal(x, again.state_dict()[k]) for k, x in drafter.state_dict().items())


H, KV, FF = 4096, 8 * 128, 12288  # of Qwen3-8B: hidden size, keys' and values', the MLP's
LAYER = {
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (32 * 128, H),
    "self_attn.k_proj.weight": (KV, H),
    "self_attn.v_proj.weight": (KV, H),
    "self_attn.o_proj.weight": (H, 32 * 128),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (FF, H),
    "mlp.up_proj.weight": (FF, H),
    "mlp.down_proj.weight": (H, FF),
}
# All tensors of z-lab/Qwen3-8B-DFlash-b16. vLLM 0.32's loader (models/qwen3_dflash.py) wants these,
# and takes embeddings and head from the target where there are none.
PUBLISHED = {
    "fc.weight": (H, 5 * H),
    "hidden_norm.weight": (H,),
    "norm.weight": (H,),
    **{f"layers.{i}.{name}": shape for i in range(5) for name, shape in LAYER.items()},
}


def at_paper_scale(monkeypatch, *overrides, **sizes):
    """The network of recipe=dflash scale=paper on the meta device, as its module exports it."""
    config = compose(["recipe=dflash", "scale=paper", *overrides], "fit")
    theirs = {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "vocab_size": 151936,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**theirs | sizes))
        monkeypatch.setattr("models.causal.load", lambda path: {"Qwen/Qwen3-8B": model}[path])
        network = build(config.network, tokenizer=tokenizer_with_mask())
    build(
        config.module,
        network=network,
        tokenizer=tokenizer_with_mask(),
        optimization=Optimization(**config.optimization),
        _convert_="object",
    )
    return network


def shapes(network):
    return {name: tuple(x.shape) for name, x in network.state_dict().items()}


def test_the_published_layout(monkeypatch):
    network = at_paper_scale(monkeypatch)
    assert shapes(network) == PUBLISHED
    config = network.config
    assert (config.block_size, config.num_target_layers, config.vocab_size) == (16, 36, 151936)
    assert config.dflash_config["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert config.layer_types == ["full_attention"] * 5


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["network.layers=[0, 1, 2, 3]"], {}),
        (["network.states=4"], {}),
        ([], {"num_key_value_heads": 4}),
        ([], {"head_dim": 64}),
    ],
)
def test_another_layout_is_noticed(monkeypatch, overrides, sizes):
    network = at_paper_scale(monkeypatch, *overrides, **sizes)
    assert shapes(network) != PUBLISHED


def test_a_renamed_tensor_is_noticed(monkeypatch):
    network = at_paper_scale(monkeypatch)
    network.context_norm = network.hidden_norm
    del network.hidden_norm
    odd = shapes(network).keys() ^ PUBLISHED.keys()
    assert odd == {"hidden_norm.weight", "context_norm.weight"}


def test_another_target_is_refused():
    drafter = tiny.dflash(target(), 2)
    with pytest.raises(ValueError, match="num_target_layers=4, and this one has 3"):
        sampler(tiny.causal_lm(V, layers=3), drafter)
    with pytest.raises(ValueError, match="hidden_size=16, and this one has 32"):
        sampler(tiny.causal_lm(V, layers=4, hidden=32), drafter)


def test_a_folder_that_holds_no_such_drafter(tmp_path):
    tiny.causal_lm(V, kind="qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no whole DFlash drafter|cannot load"):
        dflash.load(str(tmp_path))
