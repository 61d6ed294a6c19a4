"""Saves of checkpoints that are killed, whose disk is full, or of which one system call fails.

`python -m benchmarks.interrupted_saves` saves with planned models on two ranks, over a checkpoint
that is there, and writes the result into docs/reliability.md and benchmarks/results. It first lists
the system calls with which a save changes files. Then strace kills a rank at one of them, or lets
it fail. New ranks load what is left: it must be the former checkpoint or the new one, whole; and
all ranks must have ended, each of those that live with an error, or each without. The next save
must succeed, and leave nothing behind.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from autoshard import (
    Plan,
    PlanOptions,
    export_model,
    load_checkpoint,
    load_graph,
    make_mesh,
    make_plan,
    parallelize,
    rng_step,
    save_checkpoint,
)
from autoshard.errors import CheckpointError
from autoshard.integrations.accelerate import PlannedAccelerator
from autoshard.integrations.checkpoints import load_optimizers, replace_weights, save_optimizers
from autoshard.integrations.transformers import PlannedTrainer
from benchmarks.document import caption, commit, replace_table

NUM_RANKS = 2
FORMER, NEW, NEXT = 1, 2, 3
"""Numbers of checkpoints; all numbers in a checkpoint follow from its number."""

_ROOT = Path(__file__).parents[1]
_DOCUMENT = _ROOT / "docs" / "reliability.md"
_RESULT = Path(__file__).parent / "results" / "interrupted_saves.json"
_PATIENCE = 60.0
"""Seconds after which a rank that has not ended waits for ever."""

_CALLS = [
    "openat",
    "creat",
    "write",
    "writev",
    "pwrite64",
    "pwritev",
    "ftruncate",
    "fallocate",
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "symlink",
    "unlink",
    "unlinkat",
    "rmdir",
    "mkdir",
    "mkdirat",
]
_WRITES = "write,pwrite64,fallocate,ftruncate"
_LEFT = re.compile(r"unfinished|former|\.tmp")
SAVED, REFUSED, CRASHED = "saved", "refused", "crashed"
KILLED, FULL, FAILING = "kill -9", "full disk", "a call fails"
FAULTS = (KILLED, FULL, FAILING)


class Net(nn.Module):
    """A small model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.down(torch.relu(self.up(x))).square().mean()


@cache
def plan() -> Plan:
    """A plan that shards the model over the ranks."""
    graph = load_graph(export_model(Net(), (torch.ones(4, 8),)))
    pins = {"parameters": {"up.*": "S(0)", "down.weight": "S(1)", "down.bias": "I"}}
    made = make_plan(graph, make_mesh((NUM_RANKS,)), PlanOptions.model_validate({"pins": pins}))
    assert made.found, made.reason
    return made


class Training:
    """A planned model with an optimizer, whose state is that of a checkpoint with a number."""

    def __init__(self) -> None:
        mesh = plan().mesh
        devices = init_device_mesh(
            "cpu", tuple(mesh.axis_sizes), mesh_dim_names=tuple(mesh.axis_names)
        )
        self.model = parallelize(Net(), plan(), devices)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.model(torch.ones(4, 8)).backward()
        self.optimizer.step()  # makes the state
        self.optimizer.zero_grad()

    @torch.no_grad()
    def become(self, number: int) -> None:
        """Set all numbers."""
        for parameter in self.model.parameters():
            parameter.fill_(float(number))
            state = self.optimizer.state[parameter]
            for value in state.values():
                value.fill_(float(number))
        rng_step(self.model).value = number
        self.optimizer.param_groups[0]["lr"] = float(number)

    def weights(self) -> set[float]:
        """The numbers of this rank's shards."""
        return {n for p in self.model.parameters() for n in _numbers(p)}

    def numbers(self) -> set[float]:
        """The numbers of weights, optimizer and step on this rank."""
        states = [self.optimizer.state[p] for p in self.model.parameters()]
        found = {n for state in states for value in state.values() for n in _numbers(value)}
        rate = self.optimizer.param_groups[0]["lr"]
        return self.weights() | found | {float(rate), float(rng_step(self.model).value)}

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        raise NotImplementedError

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        raise NotImplementedError


def _numbers(tensor: torch.Tensor) -> list[float]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return [float(n) for n in local.detach().flatten().unique()]


class Weights(Training):
    """`replace_weights` and `load_checkpoint`: one file over one, or several over several.

    Args:
        sizes: maximum bytes of a file, of the former checkpoint and of others.
    """

    def __init__(self, former: int, others: int) -> None:
        super().__init__()
        self._sizes = {FORMER: former}, others

    def become(self, number: int) -> None:
        """Set all numbers."""
        super().become(number)
        self._number = number

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        known, others = self._sizes
        size = known.get(self._number, others)
        replace_weights(self.model, folder, max_file_bytes=size)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        load_checkpoint(self.model, folder)
        return self.weights()


class NewWeights(Training):
    """`save_checkpoint` into a folder that has none."""

    def save(self, folder: Path) -> None:
        """Save where nothing is."""
        save_checkpoint(self.model, folder / "new", max_file_bytes=500)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers; those of the former checkpoint if there is none."""
        if not [*folder.glob("new/*.index.json")]:
            return {float(FORMER)}
        load_checkpoint(self.model, folder / "new")
        return self.weights()


class Optimizers(Training):
    """`save_optimizers` and `load_optimizers`."""

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        save_optimizers(self.model, [self.optimizer], folder)

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers of the optimizer."""
        number = self.weights()
        load_optimizers(self.model, [self.optimizer], folder)
        return self.numbers() - number


def forget_accelerate() -> None:
    """Reset what accelerate keeps in a process; it has no public way."""
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    GradientState._reset_state()  # noqa: SLF001


class Accelerated(Training):
    """`PlannedAccelerator.save_state` and `load_state`."""

    def __init__(self) -> None:
        super().__init__()
        forget_accelerate()
        self._accelerator: Accelerator = PlannedAccelerator()
        self._scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self._accelerator.prepare(self.model, self.optimizer, self._scheduler)

    def become(self, number: int) -> None:
        """Set all numbers."""
        super().become(number)
        self._scheduler.last_epoch = number

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        self._accelerator.load_state(str(folder))
        return self.numbers() | {float(self._scheduler.last_epoch)}


class Trained(Training):
    """A checkpoint of `PlannedTrainer` that is saved again."""

    def __init__(self) -> None:
        super().__init__()
        forget_accelerate()

    def _trainer(self, folder: Path) -> Any:
        arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True)
        scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        trainer: Any = PlannedTrainer(self.model, arguments, optimizers=(self.optimizer, scheduler))
        trainer.optimizer = trainer.accelerator.prepare(self.optimizer)
        trainer.state.global_step = 7
        return trainer

    def save(self, folder: Path) -> None:
        """Save over what is there."""
        self._trainer(folder)._save_checkpoint(self.model, None)  # noqa: SLF001  of a step

    def load(self, folder: Path) -> set[float]:
        """Load, and return the numbers."""
        trainer = self._trainer(folder)
        trainer.settle_saves()
        place = str(folder / "checkpoint-7")
        trainer._load_from_checkpoint(place)  # noqa: SLF001  as when it is resumed
        trainer._load_optimizer_and_scheduler(place)  # noqa: SLF001
        return self.numbers()


SUBJECTS: Mapping[str, Callable[[], Training]] = {
    "save_state": Accelerated,
    "Trainer": Trained,
    "replace_weights, one file": lambda: Weights(10_000, 10_000),
    "replace_weights, several files": lambda: Weights(500, 500),
    "replace_weights, one file by several": lambda: Weights(10_000, 500),
    "replace_weights, several files by one": lambda: Weights(500, 10_000),
    "save_optimizers": Optimizers,
    "save_checkpoint": NewWeights,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A system call with which a save changes files.

    Attributes:
        rank: that makes it.
        name: of the call.
        number: of the calls of this name, from 1.
        text: as strace prints it.
    """

    rank: int
    name: str
    number: int
    text: str


@dataclass
class Trial:
    """A save with a fault.

    Attributes:
        subject: one of `SUBJECTS`.
        fault: one of `FAULTS`.
        call: where it happens.
        ended: how each rank has ended: saved, refused by `CheckpointError`, crashed, or killed.
        left: number of the checkpoint that is loaded afterwards.
        wrong: what is not as it must be; empty if all is.
    """

    subject: str
    fault: str
    call: Call
    ended: list[str] = field(default_factory=list)
    left: int = 0
    wrong: str = ""

    def run(self, former: Path) -> Self:
        """Save with the fault into a copy of a folder, and load what is left."""
        with TemporaryDirectory(prefix="saves-") as name:
            folder = Path(name) / "checkpoint"
            shutil.copytree(former, folder)
            found = launch(self.subject, folder, NEW, traced=self.call.rank, inject=self._inject())
            self.ended = [kind for kind, _ in found]
            texts = " | ".join(text for _, text in found)
            self.wrong = self._judged_ranks(texts)
            loaded = launch(self.subject, folder, NEXT, loads=True)
            kinds = {kind for kind, _ in loaded}
            numbers = {text for _, text in loaded}
            if kinds != {SAVED} or len(numbers) != 1:
                self.wrong += f" cannot load or save again: {loaded}"
            else:
                self.left = int(next(iter(numbers)))
            if SAVED in self.ended and self.left == FORMER:
                self.wrong += " saved, but the former checkpoint is there"
            left = [path.name for path in folder.rglob("*") if _LEFT.search(path.name)]
            if left or len([*folder.rglob("planned-save-*")]) > 1:
                self.wrong += f" left behind: {left}"
        return self

    def _inject(self) -> str:
        call = self.call
        if self.fault == KILLED:
            return f"inject={call.name}:signal=SIGKILL:when={call.number}"
        if self.fault == FULL:
            return f"inject={_WRITES}:error=ENOSPC:when={call.number}+"
        return f"inject={call.name}:error=EIO:when={call.number}"

    def _judged_ranks(self, texts: str) -> str:
        """What is wrong with how the ranks have ended."""
        if "waits" in self.ended:
            return f"a rank waits for ever: {texts}"
        others = {kind for rank, kind in enumerate(self.ended) if rank != self.call.rank}
        if self.ended[self.call.rank] == "killed":
            return ""
        if len({*self.ended}) > 1 or CRASHED in others:
            return f"ranks end differently: {self.ended}: {texts}"
        return ""


@contextmanager
def _as_launched(rank: int) -> Iterator[None]:
    """A context with the environment of a rank that torchrun has started."""
    size = str(NUM_RANKS)
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size}
    names |= {"LOCAL_WORLD_SIZE": size, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, names | {"GLOO_SOCKET_IFNAME": "lo"}):
        yield


def _life(
    rank: int, subject: str, folder: Path, store: str, number: int, *, loads: bool, stops: bool
) -> tuple[str, str]:
    """What a rank does: save; or load, and save again. How it ends, and what it says."""
    warnings.simplefilter("ignore")
    with _as_launched(rank):
        rendezvous = dist.FileStore(store, NUM_RANKS)
        dist.init_process_group(
            "gloo",
            store=rendezvous,
            rank=rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=2 * _PATIENCE),
        )
        training, said = SUBJECTS[subject](), ""
        if loads:
            training.become(0)
            (found,) = training.load(folder)
            said = str(int(found))
            if subject == "save_checkpoint":
                dist.barrier()
                if rank == 0 and int(found) == NEW:
                    shutil.rmtree(folder / "new")
                dist.barrier()
        training.become(number)
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            training.save(folder)
        except CheckpointError as error:
            return REFUSED, str(error)
        if loads:
            training.become(0)
            assert training.load(folder) == {float(number)}
        return SAVED, said


def launch(
    subject: str,
    folder: Path,
    number: int,
    *,
    loads: bool = False,
    traced: int | None = None,
    inject: str = "",
    log: Path | None = None,
) -> list[tuple[str, str]]:
    """Run the ranks of a save as forks of this process; how each ends, and what it says.

    Args:
        subject: one of `SUBJECTS`.
        folder: of the checkpoint.
        number: of the checkpoint that is saved.
        loads: True to load first.
        traced: the rank whose system calls strace sees.
        inject: the fault, as strace takes it.
        log: for the system calls.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="rendezvous-") as name:
        pairs = [socket.socketpair() for _ in range(NUM_RANKS)]

        def live(rank: int) -> None:
            try:
                said = _life(
                    rank,
                    subject,
                    folder,
                    f"{name}/store",
                    number,
                    loads=loads,
                    stops=rank == traced,
                )
            except BaseException as error:  # noqa: BLE001  whatever it is
                said = CRASHED, f"{type(error).__name__}: {error}"
            # Not by a write, which may be the one that fails.
            pairs[rank][1].sendall(json.dumps(said).encode())
            os._exit(0)

        ranks = [context.Process(target=live, args=(rank,)) for rank in range(NUM_RANKS)]
        for rank in ranks:
            rank.start()
        if traced is not None:
            _trace(ranks[traced].pid or 0, inject, log)
        end = time.monotonic() + _PATIENCE
        for rank in ranks:
            rank.join(max(end - time.monotonic(), 0.1))
        return [_ended(rank, pair[0]) for rank, pair in zip(ranks, pairs, strict=True)]


def _trace(pid: int, inject: str, log: Path | None) -> None:
    """Let strace see the system calls of a process that has stopped itself, and continue it."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)
    calls = ["-e", f"trace={','.join(_CALLS)}", *(["-e", inject] if inject else [])]
    output = str(log or "/dev/null")
    tracer = subprocess.Popen(  # noqa: S603  constant but for numbers
        ["strace", "-qq", "-y", "-s", "0", "-o", output, *calls, "-p", str(pid)],  # noqa: S607
    )
    while f"TracerPid:\t{tracer.pid}\n" not in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError("strace cannot trace a process here")
        time.sleep(0.005)
    os.kill(pid, signal.SIGCONT)


def _ended(rank: Any, said: socket.socket) -> tuple[str, str]:
    if rank.is_alive():
        rank.kill()
        rank.join()
        return "waits", ""
    if rank.exitcode:
        return "killed", str(rank.exitcode)
    kind, text = json.loads(said.recv(1 << 16))
    return kind, text


def calls_of(subject: str, former: Path) -> list[Call]:
    """The system calls with which a save over a checkpoint changes files, in order."""
    found = []
    for rank in range(NUM_RANKS):
        with TemporaryDirectory(prefix="saves-") as name:
            folder, log = Path(name) / "checkpoint", Path(name) / "log"
            shutil.copytree(former, folder)
            ended = launch(subject, folder, NEW, traced=rank, log=log)
            assert {kind for kind, _ in ended} == {SAVED}, ended
            numbers: Counter[str] = Counter()
            for line in log.read_text().splitlines():
                match = re.match(r"(\w+)\(", line)
                if match is None or match[1] not in _CALLS:
                    continue
                numbers[match[1]] += 1
                reads = match[1] == "openat" and "O_RDONLY" in line
                if str(folder) in line and not reads:
                    text = line.replace(str(folder), "").partition(" = ")[0].strip()
                    found.append(Call(rank, match[1], numbers[match[1]], text))
    return found


def formers(folder: Path, subjects: Sequence[str]) -> dict[str, Path]:
    """A checkpoint of each kind, which trials save over."""
    places = {}
    for number, subject in enumerate(subjects):
        places[subject] = folder / str(number)
        places[subject].mkdir()
        if subject != "save_checkpoint":
            ended = launch(subject, places[subject], FORMER)
            assert {kind for kind, _ in ended} == {SAVED}, ended
    return places


def trials(places: Mapping[str, Path], count: int, seed: int = 0) -> Iterator[Trial]:
    """Draw trials: of each kind of save, fault and system call, as many as of the others."""
    draw = random.Random(seed)
    known = {subject: calls_of(subject, former) for subject, former in places.items()}
    pairs = [(subject, fault) for subject in places for fault in FAULTS]
    remaining: dict[tuple[str, str], list[Call]] = {}
    for number in range(count):
        subject, fault = pairs[number % len(pairs)]
        left = remaining.setdefault((subject, fault), [])
        if not left:
            left += [c for c in known[subject] if fault != FULL or c.name in _WRITES.split(",")]
            draw.shuffle(left)
        yield Trial(subject, fault, left.pop())


def prepare() -> None:
    """Make the plan, and import what the ranks need, which are forks of this process."""
    torch.set_num_threads(1)
    plan()
    model = Net()
    model(torch.ones(4, 8)).backward()
    torch.optim.AdamW(model.parameters(), foreach=False).step()


def is_possible() -> bool:
    """True if strace is installed and may trace processes."""
    with suppress(OSError):
        done = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], check=False)  # noqa: S607
        return not done.returncode
    return False


def main() -> int:
    """Run trials and write the result; 1 if one was wrong."""
    options = _parser().parse_args()
    head = caption(f"{NUM_RANKS} ranks, seed {options.seed}")
    if options.again:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare()
    with TemporaryDirectory(prefix="former-") as name:
        places = formers(Path(name), options.only or [*SUBJECTS])
        drawn = list(trials(places, options.count, options.seed))
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=_work, args=(drawn, places, options, number))
            for number in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    kept = [json.loads(path.read_bytes()) for path in sorted(options.folder.glob("*.json"))]
    done = [Trial(**{**one["trial"], "call": Call(**one["trial"]["call"])}) for one in kept]
    table = _table(done, sum(one["seconds"] for one in kept))
    print(table)
    if options.write:
        _RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        text = _DOCUMENT.read_text(encoding="utf-8")
        changed = replace_table(text, "interrupted saves", f"{head}\n\n{table}")
        _DOCUMENT.write_text(changed, encoding="utf-8")
    return int(len(done) < options.count or any(trial.wrong for trial in done))


def _work(
    drawn: Sequence[Trial], places: Mapping[str, Path], options: argparse.Namespace, first: int
) -> None:
    """Run each of several workers' trials whose result is not in the folder yet."""
    for number in range(first, len(drawn), options.processes):
        file = options.folder / f"{options.seed}-{number:05}.json"
        if file.exists():
            continue
        begun, trial = time.perf_counter(), drawn[number]
        trial.run(places[trial.subject])
        if trial.wrong:
            print(f"{number}: {trial}", flush=True)
        seconds = round(time.perf_counter() - begun, 1)
        result = {"commit": commit(), "seconds": seconds, "trial": asdict(trial)}
        file.write_text(json.dumps(result), encoding="utf-8")


def _table(done: Sequence[Trial], seconds: float) -> str:
    rows = [
        "| save | fault | trials | former checkpoint | new one | neither, or a rank waits |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for subject in dict.fromkeys(trial.subject for trial in done):
        for fault in FAULTS:
            own = [t for t in done if (t.subject, t.fault) == (subject, fault)]
            wrong = sum(bool(t.wrong) for t in own)
            left = Counter(t.left for t in own if not t.wrong)
            rows.append(
                f"| `{subject}` | {fault} | {len(own)} | {left[FORMER]} | {left[NEW]} | {wrong} |"
            )
    calls = len({(t.subject, t.call.rank, t.call.name, t.call.number) for t in done})
    total = f"{len(done):,} trials at {calls:,} system calls, which took {seconds:,.0f} s."
    return "\n".join([*rows, "", total])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interrupted_saves", description=__doc__
    )
    parser.add_argument("--count", type=int, default=216, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--processes", type=int, default=2, help="trials at the same time")
    parser.add_argument("--folder", type=Path, default=Path("build/interrupted-saves"))
    parser.add_argument("--again", action="store_true", help="discard trials that are kept")
    parser.add_argument("--only", nargs="+", choices=[*SUBJECTS], help="not all kinds of saves")
    parser.add_argument(
        "--write", action=argparse.BooleanOptionalAction, default=True, help="the result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
