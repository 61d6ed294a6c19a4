"""Batch norms whose running statistics are updated once per step, from all micro-batches.

Forward normalises each micro-batch by its own statistics. Running means and variances become those
of the whole batch, as if it had not been divided.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import OPAQUE_MODULE, Graph, Node, OpaqueCall, Ref
from autoshard.runtime.global_tensors.dtensors import local_tensor
from autoshard.runtime.parameters.parameters import ModuleAttribute

_REMEDY = (
    "leave deferred_batch_norm out, so that each micro-batch updates the running statistics, or "
)
_OPERATOR = "aten.batch_norm.default"
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MOMENTUM = 0.1
"""The default of `momentum`."""


@dataclass
class _BatchNorm:
    """A batch norm of a stage.

    Attributes:
        mean: buffer of the running mean.
        variance: buffer of the running variance, which is unbiased.
        tracked: buffer of the number of batches; None if there is none.
        momentum: weight of a batch.
        count: number of elements per channel of a micro-batch.
        before: contents of the buffers before the step.
        found: mean and unbiased variance of each micro-batch.
    """

    mean: ModuleAttribute
    variance: ModuleAttribute
    tracked: ModuleAttribute | None
    momentum: float
    count: int
    before: list[torch.Tensor] = field(default_factory=list)
    found: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def running(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shards of mean and variance.

        Autograd does not see what is written into them, as in ATen: it has saved them for backward
        of other micro-batches, which reads them in evaluation only.
        """
        return local_tensor(self.mean.get()).data, local_tensor(self.variance.get()).data

    def buffers(self) -> Iterator[torch.Tensor]:
        """This rank's shards of all buffers."""
        yield from self.running
        if self.tracked is not None:
            yield local_tensor(self.tracked.get()).data


class DeferredBatchNorms:
    """The batch norms of a stage.

    Args:
        model: has their buffers.
        graph: the stage's program.

    Raises:
        PlanError: a norm is used twice, or is in a module that is kept whole.
    """

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        targets = {i.name: i.target for i in graph.inputs}
        self._norms = [
            _norm(model, node, targets, graph)
            for node in graph.nodes
            if node.operator == _OPERATOR
            and node.argument("training")
            and node.argument("running_mean") is not None
        ]
        _check_used_once(self._norms)
        _check_traced(model, graph)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Keep the running statistics of the step before."""
        for norm in self._norms:
            norm.before, norm.found = [buffer.clone() for buffer in norm.buffers()], []

    @torch.no_grad()
    def begin_forward(self) -> None:
        """Empty the running statistics, so that they become those of one micro-batch."""
        for norm in self._norms:
            for buffer in norm.running:
                buffer.zero_()

    @torch.no_grad()
    def end_forward(self) -> None:
        """Keep the statistics of a micro-batch."""
        for norm in self._norms:
            if norm.momentum:
                # The buffers were zero, so the operator has written momentum times the statistics.
                mean, variance = (buffer / norm.momentum for buffer in norm.running)
                norm.found.append((mean, variance))

    @torch.no_grad()
    def end_step(self) -> None:
        """Update the running statistics by those of the whole batch."""
        for norm in self._norms:
            for buffer, before in zip(norm.buffers(), norm.before, strict=True):
                buffer.copy_(before)
            if norm.found:
                batch = _joined(norm.found, norm.count)
                for buffer, whole in zip(norm.running, batch, strict=True):
                    buffer.lerp_(whole.to(buffer.dtype), norm.momentum)
            if norm.tracked is not None:
                local_tensor(norm.tracked.get()).add_(1)


def _norm(model: nn.Module, node: Node, targets: dict[str, str], graph: Graph) -> _BatchNorm:
    given, mean, variance = (node.argument(n) for n in ("input", "running_mean", "running_var"))
    assert isinstance(given, Ref)
    assert isinstance(mean, Ref)
    assert isinstance(variance, Ref)
    shape = graph.values[given.name].shape
    momentum = node.argument("momentum", _MOMENTUM)
    assert isinstance(momentum, (int, float))
    owner = targets[mean.name].rpartition(".")[0]
    tracked = f"{owner}.num_batches_tracked".lstrip(".")
    return _BatchNorm(
        mean=ModuleAttribute.of(model, targets[mean.name]),
        variance=ModuleAttribute.of(model, targets[variance.name]),
        tracked=ModuleAttribute.of(model, tracked) if tracked in targets.values() else None,
        momentum=float(momentum),
        count=prod(shape) // shape[1],
    )


def _check_used_once(norms: Sequence[_BatchNorm]) -> None:
    modules = Counter(norm.mean.module for norm in norms)
    if any(number > 1 for number in modules.values()):
        module, number = modules.most_common(1)[0]
        raise PlanError(
            f"deferred_batch_norm: forward uses a {type(module).__name__} {number} times, and its "
            f"running statistics are updated once per step: {_REMEDY}give each use its own norm"
        )


def _check_traced(model: nn.Module, graph: Graph) -> None:
    for node in graph.nodes:
        if node.operator != OPAQUE_MODULE:
            continue
        for name in OpaqueCall.from_json(node.argument("call")).updated:
            path = f"{node.module}.{name}".rpartition(".")[0]
            if isinstance(model.get_submodule(path), _KINDS):
                raise PlanError(
                    f"deferred_batch_norm: the norm {path!r} is in {node.module!r}, which the plan "
                    f"keeps whole, so that each micro-batch updates it: {_REMEDY}export the model "
                    f"without keeping this module whole"
                )


def _joined(
    found: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of a batch, from those of equal parts with `count` elements."""
    means, variances = (torch.stack(one) for one in zip(*found, strict=True))
    mean = means.mean(0)
    # Law of total variance: the mean of the variances, and the variance of the means, of equal
    # parts. Both without the correction by one, which is then that of the whole batch.
    inside = variances.mean(0) * (count - 1) / count
    total = inside + (means - mean).square().mean(0)
    number = count * len(found)
    return mean, total * number / (number - 1)
