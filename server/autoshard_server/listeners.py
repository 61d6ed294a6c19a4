"""Sockets that the service or a worker listens on."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autoshard.errors import OptionError


@contextmanager
def unix_listener(path: str) -> Iterator[list[socket.socket]]:
    """A Unix socket that listens within a `with` block; its file is removed at the end.

    All users of the machine who can reach the file may connect. A file that an earlier process has
    left is replaced.

    Raises:
        OptionError: another process listens on it, or the path cannot be used.
    """
    file = Path(path).absolute()
    listener = socket.socket(socket.AF_UNIX)
    try:
        if file.is_socket() and not _is_connectable(file):
            file.unlink()
        listener.bind(str(file))
        file.chmod(0o666)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        # The path is in no error of a socket; one that is too long has no number either.
        raise OptionError(
            f"cannot listen on {file}: {error.strerror or error}; choose another --uds"
        ) from None
    try:
        yield [listener]
    finally:
        listener.close()
        with suppress(FileNotFoundError):
            file.unlink()


def tcp_listeners(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host, on one port; 0 chooses a free one.

    Raises:
        OptionError: the host is unknown, or an address cannot be listened on.
    """
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((entry[0], entry[4][0]) for entry in found):
            opened = socket.create_server((str(address), port), family=family, backlog=2048)
            listeners.append(opened)
            port = opened.getsockname()[1]
    except (OSError, OverflowError, UnicodeError) as error:
        for opened in listeners:
            opened.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(
            f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        ) from None
    return listeners


def address_of(listener: socket.socket, scheme: str) -> str:
    """The address of a listener, as clients write it; of a Unix socket, the path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_connectable(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(file)) == 0
