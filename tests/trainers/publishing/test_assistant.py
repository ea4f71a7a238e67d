"""A drafter as transformers' own assistant model: the same drafts, and plain decoding's text."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from decoding.engine.params import SamplingParams
from decoding.loading import load
from models import dflash
from tests.support import learned, tiny
from trainers.export import run as export_command
from trainers.export import write_assistant

PROMPTS = [f"def {name}" for name in ("area", "sum", "row", "last")]
NEW = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose drafter has learned its prompts."""
    root = tmp_path_factory.mktemp("assistant")
    export = learned.write(root, PROMPTS, "dflash", NEW, 200)
    (export / "README.md").write_text("A card.\n")
    export_command([f"run={export.parent}", "assistant=true"])
    return export.parent


def passes(run, folder):
    """(texts, forwards of the target) of stock transformers with an assistant."""
    target = AutoModelForCausalLM.from_pretrained(run.parent / "target").eval()
    assistant = AutoModel.from_pretrained(folder).eval()
    sampler = load(str(run / "export"), dtype="float32")
    count, texts = [], []
    handle = target.register_forward_hook(lambda *_: count.append(1))
    for prompt in PROMPTS:
        ids = torch.tensor([sampler.tokenizer(prompt).input_ids])
        found = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=assistant,
            speculation_type="dflash",
            max_new_tokens=NEW,
            do_sample=False,
        )
        texts.append(found[0, ids.shape[1] :].tolist())
    handle.remove()
    return texts, len(count)


def test_stock_transformers_drafts_what_we_do(run):
    sampler = load(str(run / "export"), dtype="float32")
    params = SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
    ours = sampler.generate([sampler.tokenizer(p).input_ids for p in PROMPTS], params)
    texts, forwards = passes(run, run / "assistant")
    assert texts == [r.token_ids for r in ours]
    plain = NEW * len(PROMPTS)
    # A prefill gives the first token of each without a draft; the end may cut the last draft.
    needed = sum(r.stats.target_passes for r in ours)
    assert abs(forwards - needed) <= len(PROMPTS) < (plain - needed) / 2


@pytest.mark.parametrize("wrong", [{"mask_token_id": 1}, {"target_layer_ids": [1]}])
def test_a_wrong_config_drafts_worse(run, tmp_path, wrong):
    """The negative control: the text is the same, and takes many more forwards."""
    write_assistant(run / "export", tmp_path / "wrong")
    file = tmp_path / "wrong" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    right, least = passes(run, run / "assistant")
    texts, forwards = passes(run, tmp_path / "wrong")
    assert texts == right
    assert forwards > least + 2 * len(PROMPTS)


def test_a_head_of_its_own_is_refused(tmp_path):
    target = tiny.causal_lm(12, layers=3).float()
    drafter = tiny.dflash(target, draft_ids=torch.arange(5))
    drafter.config.block_size = 4
    drafter.save_pretrained(tmp_path / "export")
    with pytest.raises(ValueError, match=r"head of its own for 5 tokens.*draft_ids=null"):
        write_assistant(tmp_path / "export", tmp_path / "assistant")
    assert not (tmp_path / "assistant").exists()


def test_another_drafter_is_refused(tmp_path):
    tiny.causal_lm(12).save_pretrained(tmp_path / "export")
    with pytest.raises(ValueError, match="no class for a drafter of method=plain") as error:
        write_assistant(tmp_path / "export", tmp_path / "assistant")
    assert "\n" not in str(error.value)


def test_the_forward_is_the_same(tmp_path):
    target = tiny.causal_lm(26, layers=4).float()
    drafter = tiny.dflash(target, 2)
    drafter.config.block_size = 4
    drafter.save_pretrained(tmp_path / "export")
    write_assistant(tmp_path / "export", tmp_path / "assistant")
    theirs = AutoModel.from_pretrained(tmp_path / "assistant").eval()
    ours = dflash.load(str(tmp_path / "export")).eval()
    block, context = torch.randn(1, 4, 16), torch.randn(1, 6, 32)
    given = {"noise_embeds": block, "context_hidden_states": context}
    with torch.no_grad():
        found = theirs(**given).last_hidden_state
        torch.testing.assert_close(found, ours(**given).last_hidden_state, atol=1e-5, rtol=0)
