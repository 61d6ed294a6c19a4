"""Compares the Python state of a model with that of the exports of its plans."""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from autoshard.errors import PlanError
from autoshard.graph import Graph
from autoshard.graph.export.python_state.description.folding import unfold
from autoshard.graph.export.python_state.description.global_hooks import GLOBAL_HOOKS
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    FORWARD,
    HOOKS,
    MODE,
    Path,
    read_path,
)
from autoshard.graph.export.python_state.description.values import Value, describe, same
from autoshard.graph.export.python_state.description.wording import check_patterns, is_ignored
from autoshard.graph.export.python_state.user_code.code import is_user_module
from autoshard.runtime.python_state.differences import Difference, explain
from autoshard.runtime.python_state.lookup import Record
from autoshard.runtime.python_state.reference import reference_record
from autoshard.runtime.python_state.snapshot import Snapshot

_NO_HOOKS: Value = {"hooks": []}


class PythonState:
    """The values that forward of a model reads, compared with what it was when plans were exported.

    Args:
        model: the model, before plans are applied to it.
        graphs: programs by name of the plan.
        stored: names of parameters and buffers that have checks of their own.
        ignored: patterns of what is not compared.
        runs_own_hooks: True if the hooks of the model itself run.

    Attributes:
        own_forward: what the model has as `forward` in place of that of its class; None if nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Mapping[str, Graph],
        stored: Collection[str],
        ignored: Collection[str],
        *,
        runs_own_hooks: bool = True,
    ) -> None:
        check_patterns(ignored)
        self._with_own_hooks = not runs_own_hooks
        self._model, self._kind = model, type(model)
        self.own_forward: Callable[..., Any] | None = vars(model).get(FORWARD)
        self._stored = frozenset(stored)
        self._records = {name: _record(model, graph, ignored) for name, graph in graphs.items()}
        self._ignored = tuple(ignored)
        self._recorded: dict[Path, Value] = {}
        for record in self._records.values():
            self._recorded.update({n: x for n, x in record.items() if n not in self._recorded})
        self._objects: dict[Path, tuple[Any, ...]] | None = None
        self._snapshot: Snapshot | None = None
        self._differences: dict[str, tuple[Difference, ...]] = {}
        self._copies: WeakKeyDictionary[nn.Module, PythonState] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PythonState":
        """Compare the copy of the model, from its first call on."""
        return self._of(deepcopy(self._model, memo))

    def _of(self, model: nn.Module) -> "PythonState":
        """The comparison of a copy of the model."""
        other = object.__new__(PythonState)
        vars(other).update(vars(self))
        other._model = model
        other._objects = other._snapshot = None
        other._differences = {}
        other._copies = WeakKeyDictionary()
        return other

    def ignores(self, path: Path) -> bool:
        """True if a pattern says that a value is not compared."""
        return is_ignored(path, self._ignored)

    def check_applies(self) -> None:
        """Check that one of the plans may be applied to the model as it is.

        Modes may be set later. The others are for other states.

        Raises:
            PlanError: the export of every plan was made in another state.
        """
        reasons = []
        for name, record in self._records.items():
            found = [
                difference
                for difference in self.differences(self._model, name)
                if not (difference.is_mode or difference.is_query)
            ]
            if found:
                plan = f"the plan {name!r}" if name else "the plan"
                text = explain(found, _modes(record))
                reasons.append(f"{plan} was made for another state of the model: {text}")
        if len(reasons) == len(self._records):
            raise PlanError("; ".join(reasons))
        self._snapshot = None  # the plans change the model

    def check(self, model: nn.Module, name: str) -> None:
        """Check the model before a call.

        Args:
            model: the model, or a copy of it.
            name: of the plan that runs.

        Raises:
            PlanError: the planned program would compute something else than the model.
        """
        found = self.differences(model, name)
        if found:
            raise PlanError(explain(found, _modes(self._records[name])))

    def differences(self, model: nn.Module, name: str) -> tuple[Difference, ...]:
        """The differences from the export of a plan."""
        if model is not self._model:
            state = self._copies.get(model)
            if state is None:
                state = self._copies[model] = self._of(model)
            return state.differences(model, name)
        if self._snapshot is None or not self._snapshot.walk.is_unchanged():
            self._look()
        return self._differences[name]

    def _look(self) -> None:
        snapshot = Snapshot(
            self._model,
            self._kind,
            self._recorded,
            self._stored,
            self.own_forward,
            with_own_hooks=self._with_own_hooks,
        )
        if self._objects is None:
            self._objects = snapshot.objects
        replaced = {one.path: one for one in _replaced(self._objects, snapshot.objects)}
        self._snapshot = snapshot
        self._differences = {
            name: tuple(self._compare(record, snapshot, replaced))
            for name, record in self._records.items()
        }

    def _compare(
        self, record: Record, snapshot: Snapshot, replaced: Mapping[Path, Difference]
    ) -> Iterator[Difference]:
        for path, now in snapshot.values.items():
            exported = _exported(record, path, snapshot.hidden)
            if exported is None or is_ignored(path, self._ignored):
                continue
            if path in replaced:
                yield replaced[path]
            elif any(path[:end] in replaced for end in range(1, len(path))):
                continue  # of a module that was replaced as a whole
            elif not same(exported[0], now):
                yield Difference(path, exported[0], now)


def _exported(record: Record, path: Path, hidden: Mapping[Path, Path]) -> tuple[Value] | None:
    """The value at a path in an export, in a tuple; None if its forward did not read it."""
    if path in record:
        return (record[path],)
    if path in hidden:
        return (record[hidden[path]],) if hidden[path] in record else None
    if path[:1] == (GLOBAL_HOOKS,):
        return (_NO_HOOKS,)
    is_called = (*path[:-1], CALLED) in record
    return (_NO_HOOKS,) if is_called and path[-1:] != () and path[-1] in HOOKS else None


def _replaced(
    before: Mapping[Path, tuple[Any, ...]], now: Mapping[Path, tuple[Any, ...]]
) -> Iterator[Difference]:
    """Modules, objects and tensors in containers in the place of others."""
    for path in before.keys() & now.keys():
        if len(before[path]) != len(now[path]):
            continue
        for old, new in zip(before[path], now[path], strict=True):
            if old is not new and not _is_alike(old, new):
                other: Value = {"other": type(new).__name__}
                is_module = isinstance(new, nn.Module)
                yield Difference(path, describe(old), other, is_replaced=is_module)
                break


def _is_alike(old: Any, new: Any) -> bool:
    """True for two objects that only differ in what is compared itself."""
    if isinstance(old, nn.Module) and isinstance(new, nn.Module):
        # Parameters and buffers were found in the modules when the plan was applied.
        tensors = [*old.parameters(), *old.buffers(), *new.parameters(), *new.buffers()]
        return not tensors
    return is_user_module(type(old).__module__) and is_user_module(type(new).__module__)


def _record(model: nn.Module, graph: Graph, ignored: Collection[str]) -> dict[Path, Value]:
    """The values that forward read in the export of a program.

    Raises:
        PlanError: the record is malformed.
    """
    state = graph.model.state if graph.model else {}
    if not state:
        found = reference_record(model, type(model), graph)
    else:
        try:
            found = {read_path(text): value for text, value in unfold(state).items()}
        except ValueError as error:
            raise PlanError(f"the plan's record of Python state cannot be read: {error}") from None
    return {path: value for path, value in found.items() if not is_ignored(path, ignored)}


def _modes(record: Record) -> dict[Path, bool]:
    """The modes of modules in an export."""
    return {
        path: value
        for path, value in record.items()
        if path[-1:] == (MODE,) and isinstance(value, bool)
    }
