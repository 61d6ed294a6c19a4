"""The commands as a whole: help, start-up, output files, exit statuses."""

import inspect
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import autoshard
from typer.core import TyperGroup

from autoshard.cli import ExitCode
from autoshard.cli.main import COMMANDS
from autoshard.plan.options import option_groups


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


@pytest.mark.parametrize("name", [name for name, one in COMMANDS.items() if one.first_options])
def test_help_has_the_first_options_and_all_of_them_when_asked(name: str) -> None:
    command, first = COMMANDS[name].load(name), COMMANDS[name].first_options
    flags = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
    assert set(first) <= flags
    short, whole = (autoshard(name, flag).output for flag in ("--help", "--help-all"))
    shown = set(re.findall(r"^│ [* ]{0,4}(--[\w-]+)", short, re.MULTILINE))
    assert shown == {*first, "--help", "--help-all"} - {"--memory-budget"} | {"--memory"}
    assert "more options:" in short
    assert f"autoshard {name} --help-all" in short
    assert "more options:" not in whole
    assert whole.count("\n") > 3 * short.count("\n")


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


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_reader_that_ends_early_is_no_error(archive: Path, output: str) -> None:
    read, write = os.pipe()
    os.close(read)
    options = ["coverage", str(archive), "--format", output]
    command = [sys.executable, "-m", "autoshard.cli", *options]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)  # noqa: S603  our own program
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help_import_nothing_heavy(flag: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['autoshard', {flag!r}]\n"
        "from autoshard.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    print('MODULES', *sys.modules)\n"
    )
    done = subprocess.run(  # noqa: S603  our own program
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split("MODULES")[1].split()
    packages = {name.partition(".")[0] for name in modules}
    heavy = {"numpy", "scipy", "pydantic", "torch", "highspy", "httpx2", "fastapi", "sqlalchemy"}
    assert not packages & heavy
    ours = {name for name in modules if name.startswith("autoshard")}
    others = {name for name in ours if not name.startswith("autoshard.cli")}
    lazy = {"autoshard.base", "autoshard.base.lazy_imports"}
    assert others <= {"autoshard", "autoshard.version"} | lazy
    assert not {f"autoshard.cli.{name}" for name in ("options", "commands", "rendering")} & ours


def test_exit_statuses_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    source = inspect.getsource(ExitCode)
    meanings = re.findall(r'= (\d+)\n    """(.+)"""', source)
    assert len(meanings) == len(ExitCode)
    assert rows == dict(meanings)
    shown = " ".join(re.sub("[│]", " ", autoshard("--help").output).split())
    assert all(f" {code.value} " in shown for code in ExitCode)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autoshard pl", "plan"),
        ("autoshard plan --mem", "--memory"),
        ("autoshard plan --mode ", "inference"),
        ("autoshard export plan.json --to fs", "fsdp2"),
        ("autoshard cache ex", "export"),
    ],
)
def test_shells_complete_commands_options_and_choices(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_AUTOSHARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    assert expected in autoshard().output.split()


def test_explain_lists_what_a_pattern_stands_for(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    autoshard("plan", archive, "--mesh", "2", "--no-cache", "-o", path)
    for pattern in ("up", "u*"):
        result = autoshard("explain", path, pattern)
        assert result.exit_code == 0, result.output
        assert "up.weight" in result.output
        assert "linear" in result.output
    listed = autoshard("explain", path, "*.weight").output
    assert "up.weight" in listed
    assert "down.weight" in listed
    one = autoshard("explain", path, "up.we*").output
    assert one == autoshard("explain", path, "up.weight").output
    assert "chosen" in one


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_taken_port_is_a_plain_error(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = autoshard("serve", "--host", host, "--port", port)
    assert result.exit_code == 1
    assert f"error: cannot listen on {host}:{port}: Address already in use" in result.output


def test_options_are_listed_under_headings() -> None:
    groups = [kind.title for kind in option_groups().values()]
    found = re.findall(r"╭─ ([^─]+) ─", autoshard("plan", "--help-all").output)
    headings = [
        "Arguments",
        "Options",
        "Batch of a config",
        *groups,
        "The model's own operators",
        "Service and cache",
    ]
    assert found == [*headings, "Output"]
