"""Vision models in plain torch that transformers does not have; each returns its loss."""

import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo.family import Inputs, perceptron


class ResidualBlock(nn.Module):
    """Two convolutions with group norm; the time embedding is added between them."""

    def __init__(self, channels: int, outputs: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, outputs)
        self.conv1 = nn.Conv2d(channels, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Conv2d(channels, outputs, 1) if channels != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.conv2(functional.silu(self.norm2(hidden))) + self.skip(x)


class Attention(nn.Module):
    """Attention over a sequence, to itself or to a context."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(context, width, bias=False)
        self.v = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        source = x if context is None else context
        q, k, v = (
            linear(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, tokens in ((self.q, x), (self.k, source), (self.v, source))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ImageTransformer(nn.Module):
    """Self-attention over pixels and cross-attention to a text, as in a diffusion U-Net."""

    def __init__(self, channels: int, context: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.self_attention = Attention(channels, channels, heads)
        self.cross_attention = Attention(channels, context, heads)
        self.up = nn.Linear(channels, 8 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.self_attention(self.norms[0](tokens))
        tokens = tokens + self.cross_attention(self.norms[1](tokens), context)
        value, gate = self.up(self.norms[2](tokens)).chunk(2, dim=-1)
        tokens = tokens + self.down(value * functional.gelu(gate))
        return x + tokens.transpose(1, 2).reshape(x.shape)


class DiffusionUNet(nn.Module):
    """The U-Net of Stable Diffusion (arXiv:2112.10752): predicts the noise in latents."""

    def __init__(
        self,
        channels: int = 320,
        multiples: tuple[int, ...] = (1, 2, 4),
        context: int = 768,
        heads: int = 8,
        groups: int = 32,
    ) -> None:
        super().__init__()
        widths, time = [channels * m for m in multiples], 4 * channels
        self.channels = channels
        self.embed = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(4, channels, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        before = channels
        for width in widths:
            self.downs.append(self._level(before, width, time, context, heads, groups))
            before = width
        self.middle = self._level(before, before, time, context, heads, groups)
        for width in reversed(widths):
            self.ups.append(self._level(before + width, width, time, context, heads, groups))
            before = width
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.norm = nn.GroupNorm(groups, before)
        self.leave = nn.Conv2d(before, 4, 3, padding=1)

    @staticmethod
    def _level(
        channels: int, outputs: int, time: int, context: int, heads: int, groups: int
    ) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "residual": ResidualBlock(channels, outputs, time, groups),
                "attention": ImageTransformer(outputs, context, heads, groups),
            }
        )

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, text: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        time = self.embed(time_embedding(step, self.channels, noisy.dtype))
        x, kept = self.enter(noisy), []
        for i, level in enumerate(self.downs):
            x = level["attention"](level["residual"](x, time), text)
            kept.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
        x = self.middle["attention"](self.middle["residual"](x, time), text)
        for i, level in enumerate(self.ups):
            if i:
                x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = level["residual"](torch.cat([x, kept.pop()], dim=1), time)
            x = level["attention"](x, text)
        return functional.mse_loss(self.leave(functional.silu(self.norm(x))), noise)


def time_embedding(step: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Sines and cosines of a time step, [batch, width]."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=step.device) * (-math.log(10_000.0) / half))
    angles = step[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)


def diffusion(batch: int, pixels: int, text: int, context: int) -> Inputs:
    """Noisy latents, their time steps, the text that describes them, and the noise."""
    return {
        "noisy": torch.randn(batch, 4, pixels, pixels),
        "step": torch.randint(0, 1000, (batch,)),
        "text": torch.randn(batch, text, context),
        "noise": torch.randn(batch, 4, pixels, pixels),
    }


class DiffusionTransformer(nn.Module):
    """DiT (arXiv:2212.09748): a transformer over patches, modulated by time and class."""

    def __init__(
        self,
        width: int = 1152,
        layers: int = 28,
        heads: int = 16,
        pixels: int = 32,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.width = width
        self.patch = nn.Conv2d(4, width, 2, stride=2)
        self.position = nn.Parameter(torch.zeros(1, (pixels // 2) ** 2, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(ModulatedBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(width, 16)

    def forward(
        self, noisy: torch.Tensor, step: torch.Tensor, label: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        tokens = self.patch(noisy).flatten(2).transpose(1, 2) + self.position
        condition = self.time(time_embedding(step, 256, noisy.dtype)) + self.label(label)
        condition = functional.silu(condition)
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        patches = self.leave(self.norm(tokens) * (1 + scale) + shift)
        side = math.isqrt(patches.shape[1])
        image = patches.unflatten(1, (side, side)).unflatten(3, (2, 2, 4))
        image = image.permute(0, 5, 1, 3, 2, 4).reshape(noise.shape)
        return functional.mse_loss(image, noise)


class ModulatedBlock(nn.Module):
    """A transformer layer whose norms are shifted, scaled and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def labelled_diffusion(batch: int, pixels: int, classes: int) -> Inputs:
    """Noisy latents, their time steps and classes, and the noise."""
    return {
        "noisy": torch.randn(batch, 4, pixels, pixels),
        "step": torch.randint(0, 1000, (batch,)),
        "label": torch.randint(0, classes, (batch,)),
        "noise": torch.randn(batch, 4, pixels, pixels),
    }


class Vgg(nn.Module):
    """VGG-16 with batch norm (arXiv:1409.1556)."""

    def __init__(
        self,
        widths: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)),
        hidden: int = 4096,
        classes: int = 1000,
        side: int = 7,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in widths:
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.classifier = perceptron((channels * side * side, hidden, hidden, classes))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.features(pixel_values)).flatten(1)
        return functional.cross_entropy(self.classifier(pooled), labels)


class PyramidDetector(nn.Module):
    """RetinaNet's shape (arXiv:1708.02002): a backbone, a feature pyramid, heads on each level."""

    def __init__(
        self,
        widths: tuple[int, ...] = (256, 512, 1024, 2048),
        channels: int = 256,
        depth: int = 4,
        outputs: int = 9 * 80,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 7, stride=4, padding=3)
        self.backbone = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(widths)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths[1:])
        self.classes = self._head(channels, depth, outputs)
        self.boxes = self._head(channels, depth, 36)

    @staticmethod
    def _head(channels: int, depth: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(channels, outputs, 3, padding=1))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x, levels = self.stem(pixel_values), []
        for stage, lateral in zip(self.backbone, self.lateral, strict=True):
            x = stage(x)
            levels.append(lateral(x))
        for i in reversed(range(len(levels) - 1)):
            grown = functional.interpolate(levels[i + 1], scale_factor=2.0, mode="nearest")
            levels[i] = levels[i] + grown
        losses = [self.classes(p).sigmoid().mean() + self.boxes(p).abs().mean() for p in levels]
        return torch.stack(losses).sum()


class Mixer(nn.Module):
    """MLP-Mixer (arXiv:2105.01601): perceptrons over patches and over channels by turns."""

    def __init__(
        self,
        pixels: int = 224,
        patch: int = 16,
        width: int = 768,
        tokens: int = 384,
        channels: int = 3072,
        layers: int = 12,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        patches = (pixels // patch) ** 2
        self.patch = nn.Conv2d(3, width, patch, stride=patch)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.tokens = nn.ModuleList(_mlp(patches, tokens) for _ in range(layers))
        self.channels = nn.ModuleList(_mlp(width, channels) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch(pixel_values).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return functional.cross_entropy(self.head(self.norms[-1](x).mean(1)), labels)


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
