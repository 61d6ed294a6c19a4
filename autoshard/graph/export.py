"""Export of a PyTorch model to a `.pt2` archive without weights.

The only module of this package that needs torch; it is imported on first use.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from io import BytesIO
from typing import Any

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.errors import GraphError
from autoshard.graph.archive import CONSTANT_BYTES, EXPORT_FILE, ExportRecord
from autoshard.graph.forward_code import forward_code, hooked_modules
from autoshard.graph.ir import ExportedModel

_TORCH_MODULES = "torch."
"""Module prefix of torch's own functions, whose backward matches their forward."""


@contextmanager
def custom_functions() -> Iterator[set[str]]:
    """Collect the names of custom `autograd.Function`s that are called inside the context.

    An exported graph has the operators of their forward, but not their backward. Only calls with
    an input that requires a gradient count.
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
        return plain.__func__(cls, *args, **kwargs)

    # Patched here and restored below.
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        Function.apply = plain  # type: ignore[method-assign]


def export_model(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> bytes:
    """Export a model on the meta device, in the training or evaluation mode it is in.

    The model is not changed or moved, and its weights are not copied: the exported module is a
    copy whose tensors are on the meta device. Small tensors that forward creates from numbers, as
    in `torch.tensor(0.5)`, keep their values.

    Args:
        model: the model; its weights may be on any device, the meta device included.
        args: example arguments of forward; the plan is made for their shapes.
        kwargs: example keyword arguments of forward.
        loss: a criterion that becomes a part of the program, called with the result of forward
            and the targets. The planned model then takes the targets after `args` and returns the
            loss, so that logits need not leave the ranks that compute them.
        targets: example targets of the loss.
        dynamic_shapes: dynamic sizes, as in `torch.export.export`. The plan is made for the
            example sizes, and runs with other sizes that its layouts can shard.
        strict: as in `torch.export.export`.

    Returns:
        The bytes of the archive, for `load_graph` and `torch.export.load`. It also records tied
        parameters, the model's mode, and a digest of the code of forward.

    Raises:
        GraphError: the model cannot be copied, traced or saved, or a gradient passes through a
            custom `autograd.Function`; the message has the cause.

    Example:
        >>> export_model(model, (images,), loss=nn.CrossEntropyLoss(), targets=(labels,))
    """
    what = type(model).__name__
    with _named(f"{what} cannot be copied to the meta device"):
        twin = _meta_copy(model)
        if loss is not None:
            twin.__class__ = _with_loss(type(twin), copy.deepcopy(loss), len(args), len(targets))
        meta_args, meta_kwargs = pytree.tree_map(_to_meta, ((*args, *targets), kwargs or {}))
    tracing = _named(f"torch.export cannot trace {what}")
    # Dynamo (strict tracing) would trace into the mode instead of running it.
    numbers = nullcontext() if strict else _KeepNumbers()
    meta = torch.device("meta")
    with tracing, torch.enable_grad(), meta, numbers, custom_functions() as found:
        program = torch.export.export(
            twin, meta_args, meta_kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )
    if found:
        raise GraphError(
            f"{what} has custom gradients ({', '.join(sorted(found))}), which an exported graph "
            f"does not keep. Make each a torch.library.custom_op with register_autograd, or call "
            f"model.requires_grad_(False) to plan inference"
        )
    buffer = BytesIO()
    hooked = hooked_modules(dict(model.named_modules()))
    code = forward_code(type(module) for module in model.modules())
    exported = ExportedModel(model.training, code, hooked)
    record = ExportRecord(tied_names(model), exported).to_json().decode()
    with _named(f"the exported {what} cannot be saved"):
        torch.export.save(program, buffer, extra_files={EXPORT_FILE: record})
    return buffer.getvalue()


def _with_loss(
    model: type[torch.nn.Module], loss: Callable[..., torch.Tensor], num_args: int, num_targets: int
) -> type[torch.nn.Module]:
    """A subclass whose forward takes targets after its arguments, and returns the loss."""

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = model.forward(self, *args[:num_args], **kwargs)
        return loss(result, *args[num_args:])

    # The export names inputs by the parameters of forward.
    own = list(inspect.signature(model.forward).parameters.values())
    names = ["target"] if num_targets == 1 else [f"target_{i}" for i in range(num_targets)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    rest = [p.replace(kind=p.KEYWORD_ONLY) for p in own[num_args + 1 :] if p.kind is kind]
    parameters = [p.replace(kind=kind, default=p.empty) for p in own[: num_args + 1]]
    parameters += [inspect.Parameter(name, kind) for name in names]
    vars(forward)["__signature__"] = inspect.Signature([*parameters, *rest])
    return type(model.__name__, (model,), {"forward": forward, "__module__": model.__module__})


def tied_names(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names of tied parameters, in the order of the model."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


class _KeepNumbers(TorchFunctionMode):
    """Create tensors from numbers on the CPU, so that they have values, and move them to meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept a torch function."""
        given = kwargs or {}
        if func in _OF_NUMBERS and _is_of_small_numbers(args, given):
            return func(*args, **{**given, "device": "cpu"}).to("meta")
        return func(*args, **given)


_OF_NUMBERS = (torch.tensor, torch.as_tensor)


def _is_of_small_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    data = args[0] if args else kwargs.get("data")
    device = torch.device(kwargs.get("device") or "meta")
    leaves = pytree.tree_leaves(data)
    plain = all(isinstance(leaf, (bool, int, float)) for leaf in leaves)
    small = 8 * len(leaves) <= CONSTANT_BYTES
    return plain and small and device.type == "meta" and not kwargs.get("requires_grad")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Convert any exception to a GraphError that starts with `what`."""
    try:
        yield
    except Exception as error:
        cause = next(iter(str(error).strip().splitlines()), "")
        raise GraphError(f"{what}: {type(error).__name__}: {cause}") from error


def _meta_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Deep copy with every tensor replaced by one on the meta device.

    All tensors are in the memo of deepcopy, so that no contents are copied and shared tensors stay
    shared.
    """
    memo: dict[int, Any] = {id(t): _to_meta(t) for t in _tensors(model)}
    return copy.deepcopy(model, memo)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors in attributes and containers of modules."""
    for module in model.modules():
        yield from (v for v in pytree.tree_leaves(vars(module)) if isinstance(v, torch.Tensor))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    return value
