"""The code blocks of the pages: run in order, and their outputs written into the pages.

`python -m docs.pages [PAGE ...]` runs the pages and writes the outputs that changed; the tests run
them and compare. What a page can contain:

    ```python                     runs, in one namespace per page
    ```python notest              does not run
    <!-- python                   runs, and readers do not see it
    ...
    -->
    ```console                    each command runs; `autoshard serve` starts a service
    ```console notest             does not run
    <!-- file: train.py -->       the next block is written to this file instead
    <!-- output: autoshard ... -->  the next block shows what this command prints
    <!-- output: python -->       the next block shows what the Python block above prints
    <!-- ranks: 4 -->             the page's Python runs on 4 ranks

Commands and code with an address of `SERVICE_URL` reach a service that is started for the page.
Ranks have CPUs, where a page has GPUs: `init_device_mesh("cuda", ...)` runs with "cpu".
"""

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

SERVICE_URL = re.compile(r"http://(?:127\.0\.0\.1|planner\.example):8000")
"""Addresses in the pages; a service that is started for a page listens on a free port instead."""

_BLOCK = re.compile(
    r"^<!-- python\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>file|output): (?P<argument>[^\n]+) -->\n)?"
    r"^```(?P<language>\w+)(?P<notest> notest)?[^\n]*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)
_CUDA = re.compile(r'(init_device_mesh\(")cuda\b')
_VARYING = re.compile(r"(?<=\bin )[\d.,]+ m?s\b")
"""Times of this machine in outputs, such as "solved in 1.2 s"; the pages show `...` instead."""

_STARTUP_SECONDS = 120


class PageError(Exception):
    """A block of a page failed; the message names the page and the line."""


@dataclass(frozen=True)
class Block:
    """A block of code, or of output, in a page.

    Attributes:
        language: of the code; `python`, `console` and `text` have a meaning here.
        code: its text.
        line: of the page on which the text begins, from 1.
        start: offset of the text in the page.
        mark: `file` or `output`, from the comment before the block; empty if there is none.
        argument: of the mark: the file's name, or the command.
        runs: False if the block is marked `notest`.
    """

    language: str
    code: str
    line: int
    start: int
    mark: str = ""
    argument: str = ""
    runs: bool = True


def pages() -> list[Path]:
    """All pages of the repository."""
    folders = ROOT, ROOT / "docs", ROOT / "docs" / "internals", ROOT / "examples"
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, in order, with hidden ones."""
    for found in _BLOCK.finditer(text):
        group = "code" if found["hidden"] is None else "hidden"
        start = found.start(group)
        yield Block(
            language=found["language"] or "python",
            code=found[group],
            line=text.count("\n", 0, start) + 1,
            start=start,
            mark=found["mark"] or "",
            argument=found["argument"] or "",
            runs=not found["notest"],
        )


def num_ranks(text: str) -> int:
    """The number of ranks on which the Python of a page runs; 1 if it names none."""
    found = _RANKS.search(text)
    return int(found[1]) if found else 1


def run_python(path: Path) -> None:
    """Run only the Python blocks of a page, in the current folder, such as on each of some ranks.

    Raises:
        PageError: a block failed.
    """
    names = _namespace()
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "python" and block.runs and not block.mark:
            _run_code(path, block, _CUDA.sub(r"\1cpu", block.code), names)


def run_page(path: Path, folder: Path) -> str:
    """Run the blocks of a page, but not Python that is for several ranks.

    Args:
        path: of the page.
        folder: in which the commands and the code run; also for the cache.

    Returns:
        The text of the page with current outputs.

    Raises:
        PageError: a block failed.
    """
    text = path.read_text(encoding="utf-8")
    pieces, end = [], 0
    with contextlib.chdir(folder), _Session(path, text, folder) as session:
        for block in blocks(text):
            if shown := session.run(block):
                pieces += [text[end : block.start], shown]
                end = block.start + len(block.code)
    return "".join([*pieces, text[end:]])


class _Session(contextlib.ExitStack):
    """One run of a page: the namespace of its Python, outputs of its commands, its service."""

    def __init__(self, path: Path, text: str, folder: Path) -> None:
        super().__init__()
        self._path = path
        self._folder = folder
        self._names = _namespace()
        self._is_for_ranks = num_ranks(text) > 1
        self._outputs: dict[str, str] = {}
        self._url = ""
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        paths = [str(ROOT / name) for name in (".", "server", "solver_cache")]
        self._environment = {
            **os.environ,
            "PATH": programs,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
            "AUTOSHARD_CACHE": str(folder / ".cache"),
            "AUTOSHARD_STORE_URL": f"sqlite:///{folder / 'store.sqlite3'}",
            "COLUMNS": "100",
        }

    def run(self, block: Block) -> str | None:
        """Run a block, or return the text of one that shows an output."""
        if block.mark == "file":
            (self._folder / block.argument).write_text(block.code, encoding="utf-8")
        elif block.mark == "output":
            return self._output(block)
        elif block.language == "console" and block.runs:
            for command in block.code.replace("\\\n", "").splitlines():
                self._run_command(command, block)
        elif block.language == "python" and block.runs and not self._is_for_ranks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                _run_code(self._path, block, self._local(block.code), self._names)
            self._outputs["python"] = self._public(printed.getvalue())
        return None

    def _output(self, block: Block) -> str:
        if block.argument not in self._outputs:
            self._run_command(block.argument, block)
        return _VARYING.sub("...", self._outputs[block.argument])

    def _run_command(self, command: str, block: Block) -> None:
        if command.startswith("autoshard serve"):
            self._serve()
            return
        done = subprocess.run(  # noqa: S603  our own page
            ["bash", "-o", "pipefail", "-c", self._local(command)],  # noqa: S607  whichever there is
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            place = f"{self._path.name}:{block.line}"
            status = f"status {done.returncode}"
            raise PageError(f"{place}: {command}\n{status}\n{done.stdout}{done.stderr}")
        self._outputs[command] = self._public(done.stdout)

    def _local(self, code: str) -> str:
        """Code with the address of the service that runs for this page."""
        return SERVICE_URL.sub(lambda _: self._serve(), code)

    def _public(self, output: str) -> str:
        """An output with the address that pages show, and lines that end in no space."""
        output = output.replace(self._url, "http://127.0.0.1:8000") if self._url else output
        return "".join(f"{line.rstrip()}\n" for line in output.splitlines())

    def _serve(self) -> str:
        """Start a service, once; return its address."""
        if not self._url:
            self._url = self.enter_context(_service(self._folder, self._environment))
        return self._url


def _namespace() -> dict[str, Any]:
    return {"__name__": "page"}


def _run_code(path: Path, block: Block, code: str, names: dict[str, Any]) -> None:
    """Run Python with the line numbers of the page.

    Raises:
        PageError: it failed.
    """
    place = f"{path.name}:{block.line}"
    try:
        exec(compile("\n" * (block.line - 1) + code, str(path), "exec"), names)  # noqa: S102  our own page
    except Exception as error:
        raise PageError(f"{place}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _service(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """A service on a free port; yields its address.

    Raises:
        PageError: it did not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "autoshard_server", "--port", str(port)]
    log = folder / "service.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment)  # noqa: S603  our own service
    try:
        _await(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTUP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/readyz"),  # noqa: S310  our own service
        ):
            return
        time.sleep(0.05)
    raise PageError(f"the service did not start:\n{log.read_text()}")


def main(names: Sequence[str]) -> None:
    """Run pages, all if none is named, and write those whose outputs changed."""
    for path in [Path(name).resolve() for name in names] or pages():
        with tempfile.TemporaryDirectory() as folder:
            current = run_page(path, Path(folder))
        if current != path.read_text(encoding="utf-8"):
            path.write_text(current, encoding="utf-8")
            print(f"wrote {shlex.quote(str(path.relative_to(ROOT)))}")  # noqa: T201  the program's output


if __name__ == "__main__":
    main(sys.argv[1:])
