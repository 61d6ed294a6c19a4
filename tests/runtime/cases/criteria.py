"""Criteria of user code: of results that stay sharded, with plain labels, and in the program."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
from runtime.cases.updated_buffers import FEATURES, MESHES
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from autoshard.errors import PlanError
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import local, parallelize

CLASSES = 16
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes logits, labels and a tensor like the logits."""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.down = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def weight_on(like: torch.Tensor) -> torch.Tensor:
    """A weight of each class."""
    return torch.linspace(0.5, 2.0, CLASSES, device=like.device)


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda x, labels, _: functional.cross_entropy(x, labels),
    "module": lambda x, labels, _: nn.CrossEntropyLoss()(x.float(), labels),
    "smoothed": lambda x, labels, _: functional.cross_entropy(x, labels, label_smoothing=0.1),
    "weighted": lambda x, labels, _: functional.cross_entropy(x, labels, weight=weight_on(x)),
    "sum": lambda x, labels, _: functional.cross_entropy(x, labels, reduction="sum"),
    "nll": lambda x, labels, _: functional.nll_loss(x.log_softmax(-1), labels),
    "probabilities": lambda x, _, like: functional.cross_entropy(x, like.softmax(-1)),
    "mse": lambda x, _, like: functional.mse_loss(x, like),
    "mse of the target": lambda x, _, like: functional.mse_loss(like, x),
    "bce": lambda x, _, like: functional.binary_cross_entropy_with_logits(x, like.sigmoid()),
    "huber": lambda x, _, like: functional.huber_loss(2.0 * x, like),
    "kl_div": lambda x, _, like: functional.kl_div(x, like.softmax(-1), reduction="batchmean"),
    "masked": lambda x, _, like: (x * like).square().sum(),
}


@dataclass
class Outside:
    """Losses and gradients are those of the model on one device.

    Attributes:
        axes: of the mesh.
        batch: number of rows; ranks get different numbers of them if it does not divide.
        output: layout of the logits along the first axis.
    """

    axes: dict[str, int]
    batch: int
    output: str
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        layout = ",".join([self.output, *["*"] * (len(self.axes) - 1)])
        graph = graph_of((Classifier(), {"x": torch.zeros(self.batch, FEATURES)}))
        pins = {"outputs": {"0": layout}}
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(pins=pins))
        assert self.plan.found

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = Classifier()
        x, like = torch.randn(self.batch, FEATURES), torch.randn(self.batch, CLASSES)
        labels = torch.randint(0, CLASSES, (self.batch,))
        labels[: self.batch // 3] = -100  # more in one shard than in another
        planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        for name, loss in LOSSES.items():
            planned.zero_grad()
            reference.zero_grad()
            logits = planned(x)
            assert isinstance(logits, DTensor)
            found, expected = loss(logits, labels, like), loss(reference(x), labels, like)
            close(whole(found.detach()), expected.detach(), name)
            found.backward()
            expected.backward()
            for one, other in zip(planned.parameters(), reference.parameters(), strict=True):
                close(whole(one.grad), other.grad, f"gradient of {name}")
        self._check_own_labels(planned, reference, x, labels)
        with pytest.raises(RuntimeError, match="must match the size"):
            planned(x) - like[:7]

    def _check_own_labels(
        self, planned: Classifier, reference: Classifier, x: torch.Tensor, labels: torch.Tensor
    ) -> None:
        """Labels of the rank's own rows are refused unless it is said that they are such."""
        if self.output != "S(0)":
            return
        mesh = planned.down.weight.device_mesh
        rows = self.plan.stages[0].outputs[0].local_shape[0]
        own = labels[mesh.get_coordinate()[0] * rows :][:rows]
        with pytest.raises(PlanError, match=r"differs between ranks.*autoshard\.local"):
            functional.cross_entropy(planned(x), own)
        logits = planned(x)
        found = functional.cross_entropy(logits, local(own, like=logits))
        close(found.detach(), functional.cross_entropy(reference(x), labels).detach(), "own labels")
        with pytest.raises(PlanError, match=rf"that has shape \({rows},\)"):
            local(own[:-1], like=logits)


@dataclass
class Inside:
    """A criterion that the export made a part of the program.

    Attributes:
        axes: of the mesh.
    """

    axes: dict[str, int]
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        x, labels = torch.zeros(8, FEATURES), torch.zeros(8, dtype=torch.long)
        archive = export_model(
            Classifier(), (x,), loss=nn.CrossEntropyLoss(label_smoothing=0.1), targets=(labels,)
        )
        by_class = {"parameters": {"down.weight": ",".join(["S(0)"] * len(self.axes))}}
        options = PlanOptions(pins=by_class)
        self.plan = make_plan(load_graph(archive), slow_devices(**self.axes), options)
        assert [i.target for i in self.plan.stages[0].inputs if i.kind == "user"] == ["x", "target"]

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = Classifier()
        x, labels = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))
        planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        found = planned(x, labels)
        expected = functional.cross_entropy(reference(x), labels, label_smoothing=0.1)
        close(whole(found.detach()), expected.detach(), "loss")
        found.backward()
        expected.backward()
        for one, other in zip(planned.parameters(), reference.parameters(), strict=True):
            close(whole(one.grad), other.grad, "gradient")


@dataclass
class OnFullTensors:
    """Functions without a rule: what they move is said once, and their random numbers are alike."""

    plans: dict[str, Plan] = field(init=False)

    def prepare(self) -> None:
        graph = graph_of((Classifier(), {"x": torch.zeros(8, FEATURES)}))
        parameters = {"up.*": "S(0)", "down.weight": "S(1)"}
        self.plans = {
            layout: make_plan(
                graph,
                slow_devices(**MESHES["4"]),
                PlanOptions(pins={"outputs": {"*": layout}, "parameters": parameters}),
            )
            for layout in ("S(0)", "I")
        }

    def __call__(self) -> None:
        torch.manual_seed(0)
        x, reference = torch.randn(8, FEATURES), Classifier()
        expected = reference(x)
        results = {}
        for layout, plan in self.plans.items():
            results[layout] = parallelize(deepcopy(reference), plan, device_mesh(plan))(x)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for result in (results["I"], results["S(0)"], results["S(0)"]):  # "I" is the advice
                total = whole(torch.logcumsumexp(result, 0).detach())
                close(total, expected.logcumsumexp(0).detach(), "running sum")
        rank = torch.distributed.get_rank()
        said = [text for one in found if "on the full tensor" in (text := str(one.message))]
        assert len(said) == (rank == 0), [str(one.message) for one in found]
        assert all(text.startswith("logcumsumexp of a sharded result") for text in said)
        torch.manual_seed(1)
        draw = torch.rrelu, 0.1, 0.3, True
        drawn = draw[0](results["S(0)"], *draw[1:])
        torch.manual_seed(1)
        close(whole(drawn.detach()), draw[0](expected, *draw[1:]).detach(), "drawn")
        torch.manual_seed(rank)
        with pytest.raises(PlanError, match=r"random numbers .* differ between ranks"):
            draw[0](results["S(0)"], *draw[1:])


CASES: dict[str, Callable[[], None]] = (
    {
        f"{name}, {mesh}": Outside(axes, batch, output)
        for mesh, axes in MESHES.items()
        for name, batch, output in [
            ("rows", 8, "S(0)"),
            ("uneven rows", 10, "S(0)"),
            ("classes", 8, "S(1)"),
        ]
    }
    | {f"in the program, {mesh}": Inside(axes) for mesh, axes in MESHES.items()}
    | {"on full tensors": OnFullTensors()}
)
