"""The parallelism of a plan in plain words, such as "attention: FSDP over 8; MLP: tensor parallel".

Every clause follows from the roles of axes in the layers of one kind: the layouts of their
operators, and how their parameters are stored. What holds for a part of the operations or bytes is
given with its share.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.costs import GATHERED_ONCE, Frequency
from autoshard.graph import find_blocks, graph_from_json
from autoshard.lowering.recompute import checkpoint_units
from autoshard.plan.document import Plan
from autoshard.pricing.axis_roles import (
    AxisKey,
    AxisRole,
    Roles,
    Storage,
    Subject,
    percent,
    shares,
)
from autoshard.pricing.module_kinds import ModuleKind

_NEGLIGIBLE = 0.005
"""Shares that are left out; if they are the rest, a clause has no share."""


def parallelism_sentences(plan: Plan, roles: Roles) -> tuple[str, ...]:
    """Describe the parallelism of a plan: pipeline, layers by kind, recomputation, micro-batches.

    Args:
        plan: a plan with stages.
        roles: the roles of its axes.
    """
    return (*_pipeline(plan), *_layers(roles), *_recomputation(plan), *_once(plan))


@dataclass(frozen=True, slots=True)
class _Clause:
    """One kind of parallelism of a kind of layer.

    Attributes:
        words: such as "tensor parallel".
        axis: the axis and its number of ranks.
        share: share of the operations (or of the bytes of parameters) that it applies to.
        detail: added after the number of ranks.
    """

    words: str
    axis: AxisKey
    share: float = 1.0
    detail: str = ""

    @property
    def is_whole(self) -> bool:
        """True if it applies to all layers of the kind."""
        return self.share > 1 - _NEGLIGIBLE and not self.detail


def _layers(roles: Roles) -> Iterator[str]:
    """One sentence on each group of kinds of layers with the same parallelism."""
    groups: defaultdict[str, list[ModuleKind]] = defaultdict(list)
    found = {kind for kind, _ in roles.work if kind is not None}
    for kind in ModuleKind:
        if kind in found:
            groups[_joined(_clauses(kind, roles))].append(kind)
    if not groups:
        text = _joined(_clauses(None, roles))
        yield _sentence(f"all operators: {text}") if text else "One device."
    for text, kinds in groups.items():
        names = "all layers" if len(groups) == 1 else _listed([str(kind) for kind in kinds])
        yield _sentence(f"{names}: {text}" if text else f"{names}: on one device")


def _clauses(kind: Subject, roles: Roles) -> list[_Clause]:
    """The clauses about one kind of layer."""
    work = {axis: amounts for (subject, axis), amounts in roles.work.items() if subject == kind}
    total = sum(amounts.total() for amounts in work.values())
    found: list[_Clause] = []
    for axis, amounts in work.items():
        # In a pipeline, stages may have different axes: each has its share of the operations.
        of_axis = _share_of_axis(axis, work) if total else 1.0
        stored = shares(roles.stored.get((kind, axis), Counter()))
        for role, share in shares(amounts).items():
            if share * of_axis > _NEGLIGIBLE:
                found.append(_clause(kind, axis, role, share * of_axis, stored))
    return sorted(found, key=lambda clause: _ORDER.index(clause.words))


def _share_of_axis(axis: AxisKey, work: Mapping[AxisKey, Counter[AxisRole]]) -> float:
    same = sum(amounts.total() for other, amounts in work.items() if other[0] == axis[0])
    return work[axis].total() / same if same else 1.0


def _clause(
    kind: Subject, axis: AxisKey, role: AxisRole, share: float, stored: Mapping[Storage, float]
) -> _Clause:
    gathered = stored.get(Storage.GATHERED, 0.0)
    is_stored_fully, detail = gathered > 1 - _NEGLIGIBLE, ""
    if gathered > _NEGLIGIBLE:
        some = "" if is_stored_fully else f"{percent(gathered)} of "
        detail = f"{some}parameters fully sharded (FSDP)"
    if role is AxisRole.BATCH:
        if is_stored_fully:
            return _Clause("FSDP", axis, share)
        return _Clause("data parallel", axis, share, detail)
    if role is AxisRole.SEQUENCE:
        words = "context parallel" if kind is ModuleKind.ATTENTION else "sequence parallel"
        return _Clause(words, axis, share, detail)
    if role is AxisRole.IDLE:
        return _Clause("replicated", axis, share, detail)
    words = "expert parallel" if role is AxisRole.EXPERTS else "tensor parallel"
    if kind is ModuleKind.NORM:
        words = "features sharded"
    return _Clause(words, axis, share)


_ORDER = (
    "FSDP",
    "data parallel",
    "tensor parallel",
    "features sharded",
    "expert parallel",
    "sequence parallel",
    "context parallel",
    "replicated",
)


def _joined(clauses: Sequence[_Clause]) -> str:
    """Clauses as text; those with the same words that hold everywhere are one over all axes."""
    texts: list[str] = []
    for words in dict.fromkeys(clause.words for clause in clauses):
        same = [clause for clause in clauses if clause.words == words]
        whole = [clause for clause in same if clause.is_whole]
        if whole:
            size = prod(clause.axis[1] for clause in whole)
            texts.append(f"{words} over {size} ({', '.join(c.axis[0] for c in whole)})")
        texts += [_partial(clause) for clause in same if not clause.is_whole]
    return ", ".join(texts)


def _partial(clause: _Clause) -> str:
    name, size = clause.axis
    text = f"{clause.words} over {size} ({name})"
    if clause.share <= 1 - _NEGLIGIBLE:
        text += f" for {percent(clause.share)} of the work"
    return f"{text} with {clause.detail}" if clause.detail else text


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _pipeline(plan: Plan) -> Iterator[str]:
    if plan.pipeline is None:
        return
    pipeline, number = plan.pipeline, len(plan.stages)
    ranks = "" if number == len(pipeline.ranks) else f" on {len(pipeline.ranks)} pipeline ranks"
    yield (
        f"Pipeline of {number} stages{ranks}, schedule {pipeline.schedule}, "
        f"{pipeline.micro_batches} micro-batches, idle {pipeline.bubble:.1%} of the step."
    )


def _recomputation(plan: Plan) -> Iterator[str]:
    """Activation checkpointing, and gathers that backward repeats."""
    checkpointed, units = _checkpointed_units(plan)
    number = sum(len(stage.checkpoints) for stage in plan.stages)
    if number:
        kind = "modules" if plan.options.memory.checkpointed_modules else "blocks"
        what = f"{checkpointed} of {units} {kind}" if checkpointed == number else f"{number} parts"
        is_chosen = plan.options.memory.activation_checkpointing == "auto"
        yield f"Activation checkpointing on {what}{' to fit the memory' if is_chosen else ''}."
    parameters = {p.name for stage in plan.stages for p in stage.parameters}
    again = {c.value for stage in plan.stages for c in stage.reshardings if c.regather}
    if gathered := len(again & parameters):
        yield (
            f"Backward gathers {gathered} of {len(parameters)} parameters again "
            f"(reshard_after_forward)."
        )
    if activations := len(again - parameters):
        yield f"Backward gathers {activations} activations again, which are kept sharded."


def _checkpointed_units(plan: Plan) -> tuple[int, int]:
    """The number of repeated blocks, or named modules, that are checkpointed whole, and of all."""
    whole, total = 0, 0
    for stage in plan.stages:
        numbers = {node.name: number for number, node in enumerate(stage.nodes)}
        spans = [(numbers[c.first], numbers[c.last]) for c in stage.checkpoints]
        if not spans:
            continue
        graph = graph_from_json(stage.program)
        for unit in checkpoint_units(
            graph, find_blocks(graph), plan.options.memory.checkpointed_modules
        ):
            total += 1
            whole += any(a <= unit[0] and unit[-1] <= b for a, b in spans)
    return whole, total


def _once(plan: Plan) -> Iterator[str]:
    """Communication of parameters that runs once per step of several micro-batches."""
    number = plan.stages[0].micro_batches
    if number == 1:
        return
    parameters = {p.name for stage in plan.stages for p in stage.parameters}
    moved = [c for stage in plan.stages for c in stage.reshardings if c.value in parameters]
    gathered = {c.value for c in moved if c.frequency in GATHERED_ONCE}
    reduced = {c.value for c in moved if c.frequency is Frequency.STEP}
    yield (
        f"{number} micro-batches per step: of {len(parameters)} parameters {len(gathered)} are "
        f"gathered once per step, and the gradients of {len(reduced)} are reduced once."
    )
