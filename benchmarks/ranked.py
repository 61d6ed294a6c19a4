"""Models and plans of the ranking: the optimum, and worse plans that pins enforce."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from autoshard import (
    Graph,
    Plan,
    PlanOptions,
    export_model,
    load_graph,
    make_mesh,
    make_plan,
)
from autoshard.mesh.topology import Topology

_VOCABULARY = 1024
_SEQUENCE = 128

Cases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Ranked:
    """A model whose plans are ranked.

    Attributes:
        model: built on the meta device.
        tensors: makes the inputs of a step.
        weights: pattern of the parameters that are sharded.
        columns: dim of output features of a weight.
        products: pattern of the matrix products.
        sequence: true if the inputs have a sequence dim.
    """

    model: Callable[[], nn.Module]
    tensors: Callable[[], dict[str, Any]]
    weights: str
    columns: int
    products: str
    sequence: bool = True

    def graph(self) -> Graph:
        """The program of a training step."""
        with torch.device("meta"):
            model, tensors = self.model(), self.tensors()
        return load_graph(export_model(model, (), tensors))

    def on_one_axis(self) -> Cases:
        """Options of the plans on one axis, by name."""
        rows = {"inputs": {"*": "S(0)"}}
        replicated = {"inputs": {"*": "R"}}
        cases: dict[str, Mapping[str, Any]] = {
            "optimal": {},
            "Megatron": {"algo": "megatron"},
            "data parallel": {"pins": rows | {"parameters": {"*": "I"}}},
            "fully sharded": {"pins": rows | {"parameters": {self.weights: "S(0)"}}},
            "columns": {"pins": replicated | {"parameters": {self.weights: f"S({self.columns})"}}},
        }
        if self.sequence:
            tokens = {"inputs": {"*": "S(1)"}, "parameters": {"*": "I"}}
            cases["sequence"] = {"pins": tokens}
        return cases

    def on_two_axes(self) -> Cases:
        """Options of the plans on two axes, by name."""
        both, outer = {"inputs": {"*": "S(0),S(0)"}}, {"inputs": {"*": "S(0),R"}}
        columns = {"parameters": {self.weights: f"I,S({self.columns})"}}
        rows = {"parameters": {self.weights: f"I,S({1 - self.columns})"}}
        cases: dict[str, Mapping[str, Any]] = {
            "optimal": {},
            "Megatron": {"algo": "megatron", "batch_axis": "dp"},
            "data parallel": {"pins": both | {"parameters": {"*": "I,I"}}},
            "fully sharded": {"pins": both | {"parameters": {self.weights: "S(0),S(0)"}}},
            "sharded over dp": {"pins": both | {"parameters": {self.weights: "S(0),I"}}},
            "batch over dp, weights replicated": {"pins": outer | {"parameters": {"*": "I,I"}}},
            "batch over dp, columns over tp": {"pins": outer | columns},
            "batch over dp, rows over tp": {"pins": outer | rows},
            "products replicated over tp": {"pins": {"nodes": {self.products: "*,Replicate()"}}},
            "products replicated": {"pins": {"nodes": {self.products: "Replicate(),Replicate()"}}},
        }
        if self.sequence:
            tokens = {"inputs": {"*": "S(0),S(1)"}, "parameters": {"*": "I,I"}}
            cases["sequence over tp"] = {"pins": tokens}
            cases["sequence over both"] = {"pins": {"inputs": {"*": "S(1),S(1)"}}}
        return cases

    def plans(self, topology: Topology) -> Iterator[tuple[str, Plan]]:
        """All distinct plans on 4 devices, with their names."""
        graph = self.graph()
        meshes = {
            "4": (make_mesh((4,), axes=("x",), topology=topology), self.on_one_axis()),
            "2x2": (make_mesh((2, 2), axes=("dp", "tp"), topology=topology), self.on_two_axes()),
        }
        found: list[Plan] = []
        for shape, (mesh, cases) in meshes.items():
            for name, options in cases.items():
                plan = make_plan(graph, mesh, _options(options))
                if plan.found and plan.stages not in [other.stages for other in found]:
                    found.append(plan)
                    yield f"{name}, {shape}", plan


def _options(given: Mapping[str, Any]) -> PlanOptions:
    return PlanOptions(**{"optimizer": "sgd", "relative_gap": 0.01} | given)


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=256,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=_VOCABULARY,
            max_position_embeddings=_SEQUENCE,
        )
    )


def _gpt2() -> nn.Module:
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": _SEQUENCE}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=_VOCABULARY, **sizes, **ends))


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=3,
            hidden_size=192,
            intermediate_size=768,
            num_attention_heads=8,
            image_size=64,
            patch_size=8,
            num_labels=64,
        )
    )


def _tokens() -> dict[str, Any]:
    ids = torch.zeros(8, _SEQUENCE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _images() -> dict[str, Any]:
    labels = torch.zeros(16, dtype=torch.long)
    return {"pixel_values": torch.zeros(16, 3, 64, 64), "labels": labels}


MODELS: Mapping[str, Ranked] = {
    "Llama": Ranked(_llama, _tokens, "*proj.weight", 0, "linear*"),
    "GPT-2": Ranked(_gpt2, _tokens, "*.c_*.weight", 1, "addmm*"),
    "ViT": Ranked(_vit, _images, "*layers.*[_f][pc]*[jr12].weight", 0, "linear*", sequence=False),
}
"""Models by name; with 2, 4 and 3 layers."""
