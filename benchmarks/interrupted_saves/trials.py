"""Saves with a fault, on ranks that are forks of this process, and what is loaded afterwards."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

from autoshard.errors import CheckpointError
from benchmarks.interrupted_saves.subjects import (
    FORMER,
    NEW,
    NEXT,
    NUM_RANKS,
    SUBJECTS,
    Net,
    plan,
)

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
        """The fault of how the ranks have ended; empty if there is none."""
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
    """Save on a rank, or load and save again; tell how it ends, and what it says."""
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
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        if state in "XZ":
            return  # it ended before: its exit status says why
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
                    short = line.replace(str(folder), "").replace(f"<{Path.cwd()}>", "")
                    text = short.partition(" = ")[0].strip()
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
    # No backward pass: with PyTorch for CUDA it starts threads, after which forks cannot run one.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(model.parameters(), foreach=False).step()


def is_possible() -> bool:
    """True if strace is installed and may trace processes."""
    with suppress(OSError):
        done = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], check=False)  # noqa: S607
        return not done.returncode
    return False
