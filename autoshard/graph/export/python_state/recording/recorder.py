"""Records what forward reads while a model is traced.

Reads of attributes pass `__getattribute__`: that of `nn.Module`, and those of the classes of other
objects, are replaced for the time. Reads of globals and free variables are found in the lines that
run (`executed_lines`).
"""

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from autoshard.base.collection import collection_paused
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    CHILDREN,
    FORWARD,
    HOOKS,
    MODE,
    Key,
    Path,
    PythonPlace,
    elements,
    find_place,
    instance_dict,
    name_of,
    path_text,
)
from autoshard.graph.export.python_state.description.queries import (
    DEFAULT_DTYPE,
    GRAD_MODE,
    environment,
    query_of,
)
from autoshard.graph.export.python_state.description.values import (
    MISSING,
    Value,
    children_of,
    describe,
    hooks_of,
)
from autoshard.graph.export.python_state.recording.calls import ModuleCall
from autoshard.graph.export.python_state.recording.changes import Changes
from autoshard.graph.export.python_state.recording.function_results import FunctionResults
from autoshard.graph.export.python_state.recording.patching import own_attribute, patched, restore
from autoshard.graph.export.python_state.user_code.code import code_digest, is_installed
from autoshard.graph.export.python_state.user_code.executed_lines import (
    ExecutedLines,
    ReferencedNames,
    names_by_line,
)
from autoshard.graph.export.python_state.user_code.global_names import namespaces, resolve
from autoshard.graph.export.python_state.user_code.holders import (
    MODULE_FIELDS,
    Holders,
    class_path,
    function_parts,
    identity,
)
from autoshard.graph.export.python_state.user_code.readers import (
    is_asked_for,
    is_read_by_user,
    iterates_over_children,
)
from autoshard.graph.export.python_state.user_code.sources import sources_of
from autoshard.torch_private import pytree, reads_autograd


@dataclass(slots=True)
class ModeReads:
    """The modes that a module reads while it is called.

    Attributes:
        modes: their paths.
        calls: how the module was called.
    """

    modes: set[Path] = field(default_factory=set)
    calls: list[ModuleCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordedReads:
    """The values that were read up to a time.

    Attributes:
        reads: values by path.
        lines: lines that ran.
    """

    reads: dict[Path, Value]
    lines: dict[int, tuple[CodeType, set[int]]]


@dataclass(frozen=True, slots=True)
class _RunningModule:
    """A module that is being called."""

    module: nn.Module
    path: Path
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recorder:
    """Records what forward of a model reads, and what it changes.

    Args:
        model: a copy of the model, which is traced.
        kind: the class of the model, of which the copy may have a subclass.
        opaque: names of modules that are called live, with those inside.
        hidden: objects with a name of an attribute that the copy has not as the model has it.

    Attributes:
        call: how the model is called.
        reads: the values that forward read, by path, as they were before.
        modes: by path of a module, the modes that it reads.
        changes: what forward changed.
        holders: the known objects.
        reads_autograd: True if forward asks a tensor how it was computed, as by `grad_fn`.
        repeated: calls that were left out: the path of a module that was called alike, that of the
            module, and the paths inside of the first one that its call has recorded.
        around_call: runs a call of a module, or leaves it out; takes a function that runs it, the
            module, its path and the arguments.
        on_read: called with the object, its path and the name before an attribute is read; the
            object is None if it is not known.
        on_write: called with the name before an attribute of a module is set.
    """

    call: ModuleCall
    around_call: Callable[[Callable[[], Any], nn.Module, Path, Any, Any], Any] | None = None
    on_read: Callable[[Any, Path, str], None] | None = None
    on_write: Callable[[str], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        kind: type[nn.Module],
        opaque: Collection[str] = (),
        hidden: Collection[tuple[object, str]] = (),
    ) -> None:
        self.reads: dict[Path, Value] = {}
        self.modes: dict[Path, ModeReads] = {}
        self.changes = Changes()
        self.reads_autograd = False
        self.repeated: list[tuple[Path, Path, Collection[Path]]] = []
        self._model, self._kind, self._opaque = model, kind, frozenset(opaque)
        self._hidden = {(identity(holder), name) for holder, name in hidden}
        self._patches = ExitStack()
        self._is_recording = False
        self._kinds_of_objects: set[type] = set()
        self._watched: dict[type, Any] = {}
        self._unwatched: list[tuple[Any, Path]] = []
        self._running: list[_RunningModule] = []
        self._queries: dict[tuple[int, int], list[Path]] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._thread = 0
        self._replayed: Path | None = None
        self._results = FunctionResults()
        self.holders = Holders(self._watch, self._keep_class, self._results.add)
        self.holders.add_module(model, (), kind)
        self._lines = ExecutedLines(
            self._on_code, self._on_function, self._on_line, self._on_torch, self._end
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which calls of the model are recorded."""
        self._thread = threading.get_ident()
        with self._results.forgotten(), self._patches as patches:
            patches.enter_context(patched(nn.Module, "_call_impl", self._patched_call))
            patches.enter_context(patched(nn.Module, "__getattribute__", self._patched_read))
            patches.enter_context(patched(nn.Module, "__setattr__", self._patched_write))
            patches.enter_context(patched(type(os.environ), "__getitem__", self._patched_variable))
            patches.callback(self._unwatch)
            self._is_recording = True
            for kind in self._kinds_of_objects:
                self._watch_class(kind)
            yield

    def _end(self) -> None:
        """Restore all classes: a compiler, as of the branches of torch.cond, reads them too."""
        self._patches.close()

    def _unwatch(self) -> None:
        self._is_recording = False
        for kind, before in self._watched.items():
            restore(kind, "__getattribute__", before)
        self._watched.clear()

    def state(self) -> "RecordedReads":
        """The values that were read so far, for `restore`."""
        return RecordedReads(dict(self.reads), self._lines.state())

    def restore(self, state: "RecordedReads") -> None:
        """Forget what was read since `state` was called."""
        self.reads.clear()
        self.reads.update(state.reads)
        self._lines.restore(state.lines)

    @contextmanager
    def replaying(self, path: Path) -> Iterator[ModeReads]:
        """A context in which a module is called again, and its reads are recorded too.

        Args:
            path: of the module.

        Yields:
            the modes that it reads. Those of other modules are left out.
        """
        modes, changes = self.modes, self.changes
        self.modes, self.changes = {path: ModeReads()}, changes.renewed()
        self._replayed = path
        try:
            yield self.modes[path]
        finally:
            self.modes, self.changes, self._replayed = modes, changes, None

    @property
    def _is_active(self) -> bool:
        return not self._lines.is_paused and threading.get_ident() == self._thread

    # Calls of modules

    def _patched_call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            known = self.holders.find(module)
            if known is None or threading.get_ident() != self._thread:
                return plain(module, *args, **kwargs)
            running = _RunningModule(*known, args, kwargs)
            if self._running:
                return self._call(plain, module, running)
            if self._replayed is None:
                self.call = ModuleCall.of(args, kwargs)
            inside = [
                (holder, path)
                for holder, path in self.holders
                if path[: len(running.path)] == running.path
            ]
            comparing = self.changes.comparing(inside, self.reads)
            # The garbage collector may call functions that have nothing to do with forward.
            with comparing, collection_paused(), self._lines.tracing():
                return self._call(plain, module, running)

        return call

    def _call(self, plain: Callable[..., Any], module: nn.Module, running: _RunningModule) -> Any:
        self._running.append(running)
        try:
            with self._lines.paused():
                if self._is_opaque(running.path):
                    return plain(module, *running.args, **running.kwargs)
                self._add_call(running.module, running.path)
            run = partial(plain, module, *running.args, **running.kwargs)
            if self.around_call is None or self._replayed is not None:
                return run()
            return self.around_call(run, running.module, running.path, running.args, running.kwargs)
        finally:
            self._running.pop()

    def _is_opaque(self, path: Path) -> bool:
        return ".".join(map(str, path)) in self._opaque

    def _add_call(self, module: nn.Module, path: Path) -> None:
        if (*path, CALLED) in self.reads:
            return
        self.reads[*path, CALLED] = True
        self.reads[path] = self._class_of(module)
        own = instance_dict(module)
        # Those of the model itself run in every call, planned or not.
        for name in HOOKS if path else ():
            if own.get(name):
                for number, hook in enumerate(own[name].values()):
                    self.holders.add(hook, (*path, name, Key(number)))
                self.reads[*path, name] = hooks_of(own[name])

    # Reads of attributes

    def _patched_read(self, plain: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(holder: Any, name: str) -> Any:
            if self._is_active and (not name.startswith("__") or name == "__dict__"):
                self._read(holder, name, sys._getframe(1))  # noqa: SLF001  the documented way
            return plain(holder, name)

        return read

    def _patched_write(self, plain: Callable[..., None]) -> Callable[..., None]:
        def write(module: nn.Module, name: str, value: Any) -> None:
            if self._is_active:
                with self._lines.paused():
                    known = self.holders.find(module)
                    if self.on_write is not None:
                        self.on_write(name)
                if known is not None and (*known[1], name) not in self.reads:
                    self.changes.written_first.add((*known[1], name))
            plain(module, name, value)

        return write

    def _patched_variable(self, plain: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        def read(variables: Any, name: str) -> str:
            if self._is_active and is_read_by_user(sys._getframe(1)):  # noqa: SLF001  as above
                with self._lines.paused():
                    self.reads[environment(name)] = describe(os.environ.get(name))
            return plain(variables, name)

        return read

    def _read(self, holder: Any, name: str, frame: FrameType) -> None:
        with self._lines.paused():
            known = self.holders.find(holder)
            own, path = known or (None, ())
            if self.on_read is not None and (name != "__dict__" or is_asked_for(frame, holder)):
                self.on_read(own, path, name)
            if known is None:
                return
            if name == "__dict__":
                if is_asked_for(frame, own):
                    self._read_all(own, path)
            elif not isinstance(own, nn.Module):
                self._read_attribute(own, path, name)
            elif name == MODE:
                self._read_mode(own, path, frame)
            elif name == CHILDREN:
                if iterates_over_children(frame):
                    self.reads[*path, CHILDREN] = children_of(own)
            elif name not in MODULE_FIELDS and not (name == FORWARD and self._is_opaque(path)):
                self._read_attribute(own, path, name)

    def _read_attribute(self, own: Any, path: Path, name: str) -> None:
        if (*path, name) in self.reads or (identity(own), name) in self._hidden:
            return
        place = find_place(own, name)
        if own is self._model and place is not None and place.owner is not None:
            place = find_place(self._kind, name)  # the copy may have a subclass
        if place is None:
            self.reads[*path, name] = MISSING
        elif place.owner is None:
            self._record((*path, name), place)
        elif place.owner is not nn.Module and place.owner is not object:
            self._record((*class_path(place.owner), name), place)
            if isinstance(own, nn.Module):  # one that is not called, perhaps
                self.reads.setdefault(path, self._class_of(own))

    def _class_of(self, module: nn.Module) -> Value:
        kind = self._kind if module is self._model else type(module)
        return {"module": name_of(kind)}

    def _read_all(self, own: Any, path: Path) -> None:
        fields = instance_dict(own)
        for name, value in tuple(fields.items()):
            if not (isinstance(own, nn.Module) and name in (*MODULE_FIELDS, MODE)):
                self._record((*path, name), PythonPlace(fields, name, value))

    def _record(self, path: Path, place: PythonPlace) -> None:
        """Record the value at a path, and make known what it refers to."""
        if path in self.reads or path in self.changes.written_first:
            return
        value = place.value
        self.holders.add(value, path)
        self.changes.keep(path, place)
        if self.changes.is_other(path, place):
            return  # written before it is read, so that no call depends on what was there
        self.reads[path] = self.described(path, value)
        if isinstance(value, (list, tuple, dict)):
            for key, element in elements(value):
                if self.holders.find(element) is not None:
                    self._record((*path, key), PythonPlace(value, key.key, element))

    def described_at(self, path: Path) -> Value:
        """The description of what is at a path."""
        holder: Any = self._model
        for part in path:
            place = find_place(holder, part)
            if place is None:
                return MISSING
            holder = place.value
        return self.described(path, holder)

    def described(self, path: Path, value: Any) -> Value:
        """The description of the value at a path."""
        known = self.holders.find(value)
        if known is not None and known[1] != path:
            return {"same": path_text(known[1])}
        return describe(value)

    def _watch(self, value: Any, path: Path) -> None:
        """Watch the reads of an object; of one whose class cannot be changed, see `finish`."""
        self.changes.watch(value, path)
        kind = type(value)
        if kind not in self._kinds_of_objects:
            self._kinds_of_objects.add(kind)
            self._watch_class(kind)
        if self._is_recording and kind not in self._watched:
            self._unwatched.append((value, path))
            for name, inner in tuple(instance_dict(value).items()):
                self.holders.add(inner, (*path, name))

    def _watch_class(self, kind: Any) -> None:
        if self._is_recording:
            before = own_attribute(kind, "__getattribute__")
            try:
                kind.__getattribute__ = self._patched_read(kind.__getattribute__)
            except TypeError:
                return
            self._watched[kind] = before

    def _keep_class(self, kind: type) -> None:
        for name, value in tuple(vars(kind).items()):
            if _is_data(name, value):
                place = PythonPlace(kind, name, value, is_item=False, owner=kind)
                self.changes.keep((*class_path(kind), name), place)

    # Modes

    def _read_mode(self, own: nn.Module, path: Path, frame: FrameType) -> None:
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
        caller = frame.f_locals.get(first[0]) if first else None
        is_own = caller is not None and self.holders.find(caller) == (own, path)
        self._add_mode((*path, MODE), path if is_own else None)

    def _add_mode(self, mode: Path, reader: Path | None = None) -> None:
        """Note that a module reads a mode: the one at a path, or that which is called."""
        running = [one for one in self._running if one.path == reader] or self._running
        if self._replayed not in (None, running[-1].path):
            return
        reads = self.modes.setdefault(running[-1].path, ModeReads())
        reads.modes.add(mode)
        call = ModuleCall.of(running[-1].args, running[-1].kwargs)
        if call not in reads.calls:
            reads.calls.append(call)

    # Code that runs

    def _on_code(self, code: CodeType, frame: FrameType) -> None:
        self._globals[id(code)] = frame.f_globals
        for line, names in names_by_line(code).items():
            for chain in sorted(names.chains):
                for path, place in resolve(chain, frame.f_globals):
                    self.holders.add(place.value, path)
                    self.changes.keep(path, place)
                    query = query_of(place.value)
                    if query is not None:
                        self._queries.setdefault((id(code), line), []).append(query)

    def _on_function(self, code: CodeType) -> None:
        for function, path in self._functions(code):
            self.changes.watch(function, path)
            for part, place in function_parts(function):
                self.changes.keep((*path, *part), place)

    def _functions(self, code: CodeType) -> Collection[tuple[FunctionType, Path]]:
        return self.holders.functions_of(code, self._lines.closures(code))

    def _on_line(self, code: CodeType, line: int) -> None:
        for query in self._queries.get((id(code), line), ()):
            self._add_mode(query)

    def _on_torch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad:
            self._read_requires_grad(args[0])
        elif reads_autograd(func):
            self.reads_autograd = True
        elif _has_default_dtype(args, kwargs, result):
            self.reads[DEFAULT_DTYPE] = describe(torch.get_default_dtype())

    def _read_requires_grad(self, tensor: torch.Tensor) -> None:
        for running in reversed(self._running):
            for name, parameter in running.module.named_parameters():
                if parameter is tensor:
                    path = (*running.path, *name.split("."), "requires_grad")
                    self.reads[path] = parameter.requires_grad
                    return
        self._add_mode(GRAD_MODE)

    # What others ask

    @property
    def watched(self) -> Mapping[type, Any]:
        """Classes of objects whose reads are recorded."""
        return self._watched

    @property
    def unwatched(self) -> Iterator[Path]:
        """The paths of the objects whose reads are not."""
        return (path for _, path in self._unwatched)

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is recorded."""
        return self._lines.paused()

    @property
    def is_complete(self) -> bool:
        """False if a part of forward was compiled, of which the reads are not known."""
        return self._lines.is_complete

    def sources(self) -> set[Path]:
        """The clocks and the random numbers without state that forward uses."""
        return {
            path
            for code in self._lines.functions
            for path in sources_of(self._lines.names(code).chains, self._globals[id(code)])
        }

    def finish(self) -> None:
        """Add what is found after forward ran: globals, free variables, code."""
        mentioned, of_classes = set[str](), set[str]()
        for code in self._lines.functions:
            names = self._lines.names(code)
            mentioned |= names.mentioned
            if names.has_class:
                of_classes |= names.mentioned
            self._finish_globals(code, names)
            for function, path in self._functions(code):
                self._finish_function(function, path, names.free)
        for holder, path in self._unwatched:
            fields = instance_dict(holder)
            for name in sorted(mentioned & fields.keys()):
                self._record((*path, name), PythonPlace(fields, name, fields[name]))
        self._finish_classes(of_classes)

    def _finish_globals(self, code: CodeType, names: ReferencedNames) -> None:
        namespace = self._globals[id(code)]
        for chain in sorted(names.chains):
            for path, place in resolve(chain, namespace):
                if not (is_installed(code.co_filename) and _is_cache(place.value)):
                    self._record(path, place)
            for holder, path in namespaces(chain, namespace, names.mentioned):
                # It may have another name here, as in `import settings as s`.
                for name in sorted(vars(holder).keys() & names.mentioned):
                    found = find_place(holder, name)
                    if found is not None and _is_data(name, found.value):
                        self._record((*path, name), found)

    def _finish_classes(self, mentioned: Collection[str]) -> None:
        """Data of classes that is read without an instance, as in `type(self).tau`."""
        for kind in self.holders.classes:
            for name in sorted(vars(kind).keys() & mentioned):
                if _is_data(name, vars(kind)[name]):
                    place = PythonPlace(kind, name, vars(kind)[name], is_item=False, owner=kind)
                    self._record((*class_path(kind), name), place)

    def _finish_function(self, function: FunctionType, path: Path, free: Collection[str]) -> None:
        self.reads[*path, "__code__"] = code_digest(function.__code__)
        for part, place in function_parts(function):
            if part[0] != "__closure__" or part[-1] in free:
                self._record((*path, *part), place)


def _is_data(name: str, value: Any) -> bool:
    """True for attributes of classes that are no functions or descriptors, nor Python's own."""
    return not (name.startswith("__") or callable(value) or hasattr(type(value), "__get__"))


def _is_cache(value: object) -> bool:
    """True for globals that installed packages fill as they run."""
    return isinstance(value, (dict, list, set))


def _has_default_dtype(args: Any, kwargs: Any, result: Any) -> bool:
    """True if a tensor was created from no other, of the element type that is the default."""
    return (
        isinstance(result, torch.Tensor)
        and kwargs.get("dtype") is None
        and result.dtype == torch.get_default_dtype()
        and not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((args, kwargs)))
    )
