"""`autoshard cache`, for folders and for databases."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from autoshard.cli import app
from autoshard_solver_cache import (
    Cache,
    CacheFileError,
    FolderCache,
    SolverCache,
    export_entries,
    import_entries,
    open_engine,
)

Run = Callable[..., Result]


@pytest.fixture(params=["folder", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The option that names an empty cache."""
    if request.param == "folder":
        return ["--cache", str(tmp_path / "solved")]
    return ["--store", f"sqlite:///{tmp_path / 'store.sqlite3'}"]


def opened(place: list[str]) -> Any:
    kind, where = place
    cache: Cache = FolderCache(where) if kind == "--cache" else SolverCache(where)
    return closing(cache)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    ((_, found),) = json.loads(result.output).items()
    return list(found)


@pytest.fixture
def filled(place: list[str]) -> list[str]:
    with opened(place) as cache:
        cache.put("plans", "a/../b.c", b"a plan" * 100)
        cache.put("plans", "f" * 64, b"another")
        cache.put("blocks", "0" * 64, b"")
    return place


def test_a_cache_is_listed(filled: list[str]) -> None:
    namespaces = rows(run("ls", "--json", *filled))
    assert [(n["namespace"], n["entries"]) for n in namespaces] == [("blocks", 1), ("plans", 2)]
    entries = rows(run("ls", "plans", "--json", *filled))
    assert [(e["key"], e["size_bytes"]) for e in entries] == [("a/../b.c", 600), ("f" * 64, 7)]
    shown = run("ls", *filled)
    assert shown.exit_code == 0
    assert "blocks" in shown.output
    assert "plans" in shown.output


def test_an_entry_is_shown_and_written(filled: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan"
    shown = run("show", "plans", "a/../b.c", "-o", file, *filled)
    assert shown.exit_code == 0, shown.output
    assert "a/../b.c" in shown.output
    assert file.read_bytes() == b"a plan" * 100
    missing = run("show", "plans", "none", *filled)
    assert missing.exit_code == 1
    assert "'none'" in missing.output


def test_what_is_old_or_too_much_goes(filled: list[str]) -> None:
    assert run("gc", *filled).exit_code == 1
    assert "dropped 0" in run("gc", "--max-days", "1", *filled).output
    assert "dropped 3" in run("gc", "--max-bytes", "0", *filled).output
    with opened(filled) as cache:
        assert cache.stats("plans").num_entries == 0


def damage(place: list[str]) -> None:
    kind, where = place
    if kind == "--cache":
        (Path(where) / "plans" / ("f" * 64)).write_bytes(b"x" * 50)
        return
    engine = open_engine(where)
    with engine.begin() as connection:
        connection.execute(text("UPDATE cache_entries SET body = 'x' WHERE key LIKE 'f%'"))
    engine.dispose()


def test_damage_is_found_and_dropped(filled: list[str]) -> None:
    assert run("verify", *filled).exit_code == 0
    damage(filled)
    found = run("verify", *filled)
    assert found.exit_code == 1
    assert f"plans/{'f' * 64}" in found.output
    assert run("verify", *filled).exit_code == 0
    with opened(filled) as cache:
        assert cache.stats("plans").num_entries == 1


@pytest.mark.parametrize("name", ["cache.tar", "cache.tar.gz"])
def test_entries_are_taken_along(filled: list[str], tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    assert "wrote 3" in run("export", file, *filled).output
    other = ["--cache", str(tmp_path / "other")]
    assert "added 3 entries, 0 already existed" in run("import", file, *other).output
    assert "added 0 entries, 3 already existed" in run("import", file, *other).output
    with opened(filled) as before, opened(other) as after:
        assert after.namespaces() == before.namespaces() == ["blocks", "plans"]
        for namespace in before.namespaces():
            keys = [entry.key for entry in before.entries(namespace)]
            assert [entry.key for entry in after.entries(namespace)] == keys
            assert all(after.get(namespace, k) == before.get(namespace, k) for k in keys)


def test_only_what_is_asked_for_is_exported_and_nothing_damaged(
    filled: list[str], tmp_path: Path
) -> None:
    damage(filled)
    assert "wrote 1" in run("export", tmp_path / "x.tar", "-n", "plans", *filled).output


def test_an_import_takes_only_what_its_digest_says(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    good = "c" * 64
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    members = {
        f"plans/{good}/{digest}": b"hello",
        f"plans/changed/{digest}": b"hullo",
        f"../{good}/{digest}": b"hello",
        f"/plans/{good}/{digest}": b"hello",
        "plans/key": b"hello",
    }
    with tarfile.open(file, "w") as tar:
        for name, body in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
        link = tarfile.TarInfo(f"plans/link/{digest}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    place = ["--cache", str(tmp_path / "folder")]
    found = run("import", file, *place)
    assert found.exit_code == 1
    assert found.output.count("rejected:") == 5
    assert "added 1 entries" in found.output
    with opened(place) as cache:
        assert [entry.key for entry in cache.entries("plans")] == [good]
    assert {path.name for path in tmp_path.iterdir()} == {"x.tar", "folder"}


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_file_that_is_cut_off_says_so(filled: list[str], tmp_path: Path, keep: float) -> None:
    file = tmp_path / "x.tar.gz"
    run("export", file, *filled)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    found = run("import", file, "--cache", tmp_path / "other")
    assert found.exit_code == 1
    assert "cannot be read as a tar file" in found.output.replace("\n", " ")


@pytest.mark.parametrize("coding", ["gz", "xz"])
def test_a_file_that_was_damaged_says_so(tmp_path: Path, coding: str) -> None:
    file = tmp_path / "x.tar"
    source = SolverCache("sqlite://")
    for i in range(20):
        source.put("plans", str(i), bytes((i * j * j) % 251 for j in range(300)))
    export_entries(source, file)
    coder: Any = {"gz": gzip, "xz": lzma}[coding]
    whole = coder.compress(file.read_bytes())
    outcomes = set()
    for at in range(0, len(whole), max(1, len(whole) // 100)):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        file.write_bytes(content)
        try:
            import_entries(SolverCache("sqlite://"), file)
            outcomes.add("read")
        except CacheFileError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_an_import_takes_no_entry_that_is_larger_than_it_looks(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    sparse, body = bytes(1 << 20), b"hello"
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(f"plans/sparse/{hashlib.sha256(sparse).hexdigest()}")
        member.pax_headers = {"GNU.sparse.map": "0,5", "GNU.sparse.size": str(1 << 20)}
        member.size = 5
        tar.addfile(member, io.BytesIO(bytes(5)))
        for key in ("k" * 256, "a%00b", "k"):
            member = tarfile.TarInfo(f"plans/{key}/{hashlib.sha256(body).hexdigest()}")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    found = import_entries(cache := SolverCache("sqlite://"), file)
    assert (found.num_added, len(found.rejected)) == (1, 3)
    assert [entry.key for entry in cache.entries("plans")] == ["k"]


def test_a_database_that_is_not_there_says_so() -> None:
    found = run("ls", "--store", "nosuchdb://user:secret@host/name")
    assert found.exit_code == 1
    assert "cannot open the database" in found.output
    assert "secret" not in found.output


def test_nothing_but_a_cache_is_looked_after(tmp_path: Path) -> None:
    own = tmp_path / "work" / "src" / "Makefile"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"all:")
    place = ["--cache", str(tmp_path / "work")]
    assert "dropped 0" in run("gc", "--max-bytes", "0", *place).output
    assert run("verify", *place).exit_code == 0
    assert run("verify", "-n", "src", *place).exit_code == 0
    found = run("verify", "-n", own.parent, *place)
    assert found.exit_code == 1
    assert "is not a valid cache namespace" in found.output.replace("\n", " ")
    assert own.exists()
