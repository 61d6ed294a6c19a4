"""Tracing of a copy of a model on the meta device, and errors that say where and why it fails."""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from traceback import StackSummary
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.overrides import TorchFunctionMode

from autoshard.errors import AutoshardError, ExportError
from autoshard.graph.archive.read import CONSTANT_BYTES
from autoshard.graph.export.size_checks import OWN_FOLDERS, SizeDecisions, check_numbers, line_of
from autoshard.torch_private import (
    DataDependentOutputException,
    decomposition_table,
    pytree,
    without_checkpoints,
)

_TORCH_MODULES = "torch."
"""Module prefix of torch's own functions, whose backward matches their forward."""


@contextmanager
def custom_functions() -> Iterator[set[str]]:
    """Collect the names of custom `autograd.Function`s that are called inside the context.

    An exported graph has the operators of their forward, but not their backward. Only calls with
    an input that requires a gradient count. `torch.utils.checkpoint` runs its function directly,
    which has the same gradients: what is recomputed in backward is a choice of the plan.
    """
    plain = Function.__dict__["apply"]
    found: set[str] = set()

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        passes = any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in pytree.tree_leaves((args, kwargs))
        )
        if passes and torch.is_grad_enabled() and not cls.__module__.startswith(_TORCH_MODULES):
            found.add(f"{cls.__module__}.{cls.__qualname__}")
        return plain.__get__(None, cls)(*args, **kwargs)

    # Patched here and restored below.
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        with without_checkpoints():
            yield found
    finally:
        Function.apply = plain  # type: ignore[method-assign]


class OnMeta(TorchFunctionMode):
    """Creates all tensors on the meta device, also where a model names another device.

    Tensors of a few numbers are first created on the CPU, so that the export has their values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept a torch function."""
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = _META
        args = tuple(_META if isinstance(arg, torch.device) else arg for arg in args)
        if func in _MOVES:
            return args[0]
        if func in _INDEXING:
            args = (args[0], _index(args[1]), *args[2:])
        if func is torch.Tensor.to and len(args) > 1 and _is_device(args[1]):
            args = (args[0], _META, *args[2:])
        if func is torch.Tensor.new_tensor and _is_of_small_numbers(args[1:], given):
            func, args, given = torch.tensor, args[1:], {"dtype": args[0].dtype, **given}
        if func in _OF_NUMBERS and _is_of_small_numbers(args, given):
            return func(*args, **{**given, "device": "cpu"}).to("meta")
        made = _of_sizes(func, args, given) if func in _AS_CONSTANTS else None
        return func(*args, **given) if made is None else made


_META = torch.device("meta")
_MOVES = (torch.Tensor.cpu, torch.Tensor.cuda)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _index(index: Any) -> Any:
    """An index with tensors in place of lists, which indexing would make on the meta device."""
    if isinstance(index, tuple):
        return tuple(_indices(item) for item in index)
    if isinstance(index, list) and not all(isinstance(item, int | torch.SymInt) for item in index):
        return [_indices(item) for item in index]  # as a tuple
    return _indices(index)


def _indices(item: Any) -> Any:
    """The tensor of the integers or flags of a list in an index; other items as they are."""
    listed = item.tolist() if isinstance(item, np.ndarray) else item
    if not isinstance(listed, list | tuple | range):
        return item
    if all(isinstance(flag, bool) for flag in listed):  # positions of a fixed number
        listed = [position for position, flag in enumerate(listed) if flag]
    leaves = pytree.tree_leaves(list(listed))
    kinds = (int, np.integer, torch.SymInt)
    if any(isinstance(leaf, bool) or not isinstance(leaf, kinds) for leaf in leaves):
        return item
    if any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return _stacked(list(listed), torch.int64)
    return torch.tensor(listed, dtype=torch.int64, device="cpu").to("meta")


_AS_CONSTANTS = (torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""Functions that make a constant on the meta device, also of dynamic sizes."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _of_sizes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """A tensor of numbers of which some depend on dynamic sizes; None if none does.

    Args:
        func: one of `_AS_CONSTANTS`.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    like, rest = (args[:1], args[1:]) if func is torch.Tensor.new_tensor else ((), args)
    data = rest[0] if rest else kwargs.get("data")
    leaves = pytree.tree_leaves(data)
    if not any(isinstance(leaf, _SYMBOLIC) for leaf in leaves) or kwargs.get("requires_grad"):
        return None
    dtype = next((x for x in (*rest[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)), None)
    if dtype is None and like:
        dtype = like[0].dtype
    if dtype is None:
        is_real = any(isinstance(leaf, float | torch.SymFloat) for leaf in leaves)
        dtype = torch.get_default_dtype() if is_real else torch.int64
    return _stacked(data, dtype)


def _stacked(data: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(item, dtype) for item in data])
    return torch.scalar_tensor(data, dtype=dtype)


def _is_device(argument: object) -> bool:
    """True for a text or a number that names a device, which `Tensor.to` takes as well."""
    return isinstance(argument, str | int)


def _is_of_small_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    data = args[0] if args else kwargs.get("data")
    leaves = pytree.tree_leaves(data)
    plain = all(isinstance(leaf, (bool, int, float)) for leaf in leaves)
    small = 8 * len(leaves) <= CONSTANT_BYTES
    return plain and small and not kwargs.get("requires_grad")


_MIXED_PRECISION = (
    'pass the element type instead, as in export_model(..., mixed_precision="bfloat16"): the casts '
    "are then a part of the plan"
)
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The devices of which `torch.autocast` may be active."""


def check_no_autocast() -> None:
    """Check that `torch.autocast` is not active, since an export does not record its casts.

    Raises:
        ExportError: it is.
    """
    active = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    if active:
        raise ExportError(
            f"torch.autocast({active[0]!r}) is active, and its casts would be lost: export outside "
            f"of it, and {_MIXED_PRECISION}"
        )
    # Without the device, torch.autocast("cuda") is entered, but switched off.
    is_inside = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    if is_inside and not torch.cuda.is_available():
        raise ExportError(
            f"export_model is called inside of a torch.autocast that is switched off, as that of "
            f"a device which this machine lacks; its casts would be lost. Export outside of it, "
            f"and {_MIXED_PRECISION}"
        )


class _AutocastInsideError(Exception):
    """Forward switches autocast on."""


@contextmanager
def _without_autocast() -> Iterator[None]:
    """A context in which switching autocast on is an error, whether the device exists or not."""
    plain = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002  as torch's
        cache_enabled: bool | None = None,  # noqa: FBT001  as torch's
    ) -> None:
        if enabled:
            raise _AutocastInsideError
        plain(self, device_type, dtype, enabled, cache_enabled)

    # Patched here and restored below.
    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = plain  # type: ignore[method-assign]


@contextmanager
def _losses_of_labels() -> Iterator[None]:
    """A context in which losses per label have the shape of the labels.

    PyTorch's Python version of `aten.nll_loss`, which tells shapes of tensors with dynamic sizes on
    the meta device, takes the operator's `reduction` for another argument.
    """
    operator = torch.ops.aten.nll_loss.default
    version = decomposition_table.pop(operator, None)
    try:
        yield
    finally:
        if version is not None:
            decomposition_table[operator] = version


@contextmanager
def traced(model: nn.Module, what: str) -> Iterator[None]:
    """A context for tracing: its errors become an `ExportError` of one paragraph.

    torch prints the graph so far to stderr when tracing fails; that is left out.

    Args:
        model: the model that is traced.
        what: its name in messages.

    Raises:
        ExportError: the model cannot be traced.
    """
    names = {id(module): name for name, module in model.named_modules()}
    printed, failure = StringIO(), None
    decisions = SizeDecisions()
    try:
        with (
            redirect_stderr(printed),
            _quiet_logs(),
            _without_autocast(),
            _losses_of_labels(),
            decisions.noted(),
        ):
            yield
    except AutoshardError:
        raise
    except Exception as error:  # noqa: BLE001  tracing may raise anything
        failure = error
    graph = f"{getattr(failure, 'partial_fx_graph', None)}\n"
    sys.stderr.write(printed.getvalue().replace(graph, ""))
    if failure is None:
        decisions.warn(what)
    else:
        raise decisions.explain(failure, what) or _explained(failure, names, what) from None


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Hold back warnings of torch's loggers, which say the same at greater length."""
    loggers = [log for name, log in logging.root.manager.loggerDict.items() if name[:5] == "torch"]
    handlers = [x for log in loggers if isinstance(log, logging.Logger) for x in log.handlers]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)


@dataclass(frozen=True)
class _Place:
    """Place where tracing failed.

    Attributes:
        module: name of the innermost module; "" for the model itself.
        line: file, line and code of the innermost frame of the user, as text.
        is_flex: True if it is a call of FlexAttention.
    """

    module: str
    line: str
    is_flex: bool = False


def _explained(error: Exception, names: Mapping[int, str], what: str) -> ExportError:
    place = _place(error.__traceback__, names, getattr(error, "real_stack", None))
    message = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    kind = type(error).__name__
    depends = isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException)
    if place.is_flex:
        cause = (
            "FlexAttention runs a sub-graph, for which there is no sharding rule: use "
            "torch.nn.functional.scaled_dot_product_attention with a mask, which plans shard by "
            "heads"
        )
    elif "Cache" in message:
        return ExportError(
            f"torch.export cannot trace {what}{place.line}: a key-value cache is no tensor. Pass "
            f"use_cache=False, or export a module whose static cache is in its buffers, such as "
            f"transformers' TorchExportableModuleWithStaticCache ({kind}: {message[:200]})",
            place.module,
        )
    elif isinstance(error, _AutocastInsideError):
        cause = (
            f"torch.autocast is switched on, whose casts depend on the device; {_MIXED_PRECISION}"
        )
        kind = ""
    elif depends or "meta tensors" in message:
        cause = "control flow or a size depends on the data of a tensor: use torch.where or masks"
    else:
        cause = f"{kind}: {message[:300]}"
        kind = ""
    detail = f" ({kind}: {message[:200]})" if kind and not place.is_flex else ""
    return ExportError(
        f"torch.export cannot trace {what}{place.line}: {cause}{_remedy(place.module)}{detail}",
        place.module,
    )


def _remedy(module: str) -> str:
    custom = "make the function a torch.library.custom_op"
    if not module:
        return f". Otherwise {custom}, or move it to a module of its own and keep that whole"
    keep = f"keep the module whole with export_model(..., opaque=[{module!r}])"
    return f". Otherwise {keep}, or {custom}"


def _place(
    traceback: TracebackType | None, names: Mapping[int, str], stack: StackSummary | None
) -> _Place:
    module, kind, line, is_flex = "", "", "", False
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            module, kind = names[id(owner)], type(owner).__name__
        if not frame.f_code.co_filename.startswith((*OWN_FOLDERS, "<")):
            line = f", {line_of(frame.f_code.co_filename, traceback.tb_lineno)}"
        is_flex = is_flex or frame.f_code.co_name in _FLEX
        traceback = traceback.tb_next
    if not line and stack:  # dynamo has run the code without Python frames
        line = f", {stack[-1].filename}:{stack[-1].lineno}, `{(stack[-1].line or '')[:100]}`"
    inside = f" in module {module!r} ({kind})" if module else ""
    return _Place(module, f"{inside}{line}", is_flex)


_FLEX = frozenset({"flex_attention", "create_block_mask"})


_PRODUCTS = frozenset(
    {"addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm"}
)


def check_products(program: ExportedProgram, what: str) -> None:
    """Check that the factors of matrix products and convolutions have one element type.

    Tensors on the meta device, on which models are traced, do not check that.

    Raises:
        ExportError: they have not; the message has the module and the element types.
    """
    for node in program.graph.nodes:
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if packet not in _PRODUCTS:
            continue
        values = [arg.meta.get("val") for arg in node.all_input_nodes]
        dtypes = {x.dtype for x in values if isinstance(x, torch.Tensor)}
        if len(dtypes) > 1:
            modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            module = modules[-1] if modules else ""
            inside = f" in module {module!r}" if module else ""
            found = " and ".join(sorted(map(str, dtypes)))
            raise ExportError(
                f"{packet} of {what}{inside} multiplies {found}, which torch does not: convert one "
                f"of them, as in x.to(weight.dtype). With mixed_precision, parameters and "
                f"arguments are converted, but not buffers, nor what forward creates",
                module,
            )


def check_sizes(program: ExportedProgram, what: str) -> None:
    """Check that no size depends on data, and that numbers made of dynamic sizes can be computed.

    Raises:
        ExportError: one does, or cannot be; the message has the file and the line.
    """
    check_numbers(program, what)
    for node in program.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(free_unbacked_symbols(tensor) for tensor in tensors):
            modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
            module = modules[-1] if modules else ""
            lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
            code = lines[-2:] if len(lines) > 1 else lines
            at = " ".join(line.strip() for line in code)
            inside = f" in module {module!r}" if module else ""
            raise ExportError(
                f"a size in {what}{inside} depends on data ({node.target}{', ' * bool(at)}{at}): "
                f"use masks of a fixed size{_remedy(module)}",
                module,
            )
