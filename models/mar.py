"""MAR, a bidirectional transformer over image patches, with its public checkpoints.

Source: Autoregressive Image Generation without Vector Quantization (arXiv 2406.11838). An encoder
reads the class and the known tokens, a decoder adds a mask token at every other position, and a
diffusion head gives a token's density from the decoder's state. States depend on all known tokens,
so nothing can be cached, and one pass of a row serves only one set of known tokens.
"""

import argparse
import math
import re
from collections import OrderedDict
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers import initialization as init

from models.heads import DiffusionHead
from models.options import CHECKPOINTS
from models.patches import ImageConfig
from models.weights import check_complete, check_finite, load_own, one_line

PUBLIC_HEADS = {768: 12, 1024: 16, 1280: 16}  # attention heads of MAR-B, -L and -H, by hidden size
# Names of the diffusion head's tensors: in a checkpoint, and in `models.heads.DiffusionHead`.
RENAMED = (
    (r"^diffloss\.net\.", "head."),
    (r"^head\.time_embed\.mlp\.", "head.time."),
    (r"^head\.cond_embed\.", "head.condition."),
    (r"^head\.input_proj\.", "head.token."),
    (r"^head\.res_blocks\.(\d+)\.in_ln\.", r"head.blocks.\1.norm."),
    (r"^head\.res_blocks\.(\d+)\.adaLN_modulation\.1\.", r"head.blocks.\1.modulation.linear."),
    (r"^head\.res_blocks\.", "head.blocks."),
    (r"^head\.final_layer\.linear\.", "head.out."),
    (r"^head\.final_layer\.adaLN_modulation\.1\.", "head.last.linear."),
)


class MarConfig(ImageConfig):
    """Configuration of a `MarTransformer`.

    Args:
        size: Side of the square of latents.
        channels: Channels of the latents.
        patch: Side of a patch, in latents; it must divide `size`.
        classes: Number of labels, 0 to classes - 1; label `classes` means no class.
        buffer: Tokens that hold the class, before the patches.
        encoder: {hidden, layers, heads} of the encoder; heads divide hidden.
        decoder: The same of the decoder.
        head: {width, depth} of the diffusion head, and fields of its `DiffusionSchedule`.
    """

    model_type = "parade_mar"
    order = "random"

    def __init__(
        self,
        size: int = 16,
        channels: int = 16,
        patch: int = 1,
        classes: int = 1000,
        buffer: int = 64,
        encoder: dict | None = None,
        decoder: dict | None = None,
        head: dict | None = None,
        **kwargs,
    ):
        base = {"hidden": 768, "layers": 12, "heads": 12}
        self.buffer = buffer
        self.encoder, self.decoder = base | (encoder or {}), base | (decoder or {})
        self.head = {"width": 1024, "depth": 6, "noisy_last": False} | (head or {})
        for half in (self.encoder, self.decoder):
            if half["hidden"] % half["heads"]:
                raise ValueError(f"heads={half['heads']} does not divide hidden={half['hidden']}")
        super().__init__(size, channels, patch, classes, **kwargs)


class MarTransformer(PreTrainedModel):
    """MAR: encoder, decoder and diffusion head; tensors but the head's are named as published."""

    config_class = MarConfig
    base_model_prefix = ""
    main_input_name = "patches"

    def __init__(self, config: MarConfig):
        super().__init__(config)
        N, D, encoder, decoder = config.tokens, config.dim, config.encoder, config.decoder
        hidden, length = encoder["hidden"], config.buffer + N
        self.class_emb = nn.Embedding(config.classes, hidden)
        self.fake_latent = nn.Parameter(torch.empty(1, hidden))
        self.z_proj, self.z_proj_ln = nn.Linear(D, hidden), nn.LayerNorm(hidden, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.empty(1, length, hidden))
        self.encoder_blocks = nn.ModuleList(
            _Block(hidden, encoder["heads"]) for _ in range(encoder["layers"])
        )
        self.encoder_norm = nn.LayerNorm(hidden, eps=1e-6)
        width = decoder["hidden"]
        self.decoder_embed = nn.Linear(hidden, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.empty(1, length, width))
        self.decoder_blocks = nn.ModuleList(
            _Block(width, decoder["heads"]) for _ in range(decoder["layers"])
        )
        self.decoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.empty(1, N, width))
        self.head = DiffusionHead(width, D, variance="learned", affine=True, **config.head)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        if module is self:
            for name, weight in self.named_parameters(recurse=False):
                assert weight.ndim > 1, name
                init.normal_(weight, std=0.02)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Return a batch of one image of which the first half of the tokens is known."""
        N, D = self.config.tokens, self.config.dim
        known, wanted = torch.arange(N).chunk(2)
        patches = torch.linspace(-1, 1, len(known) * D).view(1, -1, D)
        label = torch.zeros(1).long()
        return {"patches": patches, "known": known[None], "wanted": wanted[None], "label": label}

    def forward(
        self,
        patches: Tensor,
        known: Tensor,
        wanted: Tensor,
        label: Tensor,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return the decoder's states z [B, k, H] that the head conditions on.

        Args:
            patches: Known tokens [B, n, D], in any order; n may be 0.
            known: Their positions [B, n].
            wanted: Positions whose states are returned [B, k].
            label: [B], 0 to classes; `classes` means no class.
            padding: bool [B, n], True for known tokens to ignore.
        """
        h = self._encode(patches, known, label, padding)
        z = self._decode(h, known, padding)
        here = wanted[..., None].expand(-1, -1, z.shape[-1])
        return z.gather(1, here) + self.diffusion_pos_embed_learned[0][wanted]

    def _encode(self, patches, known, label, padding) -> Tensor:
        """Return the encoder's states [B, buffer + n, H] of buffer and known tokens."""
        buffer = self.config.buffer
        classes = torch.cat([self.class_emb.weight, self.fake_latent])
        start = embedding(label, classes)[:, None].expand(-1, buffer, -1)
        position = self.encoder_pos_embed_learned[0]
        inputs = [start + position[:buffer], self.z_proj(patches) + position[buffer:][known]]
        h = self.z_proj_ln(torch.cat(inputs, 1))
        visible = None
        if padding is not None:
            buffered = padding.new_zeros(len(padding), buffer)
            visible = ~torch.cat([buffered, padding], 1)[:, None, None]
        for block in self.encoder_blocks:
            h = block(h, visible)
        return self.encoder_norm(h)

    def _decode(self, h, known, padding) -> Tensor:
        """Return the decoder's states [B, N, H] of all positions."""
        buffer, N = self.config.buffer, self.config.tokens
        h = self.decoder_embed(h)
        slots = known if padding is None else known.masked_fill(padding, N)  # N: a scratch slot
        full = self.mask_token.expand(len(h), N + 1, -1)
        slots = slots[..., None].expand(-1, -1, h.shape[-1])
        full = full.scatter(1, slots, h[:, buffer:])[:, :N]
        h = torch.cat([h[:, :buffer], full], 1) + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            h = block(h)
        return self.decoder_norm(h)[:, buffer:]


class _Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, h: Tensor, visible: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.proj(out.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    """A pre-norm layer of a vision transformer (ViT, arXiv 2010.11929)."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, eps=1e-6) for _ in "12")
        self.attn = _Attention(hidden, heads)
        wide = {"fc1": nn.Linear(hidden, 4 * hidden), "gelu": nn.GELU()}
        self.mlp = nn.Sequential(OrderedDict(wide, fc2=nn.Linear(4 * hidden, hidden)))

    def forward(self, h: Tensor, visible: Tensor | None = None) -> Tensor:
        h = h + self.attn(self.norm1(h), visible)
        return h + self.mlp(self.norm2(h))


def load(path: str, dtype: str | torch.dtype = "float32") -> MarTransformer:
    """Return a MAR in evaluation mode, from our folder or Hub id, or a file of `CHECKPOINTS`."""
    if not path.endswith(CHECKPOINTS):
        return load_own(MarTransformer, "a MAR", path, dtype)
    with one_line("a MAR", path):
        return from_checkpoint(path, dtype)


def from_checkpoint(
    path: str,
    dtype: str | torch.dtype = "float32",
    *,
    heads: int | None = None,
    patch: int = 1,
    average: bool = True,
) -> MarTransformer:
    """Return a MAR from a file in the layout of its authors' program (github.com/LTH14/mar).

    It is a .pth with the tensors under 'model' and, averaged over training (EMA), 'model_ema', or a
    .safetensors with one of the two. Sizes follow from the shapes; the rest is the authors'
    default: 100 denoising steps, the last one without noise. `save_pretrained` writes a folder for
    `decoding.load`.

    Args:
        path: The file. Nothing in it is executed.
        dtype: Type of the weights; 'auto' takes the file's own.
        heads: Attention heads of both halves; None takes the public model's of this hidden size.
        patch: Side of a patch, in latents; 1 in all public models.
        average: Take the averaged weights if the file has them, as in the authors' results.
    """
    tensors = {}
    for key, value in _tensors(path, average).items():
        for pattern, name in RENAMED:
            key = re.sub(pattern, name, key)
        tensors[key] = value
    network, found = MarTransformer.from_pretrained(
        None,
        config=_config(tensors, heads, patch),
        state_dict=tensors,
        dtype=dtype,
        ignore_mismatched_sizes=True,  # so that the check below names them
        output_loading_info=True,
    )
    check_complete(network, found)
    check_finite(network)
    return network


def _tensors(path: str, average: bool) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by their published names."""
    if path.endswith(".safetensors"):
        return load_file(path)
    # Beside the weights the file holds the program's options, as a plain record.
    with torch.serialization.safe_globals([argparse.Namespace]):
        file = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    names = ("model_ema", "model") if average else ("model",)
    return next((file[name] for name in names if file.get(name)), file)


def _config(tensors: dict[str, Tensor], heads: int | None, patch: int) -> MarConfig:
    """Return the configuration read from a checkpoint's shapes."""
    named = ("class_emb.weight", "z_proj.weight", "diffusion_pos_embed_learned",
             "encoder_pos_embed_learned", "head.condition.weight")  # fmt: skip
    if missing := [name for name in named if name not in tensors]:
        raise ValueError(f"it holds no MAR: it lacks {missing[0]}")
    classes, tokens, lengths, condition = (tensors[named[i]].shape for i in (0, 2, 3, 4))
    return MarConfig(
        size=math.isqrt(tokens[1]) * patch,
        channels=tensors["z_proj.weight"].shape[1] // patch**2,
        patch=patch,
        classes=classes[0],
        buffer=lengths[1] - tokens[1],
        encoder=_half(tensors, "encoder_blocks", classes[1], heads),
        decoder=_half(tensors, "decoder_blocks", tokens[2], heads),
        head={"width": condition[0], "depth": _count(tensors, "head.blocks")},
        parade={"method": "mar"},
    )


def _half(tensors: dict[str, Tensor], name: str, hidden: int, heads: int | None) -> dict[str, int]:
    """Return {hidden, layers, heads} of the encoder or the decoder."""
    if heads is None and hidden not in PUBLIC_HEADS:
        raise ValueError(
            f"hidden size {hidden} is none of the public models' {sorted(PUBLIC_HEADS)}, and a "
            "checkpoint does not tell its number of attention heads: give it to "
            "models.mar.from_checkpoint(heads=...), and save_pretrained writes a folder"
        )
    heads = heads or PUBLIC_HEADS[hidden]
    return {"hidden": hidden, "layers": _count(tensors, name), "heads": heads}


def _count(tensors: dict[str, Tensor], prefix: str) -> int:
    """Return the number of modules numbered under a prefix."""
    pattern = re.compile(rf"^{re.escape(prefix)}\.(\d+)\.")
    return len({match[1] for key in tensors if (match := pattern.match(key))})
