"""Calls with other batch and sequence sizes than planned, such as the last batch of an epoch."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from runtime.cases.gradient_habits import Checkpointed, CheckpointedReentrant
from runtime.cases.habits import (
    FEATURES,
    LENGTH,
    SHARDED,
    TOKENS,
    Habit,
    Net,
    adam,
    assert_same,
    batches,
    first_batch,
    gradients,
    step,
)
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh, whole
from support.meshes import slow_devices
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from autoshard.errors import PlanError
from autoshard.graph import export_model, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import parallelize, shard_loader, unsharded_forward
from autoshard.runtime.global_tensors.dtensors import local_tensor

WARNING = "Such calls run the unsharded model on every rank"


def epoch(model: nn.Module) -> object:
    """Two epochs whose last batches are smaller, with validation and another sequence length."""
    optimizer, found = adam(model), []
    for batch in [*batches(2), *batches(1, size=6), *batches(1, size=1), *batches(1)]:
        found.append(step(model, optimizer, batch))
        shorter = {name: tensor[:, :-1] for name, tensor in batch.items()}
        with torch.no_grad():
            found.append(model(**shorter).item())
    return found


class Averaging(Net):
    """Has batch norm, a counter and a sharded buffer that it assigns, and returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(FEATURES)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.up(self.scale(self.embed(ids).mean(1)))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.head(self.down(hidden - self.mean) / self.calls)


AVERAGING = {
    mesh: {
        "inputs": pins["inputs"],
        "outputs": {"0": pins["inputs"]["*"]},
        "parameters": {"up.*": pins["parameters"]["up.*"]},
        "buffers": {"mean": pins["parameters"]["up.*"]},
    }
    for mesh, pins in SHARDED.items()
}


def logits(model: nn.Module) -> object:
    """The criterion is outside of the model, of logits that are sharded in full batches only."""
    optimizer, found = adam(model), []
    for batch in [*batches(1), *batches(1, size=7), *batches(1, size=3), *batches(1)]:
        optimizer.zero_grad()
        labels = batch["labels"][:, 0]
        labels[:2] = -100
        loss = functional.cross_entropy(model(batch["ids"]), labels)
        loss.backward()
        optimizer.step()
        found.append(whole(loss.detach()).item())
    with torch.inference_mode():  # whose tensors do not count writes, such as those into buffers
        found += [model(batch["ids"]).mean().item() for batch in batches(1, size=5)]
    return found


class Dropping(Net):
    """Has dropout."""

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().block(x), 0.5, self.training)


@dataclass
class Unsharded(Habit):
    """Calls with other shapes run unsharded, and a warning says so once."""

    def __call__(self) -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            super().__call__()
        assert sum(WARNING in str(warning.message) for warning in found) == 1


@dataclass
class Checked(Habit):
    """What is done with a planned model and the same one on one device.

    Attributes:
        check: takes both.
    """

    check: Callable[[nn.Module, nn.Module], None] = lambda *_: None

    def __call__(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{WARNING}")
            self.check(*self.models())


def check_alike_on_ranks(planned: nn.Module, _reference: nn.Module) -> None:
    """Ranks drop the same, whatever they have drawn; in other steps something else."""
    torch.manual_seed(dist.get_rank())
    small = batches(1, size=3)[0]
    losses = [planned(**small).item() for _ in range(2)]
    assert losses[0] != losses[1]
    every: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, losses)
    assert all(one == losses for one in every)
    assert torch.initial_seed() == dist.get_rank()


def check_refused(planned: nn.Module, _reference: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"'ids' has shape \(6, 4\).*drop_last=True.*dynamic"):
        planned(**batches(1, size=6)[0])


def check_misuse(planned: nn.Module, reference: nn.Module) -> None:
    """Other small batches on every rank are errors; then all is well."""
    full, small = batches(1)[0], batches(1, size=3)[0]
    own = {name: tensor + dist.get_rank() for name, tensor in small.items()}
    with pytest.raises(PlanError, match=r"'ids' differs between ranks 0 and 1.*shard_loader"):
        planned(**{name: tensor % TOKENS for name, tensor in own.items()})
    with planned.no_sync():
        planned(**full).backward()
    with planned.no_sync():
        planned(**small).backward()
    planned(**full).backward()
    for batch in (full, small, full):
        reference(**batch).backward()
    assert_same(gradients(planned), gradients(reference), "gradients")


def check_missing_ranks(planned: nn.Module, _reference: nn.Module) -> None:
    """A rank that calls alone gets an error after a while."""
    before = unsharded_forward.MEETING_TIMEOUT
    unsharded_forward.MEETING_TIMEOUT = timedelta(seconds=1)
    try:
        if dist.get_rank():
            with pytest.raises(PlanError, match="but not on all ranks: pass the same global"):
                planned(**batches(1, size=3)[0])
    finally:
        unsharded_forward.MEETING_TIMEOUT = before


def check_loader(planned: nn.Module, reference: nn.Module) -> None:
    """Of an epoch of 19 rows, ranks read their rows of two batches, and all of the last one."""
    ids, labels = torch.randint(TOKENS, (2, 19, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = shard_loader(DataLoader(TensorDataset(ids, labels), batch_size=8), planned)
    sizes = []
    for number, (rows, targets) in enumerate(loader):
        sizes.append(len(local_tensor(rows)))
        part = slice(8 * number, 8 * number + 8)
        found, expected = planned(rows, targets), reference(ids[part], labels[part])
        assert_same(found, expected, "loss")
    own = 8 // planned.up.weight.device_mesh.size(0)
    assert sizes == [own, own, 3]
    short = DataLoader(TensorDataset(ids[: 8 + own], labels[: 8 + own]), batch_size=8)
    (_, (rows, targets)) = list(shard_loader(short, planned))
    assert type(rows) is torch.Tensor, "as many rows as a rank has of a batch, but all of them"
    assert_same(planned(rows, targets), reference(ids[8 : 8 + own], labels[8 : 8 + own]), "loss")


@dataclass
class Dynamic:
    """A batch size that the export left dynamic: sharded where ranks divide it.

    Attributes:
        mesh: its name.
    """

    mesh: str
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        shapes = {name: {0: Dim("batch", max=64)} for name in ("ids", "labels")}
        archive = export_model(Net().double(), (), first_batch(), dynamic_shapes=shapes)
        options = PlanOptions(pins=SHARDED[self.mesh])
        self.plan = make_plan(load_graph(archive), slow_devices(**MESHES[self.mesh]), options)
        assert self.plan.found

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference = Net().double()
        planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        for size, unsharded in [(8, False), (12, False), (16, False), (5, True), (3, True)]:
            batch = batches(1, size=size)[0]
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                losses = [model(**batch) for model in (planned, reference)]
            for loss in losses:
                loss.backward()
            assert_same(losses[0], losses[1], f"loss of {size}")
            assert_same(gradients(planned), gradients(reference), f"gradients of {size}")
            said = [str(w.message) for w in found if WARNING in str(w.message)]
            assert bool(said) == (unsharded and size == 5), said


HABITS: dict[str, Callable[[str], Callable[[], None]]] = {
    "smaller batches and sequences": lambda mesh: Unsharded(mesh, epoch),
    "buffers and losses of logits": lambda mesh: Unsharded(
        mesh, logits, Averaging, lambda: {"ids": first_batch()["ids"]}, AVERAGING
    ),
    "recomputed": lambda mesh: Unsharded(mesh, epoch, Checkpointed),
    "recomputed, reentrant": lambda mesh: Unsharded(mesh, epoch, CheckpointedReentrant),
    "dropout": lambda mesh: Checked(mesh, epoch, Dropping, check=check_alike_on_ranks),
    "refused": lambda mesh: Checked(
        mesh, epoch, check=check_refused, options={"other_shapes": "error"}
    ),
    "misuse": lambda mesh: Checked(mesh, epoch, check=check_misuse),
    "missing ranks": lambda mesh: Checked(mesh, epoch, check=check_missing_ranks),
    "a loader": lambda mesh: Checked(mesh, epoch, check=check_loader),
    "dynamic sizes": Dynamic,
}
CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": habit(mesh) for mesh in MESHES for name, habit in HABITS.items()
}
