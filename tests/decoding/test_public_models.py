"""Public masked diffusion LMs bring classes of their own: tiny random ones of the same shape."""

import json

import pytest

from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.masked.draft_graph import graph_of
from tests.support import tiny
from tests.support.denoising import L, V, network, reference
from tests.support.public import public_model


@pytest.fixture(params=["llada", "Dream"])
def public(request, tmp_path, monkeypatch):
    """(folder of such a model, the network inside): LLaDA's and Dream's ways to be loaded."""
    return public_model(request.param, tmp_path, monkeypatch)


PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9], [9, 9, 2, 1]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def open_one(folder, *knobs, **options):
    options = {"trust_remote_code": True, "dtype": "float64", **options}
    return load(str(folder), sampler=("method=denoise", f"block_size={L}", *knobs), **options)


def test_a_public_model_is_decoded_by_its_own_attention(public, tmp_path):
    folder, inside = public
    expected = [reference(inside, p, 12, "bidirectional") for p in PROMPTS]
    sampler = open_one(folder)
    assert (sampler.mask_id, sampler.attention) == (V, "bidirectional")
    found = sampler.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in found] == expected
    assert {r.stats.target_passes for r in found} == {12}
    graph = graph_of(L, 1, [[(i, 1) for i in range(1, n + 1)] for n in range(1, L)])
    (tmp_path / "graph.json").write_text(json.dumps(graph.to_dict()))
    drafted = open_one(folder, "method=spiffy", f"graph={tmp_path / 'graph.json'}")
    found = drafted.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in found] == expected
    assert max(r.stats.target_passes for r in found) < 12


def test_its_code_must_be_allowed_and_its_limits_hold(public):
    folder, _ = public
    with pytest.raises(ValueError, match="trust_remote_code") as error:
        open_one(folder, trust_remote_code=False)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"attention='block_causal'.*attention='bidirectional'"):
        open_one(folder, "attention=block_causal")
    if "llada" in folder.name:
        with pytest.raises(ValueError, match="context of 64"):
            open_one(folder).generate([[1] * 60], GREEDY)


def test_what_a_model_does_not_tell_is_asked_for(tmp_path):
    network().save_pretrained(tmp_path)
    tiny.tokenizer(V).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"sampler=\[method=denoise,mask_id="):
        open_one(tmp_path)
    with pytest.raises(ValueError, match=r"sampler=\[method=denoise,attention="):
        open_one(tmp_path, f"mask_id={V}")
    sampler = open_one(tmp_path, f"mask_id={V}", "attention=block_causal")
    expected = reference(network(), [3, 1, 4], 12, "block_causal")
    assert sampler.generate([[3, 1, 4]], GREEDY)[0].token_ids == expected
