"""A class-conditional causal transformer over image patches, in raster or any other order.

MAR is bidirectional, so it cannot verify several tokens of one row in one pass. Here (a stock Llama
decoder) a token attends to the class and to earlier tokens of the order, and keys and values are
cached. Input i is token i - 1 of the order, with the embeddings of its own position and of the
position to predict, that of token i (sigma-GPT, arXiv 2404.09562); input 0 is the class.
"""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from models.heads import HEADS
from models.sizes import HeadSizes, ImageSizes, TransformerSizes
from models.weights import load_own, one_line

ORDERS = ("raster", "random")
# MAR's sizes (arXiv 2406.11838): hidden size, layers of its two halves, and the head's MLP.
MAR = {"B": (768, 24, 1024, 6), "L": (1024, 32, 1280, 8), "H": (1280, 40, 1536, 12)}


class ImageConfig(PreTrainedConfig):
    """Configuration of any model that generates images patch by patch.

    Args:
        size: Side of the square image (or of its latents), in pixels.
        channels: Channels of the image (or of its latents).
        patch: Side of a patch, in pixels; it must divide `size`.
        classes: Number of labels, 0 to classes - 1; label `classes` means no class.
    """

    def __init__(self, size: int, channels: int, patch: int, classes: int, **kwargs):
        if size % patch:
            raise ValueError(f"patch={patch} does not divide size={size}")
        self.size, self.channels, self.patch, self.classes = size, channels, patch, classes
        super().__init__(**kwargs)

    @property
    def tokens(self) -> int:
        """Return N, the number of patches per image."""
        return (self.size // self.patch) ** 2

    @property
    def dim(self) -> int:
        """Return D, the number of values per patch."""
        return self.channels * self.patch**2


class PatchConfig(ImageConfig):
    """Configuration of a `PatchTransformer`; size, channels, patch, classes as in `ImageConfig`.

    Args:
        order: 'raster', or 'random' (a permutation for each image).
        head: {kind: 'diffusion' or 'mixture', and the arguments of that head}.
        backbone: Fields of transformers' LlamaConfig.
    """

    model_type = "parade_patches"

    def __init__(
        self,
        size: int = 8,
        channels: int = 1,
        patch: int = 2,
        classes: int = 10,
        order: str = "raster",
        head: dict | None = None,
        backbone: Mapping[str, Any] | None = None,
        **kwargs,
    ):
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}. Choose from {list(ORDERS)}")
        self.order = order
        self.head, self.backbone = dict(head or {}), dict(backbone or {})
        super().__init__(size, channels, patch, classes, **kwargs)


class PatchTransformer(PreTrainedModel):
    """The causal transformer over patches; its `head` maps hidden states to token densities."""

    config_class = PatchConfig
    base_model_prefix = ""
    main_input_name = "patches"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: PatchConfig):
        super().__init__(config)
        backbone = LlamaConfig(
            **config.backbone,
            max_position_embeddings=config.tokens,
            vocab_size=config.classes + 1,
            bos_token_id=None,
            eos_token_id=None,
        )
        backbone._attn_implementation = "sdpa"
        hidden = backbone.hidden_size
        self.backbone = LlamaModel(backbone)  # its token embedding holds the classes
        self.token = nn.Linear(config.dim, hidden)
        self.here = nn.Embedding(config.tokens, hidden)
        self.next = nn.Embedding(config.tokens, hidden)
        keys = dict(config.head)
        kind = keys.pop("kind", None)
        if kind not in HEADS:
            raise ValueError(f"unknown head {kind!r}. Choose from {sorted(HEADS)}")
        try:
            self.head = HEADS[kind](hidden, config.dim, **keys)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a {kind} head cannot be made of {keys}: {error}") from error
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Return a batch of one image, to compare a reloaded export with the trained model."""
        N, D = self.config.tokens, self.config.dim
        patches = torch.linspace(-1, 1, N * D).view(1, N, D)
        return {"patches": patches, "label": torch.zeros(1).long(), "order": torch.arange(N)[None]}

    def embed_class(self, label: Tensor, following: Tensor) -> Tensor:
        """Return input 0 [B, n, H] of labels [B] (`classes`: none) and next positions [B, n]."""
        return self.backbone.embed_tokens(label)[:, None] + self.next(following)

    def embed_patches(self, patches: Tensor, position: Tensor, following: Tensor) -> Tensor:
        """Return inputs [B, n, H] of patches [B, n, D], their positions and the next ones."""
        patches = patches.to(self.token.weight.dtype)
        return self.token(patches) + self.here(position) + self.next(following)

    def forward(self, patches: Tensor, label: Tensor, order: Tensor) -> Tensor:
        """Return hidden states z [B, N, H]: the head's density at z_i is p(token i | tokens < i).

        `patches` [B, N, D] are sorted by `order` [B, N], their positions; `label` is [B].
        """
        first = self.embed_class(label, order[:, :1])
        others = self.embed_patches(patches[:, :-1], order[:, :-1], order[:, 1:])
        inputs = torch.cat([first, others], 1)
        return self.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state


def from_config(
    head: Literal[*HEADS], heads: dict[str, HeadSizes], **config: Unpack[ImageSizes]
) -> PatchTransformer:
    """Return a new transformer with random weights and a head of kind `head`, a key of `heads`.

    `heads` has the arguments of each kind of head, `config` further arguments of `PatchConfig`.
    """
    return PatchTransformer(PatchConfig(head={"kind": head, **heads[head]}, **config))


def mar(
    mar_size: Literal[*MAR],
    head: Literal[*HEADS],
    heads: dict[str, HeadSizes],
    **config: Unpack[ImageSizes],
) -> PatchTransformer:
    """Return a new transformer of the width and depth of a MAR ('B', 'L' or 'H') and its head.

    The other arguments are those of `from_config`.
    """
    hidden, layers, width, depth = MAR[mar_size]
    backbone: TransformerSizes = {
        "hidden_size": hidden,
        # A gated MLP of 8/3 the width has the weights of a plain one of 4 times the width.
        "intermediate_size": hidden * 8 // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    }
    sizes: HeadSizes = {"width": width, "depth": depth} if head == "diffusion" else {}
    config["backbone"] = {**backbone, **config.get("backbone", {})}
    return from_config(head, {head: {**sizes, **heads[head]}}, **config)


def check_pair(target: PatchTransformer, drafter: PatchTransformer) -> None:
    """Raise ValueError unless a drafter can draft for a target; no weights are read.

    Patches, classes, order and noise schedule must be equal, and the chain's last step have noise.
    """
    for name in ("size", "channels", "patch", "classes", "order"):
        ours, theirs = getattr(drafter.config, name), getattr(target.config, name)
        if ours != theirs:
            raise ValueError(
                f"the drafter has {name}={ours!r}, the target {name}={theirs!r}: they must be equal"
            )
    ours, theirs = drafter.head.schedule, target.head.schedule
    if ours != theirs:
        raise ValueError(
            f"the drafter's chain has {ours or 'no noise schedule (a mixture head)'}, the target's "
            f"{theirs or 'none (a mixture head)'}: they must be equal"
        )
    if ours is not None and not ours.noisy_last:
        raise ValueError(
            "noisy_last=false: the chain's last step has no noise, so a token has no density and "
            "drafts cannot be verified. Train both models with noisy_last=true, or decode with it: "
            "'sampler=[method=cspd,gamma=4,noisy_last=true]'"
        )


def skeleton(path: str) -> PatchTransformer:
    """Return a folder's or Hub id's transformer, its weights on the device 'meta'."""
    with one_line("a patch transformer", path), torch.device("meta"):
        return PatchTransformer(PatchConfig.from_pretrained(path))


def load(path: str, dtype: str | torch.dtype = "float32") -> PatchTransformer:
    """Return a trained transformer, as `models.weights.load_own` does."""
    return load_own(PatchTransformer, "a patch transformer", path, dtype)
