"""Vision and vision-language models of the zoo.

Sizes are those of the published models; other arguments have the defaults of the config class.
"""

from collections.abc import Mapping

from transformers import Dinov2Config

from benchmarks.zoo.family import (
    Family,
    Sizes,
    image,
    image_and_text,
    labelled_image,
    segmented_image,
    video,
)

_LABELS = {"num_labels": 1000}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 8,
}


def _classifier(
    name: str,
    real: Sizes,
    small: Sizes,
    *,
    batch: int = 64,
    pixels: tuple[int, int] = (224, 16),
    kind: str = "vision",
    note: str = "base",
) -> Family:
    """A family with the classes NAMEConfig and NAMEForImageClassification."""
    return Family(
        kind=kind,
        inputs=labelled_image,
        real=_LABELS | dict(real),
        real_batch={"batch": batch, "pixels": pixels[0], "classes": 1000},
        small={"num_labels": 8} | dict(small),
        small_batch={"batch": 8, "pixels": pixels[1], "classes": 8},
        config=f"{name}Config",
        head=f"{name}ForImageClassification",
        note=note,
    )


_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_RESIDUAL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}

VISION: Mapping[str, Family] = {
    "vit": _classifier("ViT", {}, VIT),
    "deit": _classifier("DeiT", {}, VIT),
    "beit": _classifier("Beit", {}, VIT),
    "dinov2": _classifier("Dinov2", {"image_size": 224}, VIT, note="base"),
    "swin": _classifier("Swin", {}, _SWIN, pixels=(224, 32), note="tiny"),
    "swinv2": _classifier(
        "Swinv2", {"image_size": 256, "window_size": 8}, _SWIN, pixels=(256, 32), note="tiny"
    ),
    "convnext": _classifier(
        "ConvNext",
        {},
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        pixels=(224, 32),
        kind="convolution",
        note="tiny",
    ),
    "convnextv2": _classifier(
        "ConvNextV2",
        {},
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        pixels=(224, 32),
        kind="convolution",
        note="tiny",
    ),
    "resnet": _classifier(
        "ResNet", {}, _RESIDUAL, batch=256, pixels=(224, 32), kind="convolution", note="50"
    ),
    "regnet": _classifier(
        "RegNet",
        {},
        _RESIDUAL | {"groups_width": 4},
        pixels=(224, 32),
        kind="convolution",
        note="config default",
    ),
    "mobilenet-v2": _classifier(
        "MobileNetV2",
        {},
        {"depth_multiplier": 0.25},
        batch=256,
        pixels=(224, 32),
        kind="convolution",
        note="1.0",
    ),
    "efficientnet": _classifier(
        "EfficientNet",
        {},
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
            "image_size": 32,
        },
        pixels=(600, 32),
        kind="convolution",
        note="b7",
    ),
    "levit": _classifier(
        "Levit",
        {},
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "depths": [1, 1, 1],
            "num_attention_heads": [2, 2, 2],
            "key_dim": [8, 8, 8],
        },
        batch=256,
        pixels=(224, 64),
        note="128S",
    ),
    "mobilevit": _classifier(
        "MobileViT",
        {},
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
        },
        pixels=(256, 64),
        note="small",
    ),
    "poolformer": _classifier(
        "PoolFormer",
        {},
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        pixels=(224, 32),
        note="s12",
    ),
    "pvt": _classifier(
        "Pvt",
        {},
        {
            "image_size": 32,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "sequence_reduction_ratios": [2, 2, 1, 1],
        },
        pixels=(224, 32),
        note="tiny",
    ),
    "segformer": Family(
        kind="vision",
        inputs=segmented_image,
        real={"num_labels": 150},
        real_batch={"batch": 16, "pixels": 512, "classes": 150},
        small={
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 8,
        },
        small_batch={"batch": 8, "pixels": 16, "classes": 8},
        config="SegformerConfig",
        head="SegformerForSemanticSegmentation",
        note="b0",
    ),
    "clip": Family(
        kind="vision and text",
        inputs=image_and_text,
        real_batch={"batch": 256, "pixels": 224, "sequence": 77},
        small={
            "text_config": {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                "eos_token_id": 2,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
            },
            "projection_dim": 16,
        },
        small_batch={"batch": 8, "pixels": 16, "sequence": 16},
        config="CLIPConfig",
        head="CLIPModel",
        note="ViT-B/32",
    ),
    "siglip": Family(
        kind="vision and text",
        inputs=image_and_text,
        real_batch={"batch": 256, "pixels": 224, "sequence": 64},
        small={
            "text_config": {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "max_position_embeddings": 16,
                "projection_size": 32,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
            },
        },
        small_batch={"batch": 8, "pixels": 16, "sequence": 16},
        config="SiglipConfig",
        head="SiglipModel",
        note="base 16",
    ),
    "videomae": Family(
        kind="vision",
        inputs=video,
        real=_LABELS,
        real_batch={"batch": 16, "frames": 16, "pixels": 224, "classes": 1000},
        small=VIT | {"num_frames": 4},
        small_batch={"batch": 8, "frames": 4, "pixels": 16, "classes": 8},
        config="VideoMAEConfig",
        head="VideoMAEForVideoClassification",
        note="base",
    ),
    "depth-anything": Family(
        kind="vision",
        inputs=image,
        real_batch={"batch": 16, "pixels": 518},
        small={
            "backbone_config": Dinov2Config(
                **VIT | {"image_size": 28, "patch_size": 7, "num_hidden_layers": 4},
                out_indices=[1, 2, 3, 4],
                reshape_hidden_states=False,
            ),
            "reassemble_hidden_size": 32,
            "patch_size": 7,
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "head_hidden_size": 8,
        },
        small_batch={"batch": 8, "pixels": 28},
        config="DepthAnythingConfig",
        head="DepthAnythingForDepthEstimation",
        output="predicted_depth",
        note="small",
    ),
}
