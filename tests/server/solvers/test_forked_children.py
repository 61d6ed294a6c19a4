"""Children of the fork server: their start, their end, and the loss of the server itself."""

import os
import signal

import psutil
from support.worker_threads import await_end

from autoshard_server.solvers.children import Child, fork
from autoshard_server.solvers.messages import FrameKind, read_frame

STORE = {"AUTOSHARD_STORE_URL": "sqlite://"}


def ready_child() -> Child:
    child = fork("solve", STORE)
    assert read_frame(child.stdout) == (FrameKind.READY, b"")
    return child


def test_a_child_without_a_job_ends_by_itself() -> None:
    child = ready_child()
    assert child.poll() is None
    child.stdin.close()
    assert (child.wait(), child.poll()) == (0, 0)
    child.close()


def test_a_killed_child_says_so_and_leaves_nothing() -> None:
    child, other = ready_child(), ready_child()
    assert child.pid is not None
    assert os.getsid(child.pid) == child.pid
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)
    assert other.poll() is None
    # Its owner may go without a word.
    assert other.pid is not None
    other.close()
    await_end(other.pid)
    child.close()


def test_children_end_with_the_fork_server_and_the_next_one_has_another() -> None:
    child = ready_child()
    assert child.pid is not None
    server = psutil.Process(child.pid).ppid()
    os.kill(server, signal.SIGKILL)
    assert child.wait() == 1
    await_end(child.pid)
    child.close()
    following = ready_child()
    assert following.pid is not None
    assert psutil.Process(following.pid).ppid() != server
    following.kill()
    following.wait()
    following.close()
