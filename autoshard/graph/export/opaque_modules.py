"""Keeps modules whole in an export: their forward becomes a call of one operator."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from autoshard.errors import ExportError
from autoshard.graph.dtype import DType
from autoshard.graph.export.replaced_tensors import call_with_tensors
from autoshard.graph.opaque_call import OpaqueCall, OpaqueModule
from autoshard.torch_private import pytree, version_counter

T = TypeVar("T")
State = dict[str, torch.Tensor]

_TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
"""Differences between the rows of a whole batch and those of its halves."""


torch.library.define(
    "autoshard::opaque_module",
    "(Tensor[] tensors, Tensor[] state, str call, float flops=0., int saved_bytes=0, "
    "bool along_batch=False, bool random=False) -> Tensor[]",
)


def _made(
    tensors: list[torch.Tensor],
    state: list[torch.Tensor],
    call: str,
    *_args: object,
    **_kwargs: object,
) -> list[torch.Tensor]:
    found = OpaqueCall.from_json(call)
    device = next((tensor.device for tensor in (*tensors, *state)), None)
    results = [
        torch.empty(shape, dtype=getattr(torch, dtype.value), device=device)
        for shape, dtype in found.results
    ]
    by_name = dict(zip(found.state, state, strict=True))
    return [*results, *(torch.empty_like(by_name[name]) for name in found.updated)]


torch.library.register_fake("autoshard::opaque_module", _made)


def call_module(
    module: nn.Module, arguments: tuple[Sequence[Any], Mapping[str, Any]], state: State
) -> tuple[Any, State]:
    """Call a module with other parameters and buffers.

    Args:
        module: it is not changed, apart from attributes that its forward sets.
        arguments: those by position, and those by name.
        state: parameters and buffers by name.

    Returns:
        The result, and the buffers that forward has replaced or written into.

    Raises:
        ExportError: forward writes into an argument or into a parameter.
    """
    buffers = [name for name, _ in module.named_buffers() if name in state]
    before = {name: version_counter(tensor) for name, tensor in state.items()}
    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    versions = [version_counter(tensor) for tensor in given]
    replaced = dict(state)
    result = call_with_tensors(module, module, replaced, arguments)
    after = {name: replaced[name] for name in buffers}
    written = [
        name for name in state if name not in after and version_counter(state[name]) != before[name]
    ]
    if written or versions != [version_counter(tensor) for tensor in given]:
        what = f"its parameter {written[0]!r}" if written else "an argument"
        raise ExportError(f"forward writes into {what}; let it work on a copy")
    return result, {
        name: tensor
        for name, tensor in after.items()
        if tensor is not state[name] or version_counter(tensor) != before[name]
    }


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors in the result of an opaque module.

    Raises:
        ExportError: there is something else than tensors and None.
    """
    leaves = pytree.tree_leaves(result)
    other = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, torch.Tensor)]
    if other:
        raise ExportError(
            f"it returns a {type(other[0]).__name__}, which a program cannot pass on; return "
            f"tensors in tuples, lists or dicts"
        )
    return [leaf for leaf in leaves if leaf is not None]


class OpaqueModules:
    """The modules of a model that are kept whole.

    Args:
        model: the model with its weights, which is not changed.
        opaque: the modules that are kept whole.

    Raises:
        ExportError: an entry names no inner module.

    Attributes:
        inside: names of the modules, and of all modules inside.
    """

    def __init__(self, model: nn.Module, opaque: Iterable[str | type | OpaqueModule]) -> None:
        modules = dict(model.named_modules())
        inside: set[str] = set()
        self._runs: dict[str, _OpaqueRun] = {}
        for name, entry in sorted(_chosen(modules, opaque).items()):
            if name not in inside:
                module = modules[name]
                inside.update(f"{name}.{inner}".rstrip(".") for inner, _ in module.named_modules())
                self._runs[name] = _OpaqueRun(module, entry)
        self.inside = frozenset(inside)

    def replace_in(self, twin: nn.Module) -> None:
        """Make the modules of a copy call the operator.

        Args:
            twin: a copy of the model on the meta device.
        """
        for name, run in self._runs.items():
            module = twin.get_submodule(name)
            for each in module.modules():
                _remove_hooks(each)
            module.forward = _TracedModule(name, module, run).forward

    def measure(self, twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Run each module on random inputs, as a copy of the model calls it.

        The copy computes shapes only. Where that fails, tracing will say why.

        Args:
            twin: a copy of the model on the meta device, which is not changed.
            args: example arguments on the meta device.
            kwargs: likewise.

        Raises:
            ExportError: a module cannot be kept whole.
        """
        if not self._runs:
            return
        twin = copy.deepcopy(twin)
        self.replace_in(twin)
        try:
            twin(*args, **kwargs)
        except ExportError:
            raise
        except Exception:  # noqa: BLE001, S110  the export meets it again, and explains it
            pass


def _chosen(
    modules: Mapping[str, nn.Module], opaque: Iterable[str | type | OpaqueModule]
) -> dict[str, OpaqueModule]:
    found: dict[str, OpaqueModule] = {}
    for item in opaque:
        entry = item if isinstance(item, OpaqueModule) else OpaqueModule(item)
        wanted = entry.module
        if isinstance(wanted, str):
            names = [wanted] if wanted in modules else []
        else:
            names = [name for name, module in modules.items() if isinstance(module, wanted)]
        if not names:
            close = get_close_matches(str(wanted), modules, n=3)
            near = f"; similar names: {', '.join(close)}" if close else ""
            raise ExportError(f"the model has no module {wanted!r} to keep whole{near}")
        if "" in names:
            raise ExportError(
                "the whole model cannot be opaque; name inner modules, as named_modules() does"
            )
        found.update(dict.fromkeys(names, entry))
    return found


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of a copy: those of the module itself run when it is called."""
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value.clear()


@dataclass(frozen=True)
class _Measured:
    """Findings of a run of an opaque module.

    Attributes:
        result: the result, with tensors on the meta device.
        updated: names of the buffers that forward updates.
        flops: floating-point operations of forward.
        saved_bytes: bytes that autograd saves, apart from arguments and state.
        random: True if it draws random numbers.
    """

    result: Any
    updated: tuple[str, ...] = ()
    flops: float = 0.0
    saved_bytes: int = 0
    random: bool = True


class _TracedModule:
    """Stands for an opaque module while the model is traced."""

    def __init__(self, name: str, module: nn.Module, run: "_OpaqueRun") -> None:
        self._name = name
        self._module = module
        self._run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator."""
        try:
            return self._call(args, kwargs)
        except ExportError as error:
            what = type(self._module).__name__
            message = f"the opaque module {self._name!r} ({what}): {error}"
            raise ExportError(message, self._name) from None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        entry = self._run.entry
        if entry.outputs is not None:
            measured = _Measured(entry.outputs(*args, **kwargs), flops=entry.flops or 0.0)
        else:
            measured = self._run.measured([_Like.of(leaf) for leaf in leaves], spec)
        results = tensors_of(measured.result)
        state = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        call = OpaqueCall(
            arguments=_spec_text(spec),
            literals=tuple(_literals(leaves)),
            state=tuple(state),
            updated=measured.updated,
            results=tuple((tuple(x.shape), DType(str(x.dtype).split(".")[1])) for x in results),
        )
        made = torch.ops.autoshard.opaque_module(
            tensors,
            list(state.values()),
            call.to_json(),
            float(measured.flops),
            measured.saved_bytes,
            entry.along_batch,
            measured.random,
        )
        for name, contents in zip(measured.updated, made[len(results) :], strict=True):
            state[name].copy_(contents.detach())
        flat, structure = pytree.tree_flatten(measured.result)
        rest = iter(made)
        return structure.unflatten(leaf if leaf is None else next(rest) for leaf in flat)


def _spec_text(spec: pytree.TreeSpec) -> str:
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ExportError(f"its arguments cannot be stored ({error}); pass tensors") from None


def _literals(leaves: Sequence[Any]) -> Iterator[tuple[int, bool | int | float | str | None]]:
    for i, leaf in enumerate(leaves):
        if leaf is None or isinstance(leaf, bool | int | float | str):
            yield i, leaf
        elif not isinstance(leaf, torch.Tensor):
            raise ExportError(
                f"an argument is a {type(leaf).__name__}; pass tensors, numbers, strings or None"
            )


@dataclass(frozen=True)
class _Like:
    """An argument of an opaque module: a tensor to be made, or a literal."""

    literal: Any
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False

    @classmethod
    def of(cls, leaf: Any) -> "_Like":
        if not isinstance(leaf, torch.Tensor):
            return cls(leaf)
        if not all(isinstance(size, int) for size in leaf.shape):
            raise ExportError("its tensors have dynamic sizes; export with static ones")
        return cls(None, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)

    def make(self, device: torch.device, generator: torch.Generator) -> Any:
        """Normal numbers, or zeros in integers, which are valid indices."""
        if self.shape is None or self.dtype is None:
            return self.literal
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        made = torch.randn(self.shape, generator=generator).to(device, self.dtype)
        # Forward may write into tensors that are no leaves of autograd.
        return made.requires_grad_().clone() if self.requires_grad else made


class _OpaqueRun:
    """Runs a copy of an opaque module on random inputs.

    Args:
        module: the module of the model.
        entry: how it is kept whole.
    """

    def __init__(self, module: nn.Module, entry: OpaqueModule) -> None:
        self._module = module
        self.entry = entry
        self._known: dict[str, _Measured] = {}

    def measured(self, like: Sequence[_Like], spec: pytree.TreeSpec) -> _Measured:
        """Findings of a run with such arguments; it runs once.

        Raises:
            ExportError: the module cannot be kept whole.
        """
        key = repr((like, spec))  # tells 1, 1.0 and True apart
        if key not in self._known:
            # Modes that compute shapes only belong to the thread.
            with ThreadPoolExecutor(1) as pool:
                self._known[key] = pool.submit(self._run, like, spec).result()
        return self._known[key]

    def _run(self, like: Sequence[_Like], spec: pytree.TreeSpec) -> _Measured:
        """Run the module as the model calls it.

        Raises:
            ExportError: it fails, or rows depend on each other although it runs along the batch.
        """
        try:
            return self._measure(like, spec)
        except ExportError:
            raise
        except Exception as error:  # noqa: BLE001  forward may raise anything
            cause = next(iter(str(error).strip().splitlines()), "")
            raise ExportError(
                f"it does not run on random inputs ({type(error).__name__}: {cause}); state the "
                f"shapes of its results with OpaqueModule(..., outputs=...)"
            ) from None

    def _measure(self, like: Sequence[_Like], spec: pytree.TreeSpec) -> _Measured:
        module, arguments = _real_copy(self._module), self._arguments(like, spec)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        known = {
            x.untyped_storage().data_ptr()
            for x in (*state.values(), *pytree.tree_leaves(arguments))
            if isinstance(x, torch.Tensor)
        }
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        run = partial(call_module, module, arguments, state)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            (result, changed), random = _with_random_numbers(run)
        results = tensors_of(result)
        if self.entry.along_batch:
            self._check_batch(like, spec, results, changed)
        meta = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().to("meta"), result)
        flops = self._count_flops(like, spec) if self.entry.flops is None else self.entry.flops
        return _Measured(meta, tuple(changed), flops, sum(saved.values()), random)

    def _count_flops(self, like: Sequence[_Like], spec: pytree.TreeSpec) -> float:
        """The operations of forward; 0 if they cannot be counted, as in FlexAttention."""
        args, kwargs = self._arguments(like, spec)
        try:
            with torch.random.fork_rng(), FlopCounterMode(display=False) as counter:
                _real_copy(self._module)(*args, **kwargs)
        except Exception:  # noqa: BLE001  operators may refuse modes with any error
            torch.compiler.reset()  # forgets that FlexAttention could not be compiled
            return 0.0
        return float(counter.get_total_flops())

    def _arguments(
        self, like: Sequence[_Like], spec: pytree.TreeSpec
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        device = next(
            (x.device for x in self._module.parameters() if not x.is_meta), torch.device("cpu")
        )
        found: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_unflatten(
            [one.make(device, generator) for one in like], spec
        )
        return found

    def _check_batch(
        self,
        like: Sequence[_Like],
        spec: pytree.TreeSpec,
        results: Sequence[torch.Tensor],
        changed: State,
    ) -> None:
        """Check that the rows of the batch do not depend on each other."""
        shapes = [one.shape for one in like if one.shape is not None]
        size = shapes[0][0] if shapes and shapes[0] else 0
        if not size or any(x.shape[:1] != (size,) for x in results) or changed:
            what = "updates buffers" if changed else "has results without the batch as dim 0"
            raise ExportError(f"it {what}, so it cannot run along the batch")
        module = _real_copy(self._module).eval()
        whole = self._arguments(like, spec)
        flat, structure = pytree.tree_flatten(whole)
        parts = [
            [x.split(-(-size // 2))[i] if _has_rows(x, size) else x for x in flat]
            for i in range(min(size, 2))
        ]

        def run() -> list[list[torch.Tensor]]:
            calls = (whole, *(structure.unflatten(part) for part in parts))
            with torch.no_grad():
                return [tensors_of(module(*args, **kwargs)) for args, kwargs in calls]

        (expected, *found), random = _with_random_numbers(run)
        joined = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        pairs = zip(expected, joined, strict=True)
        if not random and not all(_is_close(one, other) for one, other in pairs):
            raise ExportError(
                "its rows depend on each other: on half a batch it computes something else, so it "
                "cannot run along the batch"
            )


def _has_rows(value: object, size: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:1] == (size,)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), **_TOLERANCE, equal_nan=True
    )


def _with_random_numbers(run: Callable[[], T]) -> tuple[T, bool]:
    """The result of a function, and whether it draws random numbers; generators are restored."""
    with torch.random.fork_rng():
        before = _generator_states()
        result = run()
        after = _generator_states()
    return result, not all(map(torch.equal, before, after))


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])


def _real_copy(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and has buffers of its own; meta tensors get random values."""
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        contents = tensor.detach()
        if tensor.is_meta:
            like = replace(_Like.of(tensor), requires_grad=False)
            contents = like.make(torch.device("cpu"), generator)
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(contents, requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = contents if tensor.is_meta else contents.clone()
    return copy.deepcopy(module, memo)
