"""Confinement of a process that makes models from configs of strangers.

The classes of transformers can load further files, ask a server and start programs when a config
says so. What they read of the installation is allowed; the rest is an error, whichever option asks
for it. It is no substitute for the limits of a container: native code is not stopped.
"""

import os
import sys
from typing import Any, NoReturn

_REFUSED = frozenset(
    {
        *("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"),
        *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"),
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"),
        "pickle.find_class",
    }
)
"""Audit events of what no model needs: https://docs.python.org/3/library/audit_events.html."""

_DEVICES = ("/dev/fd/", "/dev/null", "/dev/urandom", "/proc/", "/sys/")
"""Files of the machine that torch reads, and those that are open already."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine() -> None:
    """From now on, refuse network, programs, and files outside of the installed packages.

    It cannot be undone: only for a process of one task.
    """
    # Of an installation in development, the packages are where their sources are.
    roots = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isabs, sys.path)}
    readable = (*(os.path.realpath(root) + os.sep for root in roots), *_DEVICES)

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event in _REFUSED:
            _refuse(event)
        elif event == "open":
            path, _, flags = args
            if isinstance(path, int):
                return
            name = os.fsdecode(path)
            if not name.startswith(_DEVICES):
                name = os.path.realpath(name)
            if flags & _WRITES or not name.startswith(readable):
                _refuse(event)

    sys.addaudithook(check)


def _refuse(event: str) -> NoReturn:
    raise PermissionError(f"the config makes transformers do what is refused here ({event})")
