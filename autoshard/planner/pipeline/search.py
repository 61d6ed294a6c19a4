"""Search for the fastest pipeline: where a program is cut, on which devices, which schedule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, prod
from typing import NamedTuple

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.graph import CutPoint, StageCutter
from autoshard.layouts import Layout
from autoshard.mesh import Mesh
from autoshard.plan.document import StageTimes
from autoshard.plan.options import PlanOptions, ScheduleName
from autoshard.plan.options.of_stages import on_sub_mesh
from autoshard.plan.sub_meshes import is_aligned, sub_mesh, sub_mesh_sizes
from autoshard.planner.pipeline.limits import SearchLimits
from autoshard.planner.pipeline.partition import Partition, PartitionProblem, RangeTable
from autoshard.planner.pipeline.range_costs import RangeCosts, range_costs
from autoshard.planner.pipeline.stage_tables import (
    MEMORY_MARGIN,
    RangeSums,
    StageTable,
    stage_table,
)
from autoshard.schedules.schedule import Schedule, schedule_error
from autoshard.schedules.simulation import ScheduleSimulation, simulate_schedule
from autoshard.schedules.transfers import transfer_seconds
from autoshard.solve import KeyValueStore

_MAX_POINTS = 96
"""Maximum number of places where stages may begin."""
_MAX_SIMULATIONS = 100
"""Maximum number of partitions that are simulated for one schedule."""
_RESERVED_SHARE = 0.85
"""Share of the memory that estimates use, after a stage did not fit."""
_BUDGET_STEPS = 32
"""Number of steps in which the memory of a rank is divided among its stages."""
_MAX_GUIDED = 20
"""The same, of schedules with several stages per rank."""
MAX_ACTIONS = 200_000
"""Maximum number of forwards in a step: stages times micro-batches. Larger ones are too slow to
simulate."""
_STAGES_PER_RANK: Mapping[ScheduleName, tuple[int, ...]] = {
    "GPipe": (1,),
    "1F1B": (1,),
    "Interleaved1F1B": (2, 3, 4, 6, 8, 12, 16),
    "LoopedBFS": (2, 4, 8),
    "InterleavedZeroBubble": (2, 4, 8),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}
_AUTOMATIC: tuple[ScheduleName, ...] = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "GPipe",
)
"""Schedules that are tried if none is asked for; LoopedBFS is not faster than Interleaved1F1B."""


class StagePlace(NamedTuple):
    """Beginning and devices of a stage.

    Attributes:
        node: index of its first node.
        devices: number of its devices.
        first_device: number of its first device.
    """

    node: int
    devices: int
    first_device: int


@dataclass(frozen=True)
class PipelineCandidate:
    """A pipeline with estimated times.

    Attributes:
        schedule: the schedule.
        stages: its stages.
        times: estimated seconds of each stage.
        simulation: of a step.
        bound: lower bound of the step time of all partitions under this schedule, for the same
            estimates; 0 if it is not known.
        num_points: number of places where stages could begin.
        num_simulated: number of partitions that were simulated.
    """

    schedule: Schedule
    stages: tuple[StagePlace, ...]
    times: tuple[StageTimes, ...]
    simulation: ScheduleSimulation
    bound: float
    num_points: int
    num_simulated: int

    @property
    def seconds(self) -> float:
        """Estimated step time."""
        return self.simulation.seconds


class PipelineSearch:
    """Searches stages and schedules of one program on one mesh.

    Args:
        cutter: of the program.
        mesh: the devices.
        options: as for `make_plan`.
        limits: of the search; only the time limit of the options if None.
        cuts: cuts that stages must have, ascending; other cuts are chosen.
        block_cache: as for `make_plan`.
    """

    def __init__(
        self,
        cutter: StageCutter,
        mesh: Mesh,
        options: PlanOptions,
        limits: SearchLimits | None = None,
        *,
        cuts: Sequence[int] = (),
        block_cache: KeyValueStore | None = None,
    ) -> None:
        self.cutter = cutter
        self._mesh = mesh
        self._options = options
        self.limits = limits or SearchLimits(options.solver.time_limit)
        self._cuts = tuple(cuts)
        self._block_cache = block_cache
        self._budget = options.memory.budget or mesh.topology.device.memory
        self._costs: dict[int, RangeCosts] = {}
        self._sending: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._tables: dict[tuple[int, int, int], StageTable] = {}
        self._share = 1.0
        self._peaks_together = False
        self._sums: dict[int, list[RangeSums]] = {}

    @cached_property
    def points(self) -> tuple[CutPoint, ...]:
        """Places where stages may begin: at repeated blocks, and where the fewest bytes cross."""
        every = self.cutter.cut_points
        if len(every) <= _MAX_POINTS:
            return every
        pinned = set(self._cuts)
        ranked = sorted(
            every, key=lambda p: (p.node not in pinned, p.layer is None, p.nbytes, p.node)
        )
        layers = sum(point.layer is not None for point in every)
        kept = ranked[: max(_MAX_POINTS, layers + len(pinned))]
        return tuple(sorted(kept, key=lambda point: point.node))

    def search(
        self,
        num_ranks: int,
        *,
        schedule: ScheduleName | None = None,
        stages_per_rank: int | None = None,
        unequal: bool = False,
        below: float = inf,
    ) -> PipelineCandidate | None:
        """The fastest pipeline with a number of ranks; None if none fits into memory.

        Args:
            num_ranks: number of pipeline ranks.
            schedule: its name; None for the fastest one.
            stages_per_rank: number of stages of each rank; None for the fastest number.
            unequal: True if stages may have sub-meshes of different sizes.
            below: only pipelines faster than this are of interest.
        """
        best: PipelineCandidate | None = None
        for one in self._schedules(num_ranks, schedule, stages_per_rank):
            if self.limits.is_over:
                break
            self.limits.begin(
                f"{one.name} with {one.num_stages} stages on {num_ranks} pipeline ranks"
            )
            found = self._best_partition(
                one, unequal=unequal, below=below if best is None else best.seconds
            )
            best = found or best
        return best

    def _schedules(
        self, num_ranks: int, name: ScheduleName | None, stages_per_rank: int | None
    ) -> Iterator[Schedule]:
        training = self._options.mode == "training"
        names = (name,) if name else _AUTOMATIC if training else ("GPipe",)
        micro_batches = self._options.training.micro_batches
        for one in names:
            numbers = _STAGES_PER_RANK[one] if stages_per_rank is None else (stages_per_rank,)
            for number in numbers:
                stages = num_ranks * number
                if stages > len(self.points) + 1 or stages * micro_batches > MAX_ACTIONS:
                    continue
                if schedule_error(one, num_ranks, number, micro_batches) is None:
                    yield Schedule(one, num_ranks, number, micro_batches, training)

    def costs(self, devices: int) -> RangeCosts:
        """Costs of all ranges on the sub-mesh with a number of devices."""
        if devices not in self._costs:
            mesh = sub_mesh(self._mesh, devices)
            self._costs[devices] = range_costs(
                self.cutter,
                self.points,
                mesh,
                on_sub_mesh(self._options, mesh, self._mesh),
                self.limits,
                num_ranks=self._mesh.num_devices // devices,
                block_cache=self._block_cache,
            )
        return self._costs[devices]

    def _best_partition(
        self, schedule: Schedule, *, unequal: bool, below: float
    ) -> PipelineCandidate | None:
        total, per_rank = self._mesh.num_devices, schedule.stages_per_rank
        equal = total // schedule.num_ranks
        sizes: tuple[int, ...] = (equal,) if total % schedule.num_ranks == 0 else ()
        if unequal and per_rank == 1:
            most = total - schedule.num_ranks + 1
            sizes = tuple(n for n in sub_mesh_sizes(self._mesh) if n <= most)
        # The busiest rank has at least the mean work, even in plans without a memory limit: if that
        # is too slow, no table needs to be made.
        if not sizes or (sizes == (equal,) and self._mean_work(schedule, equal) >= below):
            return None
        stages = [
            [self.table(schedule, number, devices) for devices in sizes]
            for number in reversed(range(schedule.num_stages))
        ]
        problem = PartitionProblem(
            [
                [
                    self._pinned(table.range_table(schedule.micro_batches, per_rank=per_rank))
                    for table in row
                ]
                for row in stages
            ],
            total * per_rank,
            lambda offset, devices: per_rank > 1 or is_aligned(self._mesh, offset, devices),
        )

        def times(partition: Partition) -> list[StageTimes]:
            row = [stages[schedule.num_stages - 1 - s][x.table] for s, x in enumerate(partition)]
            return [table.times(x.start, x.stop) for table, x in zip(row, partition, strict=True)]

        # Of a rank with several stages, the bound only guides the search: it assumes equal stages.
        found = problem.best(
            lambda partition: simulate_schedule(schedule, times(partition)).seconds,
            below=below if per_rank == 1 else inf,
            max_simulations=_MAX_SIMULATIONS if per_rank == 1 else _MAX_GUIDED,
            is_over=lambda: self.limits.is_over,
        )
        if found is None or found.seconds >= below:
            return None
        estimated = times(found.partition)
        nodes = [0, *(point.node for point in self.points)]
        return PipelineCandidate(
            schedule,
            tuple(
                StagePlace(
                    nodes[x.start],
                    sizes[x.table],
                    x.offset if per_rank == 1 else schedule.rank_of_stage[stage] * equal,
                )
                for stage, x in enumerate(found.partition)
            ),
            tuple(estimated),
            simulate_schedule(schedule, estimated),
            found.bound if per_rank == 1 else 0.0,
            len(self.points),
            found.num_simulated,
        )

    def _mean_work(self, schedule: Schedule, devices: int) -> float:
        """Mean seconds of a rank in the fastest plan of the program."""
        part = self.costs(devices).variants[0]
        work = part.forward.sum() + part.backward_input.sum() + part.backward_weight.sum()
        total = schedule.micro_batches * work + part.end.sum()
        return float(total) / schedule.num_ranks

    def _pinned(self, table: RangeTable) -> RangeTable:
        """The table without ranges that contain a cut that stages must have."""
        if not self._cuts:
            return table
        nodes = [0, *(point.node for point in self.points)]
        wanted = np.array([nodes.index(cut) for cut in self._cuts])
        places = np.arange(table.through.shape[0])
        inside = (places[:, None, None] < wanted) & (wanted < places[None, :, None])
        forbidden = np.where(inside.any(axis=2), inf, 0.0)
        return RangeTable(
            table.devices, table.through + forbidden, table.busy + forbidden, table.last
        )

    def table(self, schedule: Schedule, stage: int, devices: int) -> StageTable:
        """Seconds of all ranges as one stage of a schedule on a number of devices."""
        in_flight, budget = schedule.in_flight[stage], self.budget(schedule, stage, devices)
        key = (devices, in_flight, budget)
        if key not in self._tables:
            if devices not in self._sending:
                self._sending[devices] = self._transfers(devices)
            send, back = self._sending[devices]
            self._tables[key] = stage_table(
                self._range_sums(devices),
                devices,
                budget=self._share * budget,
                in_flight=in_flight,
                send=send,
                send_gradient=back,
            )
        return self._tables[key]

    def _range_sums(self, devices: int) -> list[RangeSums]:
        if devices not in self._sums:
            self._sums[devices] = [RangeSums(part) for part in self.costs(devices).variants]
        return self._sums[devices]

    def reserve_memory(self) -> None:
        """Leave more of the memory budget free, after a stage did not fit as estimated."""
        self._share *= _RESERVED_SHARE
        self._tables.clear()

    def count_all_peaks(self) -> None:
        """Divide the budget as if all stages of a rank had their peaks at the same time."""
        self._peaks_together = True
        self._tables.clear()

    def whole_seconds(self) -> float:
        """Estimated step time of the program as one stage on the whole mesh; inf if too large."""
        devices = self._mesh.num_devices
        nothing = np.zeros(len(self.points) + 2)
        table = stage_table(
            self._range_sums(devices),
            devices,
            budget=self._share * self._budget,
            in_flight=1,
            send=nothing,
            send_gradient=nothing,
        )
        if not np.isfinite(table.nbytes[0, -1]):
            return inf
        times = table.times(0, -1)
        work = times.forward + times.backward_input + times.backward_weight
        return self._options.training.micro_batches * work + times.end

    def budget(self, schedule: Schedule, stage: int, devices: int) -> int:
        """Bytes per device of one stage.

        Each stage of a rank gets what it needs at least: a mean part of the parameters and what
        belongs to them, and the tensors of the operator or recomputed block that runs. The rest is
        divided by the numbers of micro-batches that the stages hold. One stage of a rank runs at a
        time, and not all hold the most micro-batches at the same time. If stages are so different
        that this is too much for the rank, `count_all_peaks` lets each have its part of the budget.
        """
        if schedule.stages_per_rank == 1:
            return self._budget
        rank = schedule.rank_of_stage[stage]
        held = schedule.ranks[rank]
        # Rounded, so that similar stages have equal budgets and are planned once.
        step = max(self._budget // _BUDGET_STEPS, 1)
        least = {s: self._least_bytes(schedule, s, devices, step) for s in held}
        state, running = zip(*least.values(), strict=True)
        if self._peaks_together:
            rest = self._budget - sum(state) - sum(running)
            held_at_once = sum(schedule.in_flight[s] for s in held)
        else:
            rest = self._budget - sum(state) - max(running)
            held_at_once = schedule.in_flight_of_rank[rank]
        share = schedule.in_flight[stage] / held_at_once
        nbytes = self._budget / len(held) if rest < 0 else sum(least[stage]) + rest * share
        return max(int(nbytes // step) * step, step)

    def _least_bytes(
        self, schedule: Schedule, stage: int, devices: int, step: int
    ) -> tuple[int, int]:
        """Bytes per device of the state of a stage of usual size, and of what runs in it.

        Both are rounded up to multiples of `step`.
        """
        part = min(self.costs(devices).variants, key=lambda part: float(part.state.sum()))
        inner = slice(stage > 0, len(part.state) - (stage < schedule.num_stages - 1))
        mean = part.state.sum() / schedule.num_stages
        running = part.working + np.maximum(part.block, part.saved)
        # The first and the last segment may be large: embeddings, and the loss.
        state = max(mean, part.state[inner].max())
        needed = (MEMORY_MARGIN * float(nbytes) for nbytes in (state, running[inner].max()))
        state_bytes, running_bytes = (ceil(nbytes / step) * step for nbytes in needed)
        return state_bytes, running_bytes

    def _transfers(self, devices: int) -> tuple[FloatArray, FloatArray]:
        """Seconds to send what crosses each cut between stages of equal sub-meshes."""
        costs, graph = self.costs(devices), self.cutter.graph
        training = self._options.mode == "training"
        senders, receivers = range(devices), range(devices, 2 * devices)
        send, back = np.zeros(len(self.points) + 2), np.zeros(len(self.points) + 2)
        if self._mesh.num_devices == devices:
            return send, back
        sizes = costs.mesh.axis_sizes
        loads: dict[str, int] = {}
        for place, point in enumerate(self.points, start=1):
            for value in point.values:
                if value not in loads:
                    tensor = graph.values[value]
                    layout = Layout.parse(costs.layouts[value])
                    loads[value] = prod(layout.local_shape(tensor.shape, sizes)) * (
                        tensor.dtype.itemsize
                    )
            forth = [loads[value] for value in point.values]
            gradients = [
                loads[v] for v in point.values if training and graph.values[v].requires_grad
            ]
            send[place] = transfer_seconds(self._mesh, senders, receivers, forth)
            back[place] = transfer_seconds(self._mesh, senders, receivers, gradients)
        return send, back
