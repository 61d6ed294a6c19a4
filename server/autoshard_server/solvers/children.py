"""Child processes: spawned with a command, or forked by the fork server of this process."""

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Lock
from typing import IO, Literal, Protocol

LENGTH = struct.Struct(">I")
"""Length of a request to the fork server."""

NUMBER = struct.Struct(">i")
"""A process id or an exit status, as the fork server sends it."""

NUM_DESCRIPTORS = 4
"""File descriptors of a request to the fork server."""

Program = Literal["solve", "parse", "export"]
"""Program that a forked child runs; `export` has torch and transformers imported."""

_LOST = 1
"""Exit status of a child whose fork server has died."""

_FORK_SERVER = (sys.executable, "-X", "faulthandler", "-m", "autoshard_server.solvers.fork_server")

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Environment in which transformers asks no server; it is read when transformers is imported."""


class Child(Protocol):
    """A child process, the leader of its session.

    Attributes:
        stdin: to write to.
        stdout: to read from.
    """

    stdin: IO[bytes]
    stdout: IO[bytes]

    @property
    def pid(self) -> int | None:
        """The process id; None if it could not be started. Waits for its start."""

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs. Does not block."""

    def wait(self) -> int:
        """Wait for its end; return the exit status."""

    def kill(self) -> None:
        """Kill it and its own children; may be called again."""

    def close(self) -> None:
        """Release all resources, after its end; may be called again."""


class SpawnedChild:
    """A child that runs a command.

    Args:
        command: of the process.
        environment: additional environment variables.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603  the command never comes from a client
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            # Without a session of its own, Ctrl-C in a terminal would end the child too.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin: IO[bytes] = self._process.stdin
        self.stdout: IO[bytes] = self._process.stdout

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; return the exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it and its own children."""
        kill_group(self._process.pid)

    def close(self) -> None:
        """Release all resources."""
        _close(self.stdin, self.stdout)


class ForkedChild:
    """A child of the fork server, which reports its start and end, and kills it.

    Args:
        owner: socket about the child, to the fork server.
        stdin: to write to.
        stdout: to read from.
    """

    def __init__(self, owner: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._owner = owner
        self._pid: int | None = None
        self._status: int | None = None
        self._lock = Lock()
        self.stdin = stdin
        self.stdout = stdout

    @property
    def pid(self) -> int | None:
        """The process id; None if the fork server died before the child started."""
        with self._lock:
            while self._pid is None and self._status is None:
                self._read()
            return self._pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with self._lock:
            while self._status is None and self._is_readable(0):
                self._read()
            return self._status

    def wait(self) -> int:
        """Wait for its end; return the exit status."""
        while (status := self.poll()) is None:
            # Another thread may read the status; after it, the socket stays readable.
            self._is_readable(None)
        return status

    def kill(self) -> None:
        """Kill it and its own children."""
        with suppress(OSError):
            self._owner.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Release all resources."""
        _close(self.stdin, self.stdout, self._owner)

    def _read(self) -> None:
        received = self._owner.recv(NUMBER.size, socket.MSG_WAITALL)
        if len(received) < NUMBER.size:
            # The fork server has died, so nobody else could end the child.
            self._status = _LOST
            if self._pid is not None:
                kill_group(self._pid)
        elif self._pid is None:
            (self._pid,) = NUMBER.unpack(received)
        else:
            (self._status,) = NUMBER.unpack(received)

    def _is_readable(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        return bool(poll.poll(timeout))


class _ForkServerProcess:
    """Starts a fork server of this process when it is first needed, and again if it died.

    Args:
        *modules: that it imports in addition to those of all children.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, program: Program, environment: Mapping[str, str]) -> ForkedChild:
        """Fork a child.

        Raises:
            OSError: the fork server cannot be started.
        """
        request = json.dumps({"program": program, "environment": dict(environment)}).encode()
        with ExitStack() as theirs, ExitStack() as ours:
            child_stdin, stdin = os.pipe()
            theirs.callback(os.close, child_stdin)
            to_child = ours.enter_context(os.fdopen(stdin, "wb"))
            stdout, child_stdout = os.pipe()
            theirs.callback(os.close, child_stdout)
            from_child = ours.enter_context(os.fdopen(stdout, "rb"))
            owner, child_owner = socket.socketpair()
            ours.enter_context(owner)
            theirs.enter_context(child_owner)
            self._send(request, (child_stdin, child_stdout, 2, child_owner.fileno()))
            theirs.close()
            ours.pop_all()
            return ForkedChild(owner, to_child, from_child)

    def close(self) -> None:
        """End the fork server and its children."""
        with self._lock:
            self._close()

    def _send(self, request: bytes, descriptors: Sequence[int]) -> None:
        assert len(descriptors) == NUM_DESCRIPTORS
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._close()
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [LENGTH.pack(len(request))], descriptors)
            self._control.sendall(request)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                (*_FORK_SERVER, *self._modules),
                stdin=theirs.fileno(),
                stdout=2,
                start_new_session=True,
                env={**os.environ, **_OFFLINE},
            )

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._control = None


_fork_server = _ForkServerProcess()
_export_server = _ForkServerProcess(
    "autoshard.requests.model_files",
    "networkx",  # of torch.export, when it first runs
    "transformers.models.llama.modeling_llama",  # with what most other models import
)
for _each in (_fork_server, _export_server):
    atexit.register(_each.close)


def fork(program: Program, environment: Mapping[str, str]) -> Child:
    """Fork a child that runs a program of a fork server.

    Args:
        program: to run.
        environment: additional environment variables.

    Raises:
        OSError: the fork server cannot be started.
    """
    server = _export_server if program == "export" else _fork_server
    return server.fork(program, environment)


def kill_group(pid: int) -> None:
    """Kill a process that leads, or will lead, a process group, and the group."""
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)


def _close(*resources: IO[bytes] | socket.socket) -> None:
    for each in resources:
        # Data for a process that is gone cannot be flushed.
        with suppress(OSError):
            each.close()
