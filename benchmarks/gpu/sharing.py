"""Several ranks on one GPU: what the driver and NCCL need for it.

Under NVIDIA's MPS the kernels of all ranks run at the same time; without it the GPU runs those of
one rank after the other, which takes far longer but computes the same. NCCL lets ranks share a GPU
since 2.31. Older versions refuse two ranks of one host on one GPU, so there each rank names a host
of its own, and they communicate through sockets.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from shutil import which
from tempfile import TemporaryDirectory

from benchmarks.gpu.records import Header

_PROBE_SECONDS = 30
"""After which ranks that cannot share the GPU are given up."""

_CONTROL = "nvidia-cuda-mps-control"
_MULTI_RANK = (2, 31)
_RANKS_AS_HOSTS = {
    "AUTOSHARD_RANKS_AS_HOSTS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share the device.

    Attributes:
        name: in words; empty if they cannot.
        variables: environment variables of the ranks.
    """

    name: str
    variables: Mapping[str, str]


@contextmanager
def sharing_of(header: Header) -> Iterator[Sharing]:
    """A context in which ranks can share the device, in the fastest way that works."""
    if header["device"] == "cpu":
        yield Sharing("gloo", {})
        return
    nccl, variables = _nccl(header["nccl"])
    with _mps() as pipes:
        if pipes and _works({**variables, **pipes}):
            yield Sharing(f"{nccl}, under MPS", {**variables, **pipes})
            return
    works = _works(variables)
    yield Sharing(f"{nccl}, one after the other" if works else "", variables)


def _nccl(version: str) -> tuple[str, Mapping[str, str]]:
    """What NCCL is told, in words and as variables."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= _MULTI_RANK:
        return f"NCCL {version}", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return f"NCCL {version}, each rank as a host of its own", _RANKS_AS_HOSTS


@contextmanager
def _mps() -> Iterator[Mapping[str, str]]:
    """A context with MPS; yields the variables of its clients, none if it cannot be started."""
    if which(_CONTROL) is None:
        yield {}
        return
    with TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        pipes = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **pipes}
        quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = subprocess.run([_CONTROL, "-d"], check=False, **quiet)  # noqa: S603  a constant command
        try:
            yield {} if started.returncode else pipes
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([_CONTROL], input=b"quit\n", timeout=20, check=False, **quiet)  # noqa: S603  as above


def _works(variables: Mapping[str, str]) -> bool:
    """True if two ranks can sum a tensor."""
    command = [sys.executable, "-m", "benchmarks.gpu.ranks"]
    process = subprocess.Popen(  # noqa: S603  our own program
        command, env={**os.environ, **variables}, start_new_session=True
    )
    try:
        return process.wait(_PROBE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
