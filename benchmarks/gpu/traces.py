"""A step as the profiler sees it: its kernels, and the time between them."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import profile

from benchmarks.gpu.devices import Device, Step

_ROWS = 20
"""Rows of the tables of kernels and of gaps."""

Event = Mapping[str, Any]


def traced(step: Step, device: Device) -> dict[str, Any]:
    """Run a step under the profiler, and summarise its trace."""
    with profile(activities=device.activities) as profiler:
        device.seconds(step, 1)
    with TemporaryDirectory(prefix="gpu-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return summary(events, device.kernels)


def summary(events: Sequence[Event], categories: frozenset[str]) -> dict[str, Any]:
    """The kernels of a trace that took longest, and the gaps before kernels.

    Args:
        events: of a trace in Chrome's format; times are microseconds.
        categories: of the events that are work of the device.
    """
    kernels = _innermost(sorted((e for e in events if e.get("cat") in categories), key=_order))
    if not kernels:
        return {"kernels": 0, "busy": 0.0, "gaps": 0.0, "longest": [], "gaps_before": []}
    launched_by = {
        e["args"]["External id"]: e["name"]
        for e in events
        if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    busy: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    end = kernels[0]["ts"]
    for kernel in kernels:
        busy[kernel["name"]].append(kernel["dur"])
        operator = launched_by.get(kernel.get("args", {}).get("External id"), kernel["name"])
        if kernel["ts"] > end:
            gaps[operator].append(kernel["ts"] - end)
        end = max(end, kernel["ts"] + kernel["dur"])
    return {
        "kernels": len(kernels),
        "busy": _total(busy.values()),
        "gaps": _total(gaps.values()),
        "longest": _rows(busy),
        "gaps_before": _rows(gaps),
    }


def _order(event: Event) -> tuple[float, float]:
    return event["ts"], -event["dur"]


def _innermost(events: Sequence[Event]) -> list[Event]:
    """Events of each thread or stream that contain no other one; given in their order."""
    last: dict[Any, Event] = {}
    outer: set[int] = set()
    for event in events:
        before = last.get(event["tid"])
        if before is not None and event["ts"] + event["dur"] <= before["ts"] + before["dur"]:
            outer.add(id(before))
        last[event["tid"]] = event
    return [event for event in events if id(event) not in outer]


def _rows(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Names with count and seconds, longest first."""
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))[:_ROWS]
    return [
        {"name": name[:120], "count": len(times), "seconds": sum(times) / 1e6}
        for name, times in longest
    ]


def _total(times: Iterable[Sequence[float]]) -> float:
    return sum(map(sum, times)) / 1e6
