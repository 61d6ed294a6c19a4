"""A PostgreSQL of our own: made in a folder, started, stopped, and gone in the end."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg

_OWNER = "postgres"
"""Who runs the server where we are root, which it refuses to be."""

_QUICK = "fsync=off\nfull_page_writes=off\nmax_connections=60\n"


def binaries() -> Path | None:
    """Folder of initdb and pg_ctl; None where PostgreSQL is not installed."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


@dataclass
class Cluster:
    """A server that listens on a socket in its folder, and nowhere else.

    Attributes:
        binaries: folder of initdb and pg_ctl.
        folder: where its data and its socket are.
        user: who runs it; ourselves if left out.
    """

    binaries: Path
    folder: Path
    user: str | None
    _numbers: Iterator[int] = field(default_factory=count)

    def make(self) -> None:
        """Make its files."""
        data = str(self.folder / "data")
        self._run("initdb", "-D", data, "-U", "autoshard", "-A", "trust", "--no-sync", "-E", "UTF8")
        with (self.folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(
                f"listen_addresses=''\nunix_socket_directories='{self.folder}'\n{_QUICK}"
            )

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", self._log, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; immediately is as if its power were cut."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def create_database(self) -> str:
        """A new, empty database, as a SQLAlchemy URL."""
        name = f"autoshard_{next(self._numbers)}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]  our own name
        return f"postgresql+psycopg://autoshard@/{name}?host={self.folder}"

    @property
    def _log(self) -> str:
        return str(self.folder / "log")

    def _address(self, database: str) -> str:
        return f"host={self.folder} user=autoshard dbname={database}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), *arguments]
        with Path(os.devnull).open("w") as nowhere:
            subprocess.run(  # noqa: S603  ours
                command, check=True, user=self.user, stdout=nowhere, cwd=self.folder
            )


@contextmanager
def running_cluster(programs: Path) -> Iterator[Cluster]:
    """A server that runs until the end of the block."""
    is_root = os.geteuid() == 0
    # Not below pytest's folder, which other users cannot enter.
    folder = Path(tempfile.mkdtemp(prefix="autoshard-pg-"))
    if is_root:
        owner = pwd.getpwnam(_OWNER)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    cluster = Cluster(programs, folder, _OWNER if is_root else None)
    try:
        cluster.make()
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)
