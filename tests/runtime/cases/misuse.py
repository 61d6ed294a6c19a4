"""Habits of training code that a planned model answers with an error."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.cases.updated_buffers import MESHES
from support.comparison import close, device_mesh, whole
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from autoshard.errors import PlanError
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize, shard_loader

BATCH, FEATURES = 8, 32


class Net(nn.Module):
    """Linear layers, with dropout or batch norm if wanted."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.middle = middle or nn.ReLU()
        self.down = nn.Linear(64, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x))).square().mean()


def batch(seed: int = 0, *, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, FEATURES, generator=generator).requires_grad_(requires_grad)


@dataclass
class Misuse:
    """A planned model, and what is done with it.

    Attributes:
        axes: of the mesh.
        check: takes the planned model and the same model on one device.
        build: makes the model.
        options: of the plan; by default the batch is sharded along the first axis.
        requires_grad: whether the example argument requires a gradient.
    """

    axes: dict[str, int]
    check: Callable[[nn.Module, nn.Module], None]
    build: Callable[[], nn.Module] = Net
    options: dict[str, Any] = field(default_factory=dict)
    requires_grad: bool = False
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = graph_of((self.build(), {"x": batch(requires_grad=self.requires_grad)}))
        rest = ["I" if self.requires_grad else "R"] * (len(self.axes) - 1)
        options = self.options or {"pins": {"inputs": {"x": ",".join(["S(0)", *rest])}}}
        self.plan = make_plan(graph, slow_devices(**self.axes), PlanOptions(**options))
        assert self.plan.found

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = self.build()
        planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        self.check(planned, reference)


def check_other_batches(planned: nn.Module, reference: nn.Module) -> None:
    """A batch of its own on every rank is refused, on all ranks; then the right one runs."""
    with pytest.raises(PlanError, match=r"'x' differs between ranks 0 and \d.*shard_loader"):
        planned(batch(seed=dist.get_rank()))
    assert_same(planned, reference)


def check_wrapped(planned: nn.Module, reference: nn.Module) -> None:
    """Wrapping in DistributedDataParallel is refused; the model still runs."""
    with pytest.raises(PlanError, match=r"cannot be wrapped in Distributed.*PlannedTrainer"):
        nn.parallel.DistributedDataParallel(planned)
    assert_same(planned, reference)


def check_distributed_sampler(planned: nn.Module, reference: nn.Module) -> None:
    """Of a DistributedSampler as large as the global batch; `shard_loader` does it right."""
    data = TensorDataset(
        torch.randn(4 * BATCH, FEATURES, generator=torch.Generator().manual_seed(3))
    )
    sampler = DistributedSampler(data, shuffle=False)
    (x,) = next(iter(DataLoader(data, batch_size=BATCH, sampler=sampler)))
    with pytest.raises(PlanError, match="instead of a DistributedSampler"):
        planned(x)
    loader = shard_loader(DataLoader(data, batch_size=BATCH), planned)
    for (x,), start in zip(loader, range(0, 4 * BATCH, BATCH), strict=True):
        found = planned(x)
        expected = reference(data.tensors[0][start : start + BATCH])
        close(whole(found.detach()), expected.detach(), "loss")


def check_rows_of_ranks(planned: nn.Module, reference: nn.Module) -> None:
    """Rows of each rank are no global batch, unless it is said whose rows they are."""
    mesh = planned.up.weight.device_mesh
    rows = BATCH // mesh.size(0)
    own = batch()[mesh.get_coordinate()[0] * rows :][:rows]
    with pytest.raises(PlanError, match=r"'x' differs between ranks 0 and \d"):
        planned(own)
    placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    found = planned(DTensor.from_local(own, mesh, placements))
    close(whole(found.detach()), reference(batch()).detach(), "loss")


def check_fewer_rows(planned: nn.Module, reference: nn.Module) -> None:
    """A global batch as small as the rows of one rank is not taken for these."""
    rows = BATCH // planned.up.weight.device_mesh.size(0)
    with pytest.warns(UserWarning, match="run the unsharded model"):
        found = planned(batch()[:rows])
    close(whole(found.detach()), reference(batch()[:rows]).detach(), "loss")


def check_eval_of_training(planned: nn.Module, _reference: nn.Module) -> None:
    planned(batch())
    planned.eval()
    with pytest.raises(
        PlanError, match=r"'middle' is evaluation now.*in training.*model\.train\(\)"
    ):
        planned(batch())
    planned.train()
    planned(batch())


def check_training_of_eval(planned: nn.Module, reference: nn.Module) -> None:
    with pytest.raises(
        PlanError, match=r"'middle' is training now.*would have no.*model\.eval\(\)"
    ):
        planned.train()(batch())
    planned.eval()
    assert_same(planned, reference.eval())


def check_mode_that_does_not_matter(planned: nn.Module, reference: nn.Module) -> None:
    planned.eval()
    assert_same(planned, reference)


def check_hooks(planned: nn.Module, reference: nn.Module) -> None:
    """Hooks of inner modules are refused on every call; those of the model run."""
    calls = []
    inner = planned.up.register_forward_hook(lambda *_: calls.append("inner"))
    planned.register_forward_hook(lambda *_: calls.append("whole"))
    for _ in range(2):
        with pytest.raises(PlanError, match=r"hooks of 'up' do not run.*'up\._forward_hooks'"):
            planned(batch())
    inner.remove()
    assert_same(planned, reference)
    assert calls == ["whole"]


def check_traced_hooks(planned: nn.Module, reference: nn.Module) -> None:
    """Hooks that the export traced are a part of the program, and nothing to warn of."""
    assert_same(planned, reference)


def hooked() -> nn.Module:
    """A model in which a hook scales what a layer reads."""
    model = Net()
    model.up.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    return model


class Overwriting(Net):
    """Writes into its argument, as a cache that is passed would be written into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return super().forward(x)


def check_overwritten_arguments(planned: nn.Module, reference: nn.Module) -> None:
    """A tensor whose new contents the caller would not see may not be passed again."""
    assert_same(planned, reference)
    x = batch()
    planned(x)
    with pytest.raises(PlanError, match=r"overwrites its argument 'x'.* passed again"):
        planned(x)
    x.add_(1.0)
    planned(x)


def check_replaced_modules(planned: nn.Module, reference: nn.Module) -> None:
    """Also after many calls, which once were looked at ever more rarely."""
    middle = planned.middle
    for _ in range(5):
        assert_same(planned, reference)
    planned.middle = nn.GELU()
    with pytest.raises(PlanError, match=r"modules 'middle' were replaced"):
        planned(batch())
    planned.middle = middle
    assert_same(planned, reference)


def check_copies_are_quiet(planned: nn.Module, reference: nn.Module) -> None:
    assert_same(deepcopy(planned), reference)


def check_input_gradient(planned: nn.Module, reference: nn.Module) -> None:
    """A full input gets its full gradient, and a DTensor the gradient of its shard."""
    x = batch(requires_grad=True)
    reference(x).backward()
    assert x.grad is not None
    full = batch(requires_grad=True)
    planned(full).backward()
    assert full.grad is not None
    close(full.grad, x.grad, "gradient of a full input")
    mesh = planned.up.weight.device_mesh
    for placements in ([Shard(0)], [Replicate()]):
        given = distribute_tensor(batch(), mesh, placements + [Replicate()] * (mesh.ndim - 1))
        given.requires_grad_()
        planned(given).backward()
        assert given.grad is not None
        close(whole(given.grad), x.grad, "gradient of a DTensor")


class Logits(nn.Module):
    """A classifier whose loss is outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def num_shards(tensor: DTensor) -> int:
    """The number of ranks that have different rows of a tensor."""
    mesh = tensor.device_mesh
    return prod(mesh.size(axis) for axis, p in enumerate(tensor.placements) if p.is_shard(0))


def check_local_results(planned: nn.Module, reference: nn.Module) -> None:
    """A local mean of a sharded result is refused; means of the DTensor and of all are right."""
    for loss in (
        lambda logits: logits.float().square().mean(),
        lambda logits: full_tensor(logits).square().mean(),
        lambda logits: logits.full_tensor().square().mean(),
    ):
        logits = planned(batch())
        assert isinstance(logits, DTensor)
        local = logits.to_local(grad_placements=logits.placements)
        assert len(local) == BATCH // num_shards(logits)
        with pytest.raises(PlanError, match=r"Shard\(dim=0\).*full_tensor"):
            (2.0 * logits).to_local()
        with torch.no_grad():
            assert logits.to_local().argmax(-1).ndim == 1
        planned.zero_grad()
        loss(logits).backward()
        reference.zero_grad()
        reference(batch()).square().mean().backward()
        for one, other in zip(planned.parameters(), reference.parameters(), strict=True):
            close(one.grad.full_tensor(), other.grad, "gradient")


def assert_same(planned: nn.Module, reference: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = planned(batch())
    close(whole(found.detach()), reference(batch()).detach(), "loss")


@dataclass
class OtherWeights(Misuse):
    """Weights that differ between ranks are refused, on all ranks."""

    def __call__(self) -> None:
        torch.manual_seed(dist.get_rank())
        with pytest.raises(PlanError, match=r"4 of 4 parameters differ, .*torch.manual_seed"):
            parallelize(self.build(), self.plan, device_mesh(self.plan))
        super().__call__()


@dataclass
class Idle(Misuse):
    """A plan in which no operator is sharded is warned of, on the first rank."""

    def __call__(self) -> None:
        if dist.get_rank() > 0:
            super().__call__()
            return
        with pytest.warns(UserWarning, match="every rank does all the work"):
            super().__call__()


@dataclass
class Edited(Misuse):
    """Code of forward that is not the exported one is refused, also if it is edited later."""

    def __call__(self) -> None:
        def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.middle(self.up(x))).square().sum()

        original, reference = Net.forward, self.build()
        refused = pytest.raises(PlanError, match=r"the code of 'Net\.forward' is not the code")
        mesh = device_mesh(self.plan)
        try:
            Net.forward = forward
            with refused:
                parallelize(deepcopy(reference), self.plan, mesh)
            Net.forward = original
            planned = parallelize(deepcopy(reference), self.plan, mesh)
            Net.forward = forward
            with refused:
                planned(batch())
        finally:
            Net.forward = original
        assert_same(planned, reference)


def with_dropout() -> nn.Module:
    return Net(nn.Dropout(0.5))


def alone(axes: dict[str, int]) -> dict[str, Any]:
    """Options of a plan that shards nothing."""
    pins = {"nodes": "I", "parameters": "I", "inputs": "R"}
    return {"pins": {kind: {"*": ",".join([one] * len(axes))} for kind, one in pins.items()}}


CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": case
    for mesh, axes in MESHES.items()
    for name, case in {
        "other batches": Misuse(axes, check_other_batches),
        "a distributed sampler": Misuse(axes, check_distributed_sampler),
        "rows of each rank": Misuse(axes, check_rows_of_ranks),
        "fewer rows": Misuse(axes, check_fewer_rows),
        "eval of a training plan": Misuse(axes, check_eval_of_training, with_dropout),
        "eval of batch norm": Misuse(axes, check_eval_of_training, lambda: Net(nn.BatchNorm1d(64))),
        "training of an eval plan": Misuse(
            axes, check_training_of_eval, lambda: with_dropout().eval()
        ),
        "a mode that does not matter": Misuse(axes, check_mode_that_does_not_matter),
        "hooks": Misuse(axes, check_hooks),
        "traced hooks": Misuse(axes, check_traced_hooks, hooked),
        "overwritten arguments": Misuse(axes, check_overwritten_arguments, Overwriting),
        "replaced modules": Misuse(axes, check_replaced_modules),
        "copies": Misuse(axes, check_copies_are_quiet),
        "edited code": Edited(axes, lambda *_: None),
        "local results": Misuse(
            axes,
            check_local_results,
            Logits,
            options={
                "pins": {
                    kind: {"*": ",".join(["S(0)", *["*"] * (len(axes) - 1)])}
                    for kind in ("inputs", "outputs")
                }
            },
        ),
        "gradient of an input": Misuse(axes, check_input_gradient, requires_grad=True),
        "DistributedDataParallel": Misuse(axes, check_wrapped),
        "other weights": OtherWeights(axes, assert_same),
        "idle ranks": Idle(axes, assert_same, options=alone(axes)),
    }.items()
}
