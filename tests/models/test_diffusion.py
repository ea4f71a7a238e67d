"""A drafter is a causal LM with other attention, the same in training and in decoding."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.corruption.draft_blocks import DraftBlocks, Noise
from data.text.tokenizer import draft_token_ids, train_tokenizer, with_draft_tokens
from decoding.engine.batch import Batch
from decoding.engine.cache import CachedNetwork
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from models import diffusion, masks
from models.masks import causal
from models.windows import with_window
from tests.support import recurrent as recurrent_lm
from tests.support import tiny
from tests.support import windowed as windowed_lm
from tests.support.results import ids

PLAIN = train_tokenizer(["ab"], 257)
TOKENIZER = with_draft_tokens(PLAIN)
V, MASK, SEP = len(PLAIN), *draft_token_ids(TOKENIZER)
SPARE, _ = draft_token_ids(PLAIN, "pard")
KINDS = pytest.mark.parametrize("kind", tiny.CLASSES)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@KINDS
def test_weights_are_copied_and_the_embedding_grows_by_the_draft_tokens(kind):
    source = tiny.causal_lm(V, kind=kind)
    before = weights(source)
    drafter = diffusion.from_causal_lm(source, TOKENIZER)
    assert drafter.config.vocab_size == V + 2
    for name, p in drafter.named_parameters():
        assert torch.equal(p[: len(before[name])], before[name]), name
    assert drafter.lm_head.weight.shape[0] == V + 2
    assert torch.isfinite(drafter.lm_head.weight).all()
    # The source is neither shared nor changed.
    with torch.no_grad():
        drafter.model.layers[0].mlp.up_proj.weight.zero_()
    assert source.config.vocab_size == V
    assert all(torch.equal(p, before[name]) for name, p in source.named_parameters())


def test_a_padded_vocabulary_has_room_already():
    source = tiny.causal_lm(V + 30)
    drafter = diffusion.from_causal_lm(source, TOKENIZER)
    assert drafter.config.vocab_size == V + 30
    assert torch.equal(drafter.lm_head.weight, source.lm_head.weight)


def test_tied_embeddings_stay_tied():
    drafter = diffusion.from_causal_lm(tiny.causal_lm(V, tie_word_embeddings=True), TOKENIZER)
    assert drafter.lm_head.weight is drafter.model.embed_tokens.weight
    assert len(drafter.lm_head.weight) == V + 2


def test_new_rows_do_not_depend_on_the_callers_random_state_and_leave_it_alone():
    source, new = tiny.causal_lm(V), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        new.append(diffusion.from_causal_lm(source, TOKENIZER).model.embed_tokens.weight[V:])
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*new)


def full_and_cached(model):
    """Causal logits of a text in one forward, and token by token with the cache."""
    ids = torch.tensor([[5, 80, 81, 7, 200, 13]])
    with torch.inference_mode():
        full = model(ids, use_cache=False).logits
        network = CachedNetwork(model.eval(), causal, 8)
        steps = [network(ids[:, i : i + 1], torch.tensor([[i]]), keep=1).logits for i in range(6)]
    return full, torch.cat(steps, 1)


@KINDS
@pytest.mark.parametrize("layers", [[0], [3], [0, 2, 3], [2, 0]])
def test_kept_layers_keep_their_order_and_run_with_a_cache(kind, layers):
    source = tiny.causal_lm(V, kind=kind, layers=4)
    drafter = diffusion.from_causal_lm(source, TOKENIZER, layers)
    assert drafter.config.num_hidden_layers == len(layers)
    for kept, original in zip(drafter.model.layers, layers, strict=True):
        old = weights(source.model.layers[original])
        assert all(torch.equal(p, old[name]) for name, p in kept.named_parameters())
    full, cached = full_and_cached(drafter)
    assert torch.allclose(full, cached, atol=1e-9)
    with torch.inference_mode():  # transformers' own cache uses the layers' indices too
        ids = torch.tensor([[5, 80, 81]])
        assert torch.allclose(drafter(ids, use_cache=True).logits, full[:, :3], atol=1e-9)
    assert len(source.model.layers) == source.config.num_hidden_layers == 4


@pytest.mark.parametrize("layers", [[], [4], [-1], [0, 9], [1, 1]])
def test_layers_that_are_not_there(layers):
    with pytest.raises(ValueError, match="0 to 3") as error:
        diffusion.from_causal_lm(tiny.causal_lm(V, layers=4), TOKENIZER, layers)
    assert "\n" not in str(error.value)


def second_reading(network, once):
    """The loss of random tokens at their second reading."""
    with torch.no_grad():
        logits = network(once.repeat(1, 2)).logits[:, once.shape[1] : -1]
    return torch.nn.functional.cross_entropy(logits.mT, once[:, 1:]).item()


@pytest.mark.slow
def test_a_number_of_layers_are_those_that_copy():
    source = tiny.causal_lm(16, layers=6, hidden=64).float().train()
    for i in (1, 2, 4):  # these do nothing, whatever is learned
        layer = source.model.layers[i]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.zero_()
            weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in source.parameters() if p.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(160):
        once = torch.randint(16, (32, 16), generator=generator)
        logits = source(once.repeat(1, 2), use_cache=False, logits_to_keep=16).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].mT, once[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    source.eval()
    assert diffusion.copying(source, 3, length=16) == [0, 3, 5]
    once, tokens = torch.randint(16, (8, 16), generator=generator), tiny.tokenizer(16)
    whole = second_reading(source, once)
    chosen, first_and_last = (
        second_reading(diffusion.from_causal_lm(source, tokens, layers), once)
        for layers in (diffusion.copying(source, 3, length=16), [0, 1, 5])
    )
    assert chosen == pytest.approx(whole, rel=1e-3)
    assert whole < 0.5 < first_and_last


@KINDS
def test_a_layer_counts_as_much_as_is_lost_without_it(kind):
    source = tiny.causal_lm(V, kind=kind, layers=5)
    once = torch.randint(V, (4, 48), generator=torch.Generator().manual_seed(0))
    lost = {}
    for i in (1, 2, 3):
        rest = [j for j in range(5) if j != i]
        lost[i] = second_reading(diffusion.from_causal_lm(source, PLAIN, rest), once)
    most = sorted(lost, key=lost.__getitem__, reverse=True)
    expected = [[4], [0, 4], *(sorted([0, 4, *most[:n]]) for n in (1, 2, 3))]
    assert [diffusion.copying(source, n) for n in (1, 2, 3, 4, 5)] == expected
    drafter = diffusion.from_causal_lm(source, TOKENIZER, 3)
    kept = weights(drafter.model.layers[1])
    assert torch.equal(kept["mlp.up_proj.weight"], source.model.layers[most[0]].mlp.up_proj.weight)


@pytest.mark.parametrize("count", [0, -1, 5])
def test_more_layers_than_there_are(count):
    with pytest.raises(ValueError, match=f"layers={count} is not allowed: the model has 4"):
        diffusion.from_causal_lm(tiny.causal_lm(V, layers=4), TOKENIZER, count)


def test_a_model_of_another_build_is_refused():
    class Other(torch.nn.Module):
        config = tiny.CLASSES["llama"][0]()

    with pytest.raises(ValueError, match="Llama, Qwen2 or Qwen3"):
        diffusion.from_causal_lm(Other(), TOKENIZER)


# -- the same draft logits: packed, one block at a time, and in the sampler ----------------------

K = 3
DOCUMENTS = [11, 7]  # tokens
ANCHORS = [4, 9, 1, 13, 4]  # clean tokens in front of each block; 13 is in the second document
ALL_MASKED = Noise(torch.ones(5, K).bool(), torch.ones(5, K).bool(), torch.ones(5))


def packed_row():
    """Two documents and two tokens of padding, as `data.rows.packing` lays them out."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(1, V, (sum(DOCUMENTS) + 2,), generator=g)
    document = torch.tensor([0] * DOCUMENTS[0] + [1] * DOCUMENTS[1] + [-1] * 2)
    position = torch.tensor([*range(DOCUMENTS[0]), *range(DOCUMENTS[1]), 0, 0])
    trained = (document >= 0).long()
    return {"input_ids": ids, "document": document, "position": position, "trained": trained}


def drafter(kind):
    return diffusion.from_causal_lm(tiny.causal_lm(V, seed=6, kind=kind), TOKENIZER).double()


def packed_logits(network, row, anchors=ANCHORS, noise=ALL_MASKED, **form):
    """[A, K, V] of one packed forward."""
    causal = form.get("attention") == "causal"
    layout = (PLAIN, "pard") if causal else (TOKENIZER, "separator")
    blocks = DraftBlocks(len(anchors), K, None, *layout)
    sample = blocks.lay_out(row, torch.tensor(anchors), noise)
    with torch.inference_mode():
        batch = {k: v[None] for k, v in sample.items()}
        return diffusion.draft_logits(network, batch, **form)[0]


def prefix_of(row, anchor):
    """The clean tokens in front of an anchor, of its own document only."""
    start = 0 if anchor <= DOCUMENTS[0] else DOCUMENTS[0]
    return row["input_ids"][start:anchor]


def lone_logits(network, row, anchor, drafted=(MASK,) * K, attention=None, shifted=False):
    """One block by a forward of its own: prefix, separator, masks, and a mask drawn by hand."""
    prefix = prefix_of(row, anchor)
    n, m = len(prefix), len(drafted)
    if attention == "causal":  # a stock causal LM over the prefix and a mask fewer
        masks = [SPARE if token == MASK else token for token in drafted[:-1]]
        ids = torch.cat([prefix, torch.tensor(masks, dtype=torch.long)])
        with torch.inference_mode():
            return network(ids[None], use_cache=False).logits[0, -m:]
    ids = torch.cat([prefix, torch.tensor([SEP, *drafted])])
    seen = torch.ones(n + 1 + m, n + 1 + m).tril().bool()
    seen[n:, n:] = True
    if attention == "bidirectional":
        seen[:] = True
    with torch.inference_mode():
        logits = network(ids[None], attention_mask=seen[None, None], use_cache=False).logits
    return logits[0, -m - 1 : -1] if shifted else logits[0, -m:]


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-9)


@KINDS
def test_packed_blocks_are_each_block_alone(kind):
    network, row = drafter(kind), packed_row()
    packed = packed_logits(network, row)
    for a, anchor in enumerate(ANCHORS):
        assert close(packed[a], lone_logits(network, row, anchor))
    assert close(packed[0], packed[4])  # the same anchor twice
    assert not close(packed[0], packed[1])


def test_partly_masked_blocks_show_their_clean_tokens():
    network, row = drafter("llama"), packed_row()
    masked = torch.tensor([[True, False, True]] * 5)
    packed = packed_logits(network, row, noise=ALL_MASKED._replace(masked=masked))
    second = int(row["input_ids"][9 + 1])
    assert close(packed[1], lone_logits(network, row, 9, (MASK, second, MASK)))
    assert not close(packed[1], lone_logits(network, row, 9))


def draft_rows(sampler, prompts, params):
    """Rows of a batch that are prefilled and have drafted nothing."""
    capacity = max(map(len, prompts)) + params.most + sampler.margin(params)
    rows = Batch(prompts, capacity, KeyedRandomness([0] * len(prompts)), "cpu")
    sampler.begin(rows, params)
    return rows


def sampler_of(network, **form):
    ids = {"block_size": K, "mask_id": MASK, "sep_id": SEP}
    if form.get("attention") == "causal":
        ids = {"block_size": K, "mask_id": SPARE}
    return DeerSampler(tiny.causal_lm(V), PLAIN, network, **ids, **form)


@KINDS
def test_the_sampler_drafts_what_training_trains(kind):
    """Cached, ragged draft passes over the prefixes of the anchors: positions and mask agree."""
    network, row, params = drafter(kind), packed_row(), SamplingParams()
    packed = packed_logits(network, row)[..., :V]
    prompts = [prefix_of(row, a).tolist() for a in ANCHORS]
    sampler = sampler_of(network)
    with torch.inference_mode():
        drafted = sampler.draft_pass(draft_rows(sampler, prompts, params), K, params)
    assert close(drafted, packed)


@pytest.mark.parametrize("kind", [*tiny.CLASSES, "mistral"])
def test_a_window_of_its_own_is_in_the_export(kind, tmp_path):
    """Tokens within the window have the numbers of a drafter without, and later ones others."""
    if kind == "mistral":
        source = windowed_lm.causal_lm(kind, vocabulary=V, sliding_window=100).double()
    else:
        source = tiny.causal_lm(V, kind=kind)
    made = {n: diffusion.from_causal_lm(source, TOKENIZER, [0, 1], n) for n in (None, 6, 7)}
    made[6].save_pretrained(tmp_path)
    text = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, found, wider = (m(text).logits for m in made.values())
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float64")(text).logits
    assert torch.equal(again, found)
    assert close(found[:, :6], whole[:, :6])
    assert not close(found[:, 6], whole[:, 6])
    assert not close(found[:, 6], wider[:, 6])  # the control: one token more
    assert close(wider[:, :7], whole[:, :7])
    assert type(made[None]) is type(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: windowed_lm.causal_lm("gemma2"), "layers of a 'gemma2' drafter cannot"),
        (lambda: windowed_lm.causal_lm("cohere2"), "layers of a 'cohere2' drafter cannot"),
        (
            lambda: tiny.causal_lm(V, attention_bias=True),
            r"network.window=6 .*llama \(without bias",
        ),
    ],
)
def test_layers_that_can_have_no_window(source, message):
    with pytest.raises(ValueError, match=message) as error:
        diffusion.from_causal_lm(source(), TOKENIZER, window=6)
    assert "\n" not in str(error.value)


def windowed(drafts, own):
    """A drafter with a window shorter than prefixes, the target's or its own; the same without."""
    if own:
        source = tiny.causal_lm(V, seed=6)
        if drafts == "causal":
            return [with_window(source, size) for size in (K + 1, 500)]
        return [diffusion.from_causal_lm(source, TOKENIZER, window=size) for size in (K + 1, 500)]
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    made = [
        tiny.causal_lm(V, seed=6, kind="qwen3", sliding_window=size, **layers)
        for size in (K + 1, 500)
    ]
    return made if drafts == "causal" else [diffusion.from_causal_lm(m, TOKENIZER) for m in made]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("attention", masks.DRAFTERS)
def test_a_drafter_with_windows_is_trained_as_it_drafts(attention, own):
    row, params = packed_row(), SamplingParams()
    prompts = [prefix_of(row, a).tolist() for a in ANCHORS]
    network, other = (m.double() for m in windowed(attention, own))
    packed = packed_logits(network, row, attention=attention)
    if attention == "causal":  # a stock causal LM, which has the windows itself
        for a, anchor in enumerate(ANCHORS):
            lone = lone_logits(network, row, anchor, attention=attention)
            assert close(packed[a], lone)
        packed = packed.index_fill(-1, torch.tensor([SPARE]), -torch.inf)
    sampler = sampler_of(network, attention=attention)
    with torch.inference_mode():
        drafted = sampler.draft_pass(draft_rows(sampler, prompts, params), K, params)
    assert close(drafted, packed[..., :V])
    without = packed_logits(other, row, attention=attention)  # the control
    assert not torch.allclose(without[..., : V - 3], packed[..., : V - 3], atol=1e-3)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "mistral", "qwen3"])
def test_copied_layers_keep_their_windows_in_an_export(kind, tmp_path):
    source = windowed_lm.causal_lm(kind)
    drafter = diffusion.from_causal_lm(source, windowed_lm.tokenizer(), [1, 2])
    if kinds := getattr(source.config, "layer_types", None):
        assert drafter.config.layer_types == kinds[1:]
    drafter.save_pretrained(tmp_path)
    again = type(drafter).from_pretrained(tmp_path)
    ids = torch.randint(windowed_lm.V, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = drafter(ids, use_cache=False).logits
        assert torch.allclose(again(ids, use_cache=False).logits, expected, atol=1e-5)
        wider = type(drafter).from_pretrained(tmp_path, sliding_window=windowed_lm.WINDOW + 1)
        found = wider(ids, use_cache=False).logits
    assert not torch.allclose(found, expected, atol=1e-3)  # the control


def test_layers_of_another_kind_than_a_config_can_say():
    """This class numbers its layers without experts: layer 0 would be layer 1 of the drafter."""
    source = windowed_lm.causal_lm("qwen3_moe", mlp_only_layers=[0])
    tokens = windowed_lm.tokenizer()
    assert diffusion.from_causal_lm(source, tokens, [0, 2]).config.num_hidden_layers == 2
    with pytest.raises(ValueError, match=r"layer 2 would be of another kind.*'qwen3_moe'"):
        diffusion.from_causal_lm(source, tokens, [2, 0])


def test_later_draft_passes_too():
    """The cache after cycles of different lengths a row, drafted blocks written over."""
    network, row, params = drafter("qwen3"), packed_row(), SamplingParams(max_new_tokens=20)
    sampler = sampler_of(network)
    text = row["input_ids"][: DOCUMENTS[0]]
    anchors = [1, 2, 3]
    with torch.inference_mode():
        rows = draft_rows(sampler, [text[:a].tolist() for a in anchors], params)
        for counts in ([1, 3, 2], [4, 1, 1], [2, 1, 4]):
            sampler.draft_pass(rows, K, params)
            new = torch.stack([text[a : a + K + 1] for a in anchors])
            rows.append(new, torch.tensor(counts))
            anchors = [a + c for a, c in zip(anchors, counts)]
        drafted = sampler.draft_pass(rows, K, params)
    assert rows.lengths.tolist() == anchors == [8, 7, 10]
    for a, logits in zip(anchors, drafted):
        assert close(logits, lone_logits(network, row, a)[:, :V])


# Drafters as masked-diffusion models are: the prefix sees the block, and outputs may be shifted.
FORMS = [
    {"attention": "bidirectional"},
    {"attention": "bidirectional", "shifted": True},
    {"attention": "prefix_causal", "shifted": True},
    {"attention": "causal"},  # PARD
]


def drafts(network, row, anchor, **form):
    """What a sampler may draft after a prefix: `lone_logits` without what the target never says."""
    logits = lone_logits(network, row, anchor, **form)[:, :V]
    if form.get("attention") == "causal":
        logits = logits.index_fill(-1, torch.tensor([SPARE]), -torch.inf)
    return logits


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_other_forms_train_each_block_alone(form):
    network, row = drafter("qwen2"), packed_row()
    packed = packed_logits(network, row, **form)
    for a, anchor in enumerate(ANCHORS):
        assert close(packed[a], lone_logits(network, row, anchor, **form))
    assert not close(packed, packed_logits(network, row))
    masked = torch.tensor([[True, False, True]] * 5)
    partly = packed_logits(network, row, noise=ALL_MASKED._replace(masked=masked), **form)
    second = int(row["input_ids"][9 + 1])
    assert close(partly[1], lone_logits(network, row, 9, (MASK, second, MASK), **form))


def test_a_short_block_does_not_change_by_its_padding():
    """Stage II's suffixes: tokens after R are of no document, in either form."""
    network, row = drafter("llama"), packed_row()
    short = Noise(
        torch.tensor([[True, True, False]] * 5), torch.arange(K).expand(5, K) < 2, torch.ones(5)
    )
    for attention in masks.DRAFTERS:
        packed = packed_logits(network, row, noise=short, attention=attention)
        alone = lone_logits(network, row, 9, (MASK, MASK), attention=attention)
        assert close(packed[1, :2], alone)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_sampler_drafts_what_the_other_forms_train(form):
    """Ragged draft passes, first and after cycles of different lengths a row."""
    network, row, params = drafter("qwen3"), packed_row(), SamplingParams(max_new_tokens=20)
    sampler, text, anchors = sampler_of(network, **form), packed_row()["input_ids"], [1, 2, 3]
    with torch.inference_mode():
        rows = draft_rows(sampler, [text[:a].tolist() for a in anchors], params)
        for counts in ([1, 3, 2], [4, 1, 1]):
            for a, logits in zip(anchors, sampler.draft_pass(rows, K, params)):
                assert close(logits, drafts(network, row, a, **form))
            rows.append(torch.stack([text[a : a + K + 1] for a in anchors]), torch.tensor(counts))
            anchors = [a + c for a, c in zip(anchors, counts)]
        rows.select([0, 2])
        drafted = sampler.draft_pass(rows, K, params)
        assert close(drafted[1], drafts(network, row, anchors[2], **form))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_request_alone_drafts_the_same(form):
    network, row, params = drafter("qwen3"), packed_row(), SamplingParams()
    sampler = sampler_of(network, **form)
    with torch.inference_mode():
        rows = draft_rows(sampler, [prefix_of(row, 9).tolist()], params)
        drafted = sampler.draft_pass(rows, K, params)
    assert close(drafted[0], drafts(network, row, 9, **form))


@pytest.mark.parametrize(
    "wrong", [{"mask_id": SPARE - 1}, {"attention": "prefix_causal", "sep_id": SEP}]
)
def test_a_wrong_layout_in_decoding_fails_the_same_comparison(wrong):
    """A mask id that is off by one; a separator where training had none."""
    network, row, params = drafter("qwen3"), packed_row(), SamplingParams()
    knobs = {"block_size": K, "mask_id": SPARE, "attention": "causal"} | wrong
    sampler = DeerSampler(tiny.causal_lm(V), PLAIN, network, **knobs)
    with torch.inference_mode():
        rows = draft_rows(sampler, [prefix_of(row, 9).tolist()], params)
        drafted = sampler.draft_pass(rows, K, params)
    assert not close(drafted[0, 1:], drafts(network, row, 9, attention="causal")[1:])


@pytest.mark.parametrize("knobs", [{"attention": "causal", "sep_id": SEP}, {}])
def test_a_separator_goes_with_the_attention(knobs):
    with pytest.raises(ValueError, match="separator"):
        DeerSampler(tiny.causal_lm(V), PLAIN, drafter("llama"), block_size=K, mask_id=0, **knobs)


def test_a_cached_bidirectional_prefix_fails_the_same_comparison():
    network, row, params = drafter("qwen3"), packed_row(), SamplingParams(max_new_tokens=20)
    sampler, text = sampler_of(network, attention="bidirectional"), row["input_ids"]
    sampler.drafter_caches = True
    with torch.inference_mode():
        rows = draft_rows(sampler, [text[:3].tolist()], params)
        drafted = sampler.draft_pass(rows, K, params)
    alone = lone_logits(network, row, 3, attention="bidirectional")
    assert (drafted[0] - alone[:, :V]).abs().max() > 1e-3


def test_what_must_and_what_must_not_change_the_logits(monkeypatch):
    """The comparisons above can fail, and blocks depend on nothing but their prefix."""
    network, row = drafter("llama"), packed_row()
    before = packed_logits(network, row)

    changed = copy.deepcopy(row)
    changed["input_ids"][2] = (changed["input_ids"][2] + 1) % V
    moved = packed_logits(network, changed)
    unmoved = [a for a in range(5) if close(moved[a], before[a])]
    assert unmoved == [2, 3]  # in front of token 2, and in the other document

    monkeypatch.setattr(masks, "draft_blocks", causal)
    assert not close(packed_logits(network, row), before)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "granitemoehybrid"])
def test_a_drafter_of_a_recurrent_target_has_its_attention_layers(kind, capsys):
    target = recurrent_lm.model(kind, V)
    able = [i for i, layer in enumerate(target.config.layer_types) if layer == "full_attention"]
    drafter = diffusion.from_causal_lm(target, TOKENIZER, len(able)).eval()
    assert f"layers {able} of 4 (those with recurrent states cannot" in capsys.readouterr().out
    assert {*drafter.config.layer_types} == {"full_attention"}
    sampler = DeerSampler(target, TOKENIZER, drafter, block_size=3, mask_id=MASK, sep_id=SEP)
    plain = PlainSampler(target, TOKENIZER)
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(12, seed=1)
    assert ids(sampler.generate(prompts, params)) == ids(plain.generate(prompts, params))
    with pytest.raises(ValueError, match=r"recurrent state cannot draft blocks. Choose from"):
        diffusion.from_causal_lm(target, TOKENIZER, [0, able[0]])
    with pytest.raises(ValueError, match=rf"has {len(able)} without a recurrent state, give 1 to"):
        diffusion.from_causal_lm(target, TOKENIZER, 4)


def test_a_target_of_which_every_layer_has_a_state_gives_no_drafter():
    with pytest.raises(ValueError, match="has 0 without a recurrent state, and others cannot"):
        diffusion.from_causal_lm(recurrent_lm.model("falcon_h1", V), TOKENIZER, 2)
