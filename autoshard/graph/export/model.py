"""Export of a PyTorch model to a `.pt2` archive without weights.

The only module of this package that needs torch; it is imported on first use.
"""

import copy
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from autoshard.base.arguments import check_arguments
from autoshard.errors import ExportError, GraphError
from autoshard.graph.archive.read import EXPORT_FILE, ExportRecord
from autoshard.graph.export.batch_norms import average_with_tensors
from autoshard.graph.export.captured import constant_paths, held_tensors
from autoshard.graph.export.casting import cast_parameters, with_casts
from autoshard.graph.export.held_state import follow_state
from autoshard.graph.export.opaque_modules import OpaqueModules
from autoshard.graph.export.python_state.description.global_hooks import check_no_global_hooks
from autoshard.graph.export.python_state.description.paths import HOOKS, path_text
from autoshard.graph.export.python_state.description.queries import GRAD_MODE
from autoshard.graph.export.python_state.description.values import Value
from autoshard.graph.export.python_state.description.wording import check_patterns, is_ignored
from autoshard.graph.export.python_state.record import record_of
from autoshard.graph.export.python_state.recording.recorder import Recorder
from autoshard.graph.export.repetition.repeated import Repetition
from autoshard.graph.export.structured_types import register_types
from autoshard.graph.export.tracing import (
    OnMeta,
    check_no_autocast,
    check_products,
    check_sizes,
    custom_functions,
    traced,
)
from autoshard.graph.ir import ExportedModel
from autoshard.graph.mixed_precision import MixedPrecision
from autoshard.graph.opaque_call import OpaqueModule
from autoshard.torch_private import pytree, untested, without_canonical_form

_log = logging.getLogger(__name__)


@check_arguments
def export_model(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    opaque: Iterable[str | type | OpaqueModule] | Literal["auto"] = (),
    dynamic_shapes: Any = None,
    strict: bool = False,
    mixed_precision: MixedPrecision | str | Any = None,
    ignore_state: Collection[str] = (),
) -> bytes:
    """Export a model on the meta device, in the training or evaluation mode it is in.

    Gradients are enabled while it is traced, except if forward asks for that, as through
    `torch.is_grad_enabled()`, and the export is made under `torch.no_grad()`.

    The model is not changed or moved, and its weights are not copied: the exported module is a
    copy whose tensors are on the meta device. Small tensors that forward creates from numbers, as
    in `torch.tensor(0.5)`, keep their values.

    Models of transformers are exported without the key-value cache that they would return: as if
    `use_cache` were False in their configs, unless the call passes `use_cache` itself.

    Args:
        model: the model; its weights may be on any device, the meta device included.
        args: example arguments of forward; the plan is made for their shapes.
        kwargs: example keyword arguments of forward.
        loss: a criterion that becomes a part of the program, called with the result of forward
            and the targets. The planned model then takes the targets after `args` and returns the
            loss, so that logits need not leave the ranks that compute them.
        targets: example targets of the loss.
        opaque: modules that are kept whole instead of being traced, since their forward branches
            on data or calls code that cannot be traced: dotted names, classes, or `OpaqueModule`s.
            They run as Python code, replicated or along the batch. "auto" keeps those whole that
            cannot be traced, with all others of their class, and logs which and why.
        dynamic_shapes: dynamic sizes, as in `torch.export.export`. The plan is made for the
            example sizes, and runs with other sizes that its layouts can shard.
        strict: as in `torch.export.export`.
        mixed_precision: element types of computations, reductions and results, with the meaning of
            FSDP2's `MixedPrecisionPolicy`: a `MixedPrecision`, a `MixedPrecisionPolicy`, or a
            `param_dtype` such as "bfloat16". The parameters keep their own element type.
        ignore_state: patterns of Python state on which no result depends, such as
            `["layers.0.calls", "*.step"]`, `"random"` or `"numpy.random"`: forward may change it,
            and it is not compared when the plan is applied and called.

    Returns:
        The bytes of the archive, for `load_graph` and `torch.export.load`. It also records tied
        parameters, the mixed precision, and the Python state that forward reads: attributes,
        modes, globals and code.

    Raises:
        ExportError: the model cannot be traced; the message has module, file and line, the cause,
            and what to do about it. Or `torch.autocast` is active, whose casts are not recorded.
            Or forward changes Python state, or draws random numbers of Python or numpy.
        OptionError: `mixed_precision` has no floating-point element type.
        GraphError: the model cannot be copied or saved, or a gradient passes through a custom
            `autograd.Function`.

    Example:
        >>> export_model(model, (images,), loss=nn.CrossEntropyLoss(), targets=(labels,))
        >>> export_model(model, (ids,), opaque=["encoder.router"])
        >>> export_model(model, (ids,), mixed_precision=MixedPrecision("bfloat16", "float32"))
    """
    check_no_autocast()
    check_patterns(ignore_state)
    check_no_global_hooks(ignore_state)
    policy = None if mixed_precision is None else MixedPrecision.of(mixed_precision)

    def export_as(
        opaque: Iterable[str | type | OpaqueModule], *, gradients: bool, repeats: bool
    ) -> _Exported:
        example = (*args, *targets), kwargs or {}
        twin, hidden = _twin(model)
        stored = cast_parameters(twin, policy) if policy else {}
        _change_forward(twin, policy, loss, num_args=len(args), num_targets=len(targets))
        _remove_own_hooks(twin, loss, ignore_state)
        exported = ExportedModel(model.training, mixed_precision=policy, name=type(model).__name__)
        record = ExportRecord(tied_names(model), exported, stored)
        whole = OpaqueModules(model, opaque)
        recorder = Recorder(twin, type(model), whole.inside, hidden)
        settings: Any = {"dynamic_shapes": dynamic_shapes, "strict": strict, "gradients": gradients}
        repetition = Repetition(recorder, twin) if repeats else None
        try:
            settings |= {"ignored": ignore_state, "repetition": repetition}
            return _export(twin, example, whole, recorder, record, **settings)
        except Exception as error:
            if repetition is None or not repetition.is_used:
                raise
            _log.info("each layer is traced: %s", error)
        return export_as(opaque, gradients=gradients, repeats=False)

    def export(opaque: Iterable[str | type | OpaqueModule]) -> bytes:
        opaque, repeats = tuple(opaque), not strict and dynamic_shapes is None
        if repeats and (reason := untested()):
            _log.info("each layer is traced: %s", reason)
            repeats = False
        found = export_as(opaque, gradients=True, repeats=repeats)
        if path_text(GRAD_MODE) in found.state and not torch.is_grad_enabled():
            # the mode in which forward is to run
            found = export_as(opaque, gradients=False, repeats=repeats)
        return found.archive

    if opaque == "auto":
        return _with_untraceable(model, export)
    if isinstance(opaque, str):
        raise ExportError(f'opaque is {opaque!r}: give a list of modules, or "auto"')
    return export(opaque)


def save_exported(program: torch.export.ExportedProgram) -> bytes:
    """The bytes of the archive of an exported program.

    Raises:
        GraphError: it cannot be saved.
    """
    buffer = BytesIO()
    with _named("torch.export.save cannot save the program"):
        torch.export.save(program, buffer)
    return buffer.getvalue()


def _with_untraceable(model: torch.nn.Module, export: Callable[[Iterable[str]], bytes]) -> bytes:
    """Export a model, and keep modules whole that cannot be traced.

    A module that can be neither traced nor kept whole is tried as a part of its parent.

    Raises:
        ExportError: the model itself cannot be traced.
    """
    modules = dict(model.named_modules())
    kept: set[str] = set()
    while True:
        try:
            return export(kept)
        except ExportError as error:
            name = error.module
            while name and not kept.isdisjoint(_outer_names(name)):
                name = name.rpartition(".")[0]
            if not name or name not in modules:
                raise
            kind = type(modules[name])
            # Modules of torch are not the cause, but how the model calls them.
            is_own = not kind.__module__.startswith("torch.")
            alike = [other for other, module in modules.items() if is_own and type(module) is kind]
            kept.update(other for other in (name, *alike) if other)
            _log.warning("kept whole: %s; %s", ", ".join(sorted({name, *alike})), error)


def _outer_names(name: str) -> Iterator[str]:
    """The names of a module and of the modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _twin(model: torch.nn.Module) -> tuple[torch.nn.Module, list[tuple[object, str]]]:
    """A copy on the meta device, and the attributes that it has not as the model has them."""
    with _named(f"{type(model).__name__} cannot be copied to the meta device"):
        twin = _meta_copy(model)
    return twin, _leave_out_caches(twin)


def _remove_own_hooks(
    twin: torch.nn.Module, loss: Callable[..., Any] | None, ignored: Collection[str]
) -> None:
    """Remove hooks of a copy of the model itself, which run in every call of the planned model."""
    hooks = {name: vars(twin)[name] for name in HOOKS if vars(twin)[name]}
    if loss is not None and any(not is_ignored((name,), ignored) for name in hooks):
        raise ExportError(
            f"the model has hooks of its own ({', '.join(hooks)}), which would be called with the "
            f"loss in place of the result of forward: register them on an inner module, leave the "
            f"loss outside of the export, or export with ignore_state={list(hooks)}"
        )
    for own in hooks.values():
        own.clear()


def _change_forward(
    twin: torch.nn.Module,
    policy: MixedPrecision | None,
    loss: Callable[..., torch.Tensor] | None,
    *,
    num_args: int,
    num_targets: int,
) -> None:
    """Make forward convert arguments and results, and return the loss if there is one."""
    if policy is not None:
        kind = type(twin)
        members = {"forward": with_casts(kind.forward, policy)}
        twin.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
    if loss is not None:
        with _named(f"the loss {loss!r} cannot be copied"):
            loss = copy.deepcopy(loss)
        twin.__class__ = _with_loss(type(twin), loss, num_args, num_targets)


@dataclass(frozen=True)
class _Exported:
    """An archive, and what it records of Python state."""

    archive: bytes
    state: Mapping[str, Value]


def _export(
    twin: torch.nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    whole: OpaqueModules,
    recorder: Recorder,
    record: ExportRecord,
    *,
    ignored: Collection[str],
    repetition: Repetition | None,
    dynamic_shapes: Any,
    strict: bool,
    gradients: bool,
) -> _Exported:
    assert record.model is not None
    what = record.model.name
    with _named(f"{what} cannot be copied to the meta device"):
        meta_args, meta_kwargs = pytree.tree_map(_to_meta, example)
    if whole.inside and dynamic_shapes is not None:
        raise ExportError("opaque modules have fixed sizes; export without dynamic_shapes")
    with torch.set_grad_enabled(gradients), torch.device("meta"), OnMeta():
        whole.measure(twin, meta_args, meta_kwargs)
    whole.replace_in(twin)
    average_with_tensors(twin)
    follow_state(twin)
    register_types(example)
    twin.register_forward_hook(lambda _, __, result: register_types(result))

    def trace(*, strict: bool) -> ExportedProgram:
        # Dynamo (strict tracing) would trace into these modes instead of running them.
        modes = (nullcontext(),) if strict else (OnMeta(), recorder.recording())
        with ExitStack() as stack:
            contexts = (traced(twin, what), torch.set_grad_enabled(gradients), torch.device("meta"))
            for context in (*contexts, *modes):
                stack.enter_context(context)
            return torch.export.export(
                twin, meta_args, meta_kwargs, dynamic_shapes=dynamic_shapes, strict=strict
            )

    with custom_functions() as found:
        program = trace(strict=strict)
    if repetition is not None:
        repetition.check(program)
    check_sizes(program, what)
    check_products(program, what)
    held = constant_paths(program, twin, what)
    if found:
        raise GraphError(
            f"{what} has custom gradients ({', '.join(sorted(found))}), which an exported graph "
            f"does not keep. Make each a torch.library.custom_op with register_autograd, or call "
            f"model.requires_grad_(False) to plan inference"
        )
    if strict:  # which runs no Python code that could be recorded
        with suppress(ExportError):
            trace(strict=False)
    with torch.set_grad_enabled(gradients):
        state = record_of(recorder, twin, what, ignored)
    record = replace(record, model=replace(record.model, state=state), constants=held)
    buffer = BytesIO()
    with _named(f"the exported {what} cannot be saved"), without_canonical_form():
        torch.export.save(program, buffer, extra_files={EXPORT_FILE: record.to_json().decode()})
    archive = buffer.getvalue()
    return _Exported(archive if repetition is None else repetition.lengthened(archive), state)


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


def _leave_out_caches(model: torch.nn.Module) -> list[tuple[object, str]]:
    """Switch `use_cache` off in the configs of transformers: a cache is no tensor."""
    changed: list[tuple[object, str]] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            vars(config)["use_cache"] = False
            changed.append((config, "use_cache"))
    return changed


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
    """Yield parameters, buffers, and tensors in attributes, containers and objects of modules."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (place.value for _, place in held_tensors(model))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    return value
