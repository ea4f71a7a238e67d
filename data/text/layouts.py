"""Layouts of draft blocks: which tokens a drafter reads in place of those that it drafts.

A block of K drafted tokens after n committed ones, in training and in decoding alike:

| layout | tokens | at positions | which outputs draft which tokens | source (arXiv) |
|---|---|---|---|---|
| `separator` | separator, K masks | n to n + K | a mask drafts its own | DEER, 2512.15176 |
| `pard` | last committed, K - 1 masks | n - 1 to n + K - 2 | each the next | PARD, 2504.18583 |
| `dflash` | last committed, K masks | n - 1 to n + K - 1 | a mask its own | DFlash, 2602.06036 |
| `none` | | | the drafter reads no block: heads over the target's states | |
| `dspark` | those of `pard` | as `pard` | each the next | DSpark, 2607.05147 |

The block of `pard` is causal, as vLLM's `parallel_drafting` runs it; the others see themselves.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a draft block in a drafter's input.

    Attributes:
        name: Its name in recipes.
        separator: Whether the first token is a separator, not the last committed token.
        anchored: Whether the first token drafts the first token of the block.
        attention: The drafter's attention (`models.masks.DRAFTERS`), with outputs that predict the
            next token as a causal LM's do; None for any.
        mask_key: The key of config.json in which engines look for the mask token, if any.
        read: Whether the drafter reads the block at all.
        served: Whether serving engines run it (without auxiliary heads).
    """

    name: str
    separator: bool = False
    anchored: bool = False
    attention: str | None = None
    mask_key: str | None = None
    read: bool = True
    served: bool = False

    def width(self, length: int) -> int:
        """Return W, a block's tokens in the drafter's input, for `length` (K) drafted ones."""
        return self.read * (length if self.anchored else 1 + length)

    def resolve_attention(self, attention: str, shifted: bool) -> str:
        """Return the drafter's attention; raise ValueError if the layout has no such choice."""
        if self.attention is None:
            return attention
        if attention != "prefix_causal" or shifted:
            raise ValueError(
                f"module.attention={attention} and module.shifted={shifted} are not allowed with "
                f"layout={self.name}, whose attention and outputs are a causal LM's"
            )
        return self.attention

    def check_vocabulary(self, drafter: int, target: int) -> None:
        """Raise ValueError unless the drafter has the target's vocabulary, as engines require."""
        if self.attention is not None and drafter != target:
            raise ValueError(
                f"layout={self.name}: the drafter has {drafter} tokens and its target {target}, "
                "and engines want as many: begin with layers of the target, "
                f"recipe=diffusion_adapt layout={self.name}"
            )


LAYOUTS = {
    layout.name: layout
    for layout in (
        BlockLayout("separator", separator=True),
        BlockLayout("pard", anchored=True, attention="causal", mask_key="pard_token", served=True),
        BlockLayout("dflash", served=True),
        BlockLayout("dspark", anchored=True),
        BlockLayout("none", read=False),
    )
}


def layout_of(name: str, allowed: tuple[str, ...] = tuple(LAYOUTS)) -> BlockLayout:
    """Return the layout of this name; raise ValueError unless it is among `allowed`."""
    if name not in allowed:
        raise ValueError(f"unknown layout {name!r}. Choose from {list(allowed)}")
    return LAYOUTS[name]
