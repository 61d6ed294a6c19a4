"""Numbers that forward computes from dynamic sizes, checked when a model is exported.

An export keeps a number as an expression of dynamic sizes, or fixes the size: where Python needs a
plain number (`float(x.shape[0])`), and where forward branches on one. PyTorch says that a size was
fixed, but not where.
"""

import linecache
import logging
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard.errors import ExportError, GraphError
from autoshard.graph.sizes.symbolic_numbers import check_functions, last_line, not_followed
from autoshard.torch_private import HigherOrderOperator, OpOverload, serialize

OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose code is not the user's."""

_log = logging.getLogger(__name__)
_VIOLATED = "Constraints violated"
_ARE_SAVED = getattr(serialize, "_SYM_OPS", None)
"""Functions of sizes that an archive can have; None if this PyTorch does not say."""


class SizeDecisions:
    """Lines of the user's code that need the values of numbers that depend on dynamic sizes."""

    def __init__(self) -> None:
        self._numbers: dict[sympy.Basic, str] = {}
        self._conditions: dict[sympy.Basic, str] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A context in which such lines are noted."""
        lines = {
            "guard_bool": self._conditions,
            "guard_float": self._numbers,
            "guard_int": self._numbers,
        }
        plain = {name: getattr(SymNode, name) for name in lines if hasattr(SymNode, name)}
        # Patched here and restored below.
        for name, method in plain.items():
            setattr(SymNode, name, _noting(method, lines[name]))
        try:
            yield
        finally:
            for name, method in plain.items():
                setattr(SymNode, name, method)

    def warn(self, what: str) -> None:
        """Say which number has fixed a dynamic size, if PyTorch accepts that.

        Args:
            what: name of the model.
        """
        number, line = next(iter(self._numbers.items()), (None, ""))
        if number is not None:
            _log.warning(
                "%s needs the plain value of %s (%s), which fixes a dynamic size: other sizes run "
                "unsharded",
                *(what, number, line),
            )

    def explain(self, error: BaseException, what: str) -> ExportError | None:
        """The error that says which number fixes a dynamic size, and where; None for others.

        Args:
            error: raised while tracing.
            what: name of the model.
        """
        message = str(error)
        if _VIOLATED not in message:
            return None
        size = message.partition("(")[2].partition(")")[0]
        if self._numbers:
            number, line = next(iter(self._numbers.items()))
            reason = f"its plain value is needed there, which fixes {size}"
            return ExportError(
                not_followed(f"the number {_named(number, size)} of {what}", line, reason)
            )
        made = {guard.expr for env in _environments(error) for guard in env.guards}
        found = [x for n, x in self._conditions.items() if n in made or sympy.Not(n) in made]
        lines = "; ".join(list(dict.fromkeys(found or self._conditions.values()))[:_MOST_LINES])
        first, *_ = [line.strip("- ") for line in message.splitlines()[1:] if line.strip()] or [""]
        advice = message.partition("Suggested fixes:")[2].partition("\n\n")[0].split("\n")
        wider = "; ".join(line.strip() for line in advice if line.strip())
        return ExportError(
            f"what {what} computes is not the same for all values of the dynamic size {size}"
            f"{f' ({lines})' if lines else ''}, and the export has it for the example "
            f"alone: {first}. Restrict the size{f', as in {wider}' if wider else ''}; or leave it "
            f"to PyTorch with torch.export.Dim.AUTO, whose other sizes run unsharded; or branch "
            f"with torch.where"
        )


_MOST_LINES = 3


def _noting(method: Callable[..., Any], lines: dict[sympy.Basic, str]) -> Callable[..., Any]:
    """A method of `SymNode` that notes the line that calls it, for each number once."""

    def note(node: SymNode, *args: Any) -> Any:
        number = node.expr
        if number.free_symbols and number not in lines:
            lines[number] = _line(sys._getframe(1))  # noqa: SLF001  the caller
        return method(node, *args)

    return note


def _line(frame: FrameType | None) -> str:
    """File, number and text of the innermost line of the user's code."""
    while frame is not None and frame.f_code.co_filename.startswith((*OWN_FOLDERS, "<")):
        frame = frame.f_back
    return line_of(frame.f_code.co_filename, frame.f_lineno) if frame else ""


def line_of(file: str, number: int) -> str:
    """A line of code, as messages have it."""
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f", `{text[:100]}`" if text else "")


def _named(number: sympy.Basic, size: str) -> str:
    """An expression with the user's name of a size, if there is only one."""
    text = str(number)
    symbols = list(number.free_symbols)
    if len(symbols) == 1 and size.isidentifier():
        text = text.replace(str(symbols[0]), size)
    return repr(text)


def _environments(error: BaseException | None) -> Iterator[ShapeEnv]:
    """The environments of symbolic sizes in which an error, or its cause, was raised."""
    while error is not None:
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            found = [x for x in traceback.tb_frame.f_locals.values() if isinstance(x, ShapeEnv)]
            yield from found
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


def check_numbers(program: ExportedProgram, what: str) -> None:
    """Check that all numbers that depend on dynamic sizes can be saved, and computed again.

    Args:
        program: the exported program.
        what: name of the model.

    Raises:
        ExportError: one cannot; the message has the number and the line.
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            value = node.meta.get("val")
            if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                continue
            reason = _why_not(node.target, value.node.expr)
            if reason:
                line = last_line(str(node.meta.get("stack_trace") or ""))
                number = f"the number {str(value)!r} of {what}"
                raise ExportError(not_followed(number, line, reason))


def _why_not(target: object, number: sympy.Basic) -> str:
    """Why a number cannot be saved or computed; empty if it can be."""
    computes = callable(target) and not isinstance(target, OpOverload | HigherOrderOperator)
    if computes and target is not operator.getitem and target not in (_ARE_SAVED or (target,)):
        return f"an archive cannot have {getattr(target, '__name__', target)!r} of sizes"
    try:
        check_functions(sympy.srepr(number))
    except GraphError as error:
        return str(error)
    return ""
