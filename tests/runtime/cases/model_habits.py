"""Habits around the model: writes into weights, copies, state dicts, dtypes, two models."""

import io
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runtime.cases.habits import (
    FEATURES,
    SHARDED,
    TOKENS,
    Habit,
    Net,
    Refused,
    adam,
    assert_same,
    batches,
    first_batch,
    gradients,
    is_planned,
    step,
    train,
)
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from autoshard.errors import ExportError, UnsupportedError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize


@torch.no_grad()
def written(model: nn.Module) -> object:
    """Writes into rows, columns, slices, views and where a mask is true, of sharded dims too."""
    up, embed, down = model.up.weight, model.embed.weight, model.down.weight
    up[0] = 3.0
    up[:, 1] = 0.5
    up[1:3, 2:5] += 1.0
    up[4] = up[5] * 2
    up[-1][2] = 7.0
    up[up > 1.0] = 0.25
    up[torch.arange(up.numel()).view(up.shape) % 11 == 0] = 0.375
    up[up[:, 0] > 0.2] = 0.625
    up[3][up[3] > 0.1] = -0.5
    up[2, torch.arange(up.shape[1]) % 3 == 0] = 0.75
    up[[7, 9]] = 0.125
    up[:, [1, 2]] = 0.875
    up[[11, 12], 1:3] = -0.25
    up.view(-1)[33] = 7.0
    up.diagonal().fill_(1.0)
    up.narrow(0, 11, 7).mul_(0.5)
    up.index_fill_(0, torch.tensor([20, 40]), 1.0)
    embed.data[5].zero_()
    embed[0].fill_(0.5)
    first, second = down.chunk(2)
    first.mul_(0.5)
    second[1].add_(1.0)
    down.t()[3].sub_(1.0)
    down.clamp_(-0.9, 0.9).masked_fill_(down.abs() < 0.01, 0.0)
    model.norm.bias[3] = 2.0
    assert float(up[0, 3]) == 0.625
    return model(**batches(1)[0])


def initialised(model: nn.Module) -> object:
    """Weights are drawn again after the plan was applied, and noise is added to some."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=0.1)
    nn.init.kaiming_uniform_(model.up.weight)
    nn.init.xavier_normal_(model.down.weight)
    model.norm.reset_parameters()
    with torch.no_grad():
        model.embed.weight.add_(0.1 * torch.randn_like(model.embed.weight))
        model.head.weight[0].normal_()
    return train(model)


def initialised_differently(model: nn.Module) -> object:
    torch.manual_seed(dist.get_rank() if isinstance(model.up.weight, DTensor) else 0)
    nn.init.normal_(model.up.weight)


@torch.no_grad()
def copied_plain(model: nn.Module) -> object:
    """A plain tensor is whole, in a copy as in a write."""
    model.up.weight.copy_(torch.linspace(-1, 1, 64 * FEATURES, dtype=torch.float64).view(64, -1))
    model.down.weight[1:3] = torch.full((2, 1), 0.25, dtype=torch.float64)
    return model(**batches(1)[0])


def assigned(model: nn.Module) -> object:
    """Parameters are replaced by parameters, their data by tensors, and a module's by another's."""
    model.up.weight = nn.Parameter(model.up.weight.detach() * 2)
    model.down.weight.data = model.down.weight.data * 0.5
    losses = train(model)
    assert model.up.weight.grad is not None
    return losses


def deep_copies(model: nn.Module) -> object:
    """Copies train by themselves, from no gradient; a shallow copy has the same weights."""
    model(**batches(1)[0]).backward()
    twin, same = deepcopy(model), copy(model)
    assert all(p.grad is None for p in twin.parameters())
    optimizers = adam(model), adam(twin, 0.1)
    losses = [
        [step(m, optimizer, b) for m, optimizer in zip((model, twin), optimizers, strict=True)]
        for b in batches(3)
    ]
    return losses, twin.state_dict(), same(**batches(1)[0])


def state_dicts(model: nn.Module) -> object:
    """The best weights are kept and restored, in memory and through `torch.save`."""
    optimizer = adam(model)
    best = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    first = [step(model, optimizer, batch) for batch in batches(3)]
    clones = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    again = [step(model, optimizer, batch) for batch in batches(3)]
    assert first == pytest.approx(again, rel=1e-12)
    model.load_state_dict(clones, assign=True)
    other = adam(model)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    losses = [step(model, other, batch) for batch in batches(2)]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    model.load_state_dict(best[0])
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    return first, losses, model(**batches(1)[0])


def converted(model: nn.Module, dtype: torch.dtype) -> object:
    train(model)
    return model.to(dtype)(**batches(1)[0])


def moved(model: nn.Module) -> object:
    """To the device and dtype that it has."""
    model.to("cpu").double()
    return train(model)


class Autocast(Net):
    """Autocasts itself."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, labels)


@dataclass
class RefusedByExport:
    """A model whose graph is refused, with the way out."""

    build: Callable[[], nn.Module]
    match: str

    def __call__(self) -> None:
        with pytest.raises((ExportError, UnsupportedError), match=self.match):
            graph_of((self.build(), first_batch()))


class Tied(Net):
    """Predicts tokens with the matrix that embeds them."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


TIED = {
    "4": {"inputs": {"*": "S(0)"}, "parameters": {"embed.weight": "S(0)", "up.*": "S(0)"}},
    "2x2": {"inputs": {"*": "S(0),R"}, "parameters": {"embed.weight": "S(0),S(0)"}},
}


def tied(model: nn.Module) -> object:
    losses = train(model)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 7
    return losses


class Nested(Net):
    """Takes a batch as a dict, and returns a dict."""

    def forward(
        self, batch: dict[str, torch.Tensor], *, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        hidden = self.hidden(batch["ids"])
        loss = functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())
        return {"loss": loss * scale, "norm": hidden.square().mean()}


def nested(model: nn.Module) -> object:
    optimizer, found = adam(model), []
    for batch in batches(3):
        optimizer.zero_grad()
        result = model(batch)
        (result["loss"] + 0.1 * result["norm"]).backward()
        optimizer.step()
        found.append({name: value.item() for name, value in result.items()})
    return found


class Dropping(Net):
    """Has dropout."""

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().block(x), 0.5, self.training)


@dataclass
class Seeded(Habit):
    """Dropout draws the same numbers in two runs with one seed, and others with another."""

    def __call__(self) -> None:
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(0)
            mesh = device_mesh(self.plan)
            model = parallelize(self.build().double(), self.plan, mesh, seed=seed)
            runs.append(train(model))
        assert runs[0] == runs[1]
        assert runs[0] != runs[2]
        assert runs[0][0] != runs[0][1]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.down = nn.Linear(64, FEATURES)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(z)))


class Discriminator(Generator):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(-1)


def noise(number: int, *, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(8, FEATURES, generator=generator, dtype=torch.float64)
    return drawn.requires_grad_(requires_grad)


@dataclass
class Gan:
    """Two planned models, of which one is called twice for each of its steps.

    Attributes:
        axes: of the mesh.
        plans: of the generator and the discriminator.
    """

    axes: dict[str, int]
    plans: tuple[Plan, Plan] = field(init=False)

    def prepare(self) -> None:
        rows = ",".join(["S(0)", *["I"] * (len(self.axes) - 1)])
        columns = {"up.*": ",".join(["I"] * (len(self.axes) - 1) + ["S(0)"])}
        inputs = {"inputs": {"*": rows}, "parameters": columns}
        examples = {"z": noise(0)}, {"x": noise(0, requires_grad=True)}
        first, second = (
            make_plan(
                graph_of((build().double(), example)),
                slow_devices(**self.axes),
                PlanOptions(pins=inputs | {"outputs": {"0": rows}}),
            )
            for build, example in zip((Generator, Discriminator), examples, strict=True)
        )
        assert first.found
        assert second.found
        self.plans = first, second

    def __call__(self) -> None:
        torch.manual_seed(0)
        references = Generator().double(), Discriminator().double()
        planned = [
            parallelize(deepcopy(model), plan, device_mesh(plan))
            for model, plan in zip(references, self.plans, strict=True)
        ]
        assert_same(self.losses(*planned), self.losses(*references), "losses")
        for one, other in zip(planned, references, strict=True):
            assert_same(one.state_dict(), other.state_dict(), "state")

    @staticmethod
    def losses(generator: nn.Module, discriminator: nn.Module) -> list[float]:
        optimizers = [adam(model) for model in (generator, discriminator)]
        ones, zeros = (make(8, dtype=torch.float64) for make in (torch.ones, torch.zeros))
        loss = functional.binary_cross_entropy_with_logits
        found = []
        for number in range(3):
            fake = generator(noise(number))
            discriminator.requires_grad_(requires_grad=True)
            optimizers[1].zero_grad()
            judged = loss(discriminator(noise(10 + number)), ones)
            judged = judged + loss(discriminator(fake.detach()), zeros)
            judged.backward()
            optimizers[1].step()
            discriminator.requires_grad_(requires_grad=False)
            optimizers[0].zero_grad()
            fooled = loss(discriminator(fake), ones)
            fooled.backward()
            optimizers[0].step()
            found += [whole(judged).item(), whole(fooled).item()]
        return found


class Held:
    """An object that holds a tensor."""

    def __init__(self) -> None:
        self.shift = torch.linspace(0, 1, FEATURES, dtype=torch.float64)


class Constants(Net):
    """Numbers in indices and calls, and tensors in containers and objects of the model."""

    def __init__(self) -> None:
        super().__init__()
        tables = [torch.linspace(-1, 1, FEATURES, dtype=torch.float64) * i for i in range(3)]
        self.tables = {"of": [tables[0], (tables[1], tables[2])]}
        self.weights = [self.up.weight, {"bias": self.up.bias}]
        self.held = Held()
        self.norm.scale = [1.5 * tables[2]]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(ids) * self.norm.scale[0] + self.held.shift
        hidden = hidden + self.tables["of"][0] * self.tables["of"][1][0]
        wide = hidden @ self.weights[0].T + self.weights[1]["bias"]
        wide = wide[..., [0, 3, -1]] * wide.new_tensor([1.0, 2.0, 3.0])
        wide = wide + torch.asarray([0.5] * 3) + wide[..., np.array([2, 1, 0])]
        wide[..., [1]] = 0.25
        last = self.head(hidden[:, [-1], :]).tile(2)
        flags = wide[:, [True, False, True, False]].square().mean()
        return functional.cross_entropy(last[:, 0], labels[:, 0]) + wide.sum() / 99 + flags


FEWER = {
    mesh: {
        kind: {name: pin for name, pin in pins.items() if not name.startswith(("up", "down"))}
        for kind, pins in kinds.items()
    }
    for mesh, kinds in SHARDED.items()
}
"""Without those of parameters that a parametrization renames."""


class Outs(Net):
    """`out` arguments: of fresh tensors, of a buffer, of a part of a tensor, by libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("doubled", torch.zeros(FEATURES))
        self.down = nn.utils.spectral_norm(self.down)
        self.up = nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight, bias = self.head.weight, self.down.bias
        with torch.no_grad():
            torch.mul(bias, 2.0, out=self.doubled)
            flags, rows = torch.empty_like(weight), torch.empty_like(weight[:, 0])
            torch.gt(weight, 0.0, out=flags)
            places = torch.empty(TOKENS, dtype=torch.int64)
            torch.max(weight, dim=1, out=(rows, places))
            squares = torch.zeros(2, FEATURES, FEATURES, dtype=weight.dtype)
            torch.matmul(weight.T, weight, out=squares[1])
        eye = torch.empty_like(squares[0])
        torch.eye(FEATURES, out=eye)
        hidden = self.hidden(ids) + self.doubled + squares[1, 0] + flags[0]
        penalty = (weight.T @ weight - eye).square().mean() + (rows * places).mean()
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + penalty


class Pair(NamedTuple):
    """A loss and logits."""

    loss: torch.Tensor
    logits: torch.Tensor


@dataclass
class Output:
    """A result of which a member may be missing."""

    pair: Pair
    number: int = 3
    hidden: torch.Tensor | None = None


class Structured(Net):
    """A result in classes of its own."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.head(self.hidden(ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(Pair(loss, logits))


def structured(model: nn.Module) -> object:
    """A step with a result in classes."""
    output = model(**first_batch())
    assert type(output) is Output
    assert type(output.pair) is Pair
    assert (output.number, output.hidden) == (3, None)
    output.pair.loss.backward()
    return [*output.pair, gradients(model)]


class Sparse(Net):
    """Sparse gradients of embeddings, and a batch norm that averages over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, FEATURES, sparse=True)
        self.bag = nn.EmbeddingBag(TOKENS, FEATURES, sparse=True, mode="sum")
        self.average = nn.BatchNorm1d(FEATURES, momentum=None)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.average(self.bag(ids)).unsqueeze(1) + self.hidden(ids)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def trained_by_sgd(model: nn.Module) -> list[float]:
    """Steps of an optimizer that takes sparse gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return [step(model, optimizer, batch) for batch in batches(3)]


def with_a_largest_norm(model: nn.Module) -> list[float]:
    """Training as with `Embedding(max_norm=1.0)`, of a planned model as its error says."""
    weight, optimizer = model.embed.weight, torch.optim.SGD(model.parameters(), 0.5)

    @torch.no_grad()
    def scale() -> None:
        norm = weight.norm(dim=1, keepdim=True)
        weight.mul_(torch.where(norm > 1.0, 1.0 / (norm + 1e-7), 1.0))

    if not is_planned(model):
        model.embed.max_norm = 1.0
    losses = []
    for batch in batches(3):
        if is_planned(model):
            scale()
        losses.append(step(model, optimizer, batch))
    scale()
    model.embed.max_norm = None
    return losses


class LargestNorm(Net):
    """An embedding that scales its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


HABITS: dict[str, Callable[[str], Callable[[], None]]] = {
    "writes into weights": lambda mesh: Habit(mesh, written),
    "a plain tensor copied into a weight": lambda mesh: Habit(mesh, copied_plain),
    "initialisation": lambda mesh: Habit(mesh, initialised),
    "initialisation by seeds of each rank": lambda mesh: Refused(
        mesh, initialised_differently, match=r"torch\.manual_seed with one seed on all ranks"
    ),
    "replaced parameters": lambda mesh: Habit(mesh, assigned),
    "copies": lambda mesh: Habit(mesh, deep_copies),
    "state dicts": lambda mesh: Habit(mesh, state_dicts),
    "another dtype": lambda mesh: Refused(
        mesh,
        partial(converted, dtype=torch.float32),
        match=r"is torch.float32 now, and the plan is for float64: convert the model first",
    ),
    "the same dtype and device": lambda mesh: Habit(mesh, moved),
    "autocast in the model": lambda _: RefusedByExport(
        Autocast, r"torch\.autocast.*mixed_precision"
    ),
    "weight tying": lambda mesh: Habit(mesh, tied, Tied, pins=TIED),
    "batches as dicts": lambda mesh: Habit(
        mesh, nested, Nested, lambda: {"batch": first_batch()}, SHARDED
    ),
    "seeds": lambda mesh: Seeded(mesh, train, Dropping),
    "constants": lambda mesh: Habit(mesh, train, Constants),
    "out arguments": lambda mesh: Habit(mesh, train, Outs, pins=FEWER),
    "named tuples and dataclasses": lambda mesh: Habit(mesh, structured, Structured),
    "sparse gradients, averaged statistics": lambda mesh: Habit(mesh, trained_by_sgd, Sparse),
    "a largest norm, by hand": lambda mesh: Habit(mesh, with_a_largest_norm),
    "a largest norm": lambda _: RefusedByExport(
        LargestNorm, r"weight\.mul_\(torch\.where\(norm > max_norm"
    ),
    "a GAN": lambda mesh: Gan(MESHES[mesh]),
}
CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": habit(mesh) for mesh in MESHES for name, habit in HABITS.items()
}
