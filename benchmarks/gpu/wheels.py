"""Fetches the packages that another machine lacks, as wheels, for `make gpu` without network there.

    make gpu-wheels PYTHON=3.12 HAVE=list.txt

`list.txt` is the output of `pip list` or `pip freeze` there, or has a name on each line. Fetched is
what autoshard and its cases of ranks need and the list lacks, for one Python on Linux and x86-64.
torch is never fetched: `make gpu` runs on the one that is there.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "build" / "gpu-wheels"
_OTHERS = ("transformers>=5.0", "pytest>=8.4")
"""What cases of ranks need beside autoshard's own dependencies."""

_NEVER = frozenset({"torch", "triton"})
_MOST_BYTES = 60 * 10**6
_GLIBC = range(34, 4, -1)
"""Minor versions of glibc 2 that wheels may be built for."""

Have = Mapping[str, Version | None]
"""Installed packages; None where the version is not known, which is taken to be right."""

Fetch = Callable[[Requirement], Path]
"""Fetches the wheel of a requirement."""


def read_have(text: str) -> Have:
    """The packages in the output of `pip list` or `pip freeze`, or in lines of names."""
    found: dict[str, Version | None] = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z0-9][\w.-]*)(?:(?:==|\s+)(\S+))?", line.strip())
        if match is None or match[0].split() == ["Package", "Version"]:
            continue
        try:
            found[canonicalize_name(match[1])] = Version(match[2] or "")
        except InvalidVersion:
            found[canonicalize_name(match[1])] = None
    return found


def missing_wheels(
    wanted: Iterable[str], have: Have, environment: Mapping[str, str], fetch: Fetch
) -> list[Path]:
    """The wheels of what is wanted and what it needs, but for what is there.

    What is there is taken to have all that it needs.

    Args:
        wanted: requirements.
        have: packages that are installed.
        environment: values of markers such as `python_version`.
        fetch: fetches a wheel.

    Raises:
        SystemExit: a fetched package is not one that another one needs.
    """
    found: dict[str, Path] = {}
    known, open_ones = dict(have), [(Requirement(text), "") for text in wanted]
    while open_ones:
        needed, extra = open_ones.pop(0)
        name = canonicalize_name(needed.name)
        applies = needed.marker is None or needed.marker.evaluate({**environment, "extra": extra})
        if not applies or name in _NEVER:
            continue
        if name not in known or not _satisfies(known[name], needed):
            if name in found:
                raise SystemExit(f"{found[name].name} is not {needed}, which is needed too")
            found[name] = path = fetch(needed)
            known[name] = parse_wheel_filename(path.name)[1]
            requirements = _metadata(path).requires_dist or []
            open_ones += [(one, e) for one in requirements for e in ("", *needed.extras)]
    return list(found.values())


def _satisfies(installed: Version | None, needed: Requirement) -> bool:
    return installed is None or needed.specifier.contains(installed, prereleases=True)


def _metadata(path: Path) -> Metadata:
    with ZipFile(path) as wheel:
        (name,) = (n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        return Metadata.from_email(wheel.read(name), validate=False)


def _fetch(needed: Requirement, python: str, folder: Path) -> Path:
    """Fetch a wheel with pip."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    before = set(folder.glob("*.whl"))
    subprocess.run(  # noqa: S603  a constant program
        [*command, *platforms, "--dest", str(folder), f"{needed.name}{needed.specifier}"],
        check=True,
    )
    (path,) = set(folder.glob("*.whl")) - before
    return path


def environment_of(python: str) -> dict[str, str]:
    """Values of markers for a Python on Linux and x86-64."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def main() -> None:
    """Fetch the wheels, and check that they are few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="version of the other Python, as 3.12")
    parser.add_argument("--have", type=Path, required=True, help="list of the packages there")
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.whl"):
        old.unlink()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheels = missing_wheels(
        (*project["dependencies"], *_OTHERS),
        read_have(given.have.read_text(encoding="utf-8")),
        environment_of(given.python),
        lambda needed: _fetch(needed, given.python, given.folder),
    )
    sizes = {path.name: path.stat().st_size for path in wheels}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:6.1f} MB  {name}")
    total = sum(sizes.values())
    print(f"{total / 1e6:6.1f} MB in {given.folder}")
    if total > _MOST_BYTES:
        raise SystemExit(f"more than {_MOST_BYTES / 1e6:.0f} MB: install the largest there")


if __name__ == "__main__":
    main()
