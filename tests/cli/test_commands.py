"""The commands as a whole: help, start-up, output files, exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import autoshard
from typer.core import TyperGroup

from autoshard.cli.main import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_help(name: str) -> None:
    deferred = COMMANDS[name]
    text = (deferred.load(name).help or "").splitlines()[0]
    assert deferred.help.replace("\\[", "[") == text


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(flag: str) -> None:
    assert autoshard(flag).exit_code == 0
    for name in COMMANDS:
        result = autoshard(name, flag)
        assert result.exit_code == 0, name
        assert "usage:" in result.output.lower(), name
        command = COMMANDS[name].load(name)
        for inner in command.commands if isinstance(command, TyperGroup) else ():
            assert autoshard(name, inner, flag).exit_code == 0, (name, inner)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "graph.pt2", "--mesh", "2", "-o"),
        ("search", "graph.pt2", "--devices", "2", "-o"),
        ("export", "plan.json", "--to", "fsdp2", "-o"),
        ("simulate", "plan.json", "-o"),
        ("simulate", "plan.json", "--svg"),
        ("profile", "plan.json", "-o"),
        ("calibrate", "-o"),
        ("mase", "write", "plan.json"),
        ("cache", "show", "plans", "0", "-o"),
        ("cache", "export"),
    ],
    ids=" ".join,
)
def test_output_files_are_checked_before_any_work(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    # The other files do not exist: an error about the output comes first.
    file = tmp_path / "file"
    file.touch()
    for path, reason in (
        (tmp_path / "missing" / "out.json", "create it first"),
        (tmp_path, "it is a folder"),
        (file / "out.json", "is not a folder"),
    ):
        result = autoshard(*arguments, path)
        assert result.exit_code == 1
        assert f"cannot write {path}: " in result.output
        assert reason in result.output


def test_a_full_disk_is_named(archive: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    result = autoshard("plan", archive, "--mesh", "2", "--no-cache", "-o", full)
    assert result.exit_code == 1
    assert "error: cannot write /dev/full: No space left on device" in result.output


def test_a_reader_that_ends_early_is_no_error(archive: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "autoshard.cli", "coverage", str(archive)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)  # noqa: S603  our own program
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 1
