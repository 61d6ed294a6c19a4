"""The fork server: a process with all modules imported that forks the service's child processes.

A forked child starts within milliseconds; importing the planner takes more than a second. The
service sends requests over a Unix socket: a length, a JSON object with the child's program and
environment, and four file descriptors: the child's stdin, stdout and stderr, and a socket about the
child. On that socket the fork server sends the process id and, when the child has ended, its exit
status. If the service closes its end, the child is killed with all processes of its group. Thus all
children end with the service, and only the process that reaps a child ever sends it a signal.

One thread only: a fork copies the locks of other threads as they are.
"""

import gc
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from autoshard import plan, planner, solve
from autoshard_server.solvers import parsing, solving
from autoshard_server.solvers.children import (
    LENGTH,
    NUM_DESCRIPTORS,
    NUMBER,
    Program,
    kill_group,
)

_PROGRAMS: Mapping[Program, Callable[[], None]] = {
    "solve": solving.main,
    "parse": parsing.main,
    "export": parsing.main,
}

_NICENESS: Mapping[Program, int] = {"solve": 10, "parse": 7, "export": 7}
"""Niceness of child processes (0 to 19; see nice(2)): a caller waits for what is parsed, so it does
not take turns with solves."""


class _ForkServer:
    """Serves the requests of one service.

    Args:
        control: socket of requests.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._owners: dict[int, socket.socket] = {}
        self._ended, self._wakeup = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Fork children until the service ends; then kill them."""
        self._wakeup.setblocking(False)
        self._ended.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        is_served = True
        while is_served:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    is_served = self._fork()
                elif key.fileobj is self._ended:
                    self._report_ended()
                else:
                    self._abandon(key.data)
        for pid in self._owners:
            kill_group(pid)

    def _fork(self) -> bool:
        """Serve one request; False if the service has ended."""
        header, descriptors, _, _ = socket.recv_fds(self._control, LENGTH.size, NUM_DESCRIPTORS)
        if not header:
            return False
        (length,) = LENGTH.unpack(header)
        request = json.loads(self._control.recv(length, socket.MSG_WAITALL))
        *streams, owner_descriptor = descriptors
        owner = socket.socket(fileno=owner_descriptor)
        pid = os.fork()
        if not pid:
            self._close_all(owner)
            _run(request["program"], request["environment"], streams)
        for stream in streams:
            os.close(stream)
        self._owners[pid] = owner
        self._selector.register(owner, selectors.EVENT_READ, pid)
        _send(owner, pid)
        return True

    def _close_all(self, owner: socket.socket) -> None:
        """Close what belongs to this process, in a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._control, self._ended, self._wakeup, owner, *self._owners.values()):
            each.close()

    def _report_ended(self) -> None:
        with suppress(BlockingIOError):
            while self._ended.recv(1024):
                pass
        for pid in [*self._owners]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            # Its own children remain in its process group.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            owner = self._owners.pop(pid)
            if owner in self._selector.get_map():
                self._selector.unregister(owner)
            _send(owner, os.waitstatus_to_exitcode(status))
            owner.close()

    def _abandon(self, pid: int) -> None:
        """Kill a child of which the service has closed the socket."""
        # The child may have ended since the event.
        if pid in self._owners:
            self._selector.unregister(self._owners[pid])
            kill_group(pid)


def _run(program: Program, environment: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Run a child's program; the process ends with it."""
    status = 1
    try:
        # A session of its own, so that the child can be killed with its children.
        os.setsid()
        _lower_priority(_NICENESS[program])
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.environ.update(environment)
        _PROGRAMS[program]()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  the child must never return to the server's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _lower_priority(niceness: int) -> None:
    """Let the processes that answer requests go first."""
    os.nice(niceness)
    # Outside of cgroups, Linux compares sessions instead of processes.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def _complete_models(base: type[BaseModel]) -> None:
    """Build the validators that pydantic otherwise builds when a model is first used."""
    for model in base.__subclasses__():
        model.model_rebuild()
        _complete_models(model)


def _send(owner: socket.socket, number: int) -> None:
    with suppress(OSError):
        owner.sendall(NUMBER.pack(number))


def main() -> None:
    """Serve the service whose socket is stdin."""
    for package in (plan, planner, solve):
        # Some modules are otherwise imported when they are first used.
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    for name in sys.argv[1:]:
        import_module(name)
    _complete_models(BaseModel)
    # The children share these objects: without collections their pages are not copied.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as control:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        _ForkServer(control).serve()


if __name__ == "__main__":
    main()
