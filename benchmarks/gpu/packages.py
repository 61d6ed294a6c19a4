"""Packages for a machine without network: wheels are installed beside the Python that is there."""

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def install_wheels(wheels: Path) -> Path:
    """The folder with the packages of all wheels of a folder, installed if they are not yet.

    It also says which version of autoshard the checkout is, unless autoshard is installed.

    Raises:
        CalledProcessError: pip cannot install them.
    """
    target, listed = wheels.with_name("gpu-packages"), wheels.with_name("gpu-packages.txt")
    found = sorted(wheels.glob("*.whl"))
    names = "\n".join([sys.version, *(path.name for path in found)])
    if listed.exists() and listed.read_text(encoding="utf-8") == names:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if found:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run(  # noqa: S603  a constant program
            [*command, "--no-compile", "--target", str(target), *map(str, found)], check=True
        )
    _describe_checkout(target)
    listed.write_text(names, encoding="utf-8")
    return target


def _describe_checkout(target: Path) -> None:
    try:
        version("autoshard")
    except PackageNotFoundError:
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        folder = target / f"autoshard-{project['version']}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: autoshard", f"Version: {project['version']}", ""]
        (folder / "METADATA").write_text("\n".join(lines), encoding="utf-8")
