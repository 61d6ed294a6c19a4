"""Settings of the whole suite."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A thread for each test process and each program that it starts: they share the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without files of bytecode, each of these programs would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from support.on_ranks import on_ranks, run_launch
from support.parts import sampled
from support.planned import megatron, planned

from benchmarks.faults.postgres import Cluster, binaries, running_cluster

__all__ = ["megatron", "on_ranks", "planned", "run_launch"]

SLOW_FILES = (
    *(
        "test_8_ranks",
        "test_pages",
        "test_code_on_ranks",
        "test_memory_problem",
        "test_training_on_ranks",
        "test_training_loops_on_ranks",
        "test_models_on_ranks",
        "test_zoo",
    ),
    *("test_pipelines_on_ranks", "test_integrations_on_ranks", "test_2_ranks"),
    *("test_memory_on_ranks", "test_ray_executor", "test_programs_on_ranks", "test_benchmarks"),
    *("test_measurements_on_ranks", "test_server_process", "test_kernels_on_ranks", "test_faults"),
    *("test_workers", "test_zoo_on_4_ranks", "test_launch"),
    *("test_zoo_on_8_ranks", "test_conformance", "test_weights_on_ranks", "test_retries"),
    *("test_gpu", "test_regather_on_ranks", "test_block_cache", "test_large_problems"),
)
"""Files that take longest, without a suffix. They begin first, so that none is left alone at the
end; those that start ranks take turns with others, so that few of them run side by side."""

# Reproducible examples, and no deadline: the first example pays for imports.
settings.register_profile("autoshard", derandomize=True, deadline=None)
settings.load_profile("autoshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes the expected files of snapshot tests."""
    parser.addoption("--update-snapshots", action="store_true", help="Write expected outputs.")
    parser.addoption(
        "--part",
        choices=("sample", "rest"),
        help="Run no thorough tests and a few cases of each matrix, or the tests that this leaves.",
    )


@pytest.fixture
def update_snapshots(request: pytest.FixtureRequest) -> bool:
    """True if the expected files are to be written."""
    return bool(request.config.getoption("--update-snapshots"))


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist keep the order of files, which begins with the long ones."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the part that is asked for, and begin with the long files."""
    part = config.option.part
    if part is not None:
        sample = sampled(items)
        others = [item for item in items if (item in sample) != (part == "sample")]
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    places = {name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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
