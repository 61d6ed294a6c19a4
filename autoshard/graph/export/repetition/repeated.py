"""Decides which calls of modules are traced, and adds one node for each that is not."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.graph.export.python_state.description.global_hooks import global_hooks
from autoshard.graph.export.python_state.description.paths import Path, path_text
from autoshard.graph.export.python_state.recording.recorder import Recorder
from autoshard.graph.export.python_state.user_code.holders import identity
from autoshard.graph.export.repetition.alike import Correspondence, NotAlikeError
from autoshard.graph.export.repetition.calls import (
    DescribedCall,
    TracedCall,
    UnsuitedError,
    own_attributes,
    tensor_like,
)
from autoshard.graph.export.repetition.lengthen import (
    NAME,
    Repeated,
    RepetitionError,
    Template,
    lengthen,
)
from autoshard.graph.export.repetition.reads import Reads
from autoshard.torch_private import (
    LiveTrace,
    TraceState,
    interception,
    outside_of_trace,
    pytree,
    with_record,
    without_torch_functions,
)

_FEWEST = 3
"""Number of alike modules of one parent from which on the third may be left out."""
_MOST_KINDS = 16
"""Number of traced calls that a further one is compared with, the latest first."""

torch.library.define("autoshard::repeated_call", "(Tensor[] tensors, int number) -> Tensor[]")


@dataclass
class _Known:
    """A traced call.

    Attributes:
        traced: what it has added.
        reads: what it has read.
        is_confirmed: True if a second call has added and read the same.
        template: its number and nodes in the archive, once it is repeated.
    """

    traced: TracedCall
    reads: Reads
    is_confirmed: bool = False
    template: Template | None = None


@dataclass(frozen=True)
class _Begun:
    """A call that is about to be made.

    Attributes:
        trace: the trace that runs.
        since: its state before, if the call is traced.
        call: the call.
        known: the traced call that it would repeat.
    """

    trace: LiveTrace
    since: TraceState | None
    call: DescribedCall
    known: _Known | None


class Repetition:
    """Leaves calls out that repeat traced ones.

    Args:
        recorder: of the export; it reports calls and reads.
        model: that is traced.

    Attributes:
        repeated: the calls that were left out.
        is_used: True once a call was to be left out.
        reason: why a call was traced that looks like an earlier one; empty if none was.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.repeated: list[Repeated] = []
        self.templates: list[Template] = []
        self.reason, self.is_used = "", False
        self._recorder = recorder
        self._candidates = set(_candidates(model))
        self._known: dict[Any, list[_Known]] = defaultdict(list)
        self._called: set[int] = set()
        self._left_out: set[Path] = set()
        self._reads: Reads | None = None
        own_attributes()
        recorder.around_call = self._call
        recorder.on_read = self._on_read
        recorder.on_write = self._on_write

    def _on_read(self, holder: Any, path: Path, name: str) -> None:
        if self._reads is not None:
            self._reads.note(holder, path, name)

    def _on_write(self, name: str) -> None:
        if self._reads is not None:
            self._reads.unsuited = f"it sets {name!r} of a module"

    def _call(
        self, run: Callable[[], Any], module: nn.Module, path: Path, args: Any, kwargs: Any
    ) -> Any:
        if any(path[:length] in self._left_out for length in range(1, len(path) + 1)):
            raise RepetitionError(f"{path_text(path)} is called again")
        own = identity(module)
        if self._reads is not None or own not in self._candidates or own in self._called:
            return run()
        self._called.add(own)
        interception = _interception()
        with self._recorder.paused(), without_torch_functions():
            begun = None
            if interception:
                self._note(path, interception)
            else:
                begun = self._begun(module, path, args, kwargs)
            if begun is not None and begun.known is not None and begun.known.is_confirmed:
                return self._repeat(begun.trace, begun.known, begun.call)
            if begun is not None:
                self._reads = Reads(self._recorder, path)
        try:
            result = run()
        finally:
            reads, self._reads = self._reads, None
        if begun is not None and reads is not None:
            with self._recorder.paused(), without_torch_functions():
                try:
                    self._learn(begun, reads, result, (args, dict(kwargs)))
                except UnsuitedError as error:
                    self._note(path, str(error))
        return result

    def _begun(self, module: nn.Module, path: Path, args: Any, kwargs: Any) -> "_Begun | None":
        """A call that is about to be made; None if it has to be traced like any other."""
        trace = LiveTrace.current()
        if trace is None:
            return None
        if trace.shares_modules:
            self._note(path, "the model has a module under several names")
            return None
        try:
            call = DescribedCall.of(trace, module, path, args, kwargs)
        except UnsuitedError as error:
            self._note(path, str(error))
            return None
        known = self._alike(call)
        return _Begun(trace, None if known and known.is_confirmed else trace.state(), call, known)

    def _note(self, path: Path, reason: str) -> None:
        self.reason = self.reason or f"{path_text(path)}: {reason}"

    def _alike(self, call: DescribedCall) -> _Known | None:
        """The latest traced call that a call would repeat."""
        for known in reversed(self._known[call.key][-_MOST_KINDS:]):
            first = known.traced.call
            try:
                alike = Correspondence(first.module, call.module, self._recorder.watched)
                difference = known.reads.difference(alike)
            except NotAlikeError as error:
                difference = str(error)
            if not difference:
                return known
            self._note(call.path, difference)
        return None

    def _learn(self, begun: "_Begun", reads: Reads, result: Any, arguments: Any) -> None:
        """Keep a call that was traced.

        Raises:
            UnsuitedError: no other can repeat it.
        """
        reads.end()
        call, known = begun.call, begun.known
        assert begun.since is not None
        traced = TracedCall.of(begun.trace, begun.since, call, result)
        after = pytree.tree_leaves(arguments)
        pairs = zip(after, call.arguments, strict=False)
        if len(after) != len(call.arguments) or any(x is not y for x, y in pairs):
            raise UnsuitedError("it changes its arguments")
        for tensor in call.given:
            tensor_like(tensor)  # it may have got attributes
        if reads.unsuited:
            raise UnsuitedError(reads.unsuited)
        if known is not None:
            self._known[call.key].remove(known)
            changed = known.reads.changed()
            if changed or known.traced.form != traced.form:
                raise UnsuitedError(changed or "two alike calls were traced differently")
        self._known[call.key].append(_Known(traced, reads, is_confirmed=known is not None))

    def _repeat(self, trace: LiveTrace, known: _Known, call: DescribedCall) -> Any:
        traced, self.is_used = known.traced, True
        if known.template is None:
            known.template = Template(len(self.templates), traced)
            self.templates.append(known.template)
            name = f"{NAME}_template_{known.template.number}"
            trace.add_call(_OPERATOR, traced.call.nodes, -1 - known.template.number, name, [])
        counts = trace.add_calls(traced.calls)
        names = [
            "" if i in traced.items else trace.create_name(base)
            for i, base in enumerate(traced.bases)
        ]
        made = list(_made(traced))
        number = len(self.repeated)
        name = f"{NAME}_{number}"
        trace.add_call(_OPERATOR, call.nodes, number, name, made, unnamed=len(traced.items))
        path = ".".join(map(str, call.path))
        self.repeated.append(Repeated(known.template, path, tuple(names), counts))
        self._left_out.add(call.path)
        self._recorder.repeated.append((traced.call.path, call.path, known.reads.recorded))
        of_kind = {"given": call.given, "made": made}
        leaves = [x if kind == "plain" else of_kind[kind][x] for kind, x in traced.results.leaves]
        return pytree.tree_unflatten(leaves, traced.results.spec)

    def check(self, program: torch.export.ExportedProgram) -> None:
        """Check that the nodes of calls that were left out can be written into a program.

        Raises:
            RepetitionError: they cannot.
        """
        if not self.repeated:
            return
        if self._recorder.changes.found or not self._recorder.is_complete:
            raise RepetitionError("forward changes Python state, or compiles a part of itself")
        if self._recorder.sources():
            raise RepetitionError("forward reads a clock")
        if self._recorder.reads_autograd:
            raise RepetitionError("forward reads how a tensor was computed")
        nodes = list(program.graph.nodes)
        calls = [node for node in nodes if node.target is _OPERATOR]
        if len(calls) < len(self.repeated) + len(self.templates):
            raise RepetitionError("layers are in a region of their own, as under torch.no_grad()")
        inputs = {node.name for node in nodes if node.op == "placeholder"}
        names = {node.name for node in nodes} - inputs
        if any(not inputs.isdisjoint(one.names) for one in self.repeated):
            raise RepetitionError("an input has the name of a node")
        for template in self.templates:
            if not names >= template.needed(names):
                raise RepetitionError("nodes got other names")

    def lengthened(self, archive: bytes) -> bytes:
        """The archive of the program with the nodes of all calls.

        Raises:
            RepetitionError: the program has an argument that cannot be renamed.
        """
        if not self.repeated:
            return archive
        return with_record(archive, "models/model.json", lambda x: lengthen(x, self.repeated))


def _interception() -> str:
    hooks = any(global_hooks().values())
    return "hooks of all modules are registered" if hooks else interception()


_OPERATOR = torch.ops.autoshard.repeated_call.default


def _made(traced: TracedCall) -> Iterator[torch.Tensor]:
    """Tensors like the results of a traced call, of no node yet."""
    results = traced.results
    with outside_of_trace(), results.mode, torch.enable_grad():
        for like in results.likes:
            _, shape, stride, dtype, requires_grad, *_, device, _, _ = like
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if requires_grad:  # no leaf of autograd, so that it may be written
                made = made.requires_grad_().clone()
            if made.stride() != stride:  # of a view with gaps
                size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
                flat = torch.empty(size, dtype=dtype, device=device)
                made = flat.requires_grad_().clone().as_strided(shape, stride)
            if tensor_like(made) != like:
                raise RepetitionError(f"no tensor can be made like {like}")
            yield made


def _candidates(model: nn.Module) -> Iterator[int]:
    """The modules of which a parent has several of one class, but for the smallest of torch."""
    for parent in model.modules():
        by_class: dict[type, list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            by_class[type(child)].append(child)
        for kind, alike in by_class.items():
            is_single = kind.__module__.startswith("torch.nn.")
            if len(alike) >= _FEWEST and not (is_single and not any(alike[0].children())):
                yield from map(identity, alike)
