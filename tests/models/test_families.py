"""The table of families in the documentation is what parade does with them (a dozen of them)."""

import pytest

from models import attention
from tests.support import families

# Of every kind: grouped heads, latent attention, experts, learned positions, windows, hybrids,
# composites, attention without masks, and positions that are counted.
DOZEN = (
    "bart", "bloom", "deepseek_v3", "gemma3_text", "glm4", "gpt2", "gpt_oss", "lfm2", "llama",
    "llama4_text", "qwen2_5_vl", "qwen3_moe",
)  # fmt: skip


@pytest.mark.parametrize("kind", DOZEN)
def test_a_family_does_what_the_table_says(kind, tmp_path):
    told = families.read_page()[kind]
    found = families.attempt(kind, tmp_path)
    again = "run python -m tests.families only=" + kind
    assert (found.result, found.reason) == (told.result, told.reason), again


def test_a_wrong_text_is_a_defect(tmp_path, monkeypatch):
    """Negative control: attention at another scale."""

    def wrong(*args, scaling=None, **options):
        return attention.grouped(*args, scaling=2 * scaling, **options)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.GROUPED, wrong)
    assert families.attempt("llama", tmp_path).result == "defect"


def test_the_page_is_what_the_command_writes():
    """All families that were tried are in it, none of them with a defect."""
    found, text = families.read_page(), families.PAGE.read_text()
    written = families.page(found).partition("## Well-known")[2]
    assert written == text.partition("## Well-known")[2]
    assert len([o for o in found.values() if o.result != "not tried"]) >= 60
    assert not [o.family for o in found.values() if o.result == "defect"]
