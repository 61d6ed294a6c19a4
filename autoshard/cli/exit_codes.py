"""Exit statuses of the `autoshard` command."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of a command."""

    SUCCESS = 0
    """The command did what it was asked."""
    FAILURE = 1
    """An error, named on stderr; or `check` and `cache verify` found something wrong."""
    USAGE = 2
    """The command line cannot be read: an unknown command, option or choice."""
    NO_PLAN = 3
    """Planning ended without a plan: nothing fits, or time ran out."""
    STOPPED = 4
    """Ctrl-C ended planning early; the best plan so far was shown and written."""
    INTERRUPTED = 130
    """Ctrl-C ended the command at once; nothing was written."""
