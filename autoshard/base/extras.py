"""Optional packages, and which extra installs them."""

from collections.abc import Iterator
from contextlib import contextmanager

from autoshard.errors import MissingPackageError


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """A context for imports of optional packages.

    Args:
        extra: the extra of this distribution that installs them.

    Raises:
        MissingPackageError: a package is missing; the message names the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{error}; install it with: pip install 'autoshard[{extra}]'", name=error.name
        ) from error
