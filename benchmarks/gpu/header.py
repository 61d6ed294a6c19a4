"""Where something is measured: card, driver and versions; as a program, prints what torch knows."""

import json
import platform
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.document import commit, processor
from benchmarks.planning import code_digest

_ROOT = Path(__file__).parents[2]
_CODE = ("autoshard", "benchmarks", "tests/runtime", "tests/support")
_PACKAGES = ("triton", "transformers", "numpy", "highspy", "pydantic", "spmd_types")


class Unusable(Exception):  # noqa: N818  it is the message that counts
    """This machine cannot be measured; the message says what to do."""


def check_torch(*, allow_old: bool) -> None:
    """Check that the installed torch is one that autoshard is for.

    Raises:
        Unusable: it is older and not allowed, or there is none.
    """
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise Unusable(
            f"{sys.executable} has no torch: name a Python that has one, as in "
            f"`make gpu PYTHON=/path/to/python`"
        ) from None
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (d[len("torch>=") :] for d in project["dependencies"] if d.startswith("torch>="))
    if _numbers(found) < _numbers(needed) and not allow_old:
        raise Unusable(
            f"torch {found} is installed, and autoshard is for {needed} or newer; with "
            f"`make gpu ALLOW_OLD_TORCH=1`, what works with it is measured and the rest is named"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:2]))


def header_of(device: str, models: tuple[str, ...], commit_name: str) -> dict[str, Any]:
    """Card, driver, versions, commit and date.

    Args:
        device: "cuda" or "cpu".
        models: names of those that are measured.
        commit_name: of the code; looked up if it is empty.

    Raises:
        Unusable: torch does not work, or sees no GPU.
    """
    command = [sys.executable, "-m", __name__, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own program
    if done.returncode:
        raise Unusable(f"this Python cannot be used: {done.stderr.strip()[-2000:]}")
    return {
        "device": device,
        **json.loads(done.stdout),
        "models": list(models),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit_name or commit(),
        "code": code_digest(_CODE),
        "python": platform.python_version(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    """Version of the driver; empty if it cannot be found."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603  constant
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.partition("\n")[0]


def _print_device(device: str) -> None:
    import torch  # noqa: PLC0415  in a process of its own: it takes seconds

    from autoshard.mesh import DEFAULT_TOPOLOGY, preset_of_device  # noqa: PLC0415  as above

    packages = {name: number for name in _PACKAGES if (number := _version(name))}
    found: dict[str, Any] = {"torch": torch.__version__, "packages": packages}
    if device == "cpu":
        found |= {"card": processor(), "topology": "cpu-10gbe", "driver": "", "nccl": ""}
    else:
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU; `make gpu DEVICE=cpu` tries everything in small")
        found |= {
            "card": (card := torch.cuda.get_device_name()),
            "topology": preset_of_device(card) or DEFAULT_TOPOLOGY,
            "memory": torch.cuda.get_device_properties(0).total_memory,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    _print_device(sys.argv[1])
