"""Results of planned models in training code: with plain models, each other, and no gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from runtime.cases.updated_buffers import MESHES
from support.comparison import close, device_mesh
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils import _pytree as pytree

import autoshard
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import full_tensor, parallelize

BATCH, FEATURES, CLASSES, EXACT = 8, 16, 12, 1e-10


class Tower(nn.Module):
    def __init__(self, width: int = CLASSES) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 32, dtype=torch.float64)
        self.down = nn.Linear(32, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


@dataclass
class Models:
    """Two planned towers, and plain parts beside them.

    Attributes:
        one: planned, or the same on one device.
        two: likewise, with results in another layout.
        plain: a tower that is never planned.
        head: a plain parameter, whose shape is that of a shard of the results on four ranks.
        scale: a plain number.
    """

    one: nn.Module
    two: nn.Module
    plain: nn.Module
    head: nn.Parameter
    scale: nn.Parameter

    def parameters(self) -> list[nn.Parameter]:
        modules = (self.one, self.two, self.plain)
        return [*(p for m in modules for p in m.parameters()), self.head, self.scale]


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


Loop = Callable[[Models, torch.Tensor, torch.Tensor], object]


def loss_of(
    compute: Callable[[Models, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Loop:
    """A loop of two steps of one optimizer over all parameters."""

    def loop(models: Models, x: torch.Tensor, y: torch.Tensor) -> object:
        parameters = models.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        losses, norms = [], []
        for _ in range(2):
            optimizer.zero_grad()
            loss = compute(models, x, y)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms

    return loop


LOSSES: dict[str, Callable[[Models, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a plain tower": lambda m, x, _: (m.one(x) * m.plain(x)).sum(),
    "a plain tower first": lambda m, x, _: (m.plain(x) - m.one(x)).square().mean(),
    "two planned towers": lambda m, x, _: functional.mse_loss(m.one(x), m.two(x)),
    "a teacher": lambda m, x, _: functional.kl_div(
        m.one(x).log_softmax(-1), m.two(x).detach().softmax(-1), reduction="batchmean"
    ),
    "a plain parameter": lambda m, x, _: (m.one(x) @ m.head.T).square().sum(),
    "contrast": lambda m, x, _: functional.cross_entropy(
        functional.normalize(m.one(x)) @ functional.normalize(m.two(x)).T * m.scale.exp(),
        torch.arange(len(x)),
    ),
    "frozen prototypes": lambda m, x, y: functional.cross_entropy(
        functional.linear(functional.normalize(m.one(x)), functional.normalize(m.head.detach())),
        y % 2,
    ),
    "several results": lambda m, x, y: (
        functional.cross_entropy(m.one(x), y)
        + 0.1 * m.two(x).square().mean()
        + m.scale * (m.one(x)[:, 0] * m.plain(x)[:, 1]).sum()
        + m.two(x).norm()
    ),
    "a masked token": lambda m, x, y: functional.cross_entropy(masked(m.one(x) * m.scale), y),
    "chained": lambda m, x, y: functional.cross_entropy(m.plain(x) + m.one(x + m.scale), y),
    "the idiom of the readme": lambda m, x, _: autoshard.full_tensor(m.one(x).square().mean()),
    "triplets": lambda m, x, _: functional.triplet_margin_loss(m.one(x), m.two(x), m.plain(x)),
    "penalties": lambda m, x, y: (
        functional.cross_entropy(m.one(x), y)
        + 0.01 * sum(full_tensor(p.square().sum()) for p in m.one.parameters())
    ),
}


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[:, 0] = -1e4
    return logits


def validated(models: Models, x: torch.Tensor, y: torch.Tensor) -> object:
    """Validation as in every example script, with and without inference mode."""
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = models.one(x)
            found.append(functional.cross_entropy(out, y).item())
            found.append((out.argmax(1) == y).sum().item())
            found.append((out.argmax(-1) == y).float().mean().item())
            found.append(out.mean().item())
            found.append(out.softmax(-1).max(-1).values.cpu().numpy().sum())
    return found


def read_norms(models: Models, x: torch.Tensor, y: torch.Tensor) -> object:
    """Norms of gradients, by hand."""
    loss = functional.cross_entropy(models.one(x), y)
    loss.backward()
    gradients = [p.grad for p in models.one.parameters()]
    norms = torch._foreach_norm(gradients)
    return [
        *(full_tensor(g.norm()).item() for g in gradients),
        *(full_tensor(torch.linalg.vector_norm(g, 1)).item() for g in gradients),
        full_tensor(gradients[0].norm(dim=0).sum()).item(),
        full_tensor(sum(n**2 for n in norms) ** 0.5).item(),
        full_tensor(nn.utils.parameters_to_vector(gradients).abs().max()).item(),
        models.one(x).norm().item(),
    ]


def flattened(models: Models, x: torch.Tensor, y: torch.Tensor) -> object:
    logits = models.one(x)[:, None].expand(-1, 2, -1)
    loss = functional.cross_entropy(logits.reshape(-1, CLASSES), y.repeat_interleave(2))
    loss.backward()
    return loss.item()


def given_gradients(models: Models, x: torch.Tensor, y: torch.Tensor) -> object:
    """Backward from a sharded result itself, hooks, and gradients of a result."""
    out = models.one(x)
    out.retain_grad()
    out.register_hook(lambda gradient: gradient * 2)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    (other,) = torch.autograd.grad(functional.cross_entropy(again := models.one(x), y), [again])
    return [full_tensor(out.grad), full_tensor(other)]


LOOPS: dict[str, Loop] = {
    **{name: loss_of(loss) for name, loss in LOSSES.items()},
    "validation": validated,
    "norms of gradients": read_norms,
    "flattened logits": flattened,
    "given gradients": given_gradients,
}


@dataclass
class InLoops:
    """All loops, for results in two layouts.

    Attributes:
        axes: of the mesh.
        outputs: layout of the results of each planned tower along the first axis.
        rows: of the batch.
    """

    axes: dict[str, int]
    outputs: tuple[str, str]
    rows: int = BATCH
    plans: list[Plan] = field(init=False)

    def prepare(self) -> None:
        graph = graph_of((Tower(), {"x": data(self.rows)[0].requires_grad_()}))
        others = ["*"] * (len(self.axes) - 1)
        self.plans = [
            make_plan(
                graph,
                slow_devices(**self.axes),
                PlanOptions(pins={"outputs": {"0": ",".join([output, *others])}}),
            )
            for output in self.outputs
        ]
        assert all(plan.found for plan in self.plans)

    def __call__(self) -> None:
        failed = []
        for name, loop in LOOPS.items():
            try:
                self._compare(name, loop)
            except AssertionError as error:
                failed.append(f"{name}: {str(error).strip().splitlines()[0]}")
        assert not failed, "\n".join(failed)

    def _models(self, *, planned: bool) -> Models:
        torch.manual_seed(0)
        one, two, plain = (Tower() for _ in range(3))
        head = nn.Parameter(torch.randn(2, CLASSES, dtype=torch.float64))
        models = Models(one, two, plain, head, nn.Parameter(torch.tensor(0.7).double()))
        if planned:
            for model, plan in zip((one, two), self.plans, strict=True):
                parallelize(model, plan, device_mesh(plan))
        return models

    def _compare(self, name: str, loop: Loop) -> None:
        """Compare what a loop returns, and all parameters and gradients after it."""
        expected, found = (self._after(loop, planned=planned) for planned in (False, True))
        assert len(expected) == len(found)
        for one, other in zip(found, expected, strict=True):
            assert not isinstance(one, DTensor)
            assert (one is None) == (other is None)
            if other is not None:
                close(torch.as_tensor(one), torch.as_tensor(other), name, EXACT)

    def _after(self, loop: Loop, *, planned: bool) -> list[object]:
        models = self._models(planned=planned)
        found = pytree.tree_leaves(loop(models, *data(self.rows)))
        parameters = models.parameters()
        return full_tensor(
            [*found, *(p.detach() for p in parameters), *(p.grad for p in parameters)]
        )


CASES: dict[str, Callable[[], None]] = {
    f"results {'; '.join(outputs)}, {rows} rows, {mesh}": InLoops(axes, outputs, rows)
    for mesh, axes in MESHES.items()
    for outputs, rows in [
        (("S(0)", "S(0)"), BATCH),
        (("S(0)", "I"), BATCH),
        (("S(0)", "S(1)"), BATCH),
        (("S(1)", "I"), BATCH),
        (("S(0)", "S(1)"), 7 if mesh == "4" else 9),
    ]
}
LONG = tuple(list(CASES)[::2])
