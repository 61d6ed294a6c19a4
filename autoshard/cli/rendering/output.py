"""Output of all commands: consoles, error reports, notes, files."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from autoshard.cli.exit_codes import ExitCode
from autoshard.cli.rendering.tables import Format, print_report, write_csv, write_json
from autoshard.cli.rendering.wording import in_flags
from autoshard.errors import AutoshardError, LaunchError, OptionError
from autoshard.report.tables import Report


class _Output(Console):
    """Stdout, whose reader may end early, as `head` does."""

    def on_broken_pipe(self) -> None:
        """Leave it to `reported`; rich would exit with the status of an error."""
        raise BrokenPipeError


console = _Output()
errors = Console(stderr=True)


class _Notes(logging.Handler):
    """Prints the library's warnings as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        message = in_flags(record.getMessage())
        errors.print(marked("note:", message, style="bold"), soft_wrap=True)


@contextmanager
def reported() -> Iterator[None]:
    """Print errors and warnings of the library for users; exit with a status after an error."""
    log, notes = logging.getLogger("autoshard"), _Notes(logging.WARNING)
    log.addHandler(notes)
    try:
        yield
    except LaunchError as error:
        # The message has the traceback of a rank.
        errors.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
        raise typer.Exit(ExitCode.FAILURE) from None
    except AutoshardError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The program that read the output, such as `head`, has ended: it wanted no more.
        _discard_stdout()
        raise typer.Exit from None
    except OSError as error:
        _fail(describe(error))
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finally:
        log.removeHandler(notes)


def describe(error: OSError) -> str:
    """Describe an error of the operating system in words: the file, and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def write_stdout(text: str) -> None:
    """Write text to stdout, unless it is closed."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def print_output(report: Report, output_format: Format) -> None:
    """Print the report of a command on stdout."""
    if output_format == "csv":
        write_stdout(write_csv(report))
    elif output_format == "json":
        write_stdout(write_json(report))
    else:
        print_report(report, console)


def check_output(context: typer.Context, path: Path | None) -> Path | None:
    """Check, before any work, that a file can be written; a callback of options.

    Raises:
        OptionError: its folder is missing, or there is no permission.
    """
    if path is None or context.resilient_parsing:
        return path
    folder = path.parent
    if path.is_dir():
        raise OptionError(f"cannot write {path}: it is a folder; give the name of a file")
    if not folder.exists():
        raise OptionError(f"cannot write {path}: there is no folder {folder}; create it first")
    if not folder.is_dir():
        raise OptionError(f"cannot write {path}: {folder} is not a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OptionError(f"cannot write {path}: permission denied")
    return path


def _fail(message: str) -> NoReturn:
    errors.print(marked("error:", in_flags(message)), soft_wrap=True)
    raise typer.Exit(ExitCode.FAILURE) from None


def _discard_stdout() -> None:
    """Send what is left of stdout nowhere, so that it is not written again at the exit."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def marked(word: str, message: object, style: str = "bold red") -> Text:
    """Put a styled word before a message, whose brackets are not markup."""
    return Text.assemble((word, style), f" {message}")
