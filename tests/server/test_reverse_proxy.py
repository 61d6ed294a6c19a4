"""The service behind nginx, set up as docs/deploy.md shows, and by itself with TLS."""

import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from support.services import free_port

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
NGINX = shutil.which("nginx", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")

pytestmark = pytest.mark.skipif(
    NGINX is None or shutil.which("openssl") is None, reason="needs nginx and openssl"
)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """A service; yields the address that it logs, and its log."""
    log = folder / "service.log"
    store = f"sqlite:///{folder / 'store.sqlite3'}"
    command = [sys.executable, "-m", "autoshard_server", "--store-url", store, *options]
    with log.open("w") as file, ended(subprocess.Popen(command, stderr=file, text=True)):  # noqa: S603  ours
        yield wait_for(log, r'"url": "([^"]+)"'), log


def wait_for(log: Path, pattern: str) -> str:
    for _ in range(6000):
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(  # noqa: S603  ours
        [*command.split(), *names, "-out", files[0], "-keyout", files[1]],
        check=True,
        capture_output=True,
    )
    return files


def configuration(folder: Path, certificate: tuple[Path, Path], ports: tuple[int, int]) -> str:
    """The page's configuration, with the paths and a port of this test.

    A second server leaves the path of the service in the requests.
    """
    text = PAGE.read_text("utf-8")
    (block,) = re.findall(r"^```nginx\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for shown, here in {
        "/run/autoshard/autoshard.sock": str(folder / "service.sock"),
        "/etc/ssl/example.pem": str(certificate[0]),
        "/etc/ssl/example.key": str(certificate[1]),
        "listen 443 ssl;": f"listen 127.0.0.1:{ports[0]} ssl;",
    }.items():
        assert shown in block
        block = block.replace(shown, here)
    upstream, server = block.split("\n\n", 1)
    kept = server.replace(str(ports[0]), str(ports[1])).replace("://autoshard/;", "://autoshard;")
    assert kept.count("proxy_pass http://autoshard;") == 1
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    # Of root, for the folders of the tests, which others cannot enter.
    user = "user root;\n" if os.geteuid() == 0 else ""
    return (
        f"{user}daemon off;\npid {folder}/nginx.pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{folders}{upstream}\n{server}\n{kept}}}\n"
    )


@dataclass(frozen=True)
class Published:
    """A service behind nginx, which removes the path from requests (`stripped`) or does not."""

    stripped: httpx2.Client
    kept: httpx2.Client
    log: Path


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]
) -> Iterator[Published]:
    folder = tmp_path_factory.mktemp("nginx")
    ports = free_port(), free_port()
    (folder / "nginx.conf").write_text(configuration(folder, certificate, ports))
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    options = ("--uds", str(folder / "service.sock"), "--root-path", "/plan", "--no-auth")
    command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-p", str(folder)]
    with ExitStack() as stack:
        address, log = stack.enter_context(served(folder, *options))
        assert address == f"unix:{folder / 'service.sock'}"
        stack.enter_context(ended(subprocess.Popen(command, text=True)))  # noqa: S603  ours
        stripped, kept = (
            stack.enter_context(
                httpx2.Client(base_url=f"https://localhost:{port}", verify=trust, timeout=300)
            )
            for port in ports
        )
        await_ready(stripped)
        yield Published(stripped, kept, log)


def await_ready(http: httpx2.Client) -> None:
    for _ in range(6000):
        with suppress(httpx2.TransportError):
            if http.get("/plan/readyz").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the service is not ready")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["stripped", "kept"])
def test_addresses_of_responses_keep_the_path(
    published: Published, make_graph: Callable[[int], bytes], way: str
) -> None:
    http: httpx2.Client = getattr(published, way)
    graph = make_graph({"stripped": 32, "kept": 48}[way])
    digest = hashlib.sha256(graph).hexdigest()
    stored = http.put(f"/plan/v1/graphs/{digest}", content=graph)
    assert (stored.status_code, stored.headers["Location"]) == (201, f"/plan/v1/graphs/{digest}")
    request = {"graph_sha256": digest, "mesh": {"shape": [2]}}
    submitted = http.post("/plan/v1/plans", json=request, headers={"Prefer": "wait=0"})
    job = submitted.headers["Location"]
    assert (submitted.status_code, job) == (202, f"/plan/v1/jobs/{submitted.json()['id']}")
    with http.stream("GET", f"{job}/events") as events:
        assert '"state":"succeeded"' in "".join(events.iter_text()).replace(" ", "")
    made = http.post("/plan/v1/plans", json=request)
    assert made.headers["Content-Location"] == f"/plan/v1/plans/{made.json()['id']}"
    assert http.get(made.headers["Content-Location"]).json() == made.json()
    missing = http.get("/plan/v1/plans/")
    assert (missing.status_code, "Location" in missing.headers) == (404, False)
    assert "no slash at their end" in missing.json()["detail"]


@pytest.mark.parametrize("way", ["stripped", "kept"])
def test_the_documentation_works_under_the_path(published: Published, way: str) -> None:
    http: httpx2.Client = getattr(published, way)
    page = http.get("/plan/docs").text
    files = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert len(files) == 4
    for file in (*files, "openapi.json"):
        assert http.get(f"/plan/{file}").status_code == 200
    # The page sends requests to the first server, here the folder of the specification.
    assert http.get("/plan/openapi.json").json()["servers"][0]["url"] == "."


def test_the_log_has_the_address_of_the_client(published: Published) -> None:
    sent = {"X-Request-ID": "who-asks", "X-Forwarded-For": "203.0.113.9"}
    assert published.stripped.get("/plan/version", headers=sent).status_code == 200
    line = wait_for(published.log, r'(\{[^\n]*"who-asks"[^\n]*\})')
    assert json.loads(line)["client"] == "127.0.0.1"


@pytest.mark.thorough
def test_it_serves_https_itself(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    options = ("--port", "0", "--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
    with served(tmp_path, *options) as (url, _):
        assert re.fullmatch(r"https://127\.0\.0\.1:\d+", url)
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx2.get(f"{url}/readyz", verify=trust).status_code == 200
