"""Fuzzing of the archive reader and of a service with damaged archives and JSON.

`python -m benchmarks.fuzz` makes 10,000 cases and writes the result into docs/reliability.md. The
reader may return a graph or raise a GraphError; the service may respond with any status below 500.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import httpx2
import psutil
import torch

from autoshard.cli.commands.demo import service
from autoshard.errors import GraphError
from autoshard.graph import ArchiveLimits, export_model, load_graph
from benchmarks.document import caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "reliability.md"
_LIMITS = ArchiveLimits(archive_bytes=1 << 24, model_bytes=1 << 26)
_WARM = 0.3
"""Share of the cases after which memory is measured for the first time."""
_NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 10**400),
    *(0.0, -0.5, 1e308, "", "\0", "é" * 300, "x" * 70_000, "../../etc/passwd", "S(0)"),
    *([], {}, [[]], [None] * 1000, {"": {}}, {"as_tensor": {"name": "x"}}),
)
_INTERNAL = 500


@dataclass
class Findings:
    """Results of the cases of one target.

    Attributes:
        outcomes: number of cases by outcome.
        failures: unexpected errors, with the number of the case.
        grown: growth of resident memory after warming up, in bytes.
        seconds: of all cases.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    grown: int = 0
    seconds: float = 0.0


class Cases:
    """Damaged inputs, each determined by its number.

    Attributes:
        intact: an archive that is not damaged.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._archives = [_mlp(), _attention(), _dynamic()]
        self.intact = self._archives[0]
        self._models = [_model_json(archive) for archive in self._archives]

    def archive(self, number: int) -> bytes:
        """A damaged archive or model.json."""
        draw = random.Random(f"{self._seed}/{number}")
        index = draw.randrange(len(self._archives))
        kind = draw.choices(("archive", "text", "model", "packed"), (4, 1, 2, 3))[0]
        if kind == "archive":
            return _damaged(self._archives[index], draw)
        model = copy.deepcopy(self._models[index])
        for _ in range(draw.randint(1, 4)):
            _change(model, draw)
        text = json.dumps(model).encode()
        if kind == "text":
            text = _damaged(text, draw)
        return _zipped(text) if kind == "packed" else text

    def request(self, number: int) -> bytes:
        """Damaged JSON of a request."""
        draw = random.Random(f"{self._seed}/request/{number}")
        request: dict[str, Any] = {
            "mesh": {"shape": [2, 2], "axes": ["a", "b"], "topology": "h100-sxm"},
            "options": {
                "mode": "training",
                "pins": {"nodes": {"*": "S(0),R"}, "parameters": {"0.weight": "*,S(1)"}},
                "forbid": [{"kind": "all_to_all", "axis": "a"}],
                "memory_budget": 10**9,
                "time_limit": 10.0,
            },
            "rules": [{"operator": "a.b.c", "sizes": [["d0", 4]]}],
            "graph_sha256": "0" * 64,
        }
        for _ in range(draw.randint(1, 3)):
            _change(request, draw)
        text = json.dumps(request).encode()
        return draw.choices((text, _damaged(text, draw)), (4, 1))[0]


def fuzz_reader(cases: Cases, count: int) -> Findings:
    """Read a number of damaged archives."""

    def read(number: int) -> str:
        try:
            load_graph(cases.archive(number), limits=_LIMITS)
        except GraphError as error:
            return type(error).__name__
        return "read"

    return _run(read, count, psutil.Process())


def fuzz_service(cases: Cases, count: int) -> Findings:
    """Send a number of damaged bodies to a new service."""
    os.environ |= {"AUTOSHARD_NUM_WORKERS": "0", "AUTOSHARD_MAX_QUEUED_JOBS": "1000000"}
    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder)) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        (process,) = (
            child
            for child in psutil.Process().children()
            if "autoshard_server" in " ".join(child.cmdline())
        )

        def send(number: int) -> str:
            answer = _sent(http, cases, number)
            if answer.status_code >= _INTERNAL:
                raise AssertionError(f"status {answer.status_code}: {answer.text[:300]}")
            return str(answer.status_code)

        return _run(send, count, process)


def _sent(http: httpx2.Client, cases: Cases, number: int) -> httpx2.Response:
    archive, request = cases.archive(number), cases.request(number)
    as_json = {"Content-Type": "application/json"}
    plain = b'{"mesh": {"shape": [2]}}'
    match number % 5:
        case 0:
            digest = hashlib.sha256(archive).hexdigest()
            return http.put(f"/v1/graphs/{digest}", content=archive)
        case 1:
            return http.post("/v1/plans", files=_form(archive, plain))
        case 2:
            return http.post("/v1/plans", files=_form(cases.intact, request))
        case 3:
            return http.post("/v1/plans:lookup", content=request, headers=as_json)
        case _:
            path = random.Random(number).choice(("plans", "searches", "operators:coverage"))
            return http.post(f"/v1/{path}", content=request, headers=as_json)


def _form(graph: bytes, request: bytes) -> dict[str, tuple[str | None, bytes]]:
    return {"graph": ("graph", graph), "request": (None, request)}


def _run(case: Callable[[int], str], count: int, process: psutil.Process) -> Findings:
    found = Findings()
    begun = time.perf_counter()
    before = 0
    for number in range(count):
        if number == int(count * _WARM):
            before = process.memory_info().rss
        try:
            found.outcomes[case(number)] += 1
        except Exception as error:  # noqa: BLE001  every error is a finding
            found.failures.append(f"case {number}: {type(error).__name__}: {error}")
    found.grown = process.memory_info().rss - before
    found.seconds = time.perf_counter() - begun
    return found


def _damaged(body: bytes, draw: random.Random) -> bytes:
    """Bytes with bits flipped, parts deleted, duplicated or replaced, or the end truncated."""
    made = bytearray(body)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        at = draw.randrange(len(made)) if made else 0
        end = min(len(made), at + draw.choice((1, 4, 100, 5000)))
        match draw.randrange(5):
            case 0 if made:
                made[at] ^= 1 << draw.randrange(8)
            case 1:
                del made[at:end]
            case 2:
                made[at:at] = made[at:end]
            case 3:
                made[at:end] = draw.randbytes(end - at)
            case _:
                del made[draw.randrange(len(made)) if made else 0 :]
    return bytes(made)


def _change(document: Any, draw: random.Random) -> None:
    """Replace, drop or multiply a random value of a document, in place."""
    places = list(_places(document))
    owner, key = draw.choice(places)
    match draw.randrange(4):
        case 0:
            del owner[key]
        case 1:
            other, name = draw.choice(places)
            # Only if the other place still exists.
            if (isinstance(other, dict) and name in other) or isinstance(other, list):
                owner[key] = copy.deepcopy(draw.choice(_NASTY))
        case 2 if isinstance(owner[key], int | float):
            owner[key] = owner[key] * draw.choice((-1, 2, 0, 10**9))
        case _:
            owner[key] = copy.deepcopy(draw.choice(_NASTY))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = ()
    if isinstance(document, dict):
        keys = list(document)
    elif isinstance(document, list):
        keys = range(len(document))
    for key in keys:
        yield document, key
        yield from _places(document[key])


def _model_json(archive: bytes) -> Any:
    with ZipFile(BytesIO(archive)) as file:
        name = next(n for n in file.namelist() if n.endswith("models/model.json"))
        return json.loads(file.read(name))


def _zipped(model: bytes) -> bytes:
    buffer = BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as file:
        file.writestr("m/models/model.json", model)
    return buffer.getvalue()


def _mlp() -> bytes:
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    return export_model(torch.nn.Sequential(*layers), (torch.zeros(8, 16),))


def _dynamic() -> bytes:
    """A model that branches on a dynamic size, and computes numbers from it."""

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = x.shape[0]
            scale = size**0.5 + 1 / size if size % 2 == 0 else 1.0
            return super().forward(x).mul(scale).reshape(size // 2, -1) * (size > 1)

    example = torch.ones(4, 8, device="meta")
    model = Scaled(8, 8, device="meta")
    return export_model(model, (example,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})


def _attention() -> bytes:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return export_model(layer, (torch.zeros(2, 8, 16),))


def _table(found: dict[str, Findings]) -> str:
    rows = ["| target | cases | ended as | failures | memory added | seconds |", "|" + "---|" * 6]
    for name, findings in found.items():
        outcomes = ", ".join(f"{n:,} {kind}" for kind, n in findings.outcomes.most_common())
        count = findings.outcomes.total() + len(findings.failures)
        rows.append(
            f"| {name} | {count:,} | {outcomes} | {len(findings.failures)} "
            f"| {findings.grown / 1e6:.1f} MB | {findings.seconds:.0f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Fuzz both targets, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="cases, half for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    head = caption(f"seed {options.solver.seed}; memory after the first {_WARM:.0%} of the cases")
    cases = Cases(options.solver.seed)
    found = {
        "reader": fuzz_reader(cases, options.count // 2),
        "service": fuzz_service(cases, options.count // 2),
    }
    table = _table(found)
    failures = [failure for findings in found.values() for failure in findings.failures]
    print(table, *failures, sep="\n")
    if options.document.exists():
        text = options.document.read_text(encoding="utf-8")
        changed = replace_table(text, "fuzz", f"{head}\n\n{table}")
        options.document.write_text(changed, encoding="utf-8")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
