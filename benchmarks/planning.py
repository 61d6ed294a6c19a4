"""Cases of planning, and repeated measurements of them."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.archives import ExportFailedError, archive, last_line

UNLIMITED = 10**15
"""Bytes per device that no model here needs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of measurements.

    Attributes:
        folder: of exported models and results.
        repetitions: measurements of a case, each in a fresh process.
        time_limit: seconds for the solver, and the same for finding a conflict.
        relative_gap: at which the solver stops; fixed, so that tables stay comparable when the
            default changes.
        timeout: seconds after which a measurement is stopped.
        most_memory: bytes of address space that a measurement may use.
        resume: reuse results in the folder that were measured with the same code and settings.
    """

    folder: Path
    repetitions: int = 5
    time_limit: float = 120.0
    relative_gap: float = 1e-3
    timeout: float = 600.0
    most_memory: int = 12 * 10**9
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is planned.

    Attributes:
        model: a name in `benchmarks.models`, a family of the zoo, or the path of an archive.
        mesh: size of each axis of H100s in nodes of 8, the default topology.
        axes: names of the axes; the default names if empty.
        options: of planning, beside those that have attributes.
        mode: training or inference.
        memory_budget: bytes per device; the device's own memory if None.
        cached: true if another process has solved the blocks of the model before.
    """

    model: str
    mesh: tuple[int, ...]
    mode: str = "training"
    memory_budget: int | None = None
    cached: bool = False
    axes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.removesuffix(".pt2").rpartition("/")[2]

    @property
    def mesh_text(self) -> str:
        """The mesh as text, such as 2x4."""
        return "x".join(map(str, self.mesh))

    def __str__(self) -> str:
        budget = ""
        if self.memory_budget is not None:
            lifted = self.memory_budget == UNLIMITED
            budget = ", memory lifted" if lifted else f", {self.memory_budget / 1e9:g} GB"
        cached = ", blocks cached" if self.cached else ""
        return f"{self.name} on {self.mesh_text}, {self.mode}{budget}{cached}"


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of a case.

    Attributes:
        case: the case.
        runs: output of `benchmarks.measure` for each repetition that finished.
        failure: reason why repetitions are missing; else empty.
    """

    case: Case
    runs: tuple[Mapping[str, Any], ...]
    failure: str = ""

    def seconds(self, phase: str) -> float:
        """Median of a phase; zero without the phase."""
        return float(median(run["seconds"].get(phase, 0.0) for run in self.runs))

    @property
    def peak(self) -> float:
        """Median of the peak memory of the process, bytes."""
        return float(median(run["peak"] for run in self.runs))

    @property
    def last(self) -> Mapping[str, Any]:
        """The last run; all but times and memory is equal in all runs."""
        return self.runs[-1]

    @property
    def gap(self) -> float | None:
        """Largest gap of all runs; None if a run has no plan or no bound."""
        gaps = [run["certificate"]["gap"] for run in self.runs]
        return None if not gaps or None in gaps else max(gaps)

    @property
    def found(self) -> bool:
        """True if every run has a plan."""
        objectives = [run["certificate"]["objective"] for run in self.runs]
        return bool(objectives) and None not in objectives

    @property
    def is_legal(self) -> bool:
        """True if every run has a plan that the checker accepts."""
        return bool(self.runs) and all(run["legal"] for run in self.runs)

    @property
    def needs_memory(self) -> bool:
        """True if there is no plan because of the memory budget."""
        return bool(self.runs) and bool(self.last["memory_conflict"])

    @property
    def status(self) -> str:
        """Status of the runs, for a table."""
        if not self.runs:
            return "**failed**"
        statuses = sorted({run["certificate"]["status"] for run in self.runs})
        if self.found and not self.is_legal:
            return "**invalid plan**"
        return ", ".join(statuses) if self.found else f"**{', '.join(statuses)}**"

    @property
    def note(self) -> str:
        """Failure, reasons and findings of the runs; empty without any."""
        return self.failure or "; ".join(sorted({run["reason"] for run in self.runs} - {""}))


def measure_case(case: Case, settings: Settings) -> Result:
    """Measure a case repeatedly; a failure is not repeated."""
    limits = (settings.time_limit, settings.relative_gap, settings.timeout, settings.most_memory)
    key = json.dumps([asdict(case), settings.repetitions, limits, code_digest()])
    name = f"{case.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    kept = settings.folder / "results" / name
    if settings.resume and kept.exists():
        known = json.loads(kept.read_text(encoding="utf-8"))
        return Result(case, tuple(known["runs"]), known["failure"])
    result = _measured(case, settings)
    kept.parent.mkdir(parents=True, exist_ok=True)
    content = {"case": asdict(case), "runs": result.runs, "failure": result.failure}
    kept.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return result


MEASURED = ("autoshard", "server", "solver_cache")
"""Folders of the code whose speed is measured."""


def code_digest(folders: Sequence[str] = MEASURED) -> str:
    """Eight hex digits of the digest of all measured source files."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _measured(case: Case, settings: Settings) -> Result:
    request = {
        "mesh": case.mesh,
        "axes": case.axes,
        "most_memory": settings.most_memory,
        "options": {"mode": case.mode, "memory_budget": case.memory_budget, **case.options},
    }
    if not case.cached:
        return _repeated(case, request, settings)
    with tempfile.TemporaryDirectory() as blocks:
        request["blocks"] = blocks
        # The first one solves the blocks.
        first = _repeated(case, request, replace(settings, repetitions=1))
        return first if first.failure else _repeated(case, request, settings)


def _repeated(case: Case, request: Mapping[str, Any], settings: Settings) -> Result:
    runs: list[Mapping[str, Any]] = []
    for _ in range(settings.repetitions):
        run = run_model("benchmarks.measure", case.model, request, settings)
        if "error" in run:
            return Result(case, tuple(runs), run["error"])
        runs.append(run)
    return Result(case, tuple(runs))


def run_model(
    module: str, model: str, request: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """Run a module in a new process with a model and the limits of the settings.

    The module gets the request as JSON, with the path of the model's `archive`.
    """
    try:
        path = archive(model, settings.folder / "models")
    except ExportFailedError as error:
        return {"error": f"{model} cannot be exported: {error}"}
    limits = {"time_limit": settings.time_limit, "relative_gap": settings.relative_gap}
    options = {**limits, **request.get("options", {})}
    return run_module(
        module, {**request, "archive": str(path), "options": options}, timeout=settings.timeout
    )


def run_module(module: str, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
    """Run a module in a new process with one JSON argument; return the last JSON that it prints.

    If it fails, or does not end within `timeout` seconds, the result has an `error`.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)  # noqa: S603  our own module
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return {"error": f"stopped after {timeout:g} s in phase '{_last(out)['phase']}'"}
        err.seek(0)
        message = last_line(err.read())
        last = _last(out)
        if process.returncode or "phase" in last:
            status = f"ended with status {process.returncode} in phase '{last.get('phase')}'"
            return {"error": f"{status}: {message}".strip(": ")}
        return last


def _last(printed: Any) -> dict[str, Any]:
    printed.seek(0)
    last: dict[str, Any] = {"phase": "start"}
    for value in _values(printed):
        last = value
    return last


def _values(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
