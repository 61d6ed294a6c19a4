"""Encoders and encoder-decoder models of the zoo.

Sizes are those of the published models; other arguments have the defaults of the config class,
which are those of the model after which the class is named.
"""

from collections.abc import Mapping

from benchmarks.models import MODELS
from benchmarks.zoo.decoders import SMALL, sizes
from benchmarks.zoo.family import (
    Family,
    Maker,
    Sizes,
    features,
    masked,
    scan_decoder,
    translation,
)

_TRANSLATOR = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
}


def _encoder(
    name: str,
    head: str,
    real: Sizes,
    small: Sizes,
    *,
    inputs: Maker = masked,
    output: str = "",
    note: str = "base",
) -> Family:
    return Family(
        kind="encoder",
        inputs=inputs,
        real=real,
        real_batch={"batch": 32, "sequence": 512},
        small=small,
        small_batch={"batch": 8, "sequence": 16},
        config=f"{name}Config",
        head=f"{name}{head}",
        output=output,
        note=note,
    )


ENCODERS: Mapping[str, Family] = {
    "bert": _encoder("Bert", "ForMaskedLM", {}, SMALL),
    "roberta": _encoder(
        "Roberta",
        "ForMaskedLM",
        sizes(1024, 4096, 24, 16, vocab_size=50_265, max_position_embeddings=514),
        SMALL,
        note="large",
    ),
    "distilbert": _encoder(
        "DistilBert",
        "ForMaskedLM",
        {},
        {
            "vocab_size": 64,
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "albert": _encoder(
        "Albert", "ForMaskedLM", {}, SMALL | {"embedding_size": 16}, note="xxlarge v2"
    ),
    "electra": _encoder(
        "Electra",
        "ForMaskedLM",
        sizes(1024, 4096, 24, 16, embedding_size=1024),
        SMALL | {"embedding_size": 16},
        note="large",
    ),
    "deberta-v2": _encoder(
        "DebertaV2",
        "ForMaskedLM",
        sizes(
            768,
            3072,
            12,
            12,
            vocab_size=128_100,
            relative_attention=True,
            position_buckets=256,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_biased_input=False,
        ),
        SMALL
        | {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
        note="v3 base",
    ),
    "modernbert": _encoder(
        "ModernBert",
        "ForMaskedLM",
        {},
        SMALL | {"num_hidden_layers": 4, "local_attention": 8, "pad_token_id": 0},
    ),
    "mpnet": _encoder("MPNet", "ForMaskedLM", {}, SMALL),
    "esm": _encoder(
        "Esm",
        "ForMaskedLM",
        sizes(
            1280,
            5120,
            33,
            20,
            vocab_size=33,
            position_embedding_type="rotary",
            pad_token_id=1,
            mask_token_id=32,
            max_position_embeddings=1026,
        ),
        SMALL | {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2},
        note="2, 650M",
    ),
    "fnet": _encoder(
        "FNet", "ForMaskedLM", {}, SMALL | {"type_vocab_size": 2}, inputs=scan_decoder
    ),
    "layoutlm": _encoder(
        "LayoutLM", "Model", {}, SMALL, inputs=features, output="last_hidden_state"
    ),
}


def _translator(
    name: str, real: Sizes, small: Sizes, *, head: str = "ForConditionalGeneration", note: str
) -> Family:
    return Family(
        kind="translator",
        inputs=translation,
        real=real,
        real_batch={"batch": 16, "source": 512, "target": 128},
        small=small,
        small_batch={"batch": 8, "source": 16, "target": 8},
        config=f"{name}Config",
        head=f"{name}{head}",
        note=note,
    )


TRANSLATORS: Mapping[str, Family] = {
    "t5": _translator(
        "T5",
        MODELS["t5-base"].sizes,
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        note="base",
    ),
    "bart": _translator("Bart", {}, _TRANSLATOR, note="large"),
    "pegasus": _translator(
        "Pegasus",
        {
            "vocab_size": 96_103,
            "encoder_layers": 16,
            "decoder_layers": 16,
        },
        _TRANSLATOR,
        note="large",
    ),
    "marian": _translator(
        "Marian",
        {},
        _TRANSLATOR | {"pad_token_id": 0, "decoder_start_token_id": 0},
        head="MTModel",
        note="config default",
    ),
    "mbart": _translator("MBart", {"vocab_size": 250_027}, _TRANSLATOR, note="large 50"),
    "m2m100": _translator(
        "M2M100",
        {
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        _TRANSLATOR,
        note="418M, all layers kept",
    ),
    "blenderbot": _translator("Blenderbot", {}, _TRANSLATOR, note="3B"),
}
