"""Settings of the whole suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from benchmarks.faults.postgres import Cluster, binaries, running_cluster

# Reproducible examples, and no deadline: the first example pays for imports.
settings.register_profile("autoshard", derandomize=True, deadline=None)
settings.load_profile("autoshard")


@pytest.fixture(scope="session", autouse=True)
def _no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Commands and services that are not told where to keep things keep them here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSHARD_CACHE", str(folder / "solved"))
        patch.setenv("AUTOSHARD_STORE_URL", f"sqlite:///{folder / 'store.sqlite3'}")
        yield folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A real PostgreSQL, started when the first test of a process asks for it."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: on Debian, apt-get install postgresql")
    with running_cluster(programs) as cluster:
        yield cluster
