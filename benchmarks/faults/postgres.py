"""A temporary PostgreSQL cluster in a folder."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Interface
from itertools import count
from pathlib import Path

import psycopg

_OWNER = "postgres"
"""User of the server if this process is root: PostgreSQL refuses to run as root."""

_QUICK = "fsync=off\nfull_page_writes=off\nmax_connections=100\n"


def binaries() -> Path | None:
    """Folder of initdb and pg_ctl; None if PostgreSQL is not installed."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


@dataclass
class Cluster:
    """A server that listens on a socket in its folder, and on an address if it has one.

    Attributes:
        binaries: folder of initdb and pg_ctl.
        folder: with its data and its socket.
        user: that runs it; the current one if None.
        network: address and length of the prefix of an interface; connections from this network
            need the password.
        password: of the user `autoshard`.
    """

    binaries: Path
    folder: Path
    user: str | None
    network: IPv4Interface | None = None
    password: str = field(default_factory=partial(secrets.token_hex, 16), repr=False)
    _numbers: Iterator[int] = field(default_factory=count)

    def make(self) -> None:
        """Initialise its data folder."""
        data, secret = self.folder / "data", self.folder / "password"
        secret.write_text(self.password)
        first = ("-D", str(data), "-U", "autoshard", "-A", "trust", "--pwfile", str(secret))
        self._run("initdb", *first, "--no-sync", "-E", "UTF8")
        address = self.network.ip if self.network else ""
        with (data / "postgresql.conf").open("a") as settings:
            settings.write(
                f"listen_addresses='{address}'\nunix_socket_directories='{self.folder}'\n{_QUICK}"
            )
        if self.network:
            with (data / "pg_hba.conf").open("a") as callers:
                callers.write(f"host all autoshard {self.network.network} scram-sha-256\n")

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", self._log, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; `immediate` does so without a shutdown, as in a crash."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def become_standby(self) -> None:
        """Restart as a standby, which answers queries and refuses to write."""
        self.stop()
        self._run("touch", str(self.folder / "data" / "standby.signal"))
        self.start()

    def promote(self) -> None:
        """End the standby: it accepts writes again."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "promote")

    def create_database(self) -> str:
        """Create an empty database; return its SQLAlchemy URL."""
        name = f"autoshard_{next(self._numbers)}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]  a safe name
        if self.network:
            return f"postgresql+psycopg://autoshard:{self.password}@{self.network.ip}/{name}"
        return f"postgresql+psycopg://autoshard@/{name}?host={self.folder}"

    @property
    def _log(self) -> str:
        return str(self.folder / "log")

    def _address(self, database: str) -> str:
        return f"host={self.folder} user=autoshard dbname={database}"

    def _run(self, program: str, *arguments: str) -> None:
        own = self.binaries / program
        command = [str(own) if own.exists() else program, *arguments]
        with Path(os.devnull).open("w") as nowhere:
            subprocess.run(  # noqa: S603  a constant command
                command, check=True, user=self.user, stdout=nowhere, cwd=self.folder
            )


@contextmanager
def running_cluster(programs: Path, network: IPv4Interface | None = None) -> Iterator[Cluster]:
    """A server that runs until the end of the `with` block, also on an address if one is given."""
    is_root = os.geteuid() == 0
    # Not in pytest's folder, which other users cannot access.
    folder = Path(tempfile.mkdtemp(prefix="autoshard-pg-"))
    if is_root:
        owner = pwd.getpwnam(_OWNER)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    cluster = Cluster(programs, folder, _OWNER if is_root else None, network)
    try:
        cluster.make()
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)
