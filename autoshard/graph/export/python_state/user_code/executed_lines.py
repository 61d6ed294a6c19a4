"""The lines of user code that run, and the globals, free variables and attributes that they name.

Functions read globals and free variables in their own bytecode, which nothing else can observe. A
trace function sees which lines run; the bytecode of these lines says what they read.
"""

import dis
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.graph.export.python_state.user_code.code import is_user_code

FreeVariables = Mapping[str, Any]
"""Values of the free variables of a function, by their names."""

Chain = tuple[str, ...]
"""A global and the attributes that are read of it: `("settings", "model", "tau")`."""


@dataclass(slots=True)
class ReferencedNames:
    """Names that a line, or several ones, refer to.

    Attributes:
        chains: globals with attributes; imported names begin with `import` and the module.
        free: free variables.
        mentioned: names of attributes and strings, which may be keys.
        locals: names of local variables.
    """

    chains: set[Chain] = field(default_factory=set)
    free: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)
    locals: set[str] = field(default_factory=set)

    @property
    def has_class(self) -> bool:
        """True where attributes may be read of a class, as in `type(self).tau`."""
        return ("type",) in self.chains or "__class__" in self.mentioned or "cls" in self.locals

    def update(self, other: "ReferencedNames") -> None:
        """Add those of another line."""
        self.chains |= other.chains
        self.free |= other.free
        self.mentioned |= other.mentioned
        self.locals |= other.locals


_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
IMPORT = "import"
"""First name of what is imported in a function: a keyword, which no global is called."""


def names_by_line(code: CodeType) -> Mapping[int, ReferencedNames]:
    """The names that each line of a function refers to."""
    found: dict[int, ReferencedNames] = defaultdict(ReferencedNames)
    chain: Chain = ()
    for step in dis.get_instructions(code):
        line = step.positions.lineno if step.positions else None
        names = found[line or code.co_firstlineno]
        chain = _next_chain(step, chain)
        if step.opname == "IMPORT_FROM":
            names.chains.add((*chain, step.argval))
        elif chain:
            names.chains.add(chain)
        _add_names(step, code, names)
    return found


def _next_chain(step: dis.Instruction, chain: Chain) -> Chain:
    """The global and the attributes that are read of it up to an instruction."""
    if step.opname in _GLOBAL:
        return (step.argval,)
    if step.opname == "IMPORT_NAME":
        return (IMPORT, step.argval)
    if step.opname in _ATTRIBUTE:
        return (*chain, step.argval) if chain else ()
    # `from package import one, two` is one IMPORT_NAME, and stores what each IMPORT_FROM reads.
    is_import = chain[:1] == (IMPORT,) and step.opname.startswith(("IMPORT", "STORE"))
    return chain if is_import or step.opname == "PUSH_NULL" else ()


def _add_names(step: dis.Instruction, code: CodeType, names: ReferencedNames) -> None:
    if step.opname in _ATTRIBUTE:
        names.mentioned.add(step.argval)
    elif "DEREF" in step.opname and step.argval in code.co_freevars:
        names.free.add(step.argval)
    elif step.opname.startswith("LOAD_FAST"):
        names.locals.update([step.argval] if isinstance(step.argval, str) else step.argval)
    elif step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str):
        names.mentioned.add(step.argval)


OnCode = Callable[[CodeType, FrameType], None]
OnFunction = Callable[[CodeType], None]
OnLine = Callable[[CodeType, int], None]
OnTorch = Callable[[Any, Any, Any, Any], None]


_COMPILER = "torch/_dynamo/convert_frame.py"


class _OutsideTorch(TorchFunctionMode):
    """Switches tracing off inside of torch's functions, whose many frames are of no interest."""

    def __init__(self, lines: "ExecutedLines") -> None:
        super().__init__()
        self._lines = lines

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function."""
        if torch.compiler.is_dynamo_compiling():  # as in branches of torch.cond
            return func(*args, **(kwargs or {}))
        self._lines.pause()
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self._lines.resume()
        frame = sys._getframe(1)  # noqa: SLF001  the documented way
        self._lines.report(func, args, kwargs or {}, result, frame)
        return result


class ExecutedLines:
    """Traces user code.

    Args:
        on_code: called before the code of a function runs for the first time.
        on_function: called before it runs for the first time with the free variables that it has.
        on_line: called before a line runs for the first time.
        on_torch: called after user code called a torch function, with its arguments and result.
        on_compiler: called before a compiler runs.

    Attributes:
        is_paused: True while nothing is traced.
        is_complete: False if a compiler has run, which must not be traced. Nothing is, afterwards.
    """

    def __init__(
        self,
        on_code: OnCode,
        on_function: OnFunction,
        on_line: OnLine,
        on_torch: OnTorch,
        on_compiler: Callable[[], None],
    ) -> None:
        self._on_code, self._on_function, self._on_line = on_code, on_function, on_line
        self._on_torch, self._on_compiler = on_torch, on_compiler
        # By identity: equal functions may be several, and comparing code takes long.
        self._lines: dict[int, tuple[CodeType, set[int]]] = {}
        self._closures: dict[int, dict[tuple[tuple[str, int], ...], FreeVariables]] = {}
        self._skipped: dict[int, CodeType] = {}
        self.is_paused = True
        self.is_complete = True

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which user code is traced."""
        before = sys.gettrace()
        with _OutsideTorch(self):
            self.resume()
            try:
                yield
            finally:
                self.is_paused = True
                sys.settrace(before)

    def pause(self) -> None:
        """Trace nothing."""
        self.is_paused = True
        sys.settrace(None)

    def resume(self) -> None:
        """Trace again."""
        self.is_paused = False
        if self.is_complete:
            sys.settrace(self._on_call)

    def state(self) -> dict[int, tuple[CodeType, set[int]]]:
        """The lines that ran so far, for `restore`."""
        return {number: (code, set(lines)) for number, (code, lines) in self._lines.items()}

    def restore(self, state: dict[int, tuple[CodeType, set[int]]]) -> None:
        """Forget the lines that ran since `state` was called."""
        self._lines = state

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is traced."""
        was_paused = self.is_paused
        self.pause()
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def report(self, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType) -> None:
        """Report a call of a torch function, if user code makes it."""
        if is_user_code(frame.f_code.co_filename):
            with self.paused():
                self._on_torch(func, args, kwargs, result)

    def names(self, code: CodeType) -> ReferencedNames:
        """The names that those lines of a function refer to that ran."""
        by_line, found = names_by_line(code), ReferencedNames()
        for line in self._lines[id(code)][1]:
            if line in by_line:
                found.update(by_line[line])
        return found

    def closures(self, code: CodeType) -> Collection[FreeVariables]:
        """The free variables with which a function was called: decorators share the code."""
        return self._closures.get(id(code), {}).values()

    @property
    def functions(self) -> tuple[CodeType, ...]:
        """The code of the functions that ran."""
        return tuple(code for code, _ in self._lines.values())

    def _on_call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if id(code) in self._skipped:
            return None
        if id(code) not in self._lines:
            if code.co_filename.endswith(_COMPILER):
                self.is_complete = False
                sys.settrace(None)
                self._on_compiler()
                return None
            if not is_user_code(code.co_filename):
                # Without a trace function for its lines, code of libraries runs at its own speed.
                # The code is kept, so that no other code gets its id.
                self._skipped[id(code)] = code
                return None
            self._lines[id(code)] = code, set()
            self._call(self._on_code, code, frame)
        if self._is_new_function(code, frame):
            self._call(self._on_function, code)
        return self._on_event

    def _is_new_function(self, code: CodeType, frame: FrameType) -> bool:
        """True if the code was not called with these free variables before."""
        local = frame.f_locals if code.co_freevars else {}
        values = {name: local[name] for name in code.co_freevars if name in local}
        key = tuple((name, id(value)) for name, value in values.items())
        known = self._closures.setdefault(id(code), {})
        is_new = key not in known
        # The values are kept, so that no other object gets the number of one of them.
        known.setdefault(key, values)
        return is_new

    def _on_event(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno
        if event == "line" and line not in self._lines[id(code)][1]:
            self._lines[id(code)][1].add(line)
            self._call(self._on_line, code, line)
        return self._on_event

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self.is_paused = True
        try:
            function(*args)
        finally:
            self.is_paused = False
