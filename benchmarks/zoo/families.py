"""All families of the zoo by name."""

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.zoo import plain_data, plain_images
from benchmarks.zoo.decoders import DECODERS, EXPERTS, STATES
from benchmarks.zoo.encoders import ENCODERS, TRANSLATORS
from benchmarks.zoo.family import Family, image, labelled_image, scan_decoder
from benchmarks.zoo.signals import DETECTION, SOUNDS
from benchmarks.zoo.vision import VISION

_CRITEO = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
    405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
    12_973, 108, 36,
)  # fmt: skip
"""Rows of the 26 embedding tables of MLPerf's DLRM on Criteo's logs, at most 40 million each."""

PLAIN: Mapping[str, Family] = {
    "diffusion-unet": Family(
        kind="diffusion",
        inputs=plain_images.diffusion,
        real_batch={"batch": 32, "pixels": 64, "text": 77, "context": 768},
        small={"channels": 8, "multiples": (1, 2), "context": 16, "heads": 4, "groups": 4},
        small_batch={"batch": 8, "pixels": 8, "text": 8, "context": 16},
        model=plain_images.DiffusionUNet,
        note="the widths of Stable Diffusion 1, one block per level",
    ),
    "dit": Family(
        kind="diffusion",
        inputs=plain_images.labelled_diffusion,
        real_batch={"batch": 256, "pixels": 32, "classes": 1000},
        small={"width": 32, "layers": 2, "heads": 4, "pixels": 8, "classes": 8},
        small_batch={"batch": 8, "pixels": 8, "classes": 8},
        model=plain_images.DiffusionTransformer,
        note="XL/2",
    ),
    "dlrm": Family(
        kind="recommendation",
        inputs=plain_data.clicks,
        real={"rows": _CRITEO},
        real_batch={"batch": 65_536, "tables": 26, "dense": 13},
        small={"rows": (64, 32, 16), "width": 16, "dense": 4, "bottom": (16,), "top": (16,)},
        small_batch={"batch": 16, "tables": 3, "dense": 4},
        model=plain_data.Dlrm,
        note="MLPerf v1",
    ),
    "deepfm": Family(
        kind="recommendation",
        inputs=plain_data.clicks,
        real_batch={"batch": 65_536, "tables": 39, "dense": 13},
        small={"rows": 64, "fields": 4, "width": 8, "hidden": 16},
        small_batch={"batch": 16, "tables": 4, "dense": 4},
        model=plain_data.DeepFm,
        note="Criteo",
    ),
    "two-tower": Family(
        kind="recommendation",
        inputs=plain_data.pairs,
        real_batch={"batch": 8192},
        small={"users": 64, "items": 64, "width": 16, "hidden": 32},
        small_batch={"batch": 16},
        model=plain_data.TwoTower,
        note="ten million users and items",
    ),
    "vgg": Family(
        kind="convolution",
        inputs=labelled_image,
        real_batch={"batch": 256, "pixels": 224, "classes": 1000},
        small={"widths": ((8, 1), (16, 1)), "hidden": 32, "classes": 8, "side": 2},
        small_batch={"batch": 8, "pixels": 16, "classes": 8},
        model=plain_images.Vgg,
        note="16 with batch norm",
    ),
    "mixer": Family(
        kind="vision",
        inputs=labelled_image,
        real_batch={"batch": 256, "pixels": 224, "classes": 1000},
        small={
            "pixels": 16,
            "patch": 4,
            "width": 32,
            "tokens": 16,
            "channels": 64,
            "layers": 2,
            "classes": 8,
        },
        small_batch={"batch": 8, "pixels": 16, "classes": 8},
        model=plain_images.Mixer,
        note="B/16",
    ),
    "pyramid-detector": Family(
        kind="detection",
        inputs=image,
        real_batch={"batch": 16, "pixels": 1024},
        small={"widths": (8, 16, 16, 16), "channels": 8, "depth": 1, "outputs": 8},
        small_batch={"batch": 8, "pixels": 32},
        model=plain_images.PyramidDetector,
        note="the widths of RetinaNet, one convolution per stage",
    ),
    "lstm": Family(
        kind="recurrent",
        inputs=scan_decoder,
        real_batch={"batch": 64, "sequence": 35},
        small={"vocabulary": 64, "width": 16, "layers": 2},
        small_batch={"batch": 8, "sequence": 8},
        model=plain_data.Recurrent,
        note="Penn Treebank, large",
    ),
    "graphsage": Family(
        kind="graph network",
        inputs=plain_data.edges,
        real_batch={"nodes": 262_144, "degree": 16, "features": 100, "classes": 47},
        small={"features": 8, "hidden": 16, "classes": 8, "layers": 2},
        small_batch={"nodes": 16, "degree": 2, "features": 8, "classes": 8},
        model=plain_data.GraphNetwork,
        note="ogbn-products, a batch of 262,144 nodes",
    ),
    "pointnet": Family(
        kind="graph network",
        inputs=plain_data.clouds,
        real_batch={"batch": 256, "points": 1024, "classes": 40},
        small={"widths": (8, 16), "classes": 8},
        small_batch={"batch": 8, "points": 16, "classes": 8},
        model=plain_data.PointNetwork,
        note="ModelNet40",
    ),
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **DECODERS,
        **EXPERTS,
        **STATES,
        **ENCODERS,
        **TRANSLATORS,
        **VISION,
        **DETECTION,
        **SOUNDS,
        **PLAIN,
    }
)
"""Families by name; batch and sequence are those of a step over all devices."""
