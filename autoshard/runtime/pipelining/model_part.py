"""The part of a model that a rank holds: the parameters and buffers of its stages."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.plan import PlacedInput, Plan, Stage
from autoshard.runtime.parameters.model_tensors import model_tensors
from autoshard.runtime.parameters.parameters import check_parameters, distribute_state
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.stage_forward import StageForward
from autoshard.torch_private import own_buffers, own_parameters

_STORED = ("parameter", "buffer")


def check_model(model: nn.Module, plan: Plan, forwards: Sequence[StageForward]) -> None:
    """Check that model and plan have the same parameters.

    Raises:
        PlanError: they have not.
    """
    stored = {i.target: i for stage in plan.stages for i in stage.parameters}
    unread = _unread_parameters(model, plan)
    merged = plan.stages[0].model_copy(update={"inputs": (*stored.values(), *unread)})
    frozen = (name for forward in forwards for name in forward.frozen)
    check_parameters(model, merged, frozen=frozenset(frozen))


def check_held_alike(plans: Mapping[str, Plan], devices: Mapping[str, StageDevices]) -> None:
    """Check that each rank stores the same parameters and buffers under all plans.

    Raises:
        PlanError: a plan stores one that the first plan does not, or stores it otherwise.
    """
    known: dict[tuple[tuple[int, ...], str], str] = {}
    for name, plan in plans.items():
        found = {
            (ranks, placed.target): (stage.axes, placed.layout.replace("I", "R"))
            for stage, ranks in zip(plan.stages, devices[name].ranks, strict=True)
            for placed in stage.inputs
            if placed.kind in _STORED
        }
        texts = {key: str(value) for key, value in found.items()}
        if not known:
            known = texts
        for (ranks, target), text in texts.items():
            if known.get((ranks, target)) != text:
                raise PlanError(
                    f"the plan {name!r} stores {target!r} on ranks {list(ranks)} as {text}, and "
                    f"the first plan as {known.get((ranks, target), 'nothing')}: make it with the "
                    f"same cuts (PlanOptions.cuts), and with pins=plan.state_pins() of the first"
                )


def _unread_parameters(model: nn.Module, plan: Plan) -> list[PlacedInput]:
    """The parameters that the model has and no stage reads, stored whole by the first stage.

    None if they are more or fewer than those of the program: the model is then another one.
    """
    names = {n for s in plan.stages for i in s.parameters for n in (i.target, *i.aliases)}
    found = {n: p for n, p in model.named_parameters() if n not in names}
    total = sum(parameter.numel() for parameter in model.parameters())
    if total != plan.graph.num_parameters:
        return []
    axes = plan.stages[0].axes
    return [
        PlacedInput(
            name=name,
            kind="parameter",
            target=name,
            dtype=str(parameter.dtype).removeprefix("torch."),
            shape=tuple(parameter.shape),
            local_shape=tuple(parameter.shape),
            layout=",".join("I" for _ in axes),
            placements=("Replicate()",) * len(axes),
        )
        for name, parameter in found.items()
    ]


def keep_own_part(
    model: nn.Module, plan: Plan, devices: StageDevices, forwards: Sequence[StageForward]
) -> None:
    """Shard the parameters and buffers of this rank's stages, and remove those of other stages.

    Args:
        model: has the full tensors, or is on the meta device.
        plan: with several stages.
        devices: of the stages.
        forwards: of this rank's stages.
    """
    unread = _unread_parameters(model, plan)
    own: dict[str, PlacedInput] = {}
    for number, forward in zip(devices.own_stages, forwards, strict=True):
        inputs = [i for i in forward.stage.inputs if i.kind in _STORED and i.target not in own]
        inputs += unread if number == 0 else []
        own.update((i.target, i) for i in inputs)
        stage = forward.stage.model_copy(update={"inputs": tuple(inputs)})
        distribute_state(model, [stage], forward.mesh, forward.program.place)
    kept = {name for i in own.values() for name in (i.target, *i.aliases)}
    _remove(model, {n for n in _names(plan.stages) if n not in kept})
    if 0 not in devices.own_stages:
        _remove(model, {i.target for i in unread})


def saved_tensors(
    model: nn.Module, plan: Plan, devices: StageDevices
) -> tuple[dict[str, torch.Tensor], ...]:
    """The tensors of the state dict that each pipeline rank saves, on the meta device.

    The first rank that holds a tensor saves it, under the first of its names; the first of all
    saves those of no stage.

    Args:
        model: has all tensors.
        plan: with several stages.
        devices: of the stages.
    """
    holders = {
        name: position
        for position, stages in reversed(list(enumerate(devices.positions)))
        for name in _names(plan.stages[stage] for stage in stages)
    }
    saved: tuple[dict[str, torch.Tensor], ...] = tuple({} for _ in devices.positions)
    for one in model_tensors(model):
        # Hooks of state dicts may rename what a stage holds.
        position = next((holders[path] for path in one.attributes if path in holders), 0)
        saved[position][one.names[0]] = torch.empty_like(one.tensor, device="meta")
    return saved


def saved_names(model: nn.Module) -> dict[str, str]:
    """For each name in the state dict, that of the saved tensor; a tied one has several names.

    Args:
        model: has all tensors.
    """
    first = {name: one.names[0] for one in model_tensors(model) for name in one.names}
    return {name: first[name] for name in model.state_dict() if name in first}


def _names(stages: Iterable[Stage]) -> set[str]:
    stored = chain.from_iterable(stage.inputs for stage in stages)
    return {name for i in stored if i.kind in _STORED for name in (i.target, *i.aliases)}


def _remove(model: nn.Module, names: Iterable[str]) -> None:
    """Replace parameters and buffers by None; modules stay."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue  # a tensor that forward created, given as a constant
        if attribute in own_parameters(owner) or attribute in own_buffers(owner):
            setattr(owner, attribute, None)


def removed_names(model: nn.Module, plan: Plan, saved: Iterable[str]) -> frozenset[str]:
    """Names in the state dict of tensors that other ranks hold.

    Args:
        model: has the tensors of this rank.
        plan: with several stages.
        saved: names in the state dict of the whole model.
    """
    state = model.state_dict()
    return frozenset(name for name in {*_names(plan.stages), *saved} if name not in state)


def drop_removed(model: nn.Module, names: frozenset[str]) -> None:
    """Let `load_state_dict` ignore the tensors of other stages."""

    def drop(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, *__: object) -> None:
        for name in names:
            state.pop(f"{prefix}{name}", None)

    register: Any = model.register_load_state_dict_pre_hook  # torch does not type it
    register(drop)
