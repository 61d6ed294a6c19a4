"""The measurement of a GPU, all of it on a CPU: its parts, their time, and going on."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import header, packages, sharing
from benchmarks.gpu.cases import FILES
from benchmarks.gpu.goals import goals_of
from benchmarks.gpu.parts import parts_of
from benchmarks.gpu.records import Record
from benchmarks.gpu.runner import run_part
from benchmarks.gpu.tables import page
from benchmarks.gpu.traces import summary
from benchmarks.gpu.wheels import environment_of, missing_wheels, read_have

ROOT = Path(__file__).parent.parent
HEADER = {
    "device": "cuda",
    "card": "a card",
    "driver": "1",
    "torch": "2.13.0",
    "nccl": "2.31.2",
    "code": "1234abcd",
    "models": ["gpt2"],
    "date": "2026-11-28 00:00 UTC",
    "commit": "abc",
    "python": "3.12.3",
    "packages": {},
}
SECONDS = 600


def start(results: Path) -> "subprocess.Popen[str]":
    """The whole measurement, with one model."""
    return subprocess.Popen(  # noqa: S603  our own program
        [
            *(sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--models", "gpt2"),
            *("--results", str(results), "--seconds", str(SECONDS)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupt_at(results: Path, line: str) -> None:
    """Start the measurement, and interrupt it when it prints the beginning of a line."""
    process = start(results)
    assert process.stdout is not None
    assert any(one.startswith(line) for one in process.stdout), process.communicate()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "the same command goes on from here" in said


def records_in(results: Path) -> dict[str, Record]:
    found = {part.name: Record.read(results / f"{part.name}.json") for part in parts_of("cpu", ())}
    return {name: record for name, record in found.items() if record is not None}


def check_all(results: Path) -> None:
    """Run what is missing, and check that every part has its results."""
    process = start(results)
    said, errors = process.communicate()
    assert process.returncode == 0, said + errors
    records = records_in(results)
    assert list(records) == [part.name for part in parts_of("cpu", ())]
    for name, record in records.items():
        assert record.complete, name
        assert record.results, name
    steps = records["models"].results
    assert len(steps) == 5
    assert all(one["seconds"] > 0 and one["kernels"] > 0 for one in steps.values())
    assert steps["gpt2: planned, compiled"]["graph_breaks"] == 0
    ranks = records["ranks"].results
    assert all(one["as_planned"] is not False for one in ranks.values())
    assert ranks["gpt2: fully_shard"]["collectives"]
    text = (results / "measured.md").read_text(encoding="utf-8")
    for title in ("| gpt2 | planned, compiled |", "| gpt2 | fully_shard |", "| launch_overhead |"):
        assert title in text
    assert "not measured: planned at most 1.03 of as written" in said


@pytest.mark.long
@pytest.mark.ranks
def test_it_is_interrupted_and_goes_on_to_its_end(tmp_path: Path) -> None:
    interrupt_at(tmp_path, "ranks, ")
    first = records_in(tmp_path)["models"].results
    check_all(tmp_path)
    assert records_in(tmp_path)["models"].results == first


@pytest.mark.long
@pytest.mark.ranks
def test_it_is_interrupted_after_each_part_and_goes_on(tmp_path: Path) -> None:
    names = [part.name for part in parts_of("cpu", ())]
    for done, following in pairwise(names):
        before = {n: record.results for n, record in records_in(tmp_path).items()}
        interrupt_at(tmp_path, f"{following}, ")
        records = records_in(tmp_path)
        assert records[done].complete
        for name in names[: names.index(done)]:
            assert records[name].results == before[name]
    check_all(tmp_path)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def result(name: str, value: int) -> str:
    return (
        f"print({json.dumps(json.dumps({'name': name, 'result': {'value': value}}))}, flush=True)"
    )


def ran(tmp_path: Path, seconds: float, **programs: str) -> Record:
    record = Record(tmp_path / "part.json", "part", HEADER)
    run_part({name: python(code) for name, code in programs.items()}, record, seconds, {})
    read = Record.read(record.path)
    assert read is not None
    return read


def test_a_process_that_fails_leaves_the_results_of_others_and_its_own(tmp_path: Path) -> None:
    record = ran(
        tmp_path,
        30,
        fails=f"{result('a', 1)}\nraise SystemExit('no such thing')",
        works=f"import time; time.sleep(0.5)\n{result('b', 2)}",
    )
    assert record.results == {"a": {"value": 1}, "b": {"value": 2}}
    assert list(record.failures) == ["fails"]
    assert "status 1:\nno such thing" in record.failures["fails"]
    assert not record.complete


def test_a_process_that_exceeds_its_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys, time\n"
    child += "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    child += "start_new_session=True)\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\n"
    record = ran(
        tmp_path, 3, late=f"{child}{result('a', 1)}\ntime.sleep(600)", works=result("b", 2)
    )
    assert record.results == {"a": {"value": 1}, "b": {"value": 2}}
    assert record.failures["late"].startswith("stopped after its share of 3 s")
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = monotonic() + 30
    while runs(status) and monotonic() < deadline:
        sleep(0.1)
    assert not runs(status)


def runs(status: Path) -> bool:
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_failed_is_forgotten_when_it_works(tmp_path: Path) -> None:
    assert ran(tmp_path, 30, one="raise SystemExit(3)").failures
    again = Record.resumed(tmp_path, "part", HEADER)
    run_part({"one": python(result("a", 1))}, again, 30, {})
    assert (again.failures, again.complete) == ({}, True)


@pytest.mark.parametrize("field", ["card", "torch", "nccl", "code", "models", "device"])
def test_results_of_another_run_are_measured_anew(tmp_path: Path, field: str) -> None:
    record = Record(tmp_path / "part.json", "part", HEADER)
    record.add("a", {"value": 1})
    assert Record.resumed(tmp_path, "part", {**HEADER, "date": "later"}).results
    assert not Record.resumed(tmp_path, "part", {**HEADER, field: "other"}).results
    record.path.write_text('{"header": {', encoding="utf-8")
    assert not Record.resumed(tmp_path, "part", HEADER).results


def step(seconds: float, predicted: float, peak: float = 100) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "predicted_seconds": predicted,
        "peak": peak,
        "predicted_peak": 100,
        "kernels": 3,
        "gaps": 0.0,
        "graph_breaks": 0,
        "longest": [{"name": "kernel", "count": 3, "seconds": 1e-3}],
        "gaps_before": [{"name": "aten::add", "count": 1, "seconds": 1e-4}],
    }


def steps(planned: float) -> dict[str, Any]:
    """Results of all models, in which compiled planned steps take a given time."""
    kinds = {"planned": 1.0, "as written": 1.0, "as written, compiled": 1.0}
    return {
        f"{model}: {kind}": step(seconds, 1.05)
        for model in ("gpt2", "llama", "moe", "vit")
        for kind, seconds in {**kinds, "planned, compiled": planned}.items()
    }


def outcomes(part: str, results: Mapping[str, Any], device: str = "cuda") -> list[str]:
    return [goal.outcome for goal in goals_of(part, device, results, {})]


def test_goals_of_models() -> None:
    assert outcomes("models", steps(1.02)) == ["met"] * 4
    assert outcomes("models", steps(1.03)) == ["missed", "met", "met", "met"]
    assert outcomes("models", steps(1.2)) == ["missed", "met", "missed", "met"]
    assert outcomes("models", steps(1.02) | {"vit: planned": step(1.0, 1.0, 104)})[-1] == "missed"
    part = {name: one for name, one in steps(1.02).items() if not name.startswith("vit")}
    assert outcomes("models", part) == ["not measured"] * 4
    assert outcomes("models", steps(1.2), "cpu") == ["not measured"] * 4


def test_goals_of_cases() -> None:
    passed, failed = {"a": {"error": ""}}, {"b": {"error": "E", "error_on_cpu": "E"}}
    assert outcomes("cases", {}) == ["not measured"]
    assert outcomes("cases", passed | failed) == ["met"]
    assert outcomes("cases", passed | {"b": {"error": "E", "error_on_cpu": ""}}) == ["missed"]
    (left,) = goals_of("cases", "cuda", passed, {"cases": "3 cases have not run"})
    assert left.outcome == "not measured"


def test_the_page_has_a_place_and_names_the_slowest_planned_step() -> None:
    document = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    record = Record(Path("models.json"), "models", HEADER, steps(1.2), {"llama": "Error:\nlate"})
    text = page(document, [record])
    assert "*2026-11-28 00:00 UTC; a card, Python 3.12.3, driver 1, torch 2.13.0" in text
    assert "gpt2: planned, compiled (1.200)" in text
    assert "* models, llama: late" in text
    assert page(document, []) == document


def event(category: str, name: str, start: float, seconds: float, **args: int) -> dict[str, Any]:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"cat": category, "name": name, "ts": start, "dur": seconds, "tid": 7, "args": named}


def test_a_trace_is_kernels_and_the_gaps_before_them() -> None:
    found = summary(
        [
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9.0, "tid": 1},
            event("cpu_op", "aten::mm", 0, 5, External_id=1),
            event("cpu_op", "aten::add", 6, 5, External_id=2),
            event("kernel", "gemm", 10, 20, External_id=1),
            event("kernel", "add", 35, 5, External_id=2),
            event("gpu_memcpy", "copy", 40, 5),
            {"ph": "M", "name": "process_name"},
        ],
        frozenset({"kernel", "gpu_memcpy"}),
    )
    assert found["kernels"] == 3
    assert (found["busy"], found["gaps"]) == (pytest.approx(30e-6), pytest.approx(5e-6))
    assert found["longest"][0] == {"name": "gemm", "count": 1, "seconds": 20e-6}
    assert found["gaps_before"] == [{"name": "aten::add", "count": 1, "seconds": 5e-6}]


def test_a_trace_of_a_cpu_counts_the_innermost_operators() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 30),
        event("cpu_op", "aten::t", 1, 4),
        event("cpu_op", "aten::addmm", 10, 20),
        event("cpu_op", "aten::relu", 40, 10),
    ]
    found = summary(events, frozenset({"cpu_op"}))
    assert {row["name"] for row in found["longest"]} == {"aten::t", "aten::addmm", "aten::relu"}
    assert summary([], frozenset({"cpu_op"}))["kernels"] == 0


def wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel of one module, with requirements."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        needed = [f"Requires-Dist: {need}" for need in needs]
        archive.writestr(f"{info}/METADATA", "\n".join([*lines, *needed, ""]))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def fetch(tmp_path: Path) -> Callable[[Requirement], Path]:
    made = [
        wheel(tmp_path, "one", "2.0", "two>=1.5", "torch>=2.0", "old; python_version < '3.10'"),
        wheel(tmp_path, "two", "1.7", "three[more]", "windows; sys_platform == 'win32'"),
        wheel(tmp_path, "three", "1.0", "four; extra == 'more'", "five; extra == 'less'"),
        wheel(tmp_path, "four", "1.0"),
    ]
    return lambda needed: next(path for path in made if path.name.startswith(needed.name))


@pytest.mark.parametrize(
    ("have", "names"),
    [
        ("", ["one", "two", "three", "four"]),
        ("two\nfour", ["one"]),
        ("two==1.4\nthree 1.0", ["one", "two"]),
        ("Package Version\n------- -------\none     2.1\ntorch 2.11.0+cu130", []),
    ],
)
def test_wheels_are_what_is_missing_and_what_that_needs(
    have: str, names: list[str], fetch: Callable[[Requirement], Path]
) -> None:
    found = missing_wheels(
        ["one>=2", "torch>=2.12"], read_have(have), environment_of("3.12"), fetch
    )
    assert [path.name.partition("-")[0] for path in found] == names


def test_wheels_that_do_not_fit_each_other_are_an_error(
    fetch: Callable[[Requirement], Path],
) -> None:
    with pytest.raises(SystemExit, match=r"two-1\.7.*is not two<1\.7"):
        missing_wheels(["one", "two<1.7", "two"][::-1], {}, environment_of("3.12"), fetch)


def test_lists_of_packages() -> None:
    text = "# made by pip\nPackage  Version\n-------- -------\nPyYAML   6.0.2\nnumpy==2.5.2\n"
    found = read_have(f"{text}typing_extensions\nlocal @ file:///somewhere\n-e .\n")
    versions = {name: version and str(version) for name, version in found.items()}
    assert versions["pyyaml"] == "6.0.2"
    assert versions["numpy"] == "2.5.2"
    assert versions["typing-extensions"] is None
    assert versions["local"] is None
    assert len(versions) == 4


def test_wheels_are_fetched_with_pip(tmp_path: Path) -> None:
    store, folder, have = tmp_path / "store", tmp_path / "wheels", tmp_path / "have.txt"
    store.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = {Requirement(needed).name for needed in project["dependencies"]} - {"zstandard"}
    have.write_text("\n".join([*there, "transformers", "pytest"]), encoding="utf-8")
    wheel(store, "zstandard", "0.99")
    done = subprocess.run(  # noqa: S603  our own program
        [
            *(sys.executable, "-m", "benchmarks.gpu.wheels", "--python", "3.12"),
            *("--have", str(have), "--folder", str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(store)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["zstandard-0.99-py3-none-any.whl"]


def test_wheels_are_installed_once(tmp_path: Path) -> None:
    wheels = tmp_path / "gpu-wheels"
    wheels.mkdir()
    wheel(wheels, "one", "2.0")
    target = packages.install_wheels(wheels)
    assert (target / "one.py").exists()
    (target / "one.py").unlink()
    assert packages.install_wheels(wheels) == target
    assert not (target / "one.py").exists()
    wheel(wheels, "two", "1.0")
    packages.install_wheels(wheels)
    assert (target / "one.py").exists()


def test_an_older_torch_has_to_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    header.check_torch(allow_old=False)
    monkeypatch.setattr(header, "version", lambda _: "2.11.0+cu130")
    header.check_torch(allow_old=True)
    with pytest.raises(header.Unusable, match=r"torch 2\.11.*ALLOW_OLD_TORCH=1"):
        header.check_torch(allow_old=False)


CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then echo started; else cat; fi >> {log}
exit {status}
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Puts a program in the place of the one that starts MPS, which ends with a status."""

    def put(status: int) -> Path:
        program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
        program.write_text(CONTROL.format(log=log, status=status), encoding="utf-8")
        program.chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return log

    return put


def test_mps_is_started_and_ended(
    control: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = control(0)
    tried: list[Mapping[str, str]] = []
    monkeypatch.setattr(sharing, "_works", lambda variables: tried.append(variables) or True)
    with sharing.sharing_of(HEADER) as found:
        assert found.name == "NCCL 2.31.2, under MPS"
        assert found.variables["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert "CUDA_MPS_PIPE_DIRECTORY" in found.variables
    assert log.read_text().split() == ["started", "quit"]


@pytest.mark.parametrize(
    ("status", "works", "name"),
    [
        (1, [True], "NCCL 2.28.9, each rank as a host of its own, one after the other"),
        (0, [False, True], "NCCL 2.28.9, each rank as a host of its own, one after the other"),
        (0, [False, False], ""),
    ],
)
def test_ranks_share_without_mps_where_it_does_not_work(
    control: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    works: Sequence[bool],
    name: str,
) -> None:
    control(status)
    answers = iter(works)
    monkeypatch.setattr(sharing, "_works", lambda _: next(answers))
    with sharing.sharing_of({**HEADER, "nccl": "2.28.9"}) as found:
        assert found.name == name
        assert "CUDA_MPS_PIPE_DIRECTORY" not in found.variables
    assert next(answers, None) is None


def test_all_files_of_cases_are_known() -> None:
    from runtime import cases_on_4_ranks  # noqa: PLC0415  it imports all of them

    assert len(cases_on_4_ranks.CASES) > len(cases_on_4_ranks.LONG) > 0
    with_ranks = {
        f"{area}.{path.stem}"
        for area in ("runtime", "checkpoint", "measure")
        for path in (ROOT / "tests" / area).glob("test_*.py")
        if "on_ranks(case)" in path.read_text()
    }
    on_a_cpu = {"runtime.test_pipelines_on_one_rank"}
    others = {f"runtime.{file}" for file in FILES} - {"runtime.cases_on_4_ranks"}
    assert with_ranks - on_a_cpu == {*cases_on_4_ranks.FILES, *others}
