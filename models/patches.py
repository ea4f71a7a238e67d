"""A causal transformer over the patches of an image, class-conditional, in any order.

MAR is bidirectional, so that it cannot verify several tokens in one pass; here a token sees the
class and what stands before it in the order, by a stock Llama decoder, and keys and values are
cached. Input i is the (i-1)-th token of the order with its own position and that of the token that
is asked for, the i-th (sigma-GPT, arXiv 2404.09562); input 0 is the class. So one network serves
the raster order and any other.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from models.heads import HEADS

ORDERS = ("raster", "random")
# MAR's sizes (arXiv 2406.11838): hidden size, layers of its two halves, and the head's MLP.
MAR = {"B": (768, 24, 1024, 6), "L": (1024, 32, 1280, 8), "H": (1280, 40, 1536, 12)}


class PatchConfig(PreTrainedConfig):
    """size, channels: of the square image (or its latents); patch: side of a patch.

    classes: labels 0 to classes - 1; one more means no class. order: 'raster', or 'random' (each
    image its own). head: {kind: 'diffusion' or 'mixture', and that head's keys}. backbone: keys of
    transformers' LlamaConfig.
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
        backbone: dict | None = None,
        **kwargs,
    ):
        if size % patch:
            raise ValueError(f"patch={patch} does not divide size={size}")
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}. Choose from {list(ORDERS)}")
        self.size, self.channels, self.patch = size, channels, patch
        self.classes, self.order = classes, order
        self.head, self.backbone = dict(head or {}), dict(backbone or {})
        super().__init__(**kwargs)

    @property
    def tokens(self) -> int:
        """N, patches of an image."""
        return (self.size // self.patch) ** 2

    @property
    def dim(self) -> int:
        """D, numbers of a patch."""
        return self.channels * self.patch**2


class PatchTransformer(PreTrainedModel):
    """Hidden states from which `head` makes the density of each token."""

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
        self.backbone = LlamaModel(backbone)  # its token embedding is that of the classes
        self.token = nn.Linear(config.dim, hidden)
        self.here = nn.Embedding(config.tokens, hidden)
        self.next = nn.Embedding(config.tokens, hidden)
        keys = dict(config.head)
        kind = keys.pop("kind", None)
        if kind not in HEADS:
            raise ValueError(f"unknown head {kind!r}. Choose from {sorted(HEADS)}")
        try:
            self.head = HEADS[kind](hidden, config.dim, **keys)
        except TypeError as error:
            raise ValueError(f"a {kind} head cannot be made of {keys}: {error}") from error
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """One image: what an export is compared with."""
        N, D = self.config.tokens, self.config.dim
        patches = torch.linspace(-1, 1, N * D).view(1, N, D)
        return {"patches": patches, "label": torch.zeros(1).long(), "order": torch.arange(N)[None]}

    def embed_class(self, label: Tensor, following: Tensor) -> Tensor:
        """Input 0: labels [B], asking for the token at positions [B, n] -> [B, n, H]."""
        return self.backbone.embed_tokens(label)[:, None] + self.next(following)

    def embed_patches(self, patches: Tensor, position: Tensor, following: Tensor) -> Tensor:
        """Inputs [B, n, H] of patches [B, n, D] at positions [B, n], each asking for the next."""
        return self.token(patches) + self.here(position) + self.next(following)

    def forward(self, patches: Tensor, label: Tensor, order: Tensor) -> Tensor:
        """Hidden states z [B, N, H]: z_i says what token i is, given the tokens before it.

        patches [B, N, D] in their order; label [B]; order [B, N], the position of each.
        """
        first = self.embed_class(label, order[:, :1])
        others = self.embed_patches(patches[:, :-1], order[:, :-1], order[:, 1:])
        inputs = torch.cat([first, others], 1)
        return self.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state


def from_config(head: str, heads: dict[str, dict], **config) -> PatchTransformer:
    """A new transformer. head: the one of `heads`, {kind: its keys}; others: of `PatchConfig`."""
    if head not in heads:
        raise ValueError(f"unknown head {head!r}. Choose from {sorted(heads)}")
    return PatchTransformer(PatchConfig(head={"kind": head, **heads[head]}, **config))


def mar(mar_size: str, head: str, heads: dict[str, dict], **config) -> PatchTransformer:
    """The same with the width and depth of MAR-B, -L or -H, and of its diffusion head."""
    if mar_size not in MAR:
        raise ValueError(f"unknown mar_size {mar_size!r}. Choose from {sorted(MAR)}")
    hidden, layers, width, depth = MAR[mar_size]
    backbone = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 64 * 64,  # gated: as many weights as 4 times plain
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    }
    sizes = {"diffusion": {"width": width, "depth": depth}}
    heads = {kind: {**sizes.get(kind, {}), **keys} for kind, keys in heads.items()}
    return from_config(head, heads, backbone=backbone, **config)


def check_pair(target: PatchTransformer, drafter: PatchTransformer) -> None:
    """Raise ValueError unless these two make the same tokens in the same way."""
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
            "drafts cannot be verified. Train both models with noisy_last=true"
        )


def load(path: str, dtype: str | torch.dtype = "float32") -> PatchTransformer:
    """A trained one, from a folder or the Hub. Errors: one line that names the path and why."""
    try:
        return PatchTransformer.from_pretrained(path, dtype=dtype)
    except Exception as error:  # each library below has its own; a user needs one line
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if not Path(path).exists():
            reason = f"there is no such folder. {reason}"
        raise ValueError(f"cannot load a patch transformer from {path!r}: {reason}") from error
