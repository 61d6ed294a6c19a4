"""Optional packages, and which extra installs them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """A context for imports of optional packages.

    Args:
        extra: the extra of this distribution that installs them.

    Raises:
        ImportError: a package is missing; the message names the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{error}; this module needs it: pip install 'autoshard[{extra}]'", name=error.name
        ) from error
