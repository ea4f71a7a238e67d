"""Every attention pattern against a matrix drawn by hand, and its two forms against each other."""

import pytest
import torch

from models.attention import attention_inputs
from models.masks import (
    Layout,
    bidirectional,
    block_causal,
    branches,
    causal,
    clean_windows,
    dense,
    draft_blocks,
    drafter_attention,
    flex,
    numbered_blocks,
)
from tests.support import tiny
from tests.support.masks import drawn, layout

PREDICATES = [
    *[causal, draft_blocks, numbered_blocks(3, causal=True), branches],
    *[clean_windows(3), block_causal(3), bidirectional(3)],
]


# Two documents of three and two tokens, and one padding token.
TWO_DOCUMENTS = layout([0, 0, 0, 1, 1, -1], range(6), [-1] * 6)

CAUSAL = drawn("""
    x . . . . .
    x x . . . .
    x x x . . .
    . . . x . .
    . . . x x .
    . . . . . x
""")


def test_causal_within_each_document():
    assert torch.equal(dense(causal, TWO_DOCUMENTS)[0, 0], CAUSAL)
    assert torch.equal(dense(draft_blocks, TWO_DOCUMENTS)[0, 0], CAUSAL)  # no block, no difference


def test_a_document_that_sees_all_of_itself():
    expected = drawn("""
        x x x . . .
        x x x . . .
        x x x . . .
        . . . x x .
        . . . x x .
        . . . . . x
    """)
    assert torch.equal(dense(drafter_attention("bidirectional"), TWO_DOCUMENTS)[0, 0], expected)
    assert drafter_attention("prefix_causal") is draft_blocks
    with pytest.raises(ValueError, match=r"attention 'full'.*'bidirectional'"):
        drafter_attention("full")


# The same clean tokens without padding, then block 0 (separator and two masks) after two tokens of
# the first document, and block 1 (separator and one mask) after one token of the second.
BLOCKS = layout(
    document=[0, 0, 0, 1, 1, 0, 0, 0, 1, 1],
    index=[0, 1, 2, 3, 4, 2, 2, 2, 4, 4],
    block=[-1, -1, -1, -1, -1, 0, 0, 0, 1, 1],
)

DRAFT_BLOCKS = drawn("""
    x . . . . . . . . .
    x x . . . . . . . .
    x x x . . . . . . .
    . . . x . . . . . .
    . . . x x . . . . .
    x x . . . x x x . .
    x x . . . x x x . .
    x x . . . x x x . .
    . . . x . . . . x x
    . . . x . . . . x x
""")


def test_a_block_sees_its_prefix_and_itself():
    assert torch.equal(dense(draft_blocks, BLOCKS)[0, 0], DRAFT_BLOCKS)


def test_two_blocks_of_one_document_do_not_see_each_other():
    both = layout([0] * 6, [0, 1, 1, 1, 2, 2], [-1, -1, 0, 0, 1, 1])
    expected = drawn("""
        x . . . . .
        x x . . . .
        x . x x . .
        x . x x . .
        x x . . x x
        x x . . x x
    """)
    assert torch.equal(dense(draft_blocks, both)[0, 0], expected)


def test_causal_blocks_see_their_prefix_and_what_comes_before_within_them():
    """PARD: two blocks of three, of prefixes of one and two tokens; the last token is padding."""
    rows = layout([0] * 8 + [-1], [0, 1, 1, 1, 1, 2, 2, 2, 2], [-1, -1, 0, 1, 2, 3, 4, 5, -1])
    expected = drawn("""
        x . . . . . . . .
        x x . . . . . . .
        x . x . . . . . .
        x . x x . . . . .
        x . x x x . . . .
        x x . . . x . . .
        x x . . . x x . .
        x x . . . x x x .
        . . . . . . . . x
    """)
    assert torch.equal(dense(numbered_blocks(3, causal=True), rows)[0, 0], expected)
    assert drafter_attention("causal") is causal  # one block, at the end of the text


def test_queries_over_other_keys_are_rows_of_the_square():
    """What a cache does: the last tokens only, over all slots."""
    last = BLOCKS.map(lambda t: t[:, 5:])
    assert torch.equal(dense(draft_blocks, last, BLOCKS)[0, 0], DRAFT_BLOCKS[5:])


# A prompt of two tokens and two blocks of two, each noisy (0) and then clean (1).
NOISY_AND_CLEAN = layout(
    document=[0] * 10,
    index=[-2, -1, 0, 1, 0, 1, 2, 3, 2, 3],
    block=[-1, -1, 0, 0, 1, 1, 0, 0, 1, 1],
)

NOISE_CONDITIONED = drawn("""
    x . . . . . . . . .
    x x . . . . . . . .
    x x x . . . . . . .
    x x x x . . . . . .
    x x . . x . . . . .
    x x . . x x . . . .
    x x x x . . x . . .
    x x x x . . x x . .
    x x . . x x . . x .
    x x . . x x . . x x
""")
# Every window is one block: the second noisy block sees the first clean one.
CLEAN_WINDOWS_OF_ONE = drawn("""
    x . . . . . . . . .
    x x . . . . . . . .
    x x x . . . . . . .
    x x x x . . . . . .
    x x . . x . . . . .
    x x . . x x . . . .
    x x . . x x x . . .
    x x . . x x x x . .
    x x . . x x . . x .
    x x . . x x . . x x
""")


def test_noise_conditioned_blocks_and_a_window_of_two():
    assert torch.equal(dense(branches, NOISY_AND_CLEAN)[0, 0], NOISE_CONDITIONED)
    # Both blocks are of one window, so nothing is clean for a noisy block.
    assert torch.equal(dense(clean_windows(4), NOISY_AND_CLEAN)[0, 0], NOISE_CONDITIONED)


def test_earlier_windows_are_clean_for_a_noisy_block():
    assert torch.equal(dense(clean_windows(2), NOISY_AND_CLEAN)[0, 0], CLEAN_WINDOWS_OF_ONE)


def test_three_blocks_and_a_window_of_two():
    """One token a block: x c x c x c; only the third noisy block is of another window."""
    three = layout([0] * 7, [-1, 0, 0, 1, 1, 2, 2], [-1, 0, 1, 0, 1, 0, 1])
    expected = drawn("""
        x . . . . . .
        x x . . . . .
        x . x . . . .
        x x . x . . .
        x . x . x . .
        x . x . x x .
        x . x . x . x
    """)
    assert torch.equal(dense(clean_windows(2), three)[0, 0], expected)


def random_layout(seed):
    """Clean tokens of a few documents, draft blocks after them, and padding."""
    g = torch.Generator().manual_seed(seed)
    document = torch.randint(0, 3, (10,), generator=g).sort().values
    document[8:] = -1
    index = torch.arange(10)
    block = torch.full((10,), -1)
    for number in range(3):
        anchor = int(torch.randint(1, 8, (), generator=g))
        size = int(torch.randint(1, 5, (), generator=g))
        document = torch.cat([document, document[anchor - 1].expand(size)])
        index = torch.cat([index, torch.full((size,), anchor)])
        block = torch.cat([block, torch.full((size,), number)])
    return Layout(document[None], index[None], block[None])


@pytest.mark.parametrize("predicate", PREDICATES)
@pytest.mark.parametrize("seed", range(5))
def test_flex_is_dense_element_by_element(predicate, seed):
    rows = random_layout(seed)
    L = rows.document.shape[1]
    mask_mod = flex(predicate, rows).mask_mod
    q, k = torch.meshgrid(torch.arange(L), torch.arange(L), indexing="ij")
    zero = torch.tensor(0)
    assert torch.equal(mask_mod(zero, zero, q, k), dense(predicate, rows)[0, 0])


@pytest.mark.parametrize("predicate", PREDICATES)
@pytest.mark.parametrize("seed", range(20))
def test_no_row_is_entirely_masked_and_every_token_sees_itself(predicate, seed):
    """A row without any key is NaN in a softmax."""
    mask = dense(predicate, random_layout(seed))[0, 0]
    assert mask.diagonal().all()


@pytest.mark.parametrize("seed", range(10))
def test_no_clean_token_sees_a_block(seed):
    """What makes the keys and values of a prefix cacheable."""
    rows = random_layout(seed)
    mask, clean = dense(draft_blocks, rows)[0, 0], rows.block[0] < 0
    assert not mask[clean][:, ~clean].any()


def test_the_implementation_chooses_the_form():
    def inputs(implementation):
        network = tiny.causal_lm(8)
        network.config._attn_implementation = implementation
        return attention_inputs(network, causal, TWO_DOCUMENTS)

    assert torch.equal(inputs("sdpa")["attention_mask"][0, 0], CAUSAL)
    assert inputs("flex_attention")["attention_mask"].mask_mod is not None
    with pytest.raises(ValueError, match=r"attention=eager is not allowed.*give attention=sdpa"):
        inputs("eager")


# A text of five tokens in blocks of two, then a noised copy of it, and a padding token.
COPIES = layout(
    document=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1],
    index=[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0],
    block=[-1, -1, -1, -1, -1, 0, 0, 0, 0, 0, -1],
)

BLOCK_CAUSAL = drawn("""
    x x . . . . . . . . .
    x x . . . . . . . . .
    x x x x . . . . . . .
    x x x x . . . . . . .
    x x x x x . . . . . .
    . . . . . x x . . . .
    . . . . . x x . . . .
    x x . . . . . x x . .
    x x . . . . . x x . .
    x x x x . . . . . x .
    . . . . . . . . . . x
""")

BIDIRECTIONAL = drawn("""
    x x x x x . . . . . .
    x x x x x . . . . . .
    x x x x x . . . . . .
    x x x x x . . . . . .
    x x x x x . . . . . .
    . . x x x x x . . . .
    . . x x x x x . . . .
    x x . . x . . x x . .
    x x . . x . . x x . .
    x x x x . . . . . x .
    . . . . . . . . . . x
""")


@pytest.mark.parametrize(
    ("predicate", "matrix"), [(block_causal, BLOCK_CAUSAL), (bidirectional, BIDIRECTIONAL)]
)
def test_blocks_and_their_copies(predicate, matrix):
    assert torch.equal(dense(predicate(2), COPIES)[0, 0], matrix)


def test_copies_of_one_block_do_not_see_each_other():
    """Spiffy, Fig. 2: two blocks and two drafts of the second one."""
    both = layout([0] * 8, [0, 1, 2, 3, 2, 3, 2, 3], [-1, -1, -1, -1, 0, 0, 1, 1])
    expected = drawn("""
        x x . . . . . .
        x x . . . . . .
        x x x x . . . .
        x x x x . . . .
        x x . . x x . .
        x x . . x x . .
        x x . . . . x x
        x x . . . . x x
    """)
    assert torch.equal(dense(block_causal(2), both)[0, 0], expected)


def test_documents_of_a_row_have_blocks_of_their_own():
    two = layout([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [-1] * 6)
    expected = drawn("""
        x x . . . .
        x x . . . .
        x x x . . .
        . . . x x .
        . . . x x .
        . . . x x x
    """)
    assert torch.equal(dense(block_causal(2), two)[0, 0], expected)
