"""Planning the families at their published sizes; results are stored, so a run can be resumed.

One process per family exports it and plans all of its cases, with a time limit, so that a failure
does not affect other families. It is forked from this one, whose imports take long.
"""

import json
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from os import devnull
from pathlib import Path
from typing import Any

import transformers

from autoshard.errors import AutoshardError
from autoshard.graph import export_model
from benchmarks.measure import measure
from benchmarks.planning import UNLIMITED, code_digest
from benchmarks.zoo.families import FAMILIES

MESHES = ((8,), (2, 4))
MODES = ("training", "inference")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the measurements.

    Attributes:
        folder: of exported models and results.
        time_limit: seconds for the solver, per plan.
        timeout: seconds after which a family is stopped.
        most_memory: bytes of address space that a process may use.
    """

    folder: Path
    time_limit: float = 120.0
    timeout: float = 1800.0
    most_memory: int = 12 * 10**9


@dataclass(frozen=True, slots=True)
class Outcome:
    """One family on one mesh in one mode.

    Attributes:
        family: its name.
        mesh: size of each axis.
        mode: training or inference.
        run: result of `benchmarks.measure`, or its `error`.
        cpu: seconds of processor time from the archive to the checked plan.
        code: digest of the code that was measured.
        lifted: true if no plan fits into memory, so that the case has no memory limit.
    """

    family: str
    mesh: tuple[int, ...]
    mode: str
    run: Mapping[str, Any]
    cpu: float
    code: str
    lifted: bool

    @property
    def found(self) -> bool:
        """True if there is a plan that the checker accepts."""
        return bool(self.run.get("legal"))

    @property
    def gap(self) -> float | None:
        """Relative gap of the plan; None without a plan or a bound."""
        return None if "error" in self.run else self.run["certificate"]["gap"]

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        status = self.run.get("error") or self.run["certificate"]["status"]
        return f"{self.family} on {mesh}, {self.mode}: {status}"


def outcomes_of(name: str, settings: Settings) -> list[Outcome]:
    """Stored results of a family, in the order of meshes and modes."""
    kept = (_kept(name, mesh, mode, settings) for mesh, mode in product(MESHES, MODES))
    return list(_read([path for path in kept if path.exists()]))


def measure_family(name: str, settings: Settings) -> list[Outcome]:
    """Plan a family in all cases that have no result in the folder yet."""
    missing = [c for c in product(MESHES, MODES) if not _kept(name, *c, settings).exists()]
    if missing:
        child = multiprocessing.get_context("fork").Process(
            target=_measure_cases, args=(name, missing, settings)
        )
        child.start()
        child.join(settings.timeout)
        ended = child.exitcode
        if ended is None:
            child.kill()
            child.join()
        if ended != 0:
            reason = f"stopped after {settings.timeout:g} s" if ended is None else f"status {ended}"
            _fail(name, missing, reason, settings)
    return outcomes_of(name, settings)


def _measure_cases(
    name: str, missing: Sequence[tuple[tuple[int, ...], str]], settings: Settings
) -> None:
    """Main function of a family's process: export it, and plan its cases."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    code, path = code_digest(), settings.folder / "models" / f"{name}.pt2"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        model, inputs = FAMILIES[name].build_real()
        path.write_bytes(export_model(model, (), inputs))
    except (AutoshardError, ValueError, TypeError, RuntimeError) as error:
        _fail(name, missing, f"export: {error}".partition("\n")[0], settings)
        return
    for mesh, mode in missing:
        start = time.process_time()
        run, lifted = _run(path, mesh, mode, settings)
        outcome = Outcome(name, mesh, mode, run, time.process_time() - start, code, lifted=lifted)
        _keep(outcome, settings)


def _run(
    path: Path, mesh: tuple[int, ...], mode: str, settings: Settings
) -> tuple[dict[str, Any], bool]:
    """Plan one case; if no plan fits into memory, again without the memory limit."""
    options = {"mode": mode, "time_limit": settings.time_limit}
    case = {"archive": str(path), "mesh": mesh, "most_memory": settings.most_memory}
    try:
        with Path(devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            run = measure({**case, "options": options})
            lifted = bool(run["memory_conflict"])
            if lifted:
                run = measure({**case, "options": options | {"memory_budget": UNLIMITED}})
    except (AutoshardError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}".strip(": ")}, False
    return run, lifted


def _fail(
    name: str, cases: Sequence[tuple[tuple[int, ...], str]], reason: str, settings: Settings
) -> None:
    """Store a failure for every case that has no result."""
    for mesh, mode in cases:
        if not _kept(name, mesh, mode, settings).exists():
            run = {"error": reason}
            _keep(Outcome(name, mesh, mode, run, 0.0, code_digest(), lifted=False), settings)


def _kept(name: str, mesh: tuple[int, ...], mode: str, settings: Settings) -> Path:
    return settings.folder / "results" / f"{name}-{'x'.join(map(str, mesh))}-{mode}.json"


def _keep(outcome: Outcome, settings: Settings) -> None:
    path = _kept(outcome.family, outcome.mesh, outcome.mode, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: getattr(outcome, name) for name in Outcome.__dataclass_fields__}
    path.write_text(json.dumps(fields, indent=1), encoding="utf-8")


def _read(paths: Sequence[Path]) -> Iterator[Outcome]:
    for path in paths:
        fields = json.loads(path.read_text(encoding="utf-8"))
        yield Outcome(**fields | {"mesh": tuple(fields["mesh"])})
