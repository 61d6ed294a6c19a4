"""Runs the cases of test files on real ranks; started as a program by `on_ranks.py`.

Starting ranks takes far longer than most cases. So the program imports once what most files
need, and runs each file in a fork of itself. One launch runs all cases of a file: the file is
imported once, and each rank is a fork of that process; or a new one on GPUs, which do not work in
forks. After every case the ranks tell each
other through a file how it went, so that a failed case is named, and the ones behind it run on
new ranks; also where a rank has died of it.
"""

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from support.devices import BACKEND, DEVICE, use_device

TIMEOUT = timedelta(seconds=float(os.environ.get("AUTOSHARD_TEST_TIMEOUT", "120")))
"""After which a rank that waits for others ends."""
_SUPPORT = ("support.comparison", "support.training", "support.transformer_plans", "fsspec.core")
_MODELS = tuple(f"transformers.models.{n}.modeling_{n}" for n in ("bert", "gpt2", "llama", "t5"))


@runtime_checkable
class Prepared(Protocol):
    """A case with work that is done once, before there are ranks."""

    def prepare(self) -> None: ...


def joined(*modules: ModuleType) -> dict[str, Callable[[], None]]:
    """The `CASES` of several modules, for one launch; names begin with that of the module."""
    return {
        f"{module.__name__.rpartition('.')[2]}: {name}": case
        for module in modules
        for name, case in module.CASES.items()
    }


def load_cases(file: Path) -> dict[str, Callable[[], None]]:
    """The `CASES` of a test file by name."""
    sys.path[:0] = [str(folder) for folder in file.resolve().parents[1:3]]  # as pytest has it
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    cases: dict[str, Callable[[], None]] = module.CASES
    return cases


def run_cases(
    rank: int, *, num_ranks: int, cases: Sequence[tuple[str, Callable[[], None]]], folder: Path
) -> None:
    """One rank's life: writes the error of each case, empty where it passed, in JSON.

    The file is written after every case. The life ends with the first case that fails on any
    rank, since collectives that one rank has started and another has not leave the process
    groups unusable. On GPUs it goes on if all ranks have failed alike.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # spmd_types calls collectives of torch by names that newer releases deprecate.
    warnings.filterwarnings("ignore", ".*_functional_collectives", FutureWarning)
    # Over real links, models as small as those of the cases are often best left whole.
    warnings.filterwarnings("ignore", "no operator is sharded", UserWarning)
    # Where AUTOSHARD_ANY_TORCH is set, it is known that the torch is another one.
    warnings.filterwarnings("ignore", ".*lets it run all the same", UserWarning)
    # Said once in a process, by the first case that needs a full tensor; a case of its own looks.
    warnings.filterwarnings("ignore", ".* on the full tensor on every rank", UserWarning)
    use_device(rank)
    store = dist.FileStore(str(folder / "rendezvous"), num_ranks)
    store.set_timeout(TIMEOUT)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    outcomes = {}
    for number, (name, case) in enumerate(cases):
        torch.manual_seed(0)
        outcomes[name] = _outcome(case)
        _file(folder, rank).write_text(json.dumps(outcomes))
        store.set(f"{number}/{rank}", outcomes[name].strip().rpartition("\n")[2] or "passed")
        states = [store.get(f"{number}/{other}") for other in range(num_ranks)]
        # New ranks on GPUs take long; where all have failed alike, no collective waits for one.
        if any(state != states[0] for state in states) or (DEVICE == "cpu" and outcomes[name]):
            break
    dist.destroy_process_group()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except BaseException:  # noqa: BLE001  whatever it is, it is this case's failure
        return traceback.format_exc()
    return ""


@dataclass
class Launch:
    """Cases of one file, run on ranks.

    Attributes:
        file: has the cases.
        folder: for the rendezvous, the results, and what the ranks print.
        num_ranks: of the process group.
        names: of the cases.
        timeout: seconds.
    """

    file: str
    folder: str
    num_ranks: int
    names: list[str]
    timeout: float

    def run(self) -> None:
        """Run the cases on forked ranks, on new ones after each case that failed."""
        os.setsid()
        folder = Path(self.folder)
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        cases = Forked(self) if DEVICE == "cpu" else Fresh(self)
        outcomes = [dict(cases.failed) for _ in range(self.num_ranks)]
        while remaining := [name for name in self.names if name not in outcomes[0]]:
            attempt = folder / f"launch{len(outcomes[0])}"
            attempt.mkdir()
            processes = [cases.process(rank, remaining, attempt) for rank in range(self.num_ranks)]
            for rank, found in enumerate(_launch(processes, remaining, attempt)):
                outcomes[rank].update(found)
        (folder / "outcomes.json").write_text(json.dumps(outcomes))


class Forked:
    """Ranks that are forks of this process, where the cases are prepared.

    Attributes:
        failed: errors of cases that could not be prepared.
    """

    def __init__(self, launch: Launch) -> None:
        self._num_ranks = launch.num_ranks
        self._cases = load_cases(Path(launch.file))
        self.failed = _prepare([(name, self._cases[name]) for name in launch.names])

    def process(self, rank: int, names: Sequence[str], folder: Path) -> BaseProcess:
        """The process of a rank, to be started."""
        settings = {
            "num_ranks": self._num_ranks,
            "cases": [(name, self._cases[name]) for name in names],
            "folder": folder,
        }
        context = multiprocessing.get_context("fork")
        return context.Process(target=run_cases, args=(rank,), kwargs=settings)


class Fresh:
    """Ranks that prepare the cases themselves: GPUs do not work in forks.

    Attributes:
        failed: empty; ranks report what could not be prepared.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.failed: dict[str, str] = {}

    def process(self, rank: int, names: Sequence[str], folder: Path) -> BaseProcess:
        """The process of a rank, to be started."""
        given = (rank, self._launch.file, self._launch.num_ranks, list(names), folder)
        return multiprocessing.get_context("spawn").Process(target=run_fresh, args=given)


def run_fresh(rank: int, file: str, num_ranks: int, names: Sequence[str], folder: Path) -> None:
    """One rank's life, with what comes before it; see `run_cases`.

    Cases are prepared one by one, so that the first ones have run when the time is over.
    """
    known = load_cases(Path(file))
    cases = [(name, partial(_run_prepared, known[name])) for name in names]
    run_cases(rank, num_ranks=num_ranks, cases=cases, folder=folder)


def _run_prepared(case: Callable[[], None]) -> None:
    if isinstance(case, Prepared):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as where cases are prepared before there are ranks
            case.prepare()
        torch.manual_seed(0)
    case()


def _prepare(cases: Sequence[tuple[str, Callable[[], None]]]) -> dict[str, str]:
    """Prepare cases; the errors of those that fail."""
    outcomes = {name: _outcome(case.prepare) for name, case in cases if isinstance(case, Prepared)}
    return {name: error for name, error in outcomes.items() if error}


def main() -> None:
    """Answer each line of the input: names of cases, or the exit status of a launch."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # threads of a product that wait for a processor take time of others
    # A build of torch for CUDA without a GPU: the first backward after an export would start
    # threads for a pretended device, and then none could run in the forks of this process.
    torch.ones(1, requires_grad=True).sum().backward()
    for name in (*_SUPPORT, *_MODELS):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _listed(**request) if len(request) == 1 else _status(Launch(**request))
        print(answer, flush=True)  # noqa: T201


def _listed(file: str) -> str:
    """The number of ranks and the cases of a file but the long ones, in JSON."""
    cases, module = load_cases(Path(file)), sys.modules[Path(file).stem]
    long = getattr(module, "LONG", ())
    return json.dumps([module.NUM_RANKS, [name for name in cases if name not in long]])


def _status(launch: Launch) -> str:
    """Run a launch in a fork; its exit status, or "timeout"."""
    process = multiprocessing.get_context("fork").Process(target=launch.run)
    process.start()
    process.join(launch.timeout)
    if not process.is_alive():
        return str(process.exitcode)
    os.killpg(process.ident or 0, signal.SIGKILL)
    process.join()
    return "timeout"


def _launch(
    processes: Sequence[BaseProcess], names: Sequence[str], folder: Path
) -> list[dict[str, str]]:
    """The outcomes on each rank of the cases up to the first that fails."""
    # What is there before the ranks is no garbage: no rank looks through it, or copies its pages.
    gc.collect()
    gc.freeze()
    for process in processes:
        process.start()
    died = _first_deaths(processes)
    for process in processes:
        if died:
            process.kill()
        process.join()
    files = [_file(folder, rank) for rank in range(len(processes))]
    outcomes = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    if died:
        during = names[min(*map(len, outcomes), len(names) - 1)]
        for found in outcomes:
            found[during] = found.get(during) or f"ended: {died}"
    return outcomes


def _first_deaths(processes: Sequence[BaseProcess]) -> str:
    """Waits until all have ended well, or some have not: which, and how; else empty."""
    running = {process.sentinel: process for process in processes}
    while running:
        ended = [running.pop(int(sentinel)) for sentinel in connection.wait(list(running))]
        for process in ended:
            process.join()
        if any(process.exitcode for process in ended):
            break
    return ", ".join(
        f"rank {rank} with status {process.exitcode}"
        for rank, process in enumerate(processes)
        if process.exitcode
    )


if __name__ == "__main__":
    main()
