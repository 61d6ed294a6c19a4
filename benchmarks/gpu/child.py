"""A process of a part: `python -m benchmarks.gpu.child PART PROCESS --device cuda ...`.

Prints a line of JSON for every result.
"""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from benchmarks.gpu.parts import MODELS, MODULES
from benchmarks.gpu.records import Record


@dataclass
class Job:
    """What a process has to do.

    Attributes:
        process: its name.
        device: "cuda" or "cpu"; on a CPU everything is small.
        models: names of the models that are measured.
        topology: preset with the prices of the device.
        folder: of the records.
        done: results that are there already.
        deadline: by `time.monotonic`.
        output: takes the results.
    """

    process: str
    device: str
    models: tuple[str, ...]
    topology: str
    folder: Path
    done: Mapping[str, Any]
    deadline: float
    output: IO[str]

    def put(self, name: str, result: Mapping[str, Any]) -> None:
        """Hand a result to the runner."""
        self._print({"name": name, "result": result})

    def _print(self, fields: Mapping[str, Any]) -> None:
        print(json.dumps(fields), file=self.output, flush=True)

    @contextmanager
    def failures_of(self, name: str) -> Iterator[None]:
        """A context whose exception is the failure of one measurement; others go on."""
        try:
            yield
        except Exception:  # noqa: BLE001  whatever it is, the next one is measured
            self._print({"name": name, "error": traceback.format_exc()})


def _open_output() -> IO[str]:
    """The standard output, for results alone; what else is printed goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output


def main() -> None:
    """Run one process of a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=MODULES)
    parser.add_argument("process")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    record = Record.read(given.folder / f"{given.part}.json")
    assert record is not None  # the runner has written it
    job = Job(
        process=given.process,
        device=given.device,
        models=tuple(given.models),
        topology=record.header["topology"],
        folder=given.folder,
        done=record.results,
        deadline=monotonic() + given.seconds,
        output=_open_output(),
    )
    os.environ["AUTOSHARD_TEST_DEVICE"] = given.device  # of the cases of tests
    module = importlib.import_module(f"benchmarks.gpu.{MODULES[given.part]}")
    run: Callable[[Job], None] = module.run
    run(job)


if __name__ == "__main__":
    main()
