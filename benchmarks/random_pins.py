"""Random small models with random pins: no pinned plan may be faster than the free one.

For each seed a model and a mesh are drawn, and planned without pins to the last digit. Then a
layout of a random tensor is pinned, drawn from all that the notation of layouts can say, many
times. A pinned plan that is faster shows a layout that is not offered: it is listed with the kind
of that layout, which the certificate's sentence must name. Run
`python -m benchmarks.random_pins --count 100`, which writes benchmarks/results/random_pins.json.
"""

import argparse
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.graph import Graph, export_model, load_graph
from autoshard.mesh import make_mesh
from autoshard.planner import make_plan

RESULT = Path(__file__).parent / "results" / "random_pins.json"
_ROUNDING = 1e-9
_MESHES = ("2", "4", "2x2", "2x4", "2x2x2")
_PINS_PER_MODEL = 12
_ALLOWED = 5
"""Models of 100 with a faster pin, each of a kind that the sentence of the certificate names."""

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Flat(nn.Module):
    """A product with matrices that are views of one flat parameter."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.flat = nn.Parameter(torch.empty(number * width * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all matrices, and average their results."""
        matrices = self.flat.view(self.number, self.width, self.width)
        return torch.einsum("bk,ekn->ebn", x, matrices).square().mean()


class Fused(nn.Module):
    """Attention with a fused projection, whose heads are split by a view, a chunk or a slice."""

    def __init__(self, heads: int, width: int, split: str) -> None:
        super().__init__()
        self.heads, self.split = heads, split
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention without a mask."""
        batch, length, width = x.shape
        fused = self.qkv(x)
        if self.split == "view":
            parts = fused.view(batch, length, 3, width).unbind(2)
        elif self.split == "chunk":
            parts = fused.chunk(3, -1)
        else:
            parts = tuple(fused[..., i * width : (i + 1) * width] for i in range(3))
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.out(mixed).square().mean()


class Gated(nn.Module):
    """A gated network between norms, of which the tokens are one dim or two."""

    def __init__(self, width: int, *, is_flat: bool) -> None:
        super().__init__()
        self.is_flat = is_flat
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm, gate, product and skip connection."""
        tokens = x.reshape(-1, x.shape[-1]) if self.is_flat else x
        gate, up = self.up(self.norm(tokens)).chunk(2, -1)
        return (tokens + self.down(nn.functional.silu(gate) * up)).square().mean()


class Joined(nn.Module):
    """Two products that are concatenated, and a table of embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8 * width, width)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.last = nn.Linear(4 * width, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up, multiply, concatenate and classify."""
        x = self.table(ids)
        both = torch.cat([self.one(x), torch.relu(self.two(x))], -1)
        return self.last(both).log_softmax(-1).mean()


@dataclass(frozen=True)
class Faster:
    """A pinned plan that is faster than the free one.

    Attributes:
        seed: of the model and the mesh.
        model: in words.
        mesh: its shape.
        pin: kind, name and layout.
        pinned: seconds of a step with the pin.
        free: seconds of a step without.
    """

    seed: int
    model: str
    mesh: str
    pin: str
    pinned: float
    free: float


def model_of(random_: random.Random) -> tuple[str, Built]:
    """A random model with arguments, on the meta device."""
    width, batch = random_.choice([256, 1024, 4096]), random_.choice([8, 16, 64])
    number, heads = random_.choice([2, 3, 4, 8, 9]), random_.choice([4, 8, 16])
    split, is_flat = random_.choice(["view", "chunk", "slice"]), random_.choice([False, True])
    length = random_.choice([64, 512])
    tokens = torch.empty(batch, length, width, device="meta")
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    kinds: dict[str, Callable[[], Built]] = {
        f"flat parameter of {number} matrices of {width}": lambda: (
            Flat(number, width),
            (torch.empty(batch, width, device="meta"),),
        ),
        f"fused attention, {split}, {heads} heads of {width}": lambda: (
            Fused(heads, width, split),
            (tokens,),
        ),
        f"gated network of {width}, tokens {'flat' if is_flat else 'in two dims'}": lambda: (
            Gated(width, is_flat=is_flat),
            (tokens,),
        ),
        f"concatenated products of {width}": lambda: (Joined(width), (ids,)),
    }
    name = random_.choice(list(kinds))
    with torch.device("meta"):
        return name, kinds[name]()


def pins_of(random_: random.Random, graph: Graph, num_axes: int) -> Iterator[tuple[str, str, str]]:
    """Random pins, without end: kind, name and layout."""
    tables = {
        "parameters": [i.name for i in graph.parameters],
        "inputs": [i.name for i in graph.inputs if i.kind.name == "USER"],
        "nodes": [node.name for node in graph.nodes if len(node.outputs) == 1],
    }
    values = {node.name: node.outputs[0] for node in graph.nodes if len(node.outputs) == 1}
    while True:
        kind = random_.choice(list(tables))
        name = random_.choice(tables[kind])
        shape = graph.values[values.get(name, name)].shape
        yield kind, name, _layout(random_, shape, num_axes, has_partial=kind == "nodes")


def _layout(
    random_: random.Random, shape: tuple[int, ...], num_axes: int, *, has_partial: bool
) -> str:
    parts = []
    for _ in range(num_axes):
        sharded = [f"S({dim})" for dim in range(len(shape))]
        sections = random_.choice([2, 3, 4, 8, 9])
        sharded += [f"{one}/{'+'.join('1' * sections)}" for one in sharded]
        parts.append(random_.choice(["R", "*", *(["P"] if has_partial else []), *sharded * 2]))
    order = random_.choice(["", "", ";*", ";1>0"]) if num_axes > 1 else ""
    return ",".join(parts) + order


def compare(seed: int) -> tuple[int, list[Faster]]:
    """Plan one random model freely and with pins; the number of pinned plans, and the faster."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    words, (model, arguments) = model_of(random_)
    graph = load_graph(export_model(model, arguments))
    shape, mode = random_.choice(_MESHES), random_.choice(["training", "inference"])
    mesh = make_mesh(shape)
    free = make_plan(graph, mesh, mode=mode, relative_gap=0.0)
    number, faster = 0, []
    for kind, name, layout in pins_of(random_, graph, len(mesh.axes)):
        try:
            plan = make_plan(graph, mesh, mode=mode, relative_gap=0.0, pins={kind: {name: layout}})
        except InputError:  # such as a dim that the axis does not divide
            continue
        number += 1
        if plan.found and plan.costs.total < free.costs.total * (1 - _ROUNDING):
            pin = f"{kind.removesuffix('s')}:{name}={layout}"
            faster.append(Faster(seed, words, shape, pin, plan.costs.total, free.costs.total))
        if number == _PINS_PER_MODEL:
            return number, faster
    raise AssertionError("pins do not end")


def main() -> int:
    """Compare many models, and write what was found."""
    parser = argparse.ArgumentParser(description="Compare free plans with pinned ones.")
    parser.add_argument("--count", type=int, default=100, help="number of models")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    number, faster = 0, []
    for seed in range(given.first, given.first + given.count):
        pinned, found = compare(seed)
        number += pinned
        faster += found
        for one in found:
            print(f"seed {seed}: {one.model} on {one.mesh}, {one.pin}: {one.pinned} < {one.free}")
    models = len({one.seed for one in faster})
    print(
        f"{given.count} models, {number:,} pinned plans, {len(faster)} faster, of {models} models"
    )
    record = {"models": given.count, "pinned": number, "faster": [asdict(one) for one in faster]}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(models > _ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
