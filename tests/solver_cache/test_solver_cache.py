"""Caches: entries, eviction, damage, concurrency."""

import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from autoshard_solver_cache import (
    Cache,
    FolderCache,
    NamespacedCache,
    NamespaceError,
    SolverCache,
    StoreUnavailableError,
    open_engine,
)

KINDS = ("sqlite in memory", "sqlite file", "folder")
MakeCache = Callable[..., Cache]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'deep' / 'store.sqlite3'}"


@pytest.fixture(params=KINDS)
def make_cache(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Iterator[MakeCache]:
    opened: list[Cache] = []

    def make(*, max_bytes: int | None = None) -> Cache:
        if request.param == "folder":
            cache: Cache = FolderCache(tmp_path / "folder", max_bytes=max_bytes)
        else:
            store = "sqlite://" if "in memory" in request.param else url
            cache = SolverCache(store, max_bytes=max_bytes)
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


def noise(seed: int, size: int = 1000) -> bytes:
    """Bytes that do not compress."""
    value, made = seed + 1, bytearray()
    while len(made) < size:
        value = value * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        made += (value >> 24).to_bytes(5, "big")
    return bytes(made[:size])


def test_what_is_put_is_got_and_what_is_deleted_is_gone(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.get("plans", "k") is None
    assert cache.put("plans", "k", b"body")
    assert cache.get("plans", "k") == b"body"
    assert cache.delete("plans", "k")
    assert not cache.delete("plans", "k")
    assert cache.get("plans", "k") is None


def test_namespaces_are_apart(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.put("plans", "k", b"plan")
    cache.put("blocks", "k", b"block")
    assert cache.get("plans", "k") == b"plan"
    assert cache.get("blocks", "k") == b"block"
    assert cache.get("costs", "k") is None


def test_the_first_writer_stays(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.put("plans", "k", b"first")
    assert not cache.put("plans", "k", b"second")
    assert cache.get("plans", "k") == b"first"


def test_stats_count_entries_hits_and_misses_per_namespace(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.put("plans", "a", b"a" * 10)
    cache.put("plans", "b", b"b" * 10)
    cache.put("blocks", "c", b"c")
    for key in ("a", "a", "missing"):
        cache.get("plans", key)
    stats = cache.stats("plans")
    assert (stats.num_entries, stats.hits, stats.misses, stats.corrupted) == (2, 2, 1, 0)
    assert stats.nbytes > 0
    assert cache.stats("costs").num_entries == 0


def test_the_least_recently_used_make_room(make_cache: MakeCache) -> None:
    cache = make_cache(max_bytes=3500)
    for i in range(5):
        cache.put("plans", str(i), noise(i))
    held = [i for i in range(5) if cache.get("plans", str(i)) is not None]
    assert held == [2, 3, 4]
    assert cache.stats("plans").nbytes <= 3500


def test_an_entry_larger_than_the_room_is_not_kept(make_cache: MakeCache) -> None:
    cache = make_cache(max_bytes=500)
    cache.put("plans", "large", noise(1))
    assert cache.get("plans", "large") is None


@settings(max_examples=30, derandomize=True, deadline=None)
@given(body=st.binary(max_size=2000))
def test_any_bytes_come_back(body: bytes) -> None:
    with closing(SolverCache("sqlite://")) as cache:
        cache.put("plans", "k", body)
        assert cache.get("plans", "k") == body


def test_entries_outlive_the_cache_object(url: str) -> None:
    with closing(SolverCache(url)) as cache:
        cache.put("plans", "k", b"body")
    with closing(SolverCache(url)) as cache:
        assert cache.get("plans", "k") == b"body"


def test_entries_are_listed_without_being_used(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert (cache.namespaces(), list(cache.entries("plans"))) == ([], [])
    for key in ("b", "a/../.", "c"):
        cache.put("plans", key, b"12345")
    cache.put("blocks", "x", b"")
    assert cache.namespaces() == ["blocks", "plans"]
    listed = list(cache.entries("plans"))
    assert [(e.namespace, e.key, e.size) for e in listed] == [
        ("plans", "a/../.", 5),
        ("plans", "b", 5),
        ("plans", "c", 5),
    ]
    assert cache.info("plans", "b") == listed[1]
    assert cache.info("plans", "d") is None
    assert cache.existing("plans", ["b", "c", "d", "x"]) == {"b", "c"}
    assert cache.read("plans", "b") == b"12345"
    assert cache.read("plans", "d") is None
    stats = cache.stats("plans")
    assert (stats.hits, stats.misses) == (0, 0)


def test_the_least_recently_used_are_evicted(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.evict(max_bytes=0) == 0
    for i in range(4):
        cache.put("plans", str(i), noise(i))
    assert cache.evict() == 0
    assert cache.evict(max_age=3600) == 0
    assert cache.evict(max_bytes=2500, max_age=3600) == 2
    assert [entry.key for entry in cache.entries("plans")] == ["2", "3"]
    assert cache.evict(max_age=-1) == 2


DAMAGES = {
    "other bytes": {"body": zlib.compress(b"another body")},
    "not compressed": {"body": b"\x00\x01\x02"},
    "truncated": {"body": zlib.compress(b"body" * 100)[:-6]},
    "empty": {"body": b""},
    "other digest": {"sha256": "0" * 64},
    "other size": {"size": 3},
    "negative size": {"size": -1},
    "text": {"body": "text"},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_dropped_and_can_be_written_again(
    url: str, damage: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(url)
    cache = SolverCache(engine)
    cache.put("plans", "k", b"body" * 100)
    changes = ", ".join(f"{column} = :{column}" for column in damage)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE cache_entries SET {changes}"), damage)  # noqa: S608  our columns
    assert cache.get("plans", "k") is None
    assert "plans/k" in caplog.text
    stats = cache.stats("plans")
    assert (stats.num_entries, stats.misses, stats.corrupted) == (0, 1, 1)
    assert cache.put("plans", "k", b"body" * 100)
    assert cache.get("plans", "k") == b"body" * 100
    engine.dispose()


def test_a_bomb_in_the_store_is_not_inflated(url: str) -> None:
    engine = open_engine(url)
    cache = SolverCache(engine)
    cache.put("plans", "k", b"small")
    bomb = zlib.compress(bytes(64 << 20))
    with engine.begin() as connection:
        connection.execute(text("UPDATE cache_entries SET body = :bomb"), {"bomb": bomb})
    tracemalloc.start()
    assert cache.get("plans", "k") is None
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    engine.dispose()


def test_threads_share_one_cache(make_cache: MakeCache) -> None:
    cache = make_cache()

    def work(i: int) -> bool:
        stored = cache.put("plans", str(i % 10), noise(i % 10))
        assert cache.get("plans", str(i % 10)) == noise(i % 10)
        return stored

    with ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(work, range(100)))
    assert sum(stored) == 10


@pytest.mark.parametrize("content", [b"", b"short", bytes(32) + b"body"])
def test_a_damaged_file_is_dropped_and_can_be_written_again(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = FolderCache(tmp_path)
    cache.put("blocks", "k", b"body")
    file = tmp_path / "blocks" / "k"
    file.write_bytes(content)
    assert cache.get("blocks", "k") is None
    assert str(file) in caplog.text
    stats = cache.stats("blocks")
    assert (stats.num_entries, stats.misses, stats.corrupted) == (0, 1, 1)
    assert cache.put("blocks", "k", b"body")
    assert cache.get("blocks", "k") == b"body"


def test_no_key_leaves_the_folder(tmp_path: Path) -> None:
    cache = FolderCache(tmp_path / "inside")
    for key in ("../../outside", "/outside", ".", "..", "a" * 300, "\0"):
        assert cache.put("blocks", key, key.encode())
        assert cache.get("blocks", key) == key.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert cache.stats("blocks").num_entries == 6
    for namespace in ("..", "/abs", "a/b", "", "A", "x" * 65):
        with pytest.raises(NamespaceError, match="not a valid cache namespace"):
            cache.put(namespace, "k", b"body")
        with pytest.raises(NamespaceError, match="not a valid cache namespace"):
            list(cache.entries(namespace))


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("src/Makefile", "plans/id_rsa", "notes", "ours/k.txt")]
    for path in others[:3]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(noise(0, 3000))
    cache = FolderCache(tmp_path, max_bytes=500)
    for key in ("a", "b"):
        cache.put("ours", key, noise(1, 300))
    others[3].write_bytes(b"put there later")
    (tmp_path / "ours" / "folder").mkdir()
    # A folder that was there before, with something in it, is not taken over.
    with pytest.raises(FileExistsError, match="another folder"):
        cache.put("plans", "k", b"body")
    assert cache.get("plans", "id_rsa") is None
    assert not cache.delete("plans", "id_rsa")
    assert cache.namespaces() == ["ours"]
    assert list(cache.entries("src")) == []
    assert [entry.key for entry in cache.entries("ours")] == ["b"]
    assert cache.evict(max_bytes=0, max_age=-1) == 1
    assert all(path.exists() for path in others)


def test_a_namespaced_cache_uses_one_namespace() -> None:
    cache = SolverCache("sqlite://")
    cached = NamespacedCache(cache, "blocks")
    cached.put("k", b"body")
    assert cached.get("k") == cache.get("blocks", "k") == b"body"
    assert cache.get("plans", "k") is None


def test_a_namespaced_cache_stops_using_a_database_that_fails(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(url)
    cached = NamespacedCache(SolverCache(engine), "blocks")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE cache_entries"))
    assert cached.get("k") is None
    cached.put("k", b"body")
    assert cached.get("k") is None
    assert len(caplog.records) == 1
    engine.dispose()


def test_a_namespaced_cache_stops_using_a_folder_that_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    cached = NamespacedCache(FolderCache(tmp_path / "file" / "folder"), "blocks")
    cached.put("k", b"body")
    assert cached.get("k") is None
    assert len(caplog.records) == 1


WRITER = """
import sys
from autoshard_solver_cache import FolderCache, SolverCache
cache = {"sql": SolverCache, "folder": FolderCache}[sys.argv[1]](sys.argv[2])
print(sum(cache.put("plans", str(i), b"%d" % i * 100) for i in range(100)))
cache.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sql", "folder"])
def test_processes_share_one_store(kind: str, url: str, tmp_path: Path) -> None:
    store = url if kind == "sql" else str(tmp_path / "folder")
    command = [sys.executable, "-c", WRITER, kind, store]
    writers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own code
        for _ in range(3)
    ]
    answers = [writer.communicate()[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert sum(map(int, answers)) == 100
    opened: Cache = SolverCache(store) if kind == "sql" else FolderCache(store)
    with closing(opened) as cache:
        assert all(cache.get("plans", str(i)) == b"%d" % i * 100 for i in range(100))


def test_sqlite_is_set_up_for_many_processes(url: str) -> None:
    engine = open_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA busy_timeout")).scalar_one() == 10_000
    engine.dispose()


@pytest.mark.parametrize(
    "store",
    ["no url", "nosuchdb://host/name", "sqlite:////proc/nowhere/store.sqlite3"],
)
def test_a_store_that_cannot_be_opened_says_so(store: str) -> None:
    with pytest.raises(StoreUnavailableError, match="give"):
        SolverCache(store)


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreUnavailableError, match=r"store\.sqlite3"):
        SolverCache(f"sqlite:///{path}")


def test_a_store_whose_connections_are_all_in_use_says_so(url: str) -> None:
    for store in ("sqlite://", url):
        engine = open_engine(store)
        engine.pool._timeout = 0.05  # type: ignore[attr-defined]  half a minute otherwise
        room = 1 if store == "sqlite://" else 15
        with ExitStack() as held:
            for _ in range(room):
                held.enter_context(engine.connect())
            with pytest.raises(StoreUnavailableError, match="in use"):
                engine.connect()
        engine.dispose()


def test_what_can_be_read_but_not_written_is_read() -> None:
    engine = open_engine("sqlite://")
    cache = SolverCache(engine)
    cache.put("plans", "k", b"body")
    with engine.begin() as connection:
        connection.execute(text("UPDATE cache_entries SET used_at = 0"))
    with engine.connect() as connection:
        connection.execute(text("PRAGMA query_only = ON"))
    with pytest.raises(StoreUnavailableError):
        cache.put("plans", "l", b"body")
    assert cache.get("plans", "k") == b"body"
    engine.dispose()


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        open_engine("nosuchdb://user:secret@host/name")
    assert "secret" not in str(caught.value)


NUM_OPENERS, NUM_DATABASES = 6, 40


@pytest.mark.thorough
def test_connections_that_open_a_new_database_at_once_wait_for_each_other(tmp_path: Path) -> None:
    def connect(engine: Engine, together: Barrier) -> str:
        together.wait()
        with engine.connect() as connection:
            return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar_one())

    for number in range(NUM_DATABASES):
        url = f"sqlite:///{tmp_path / str(number)}.sqlite3"
        engines = [open_engine(url) for _ in range(NUM_OPENERS)]
        together = Barrier(NUM_OPENERS)
        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            modes = list(pool.map(lambda engine, b=together: connect(engine, b), engines))
        assert modes == ["wal"] * NUM_OPENERS
        for engine in engines:
            engine.dispose()
