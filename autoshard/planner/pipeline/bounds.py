"""Lower bounds of the step time of pipelines, with the plans among which they hold."""

from typing import NamedTuple

from autoshard.planner.pipeline.search import PipelineCandidate

_COMPARED = "other numbers of ranks, and schedules, were compared by estimated times"
GIVEN_CUTS = (
    "no pipeline with these cuts under this schedule, whose stages exchange activations in these "
    "layouts, takes less than the bound, the work of the busiest rank"
)


class ProvenBound(NamedTuple):
    """A lower bound of the seconds of a step, and among which plans it holds."""

    seconds: float
    proof: str


def mean_work(candidate: PipelineCandidate) -> str:
    """Among which plans the mean work of a rank is a bound."""
    return (
        f"no pipeline with {candidate.schedule.num_ranks} ranks on {_shape(candidate)} takes less "
        f"than the bound, the mean work of a rank in the fastest plan of the whole program on a "
        f"sub-mesh; {_COMPARED}"
    )


def all_cuts(candidate: PipelineCandidate) -> str:
    """Among which plans the bound of the search holds."""
    schedule = candidate.schedule
    return (
        f"bound over all ways to cut the program at {candidate.num_points} places into "
        f"{schedule.num_stages} stages on {_shape(candidate)} under {schedule.name}, for stages "
        f"whose operators cost what they cost in the fastest plan of the whole program on a "
        f"sub-mesh; {_COMPARED}"
    )


def _shape(candidate: PipelineCandidate) -> str:
    sizes = {stage.devices for stage in candidate.stages}
    return "equal sub-meshes" if len(sizes) == 1 else "aligned sub-meshes"
