"""A test of the container image without a container engine.

`debootstrap` makes a base of Debian with Python, `buildah` builds the Dockerfile on it, and the
image runs with its own settings (user, variables, command) in new namespaces, with a read-only root
file system, /tmp in memory and one writable volume. Its health check must pass, and its plan of
GPT-2 must equal the one that is made here. Then a server without workers and a worker run in a
container each, on one PostgreSQL, and plan GPT-2 too. The program ends with status 1 if a check
fails; with `--write` it writes the results into benchmarks/results.

Run `make prove-image` as root on Linux with buildah, debootstrap, util-linux and PostgreSQL.
"""

import argparse
import json
import os
import pwd
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autoshard import Client, load_graph, make_mesh, make_plan
from autoshard.cli.commands.demo import export_gpt2
from autoshard.errors import ServiceUnavailableError
from benchmarks.document import RESULTS, caption
from benchmarks.faults.postgres import Cluster, binaries

ROOT = Path(__file__).parent.parent
RESULT = RESULTS / "image.md"
BASE = "localhost/python-base"
IMAGE = "localhost/autoshard"
SUITE = "trixie"
PACKAGES = "python3,python3-venv,ca-certificates"
PORT = "8000"
MESH = (2, 4)
_START_SECONDS = 60.0

_CONFINE = """
set -e
mount --make-rprivate /
mount --bind "$0" "$0"
mount -o remount,bind,ro "$0"
mount -t proc proc "$0/proc"
mount -t tmpfs -o nosuid,nodev,size=512m,mode=1777 tmpfs "$0/tmp"
mount -t tmpfs -o nosuid,mode=755 tmpfs "$0/dev"
for device in null urandom; do
    touch "$0/dev/$device"
    mount --bind "/dev/$device" "$0/dev/$device"
done
mount --bind "$1" "$0/var/lib/autoshard"
owner="$2"
shift 2
exec setpriv --no-new-privs chroot --userspec="$owner" --groups= "$0" /usr/bin/env -i "$@"
"""
"""Arguments: root of the image, volume, owner, then variables and command; in new namespaces."""


@dataclass(frozen=True, slots=True)
class Container:
    """An unpacked image with its settings."""

    root: Path
    volume: Path
    settings: dict[str, Any]

    def start(
        self, command: Sequence[str], variables: Sequence[str] = (), **options: Any
    ) -> "subprocess.Popen[str]":
        """Run a command in it, confined."""
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
        confined = ["sh", "-c", _CONFINE, str(self.root), str(self.volume), self.settings["User"]]
        return subprocess.Popen(  # noqa: S603  a constant command
            [*namespaces, *confined, *self.settings["Env"], *variables, *command],
            text=True,
            **options,
        )

    def output(self, *command: str, variables: Sequence[str] = ()) -> tuple[int, str]:
        """Status and output of a short command in it."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.start(command, variables, **pipes) as process:
            output, _ = process.communicate(timeout=60)
        return process.returncode, output.strip()


def run(*command: str) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def make_base() -> None:
    """Make an image of Debian with Python, from its packages."""
    with TemporaryDirectory() as folder:
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, folder)
        subprocess.run(["umount", f"{folder}/proc"], capture_output=True, check=False)  # noqa: S603,S607
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
            run("find", f"{folder}/{waste}", "-type", "f", "-delete")
        container = run("buildah", "from", "scratch")
        run("buildah", "add", "--quiet", container, folder, "/")
        run("buildah", "commit", "--quiet", "--rm", container, BASE)


def build(volumes: Sequence[str], arguments: Sequence[str]) -> float:
    """Build the Dockerfile; return the seconds that it took."""
    start = time.perf_counter()
    mounts = [f"--volume={volume}:{volume}:ro" for volume in volumes]
    arguments = [f"--build-arg={argument}" for argument in (f"BASE={BASE}", *arguments)]
    confined = ["--network=host", "--isolation=chroot", "--format=docker", "--layers"]
    run("buildah", "build", *confined, *mounts, *arguments, f"--tag={IMAGE}", str(ROOT))
    return time.perf_counter() - start


@contextmanager
def unpacked() -> Iterator[Container]:
    """The image as a folder, with an empty volume that its user owns."""
    container = run("buildah", "from", IMAGE)
    try:
        settings = json.loads(run("buildah", "inspect", container))["Docker"]["config"]
        with TemporaryDirectory() as volume:
            user, group = map(int, settings["User"].split(":"))
            os.chown(volume, user, group)
            root = Path(run("buildah", "mount", container))
            yield Container(root, Path(volume), settings)
    finally:
        run("buildah", "rm", container)


def check_image(container: Container) -> list[tuple[str, str]]:
    """Start the service with the image's settings, check it, and stop it; return the results.

    Raises:
        SystemExit: a check failed.
    """
    settings, archive = container.settings, export_gpt2()
    rows = [("user", container.output("id")[1])]
    for path in ("/", "/opt/autoshard"):
        status, output = container.output("touch", f"{path}/x")
        expect(status != 0, f"{path} can be written")
        rows.append((f"`touch {path.rstrip('/')}/x`", output.rpartition(": ")[2]))
    command = [*settings["Entrypoint"], *settings["Cmd"]]
    status, output = container.output(*command)
    expect(status != 0 and "no API key" in output, "it starts without a key")
    rows.append((f"`{shlex.join(command)}`", "refuses to start: there is no API key"))
    key = make_key(container)
    rows.append(("`autoshard keys create prove`", "a key"))
    with container.start(command, stderr=subprocess.PIPE) as service:
        try:
            rows += check_service(container, archive, key)
        finally:
            terminate(service)
        log = service.stderr.read() if service.stderr is not None else ""
    expect("Application shutdown complete" in log, f"it did not shut down cleanly:\n{log}")
    return [*rows, ("SIGTERM", "clean shutdown")]


def make_key(container: Container, variables: Sequence[str] = ()) -> str:
    """An API key, made in the container."""
    create = (*container.settings["Entrypoint"], "keys", "create", "prove")
    status, output = container.output(*create, variables=variables)
    key = next((word for word in output.split() if word.startswith("autoshard_")), "")
    expect(status == 0 and key != "", f"no key can be made: {output}")
    return key


def check_separate_worker(container: Container, programs: Path) -> list[tuple[str, str]]:
    """Check a server without workers and a worker, in a container each, on one PostgreSQL."""
    folder = container.volume / "postgres"
    folder.mkdir()
    container.volume.chmod(0o755)
    owner = pwd.getpwnam("postgres")
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    cluster = Cluster(programs, folder, owner.pw_name)
    cluster.make()
    cluster.start()
    try:
        url = cluster.create_database().replace(str(container.volume), "/var/lib/autoshard")
        store = f"AUTOSHARD_STORE_URL={url}"
        key = make_key(container, [store])
        entry, serve = container.settings["Entrypoint"], container.settings["Cmd"]
        quiet = {"stderr": subprocess.DEVNULL}
        queues = [store, "AUTOSHARD_NUM_WORKERS=0"]
        with (
            container.start([*entry, *serve], queues, **quiet) as server,
            container.start([*entry, "worker"], [store], **quiet) as worker,
        ):
            try:
                return request_plan_apart(key)
            finally:
                terminate(worker)
                terminate(server)
    finally:
        cluster.stop()


def request_plan_apart(key: str) -> list[tuple[str, str]]:
    """Request a plan from a server without workers."""
    with Client(f"http://127.0.0.1:{PORT}", api_key=key, cache=False) as client:
        wait_until_ready(client)
        start = time.perf_counter()
        result = client.request_plan(export_gpt2(), mesh=MESH)
        seconds = time.perf_counter() - start
    expect(result.plan is not None and not result.cached, "the worker made no plan")
    return [("separate server, `autoshard worker` and PostgreSQL", f"planned in {seconds:.2f} s")]


def check_service(container: Container, archive: bytes, key: str) -> list[tuple[str, str]]:
    """Check health and request a plan over HTTP."""
    with Client(f"http://127.0.0.1:{PORT}", api_key=key, cache=False) as client:
        start = time.perf_counter()
        wait_until_ready(client)
        ready = time.perf_counter() - start
        check = container.settings["Healthcheck"]["Test"]
        expect(check[0] == "CMD", "the health check needs a shell")
        status, output = container.output(*check[1:])
        expect(status == 0, f"the health check fails: {output}")
        start = time.perf_counter()
        result = client.request_plan(archive, mesh=MESH)
        solved = time.perf_counter() - start
        again = client.request_plan(archive, mesh=MESH)
    expected = make_plan(load_graph(archive), make_mesh(MESH))
    expect(result.plan is not None, "there is no plan")
    assert result.plan is not None
    expect(result.plan.id == expected.id, "the plan has another id than one made here")
    expect(
        result.plan.certificate.objective == expected.certificate.objective,
        "the plan has another objective than one made here",
    )
    expect(again.cached, "the second request was not answered from the cache")
    return [
        ("`/readyz`", f"after {ready:.1f} s"),
        ("health check", "passes"),
        ("plan of GPT-2 on 2x4", f"made in {solved:.2f} s, the same plan as outside"),
        ("the same request again", "answered from the cache"),
    ]


def wait_until_ready(client: Client) -> None:
    """Poll until the service is ready."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            client.health()
        except ServiceUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def terminate(process: "subprocess.Popen[str]") -> None:
    """Send SIGTERM to the container's first process, as engines do, and wait."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
    for child in children.split():
        os.kill(int(child), signal.SIGTERM)
    process.wait(timeout=60)


def expect(condition: bool, otherwise: str) -> None:  # noqa: FBT001  reads as a sentence
    """Exit with a message unless a condition is true."""
    if not condition:
        raise SystemExit(f"wrong: {otherwise}")


def size_of(image: str) -> str:
    """Megabytes of an image."""
    found = json.loads(run("buildah", "images", "--json", image))
    return str(found[0]["size"])


def main() -> None:
    """Build, run and check the image; print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep-base", action="store_true", help="use the base of an earlier run")
    parser.add_argument(
        "--volume", action="append", default=[], help="read-only in the build: settings of pip"
    )
    parser.add_argument("--build-arg", action="append", default=[], help="of the Dockerfile")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parser.parse_args()
    head = caption("the container image")
    if not given.keep_base:
        make_base()
    rows = [("build", f"{build(given.volume, given.build_arg):.0f} s"), ("image", size_of(IMAGE))]
    rows.append(("base", f"{size_of(BASE)} (Debian {SUITE})"))
    with unpacked() as container:
        rows += check_image(container)
        programs = binaries()
        expect(programs is not None, "PostgreSQL is not installed")
        assert programs is not None
        rows += check_separate_worker(container, programs)
    lines = ["| check | result |", "|---|---|", *(f"| {name} | {seen} |" for name, seen in rows)]
    table = "\n".join(lines)
    sys.stdout.write(table + "\n")
    if given.write:
        RESULT.write_text(f"{head}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
