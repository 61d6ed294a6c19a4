"""Every distinct call of real models has a rule, which holds on simulated ranks."""

from typing import Any

import pytest
import torch
from ops.calls import MakeExample, Prove
from support.models import Case, bert, gpt2, graph_of, llama, mlp
from transformers import (
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from autoshard.graph import Argument, DType, Ref, Tensor, Token
from autoshard.ops import Call, call_of, has_rule, spec_for


def t5() -> Case:
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = torch.randint(0, 32, (4, 8))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def vit() -> Case:
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=4,
    )
    pixels = torch.randn(4, 3, 8, 8)
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(4)}


def swin() -> Case:
    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=4,
        drop_path_rate=0.0,
    )
    pixels = torch.randn(4, 3, 32, 32)
    return SwinForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(4)}


def segformer() -> Case:
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=4,
        drop_path_rate=0.0,
    )
    pixels, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4, 16, 16))
    model = SegformerForSemanticSegmentation(config).eval()
    return model, {"pixel_values": pixels, "labels": labels}


CASES = {
    "mlp": mlp,
    "gpt2": lambda: gpt2(layers=1),
    "bert": lambda: bert(layers=1),
    "llama": lambda: llama(layers=1),
    "t5": t5,
    "vit": vit,
    "swin": swin,
    "segformer": segformer,
}


@pytest.fixture(scope="module", params=CASES)
def calls(request: pytest.FixtureRequest) -> list[Call]:
    """The distinct calls of a model."""
    graph = graph_of(CASES[request.param]())
    return list(dict.fromkeys(_anonymous(call_of(graph, node)) for node in graph.nodes))


@pytest.mark.matrix
def test_every_operator_has_a_rule(calls: list[Call]) -> None:
    assert {call.operator for call in calls if not has_rule(call.operator)} == set()


@pytest.mark.matrix
def test_every_call_keeps_its_rule(calls: list[Call], example: MakeExample, prove: Prove) -> None:
    for call in calls:
        probability = spec_for(call.operator).draws
        draws = probability is not None and (not probability or call.number(probability, 0) > 0)
        if not draws and "empty" not in call.operator:
            made = iter(_values(tensor) for tensor in call.inputs)
            arguments = {key: _concrete(value, made) for key, value in call.arguments}
            prove(example(call.operator, **arguments), meshes=[(2,)])


def _anonymous(call: Call) -> Call:
    """The call without the names of its tensors, so that layers make the same calls."""
    arguments = tuple((key, _unnamed(value)) for key, value in call.arguments)
    return Call(call.operator, arguments, call.inputs, call.outputs)


def _unnamed(argument: Argument) -> Argument:
    if isinstance(argument, tuple):
        return tuple(_unnamed(item) for item in argument)
    return Ref("") if isinstance(argument, Ref) else argument


def _values(tensor: Tensor) -> torch.Tensor:
    """Numbers in double precision, ids that fit every table, and masks with few holes."""
    if tensor.dtype.is_differentiable:
        return torch.rand(tensor.shape, dtype=torch.float64) + 0.1
    if tensor.dtype is DType.BOOL:
        return torch.rand(tensor.shape) > 0.2
    return torch.randint(0, 2, tensor.shape)


def _concrete(argument: Argument, made: Any) -> Any:
    if isinstance(argument, Ref):
        return next(made)
    if isinstance(argument, tuple):
        return [_concrete(item, made) for item in argument]
    if isinstance(argument, Token):
        return torch.float64 if argument.value.startswith("float") else _object(argument)
    return argument


def _object(token: Token) -> Any:
    return torch.device("cpu") if token.kind == "device" else getattr(torch, token.value)
