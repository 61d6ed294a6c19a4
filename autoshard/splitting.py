"""`split_model`: the stages of a model as modules, in one process."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import fx, nn

from autoshard.base.arguments import Count, check_arguments, names_elsewhere
from autoshard.errors import OptionError, PlanError
from autoshard.graph import Graph, OpaqueModule, export_model, graph_from_json, load_graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner.pipeline.policies import cuts_of, stage_cutter
from autoshard.runtime.pipelining.stage_module import stage_module


@names_elsewhere(
    shard_count="pass the number of stages as second argument, and then example arguments",
    split_spec="pass PlanOptions(cuts=('before:layers.4',)) in place of the number of stages",
)
@check_arguments
def split_model(
    model: nn.Module,
    stages: Plan | PlanOptions | Count,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opaque: Iterable[str | type | OpaqueModule] | Literal["auto"] = (),
    device: str | torch.device | None = None,
    custom_operators: Collection[str] = (),
) -> list[fx.GraphModule]:
    """Split a model into stages that run one after the other in one process, without ranks.

    A stage is called with what the stage before returns, and has the parameters and buffers of the
    model that it reads, under their names: the same tensors, so that autograd sums the gradients of
    one that several stages use. What a later stage needs is passed on by the stages between.

    Example:
        >>> first, second, third = split_model(model, 3, (x,))
        >>> y = third(second(first(x)))

    Args:
        model: its mode is that in which the stages run.
        stages: their number, balanced by parameters; options with `stages`, `cuts` or `balance`,
            which say where to cut; or a plan.
        args: example arguments of forward, as in `export_model`; not needed with a plan.
        kwargs: example keyword arguments of forward.
        opaque: as in `export_model`; not needed with a plan.
        device: of the tensors that forward creates; by default that of the first parameter.
        custom_operators: as in `parallelize`.

    Returns:
        A module for each stage. Its arguments are what the stage before sends, by position, and
        then those arguments of forward that the stage reads, by name. A stage that sends several
        tensors returns a tuple; the last one returns what forward does.

    Raises:
        GraphError: the model cannot be exported, or not be cut.
        OptionError: the options do not say where to cut.
        PlanError: there is no plan, or it is for another model.
    """
    if isinstance(stages, Plan):
        if not stages.found:
            raise PlanError(f"there is no plan to split the model by: {stages.reason}")
        programs = [graph_from_json(stage.program) for stage in stages.stages]
    else:
        archive = export_model(model, args, dict(kwargs or {}), opaque=opaque)
        programs = list(_programs(load_graph(archive), stages))
    tensor = next(model.parameters(), None)
    home = torch.device("cpu") if tensor is None else tensor.device
    place = home if device is None else torch.device(device)
    return [
        stage_module(program, model, device=place, custom_operators=custom_operators)
        for program in programs
    ]


def _programs(graph: Graph, stages: PlanOptions | int) -> tuple[Graph, ...]:
    """The programs of stages that options determine without planning."""
    if isinstance(stages, int):
        stages = PlanOptions(stages=stages, balance="parameters" if stages > 1 else None)
    cutter = stage_cutter(graph)
    cuts = cuts_of(stages, cutter, make_mesh((1,)))
    if cuts is None:
        raise OptionError(
            "the options leave it to planning where to cut: give balance or all cuts, or a plan of "
            "make_plan"
        )
    return cutter.split(cuts)
