"""Traces as Chrome and Perfetto read them.

Format: "Trace Event Format" (Google, 2016), JSON object form: complete events (`X`) on one
thread per lane, counters (`C`) for memory, and metadata (`M`) for names; times in microseconds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.plan.simulation.events import Event, Simulation

_MICROSECONDS = 1e6


def chrome_trace(simulation: Simulation, measured: Iterable[Event] = ()) -> str:
    """A simulation as a JSON document.

    Args:
        simulation: of a step.
        measured: events of a step that ran, to be shown below.
    """
    predicted = f"predicted, plan {simulation.plan[:12]}"
    records = [
        *_process(0, predicted, simulation.lanes, simulation.events),
        *_counters(simulation),
    ]
    if events := list(measured):
        records += _process(1, "measured", simulation.lanes, events)
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def _process(
    process: int, name: str, lanes: Sequence[str], events: Iterable[Event]
) -> Iterator[dict[str, Any]]:
    yield from _names(process, name, lanes)
    yield from _events(process, events, lanes)


def _names(process: int, name: str, lanes: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Names of a process and of its lanes."""
    yield _record("M", "process_name", process, args={"name": name})
    for thread, lane in enumerate(lanes):
        yield _record("M", "thread_name", process, thread, args={"name": lane})
        yield _record("M", "thread_sort_index", process, thread, args={"sort_index": thread})


def _events(
    process: int, events: Iterable[Event], lanes: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Events on their lanes."""
    threads = {lane: thread for thread, lane in enumerate(lanes)}
    for event in events:
        args: dict[str, Any] = {"of": event.subject, "phase": event.phase.value}
        if event.nbytes:
            args["bytes"] = event.nbytes
        if event.overlapped:
            args["overlapped"] = True
        if event.inside:
            args["inside"] = event.inside
        yield _record(
            "X",
            event.name,
            process,
            threads[event.lane],
            cat=event.category,
            ts=event.start * _MICROSECONDS,
            dur=event.seconds * _MICROSECONDS,
            args=args,
        )


def _counters(simulation: Simulation) -> Iterator[dict[str, Any]]:
    kinds, nbytes = zip(*simulation.memory.nbytes.items(), strict=True)
    for start, *alive in zip(simulation.moments, *nbytes, strict=True):
        args = {kind: int(held) for kind, held in zip(kinds, alive, strict=True)}
        yield _record("C", "memory, bytes", 0, ts=float(start) * _MICROSECONDS, args=args)


def _record(phase: str, name: str, process: int, thread: int = 0, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": thread, **rest}
