"""Databases that do not exist yet, opened by several at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from sqlalchemy import Engine

from autoshard_solver_cache import open_engine

NUM_OPENERS, NUM_DATABASES = 6, 40


def test_nobody_is_told_that_a_new_database_is_locked(tmp_path: Path) -> None:
    for number in range(NUM_DATABASES):
        url = f"sqlite:///{tmp_path / str(number)}.sqlite3"
        engines = [open_engine(url) for _ in range(NUM_OPENERS)]
        together = Barrier(NUM_OPENERS)

        def connect(engine: Engine, together: Barrier = together) -> None:
            together.wait()
            engine.connect().close()

        with ThreadPoolExecutor(NUM_OPENERS) as pool:
            list(pool.map(connect, engines))
        for engine in engines:
            engine.dispose()
