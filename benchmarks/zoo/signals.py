"""Models of the zoo for object detection, audio and time series.

Sizes are those of the published models; other arguments have the defaults of the config class.
"""

from collections.abc import Mapping

from transformers import ResNetConfig, RTDetrResNetConfig

from benchmarks.zoo.family import (
    Family,
    Maker,
    Sizes,
    image,
    labelled_spectrogram,
    masked_image,
    series,
    spectrogram,
    waveform,
)
from benchmarks.zoo.vision import VIT


def _detector(
    name: str,
    real: Sizes,
    small: Sizes,
    *,
    output: str,
    inputs: Maker = image,
    pixels: tuple[int, int] = (800, 64),
    training: bool = True,
    note: str,
) -> Family:
    return Family(
        kind="detection",
        inputs=inputs,
        real=real,
        real_batch={"batch": 16, "pixels": pixels[0]},
        small=small,
        small_batch={"batch": 8, "pixels": pixels[1]},
        config=f"{name}Config",
        head=f"{name}ForObjectDetection",
        output=output,
        training=training,
        note=note,
    )


DETECTION: Mapping[str, Family] = {
    "yolos": _detector(
        "Yolos",
        {"image_size": [800, 1344]},
        VIT | {"image_size": [64, 64], "patch_size": 16, "num_detection_tokens": 8},
        output="pred_boxes",
        pixels=(800, 64),
        note="base",
    ),
    "detr": _detector(
        "Detr",
        {"backbone_config": ResNetConfig(out_features=["stage4"])},
        {
            "backbone_config": ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
            ),
            "d_model": 16,
            "num_queries": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_labels": 8,
        },
        output="pred_boxes",
        inputs=masked_image,
        training=False,
        note="ResNet-50",
    ),
    "rt-detr": _detector(
        "RTDetr",
        {},
        {
            "backbone_config": RTDetrResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16, 16, 16],
                depths=[1, 1, 1, 1],
                layer_type="basic",
                out_features=["stage2", "stage3", "stage4"],
            ),
            "encoder_in_channels": [16, 16, 16],
            "encoder_hidden_dim": 16,
            "encoder_ffn_dim": 32,
            "encoder_attention_heads": 2,
            "hidden_expansion": 0.5,
            "d_model": 16,
            "num_queries": 8,
            "num_denoising": 0,
            "decoder_in_channels": [16, 16, 16],
            "decoder_ffn_dim": 32,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "num_labels": 8,
        },
        output="pred_boxes",
        pixels=(640, 64),
        training=False,
        note="R50",
    ),
}

SOUNDS: Mapping[str, Family] = {
    "whisper": Family(
        kind="audio",
        inputs=spectrogram,
        real={
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "vocab_size": 51_866,
        },
        real_batch={"batch": 16, "bins": 128, "frames": 3000, "target": 128},
        small={
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        small_batch={"batch": 8, "bins": 8, "frames": 32, "target": 8},
        config="WhisperConfig",
        head="WhisperForConditionalGeneration",
        note="large v3",
    ),
    "audio-spectrogram-transformer": Family(
        kind="audio",
        inputs=labelled_spectrogram,
        real={"num_labels": 527},
        real_batch={"batch": 32, "frames": 1024, "bins": 128, "classes": 527},
        small={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 16,
            "num_mel_bins": 8,
            "num_labels": 8,
        },
        small_batch={"batch": 8, "frames": 16, "bins": 8, "classes": 8},
        config="ASTConfig",
        head="ASTForAudioClassification",
        note="AudioSet",
    ),
    **{
        name: Family(
            kind="audio",
            inputs=waveform,
            real={"layerdrop": 0.0, "mask_time_prob": 0.0},
            real_batch={"batch": 16, "samples": 160_000},
            small={
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "conv_dim": [8, 8],
                "conv_stride": [4, 4],
                "conv_kernel": [8, 4],
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4,
            },
            small_batch={"batch": 8, "samples": 260},
            config=f"{config}Config",
            head=f"{config}Model",
            output="last_hidden_state",
            note="base, 10 s of sound, all layers kept",
        )
        for name, config in (("wav2vec2", "Wav2Vec2"), ("hubert", "Hubert"))
    },
    "patchtst": Family(
        kind="time series",
        inputs=series,
        real={
            "num_input_channels": 321,
            "context_length": 512,
            "prediction_length": 96,
            "patch_length": 16,
            "patch_stride": 8,
            "d_model": 128,
            "num_attention_heads": 16,
            "ffn_dim": 256,
        },
        real_batch={"batch": 32, "steps": 512, "channels": 321, "horizon": 96},
        small={
            "num_input_channels": 4,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_attention_heads": 4,
            "ffn_dim": 32,
            "num_hidden_layers": 2,
        },
        small_batch={"batch": 8, "steps": 32, "channels": 4, "horizon": 8},
        config="PatchTSTConfig",
        head="PatchTSTForPrediction",
        note="64, electricity",
    ),
}
