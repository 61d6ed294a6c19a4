"""A planned stage as torch.distributed.pipelining runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.pricing.stage_times import splits_backward
from autoshard.runtime.pipelining.backward import SplitBackward, run_backward
from autoshard.runtime.pipelining.routes import Incoming, Messages, Route
from autoshard.runtime.pipelining.stage_forward import MicroBatch, StageForward
from autoshard.runtime.recorder import CONTENTS
from autoshard.torch_private import StageBase

_VALUE, _GRADIENT = CONTENTS.index("value"), CONTENTS.index("gradient")
"""Tags of messages."""


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value that crosses a cut.

    Attributes:
        value: its name.
        forward: messages of the value.
        gradient: messages of its gradient; None if there is none.
    """

    value: str
    forward: Route
    gradient: Route | None


@dataclass
class StageStep:
    """Work of a stage in one step of the schedule.

    Attributes:
        arguments: the arguments of the stage's program, of each micro-batch.
        micro_batches: how each micro-batch runs.
        keeps_results: True if the results of forward are kept.
        results: of each micro-batch, if the stage is the last one.
    """

    arguments: Sequence[Sequence[Any]] = ()
    micro_batches: Sequence[MicroBatch] = ()
    keeps_results: bool = False
    results: list[Any] = field(default_factory=list)


class _Arriving:
    """Tensors that are being received.

    Args:
        tensors: the tensors; None for values without a gradient.
        group: for the messages.
        tag: of the messages.
    """

    def __init__(self, tensors: Sequence[Incoming | None], group: ProcessGroup, tag: int) -> None:
        self._incoming = tensors
        given = (one for one in tensors if one is not None)
        self._messages = Messages([op for one in given for op in one.operations(group, tag)])

    def tensors(self) -> list[torch.Tensor | None]:
        """Wait for the messages, and return this rank's shards."""
        self._messages.wait()
        return [None if one is None else one.tensor() for one in self._incoming]


class ScheduledStage(StageBase):
    """Runs the program of a stage for the schedules of torch, and sends the planned messages.

    Args:
        model: the model.
        forward: the program.
        index: number of the stage.
        num_stages: number of all stages.
        position: number of the pipeline rank, and of all pipeline ranks.
        incoming: what the previous stage sends.
        outgoing: what is sent to the next stage, in the order of the program's outputs.
        groups: for the messages of each tag.
        splits: True if the schedule runs backward in two parts.

    Attributes:
        step: what is run; set before each step.
        splits_backward: True if gradients of parameters are computed apart.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: StageForward,
        *,
        index: int,
        num_stages: int,
        position: tuple[int, int],
        incoming: Sequence[CutValue],
        outgoing: Sequence[CutValue],
        groups: Sequence[ProcessGroup],
        splits: bool,
    ) -> None:
        super().__init__(
            model,
            index,
            num_stages,
            device=forward.program.place.device,
            group=groups[_VALUE],
            position=position,
        )
        self.forward_program = forward
        self.step = StageStep()
        self._incoming, self._outgoing, self._groups = incoming, outgoing, groups
        self._sending: list[Messages] = []
        self._arriving: dict[int, _Arriving] = {}
        self._received: dict[int, list[torch.Tensor]] = {}
        self._made: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._apart: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._second: dict[int, Callable[[], None]] = {}
        self.splits_backward = splits and splits_backward(forward.stage)
        if self.splits_backward:
            trained = {link.value for link in incoming if link.gradient is not None}
            inputs = enumerate(forward.stage.inputs)
            forward.program.compute_apart(slot for slot, i in inputs if i.name in trained)
        self._arriving_gradients: dict[int, _Arriving] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}
        self._input_gradients: dict[int, tuple[torch.Tensor | None, ...]] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The devices of the stage."""
        return self.forward_program.mesh

    def clear_runtime_states(self) -> None:
        """Forget the micro-batches of the step before."""
        self._sending = []
        for one in (
            self._arriving,
            self._received,
            self._made,
            self._apart,
            self._second,
            self._arriving_gradients,
            self._gradients,
            self._input_gradients,
        ):
            one.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Start to receive the values that the previous stage sends.

        Returns:
            Nothing: schedules would mix messages of both directions in one call on some ranks only.
        """
        arriving = [Incoming(link.forward, self.device) for link in self._incoming]
        self._arriving[fwd_chunk_id] = _Arriving(arriving, self._groups[_VALUE], _VALUE)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        """Start to send this rank's parts of what the next stage receives."""
        if not self.is_last:
            outputs, _ = self._made[fwd_chunk_id]
            pairs = zip(self._outgoing, outputs, strict=True)
            self._send([(link.forward, tensor.detach()) for link, tensor in pairs], _VALUE)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Start to receive gradients of what was sent to the next stage."""
        if self.has_backward and not self.is_last:
            arriving = [
                None if link.gradient is None else Incoming(link.gradient, self.device)
                for link in self._outgoing
            ]
            group = self._groups[_GRADIENT]
            self._arriving_gradients[bwd_chunk_id] = _Arriving(arriving, group, _GRADIENT)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        """Start to send gradients of what the previous stage has sent."""
        if self.has_backward and not self.is_first:
            gradients = self._input_gradients.pop(bwd_chunk_id)
            pairs = [
                (link.gradient, gradient)
                for link, gradient in zip(self._incoming, gradients, strict=True)
                if link.gradient is not None and gradient is not None
            ]
            self._send(pairs, _GRADIENT)
        return []

    def _send(self, tensors: Sequence[tuple[Route, torch.Tensor]], tag: int) -> None:
        group = self._groups[tag]
        operations = [op for route, tensor in tensors for op in route.send(tensor, group, tag)]
        # Messages keep their tensors until they are sent; those that are done are let go.
        self._sending = [one for one in self._sending if not one.is_done]
        self._sending.append(Messages(operations))

    def end_step(self) -> None:
        """Wait for the messages that this rank has sent."""
        for one in self._sending:
            one.wait()
        self._sending = []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what the previous stage has made on this rank."""
        self._received[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what the previous stage has made on this rank."""
        return self._input_gradients.pop(mb_index, ())

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the gradients that the next stage has made on this rank."""
        self._gradients[mb_index] = list(next_stage_bwd_outputs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],  # noqa: ARG002  the base's; the arguments are in `step`
        kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002  as above
        save_forward_output: bool = True,  # noqa: ARG002, FBT001, FBT002  as above
    ) -> Any:
        """Run forward of a micro-batch.

        Returns:
            The values for the next stage, or the results of forward, flat.
        """
        if fwd_chunk_id in self._arriving:
            arrived = self._arriving.pop(fwd_chunk_id).tensors()
            self._received[fwd_chunk_id] = [one for one in arrived if one is not None]
        received = self._received.pop(fwd_chunk_id, [])
        trains = self.has_backward and torch.is_grad_enabled()
        for link, tensor in zip(self._incoming, received, strict=True):
            tensor.requires_grad_(trains and link.gradient is not None)
        apart = self._apart.setdefault(fwd_chunk_id, []) if self.splits_backward else None
        outputs = self.forward_program.run(
            self.step.arguments[fwd_chunk_id],
            {link.value: x for link, x in zip(self._incoming, received, strict=True)},
            self.step.micro_batches[fwd_chunk_id],
            apart if trains else None,
        )
        if self.is_last:
            if self.step.keeps_results:
                kept = [x.detach() if isinstance(x, torch.Tensor) else x for x in outputs]
                self.step.results.append(self.forward_program.nest(kept))
            self._made[fwd_chunk_id] = [], received
        else:
            self._made[fwd_chunk_id] = list(outputs), received
        return outputs

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002  the base's
        last_backward: bool = False,  # noqa: ARG002, FBT001, FBT002  as above
    ) -> None:
        """Run backward of a micro-batch.

        Args:
            bwd_chunk_id: the micro-batch.
            loss: of the last stage.
            full_backward: False if `backward_weight_one_chunk` follows.
            last_backward: not used; the micro-batch itself knows whether it is the last one.
        """
        if not self.has_backward:
            return
        made, received = self._made.pop(bwd_chunk_id)
        outputs, gradients = self._differentiated(bwd_chunk_id, made, loss)
        apart = self._apart.pop(bwd_chunk_id, [])
        inputs = [tensor for tensor in received if tensor.requires_grad]
        if full_backward or not self.splits_backward:
            run_backward(outputs, gradients, apart)
        elif inputs:
            split = SplitBackward(outputs, gradients, inputs, apart)
            self._second[bwd_chunk_id] = split.run_second
        else:
            self._second[bwd_chunk_id] = partial(run_backward, outputs, gradients, apart)
        self._input_gradients[bwd_chunk_id] = tuple(
            _gradient(tensor) if tensor.requires_grad else None for tensor in received
        )

    def backward_weight_one_chunk(
        self,
        bwd_chunk_id: int,
        last_backward: bool = False,  # noqa: ARG002, FBT001, FBT002  the base's
    ) -> None:
        """Compute the gradients of parameters that `backward_one_chunk` has left out, if any."""
        if bwd_chunk_id in self._second:
            self._second.pop(bwd_chunk_id)()

    def _differentiated(
        self, number: int, made: Sequence[torch.Tensor], loss: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The outputs that have gradients, and their gradients."""
        if self.is_last:
            assert loss is not None
            return [loss], [None]
        if number in self._arriving_gradients:
            self._gradients[number] = self._arriving_gradients.pop(number).tensors()
        gradients = self._gradients.pop(number)
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(made, gradients, strict=True)
            if tensor.requires_grad and gradient is not None
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def check_local(self, links: Sequence[CutValue]) -> None:
        """Check that values which stay on this rank are stored alike by both stages.

        Raises:
            PlanError: they are not.
        """
        for link in links:
            if not link.forward.is_local or not (link.gradient is None or link.gradient.is_local):
                raise PlanError(
                    f"stage {self.stage_index} receives {link.value!r} from a stage with the same "
                    f"devices, but in another layout; give both the same layout"
                )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
