"""Steps of plans, and calibrations, as tables on a terminal."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cli.render import format_bytes, milliseconds, titled_table
from autoshard.plan.simulation import Event, Simulation

if TYPE_CHECKING:  # it needs torch
    from autoshard.runtime.calibration import Calibration
    from autoshard.runtime.profiling import Profile


def render_simulation(simulation: Simulation, *, most: int = 12) -> RenderableType:
    """Where the time of a step goes, and when most memory is held.

    Args:
        simulation: of the step.
        most: rows of what takes longest.
    """
    return Group(
        Text(f"One step takes {milliseconds(simulation.seconds)}", style="bold"),
        _lanes(simulation),
        _phases(simulation),
        _longest(simulation, most),
        Text(_peak(simulation), style="bold"),
    )


def render_calibration(calibration: "Calibration") -> RenderableType:
    """The device that was found, and collectives that the fit did not see."""
    topology = calibration.topology
    device = topology.device
    peaks = ", ".join(f"{flops:.3g} {dtype}" for dtype, flops in device.peak_flops.items())
    table = titled_table("Collectives that the fit did not see")
    for title in ("axis", "collective"):
        table.add_column(title, no_wrap=True)
    for title in ("bytes", "measured", "predicted", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for comparison in calibration.comparisons:
        sample = comparison.sample
        table.add_row(
            comparison.axis,
            sample.action,
            format_bytes(sample.nbytes),
            milliseconds(sample.seconds),
            milliseconds(comparison.predicted),
            f"{comparison.error:+.0%}",
        )
    return Group(
        Text(f"{topology.name}: {topology.source}", style="bold"),
        Text(
            f"{device.name}: {peaks} FLOP/s, {format_bytes(device.memory_bandwidth)} per second "
            f"of memory, {milliseconds(device.launch_overhead)} per operator"
        ),
        Text(
            f"between other work a collective takes {milliseconds(calibration.skew)} more, in "
            f"which ranks wait for the last of them"
        ),
        table,
    )


def render_profile(profile: "Profile", *, most: int = 30) -> RenderableType:
    """A step as it was predicted and as it ran; at most so many rows."""
    table = titled_table("Parts of a step, each measured by itself")
    table.add_column("what", style="cyan", overflow="fold")
    table.add_column("lane", no_wrap=True)
    for title in ("predicted", "measured", "times as long"):
        table.add_column(title, justify="right", no_wrap=True)
    rows = profile.rows()
    for row in rows[:most]:
        table.add_row(
            row.name.removeprefix("aten."),
            row.lane,
            milliseconds(row.predicted),
            milliseconds(row.measured),
            _times(row.measured, row.predicted),
        )
    left = rows[most:]
    if left:
        sums = sum(row.predicted for row in left), sum(row.measured for row in left)
        table.add_row(f"{len(left)} more", "", *map(milliseconds, sums), _times(sums[1], sums[0]))
    return Group(
        Text(
            f"One step takes {milliseconds(profile.seconds)}, predicted "
            f"{milliseconds(profile.predicted)}: {_times(profile.seconds, profile.predicted)} "
            f"times as long",
            style="bold",
        ),
        table,
    )


def _times(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted else "-"


def _lanes(simulation: Simulation) -> Table:
    table = titled_table("Lanes")
    table.add_column("lane", style="cyan", no_wrap=True)
    for title in ("events", "busy", "of the step", "beside compute"):
        table.add_column(title, justify="right", no_wrap=True)
    for lane in simulation.lanes:
        events = [event for event in simulation.events if event.lane == lane]
        busy = sum(event.seconds for event in events)
        hidden = sum(event.seconds for event in events if event.overlapped)
        table.add_row(
            lane,
            str(len(events)),
            milliseconds(busy),
            _share(busy, simulation.seconds),
            milliseconds(hidden),
        )
    return table


def _phases(simulation: Simulation) -> Table:
    table = titled_table("Parts of the step")
    table.add_column("part", no_wrap=True)
    for title in ("compute", "communication"):
        table.add_column(title, justify="right", no_wrap=True)
    for phase in dict.fromkeys(event.phase for event in simulation.events):
        inside = [event for event in simulation.events if event.phase is phase]
        compute = sum(event.seconds for event in inside if event.axis is None)
        moved = sum(event.seconds for event in inside if event.axis is not None)
        table.add_row(phase.value, milliseconds(compute), milliseconds(moved))
    return table


def _longest(simulation: Simulation, most: int) -> Table:
    table = titled_table("What takes longest")
    table.add_column("what", style="cyan", overflow="fold")
    table.add_column("lane", no_wrap=True)
    for title in ("count", "time", "of the step"):
        table.add_column(title, justify="right", no_wrap=True)
    found = _by_name(simulation.events)
    for (name, lane), (count, seconds) in sorted(found.items(), key=lambda item: -item[1][1])[
        :most
    ]:
        share = _share(seconds, simulation.seconds)
        table.add_row(name.removeprefix("aten."), lane, str(count), milliseconds(seconds), share)
    return table


def _by_name(events: Iterable[Event]) -> Mapping[tuple[str, str], tuple[int, float]]:
    """How many events of a name and lane there are, and their seconds."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for event in events:
        count, seconds = found.get((event.name, event.lane), (0, 0.0))
        found[event.name, event.lane] = count + 1, seconds + event.seconds
    return found


def _peak(simulation: Simulation) -> str:
    moment = simulation.memory.peak_moment
    phase, name = simulation.memory.moments[moment]
    where = f"{phase} of {name}" if name else phase.value
    return (
        f"Memory peaks at {format_bytes(simulation.memory.peak)}, "
        f"{milliseconds(float(simulation.moments[moment]))} into the step ({where})"
    )


def _share(seconds: float, total: float) -> str:
    return f"{seconds / total:.1%}" if total else "-"
