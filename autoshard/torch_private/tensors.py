"""Private parts of `torch` itself: tensors, autograd, modules and operators."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import Node
from torch.utils.data import RandomSampler

from autoshard.torch_private.versions import expected_of_torch

with expected_of_torch("base classes and exceptions in private modules"):
    from torch._decomp import decomposition_table
    from torch._export.serde import serialize
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "decomposition_table",
    "pytree",
    "serialize",
]
# Documented by PyTorch, and public in all but the place: the classes of operators, an exception and
# the archives of torch.export, modes that see every operator, operators as functions of others, and
# nested containers of tensors.

BatchNormBase = _BatchNorm
"""The base class of all batch norms.

Relies on: `nn.BatchNorm1d` to `nn.SyncBatchNorm` derive from it; they have no public base class.
"""

DropoutBase = _DropoutNd
"""The base class of all dropouts, with the probability `p`.

Relies on: `nn.Dropout` to `nn.FeatureAlphaDropout` derive from it; they have no public base class.
"""

TensorT = TypeVar("TensorT", bound=torch.Tensor)
Function = Callable[..., Any]


def check_input_dim(norm: _BatchNorm, x: torch.Tensor) -> None:
    """Check the number of dims of a batch norm's input, as its forward does.

    Relies on: `_check_input_dim`, which each class defines; there is no public check.
    """
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]  # torch


def register_named_tuple(kind: type, name: str) -> None:
    """Register a named tuple as a node of pytrees, under the name that archives have for it.

    Relies on: `_register_namedtuple`, which the error of `torch.export.save` tells users to call.
    """
    pytree._register_namedtuple(kind, serialized_type_name=name)


_SAVED = "_saved_"
_ARGUMENTS = re.compile(
    _SAVED + r"(self|other|input|mat[12]|vec2?|batch[12]|tensors?[12]?|weights?|bias|condition|mask"
    r"|index|indices|target|exponent|end|query|key|value|running_(mean|var)|result[1-9])"
)
"""Names under which autograd keeps arguments of operators, and further results such as means."""


def saves_result(node: Node | None) -> bool:
    """True if backward of the function that computed a tensor may need the tensor itself.

    Relies on: nodes of autograd have what they save as `_saved_<name>`, with the names of
    `derivatives.yaml`; those of an `autograd.Function` have `saved_tensors`. Public is only the
    graph of the nodes.

    Args:
        node: `grad_fn` of the tensor. Views and copies of a tensor that is needed count as well.
    """
    while node is not None:
        saved = [name for name in dir(node) if name.startswith(_SAVED) and _is_tensor(node, name)]
        if not all(map(_ARGUMENTS.fullmatch, saved)) or _saves_tensors(node):
            return True
        if saved or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def _saves_tensors(node: Node) -> bool:
    """True if an `autograd.Function` has saved tensors, which may be its results."""
    try:
        return bool(getattr(node, "saved_tensors", ()))
    except RuntimeError:  # they are freed, since backward has run
        return False


def _is_tensor(node: Node, name: str) -> bool:
    try:
        return isinstance(getattr(node, name), torch.Tensor)
    except RuntimeError:  # written since, or freed
        return True


def version_counter(tensor: torch.Tensor) -> int:
    """Number of writes into a tensor and its views; 0 where they are not counted.

    Relies on: operators in place increase `_version`, by which autograd notices changes of what it
    has saved. Public is only the way to increase it.
    """
    return 0 if tensor.is_inference() else tensor._version


def reads_autograd(function: Any) -> bool:
    """True for functions that read how autograd computed a tensor, and not its values.

    Relies on: modes of `__torch_function__` are given the getters of `grad_fn`, of `_version` (the
    number of writes) and of `_base` (the tensor that a view is of), and `_is_view`.
    """
    attribute = getattr(function, "__self__", None)
    of_autograd = (torch.Tensor.grad_fn, torch.Tensor._version, torch.Tensor._base)
    return attribute in of_autograd or function is torch.Tensor._is_view


def backward_pass() -> int:
    """Number of the backward pass that this thread runs; -1 outside of one.

    Relies on: `_current_graph_task_id`, by which `torch.utils.checkpoint` tells passes apart. There
    is no public way to ask.
    """
    return torch._C._current_graph_task_id()


def runs_backward() -> bool:
    """True if this thread runs a backward pass."""
    return backward_pass() != -1


call_with_hooks: Callable[..., Any] = nn.Module._call_impl
"""Hooks and forward of a module.

Relies on: `__call__` of a module runs it, unless the module has a compiled one. The public
`__call__` cannot be reached where a subclass replaces it and compiles.
"""


def accumulates(leaf: Node) -> bool:
    """True if the running backward pass adds to the gradient of a leaf, instead of returning it.

    Relies on: `_will_engine_execute_node` is true for what `backward()` computes, and an error for
    leaves whose gradient `torch.autograd.grad` returns. `torch.autograd.graph` uses it so; there
    is no public way to ask.

    Args:
        leaf: the node that accumulates its gradient.
    """
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:
        return False


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """True if hooks see or replace the gradient of a leaf.

    Relies on: `register_hook` and `register_post_accumulate_grad_hook` store hooks in these two
    attributes. Optimizers of torch read them; there is no public way to ask.
    """
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks)


def is_transformed() -> bool:
    """True inside of a transform of `torch.func`, such as `vmap`.

    Relies on: `peek_interpreter_stack` returns the innermost transform, or None. There is no public
    way to ask.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which functions of torch do not call `__torch_function__` of subclasses.

    Relies on: `DisableTorchFunctionSubclass`, which the pages of torch on extending it name. It
    has no public place.
    """
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def tensor_without_memory(kind: type[TensorT], like: torch.Tensor) -> TensorT:
    """A tensor of a subclass with the size, element type and device of another one.

    Relies on: `_make_wrapper_subclass`, by which DTensor is made. There is no public way to make
    a tensor without memory on a device.
    """
    made: TensorT = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, dtype=like.dtype, device=like.device
    )
    return made


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two plain tensors are views of one storage.

    Relies on: `_cdata` is the address of a storage. The public `data_ptr` is 0 of all empty ones.
    """
    first, second = one.untyped_storage(), other.untyped_storage()
    return bool(first._cdata == second._cdata)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Check a flag on its device, without waiting for it; on a GPU, a failure ends the process.

    Relies on: `_assert_async`. `torch._check` and assertions of Python wait for the device.
    """
    torch._assert_async(condition, message)


def schema_of(operator: Any) -> Any:
    """The schema of an operator: its name, arguments, and what it writes.

    Relies on: `OpOverload._schema`, which `torch.export` reads as well. There is no public one.
    """
    return operator._schema


def overload_name(operator: Any) -> str:
    """The name of an overload among those of an operator, as `Tensor` of `add.Tensor`.

    Relies on: `_overloadname`, the last part of the public `name()`, which leaves out `default`.
    """
    name: str = operator._overloadname
    return name


def operator_names() -> list[str]:
    """The names of all operators that are registered, as `aten::add.Tensor`.

    Relies on: `_dispatch_get_all_op_names`. The public `dir(torch.ops.aten)` has only those that
    have been used.
    """
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module without those of its children; the module's own dict.

    Relies on: `_parameters`, which `torch.func.functional_call` reads as well. The public
    `named_parameters` leaves out None, and is too slow for every call.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module without those of its children; the module's own dict.

    Relies on: `_buffers`, as `own_parameters` does on `_parameters`.
    """
    return module._buffers


@contextmanager
def _checkpoints(reentrant: Function, other: Function) -> Iterator[None]:
    """A context in which `torch.utils.checkpoint` calls other functions in place of its two parts.

    Relies on: it looks up both parts in its module, and passes them the checkpointed function
    first; the generator's name has the suffix `_impl` since PyTorch 2.15. Public are only contexts
    that the caller of `checkpoint` passes, which may be a library.

    Args:
        reentrant: makes the part that calls the function and returns its result from that part.
        other: makes the part that is a generator, and waits while the function is called.
    """
    module: Any = torch.utils.checkpoint
    named = "_checkpoint_without_reentrant_generator"
    generator = f"{named}_impl" if hasattr(module, f"{named}_impl") else named
    kind, before = module.CheckpointFunction, getattr(module, generator)
    apply, is_replaced = kind.apply, "apply" in vars(kind)
    kind.apply = reentrant(apply)
    setattr(module, generator, other(before))
    try:
        yield
    finally:
        setattr(module, generator, before)
        if is_replaced:
            kind.apply = apply
        else:
            del kind.apply


def checkpointed(change: Callable[[Function], Function]) -> AbstractContextManager[None]:
    """A context in which `torch.utils.checkpoint` recomputes changed functions in backward.

    Args:
        change: makes the function that is recomputed.
    """

    def changed(part: Function) -> Function:
        return lambda function, *rest, **options: part(change(function), *rest, **options)

    return _checkpoints(changed, changed)


def without_checkpoints() -> AbstractContextManager[None]:
    """A context in which `torch.utils.checkpoint` only calls its function."""

    def called(_part: Function) -> Function:
        return lambda function, _preserves, *args: function(*args)

    def waiting(_part: Function) -> Function:
        def wait(*_: Any, **__: Any) -> Iterator[None]:
            yield

        return wait

    return _checkpoints(called, waiting)


def given_num_samples(sampler: RandomSampler) -> int | None:
    """The number of samples that a sampler was given; None if it follows the dataset.

    Relies on: `_num_samples` keeps the argument; the public `num_samples` replaces None.
    """
    return sampler._num_samples


def safe_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax that is zero, not NaN, where all scores are minus infinity.

    Relies on: the operator `_safe_softmax`, which `scaled_dot_product_attention` uses. It has no
    public function.
    """
    weights: torch.Tensor = torch.ops.aten._safe_softmax(scores, dim)
    return weights
