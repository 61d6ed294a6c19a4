"""What a plan decides, as choices of a formulation: from a solution, or read from a plan."""

from dataclasses import dataclass

import numpy as np

from autoshard.arrays import IntArray
from autoshard.errors import PlanError
from autoshard.layouts import Layout
from autoshard.plan.document import Stage, Use
from autoshard.plan.memory.spans import checkpoint_spans
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Arc, Role


@dataclass(frozen=True)
class Decisions:
    """What a plan decides.

    Attributes:
        choice: strategy index per variable of a formulation.
        again: indices of its arcs whose resharding runs once more in backward.
        checkpoints: nodes of each checkpoint, in program order.
    """

    choice: IntArray
    again: frozenset[int] = frozenset()
    checkpoints: tuple[range, ...] = ()


def use_of(formulation: Formulation, arc: Arc) -> Use:
    """Value, consumer and position of an arc's resharding in a plan."""
    consumer = formulation.variables[arc.target]
    if consumer.role is Role.OUTPUT:
        return arc.value, "output", int(consumer.name)
    return arc.value, None if consumer.role is Role.SHARED else consumer.name, arc.position


def decisions_of(formulation: Formulation, stage: Stage) -> Decisions:
    """What a stage of a plan decides.

    Raises:
        PlanError: the plan has a layout that the formulation does not offer.
    """
    again = {c.use for c in stage.reshardings if c.regather}
    return Decisions(
        _choice(formulation, stage),
        frozenset(
            number
            for number, arc in enumerate(formulation.arcs)
            if again and use_of(formulation, arc) in again
        ),
        checkpoint_spans(formulation.graph, stage),
    )


def _choice(formulation: Formulation, stage: Stage) -> IntArray:
    """The strategy index of each choice of a formulation in a plan."""
    axes = formulation.axes

    def layouts(*texts: str) -> tuple[Layout, ...]:
        return tuple(axes.narrow(Layout.parse(text)) for text in texts)

    placed = {
        **{(Role.INPUT, i.name): ((), layouts(i.layout)) for i in stage.inputs},
        **{(Role.OPERATOR, n.name): (layouts(*n.inputs), layouts(*n.outputs)) for n in stage.nodes},
        **{(Role.OUTPUT, str(o.position)): (layouts(o.layout), ()) for o in stage.outputs},
    }
    shared = {c.value: layouts(c.target) for c in stage.reshardings if c.consumer is None}
    into = {arc.target: arc for arc in formulation.arcs}
    choice: IntArray = np.zeros(len(formulation.variables), dtype=np.intp)
    for i, variable in enumerate(formulation.variables):
        wanted = placed.get((variable.role, variable.name))
        if variable.role is Role.SHARED:
            arc = into[i]
            made = formulation.variables[arc.source].strategies[choice[arc.source]]
            kept = shared.get(variable.name, (formulation.layout_at_source(arc, made),))
            wanted = (kept, kept)
        try:
            choice[i] = next(
                s
                for s, strategy in enumerate(variable.strategies)
                if (strategy.inputs, strategy.outputs) == wanted
            )
        except StopIteration:
            raise PlanError(
                f"the plan's {variable.role} {variable.name!r} is not among the strategies "
                "of this version; check the plan, or make it anew"
            ) from None
    return choice
