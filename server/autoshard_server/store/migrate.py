"""Bringing a database up to date, and asking whether it is."""

import logging
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from autoshard_solver_cache import StoreUnavailableError, lock, reader

_LOCK = "autoshard migrations"

_log = logging.getLogger(__name__)

# It tells of every look at a database.
logging.getLogger("alembic.runtime.migration").setLevel(logging.WARNING)


def migrate(engine: Engine) -> None:
    """Run the migrations that are missing; who comes second waits and finds nothing to do.

    All of them happen, or none.

    Raises:
        StoreUnavailableError: the database cannot be written, or a newer release wrote it.
    """
    if is_current(engine):
        return
    with engine.begin() as connection:
        lock(connection, _LOCK)
        _refuse_newer(connection)
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    _log.info("the database was brought up to migration %s", newest_revision())


def is_current(engine: Engine) -> bool:
    """Whether the database is as this release wants it.

    Raises:
        StoreUnavailableError: the database cannot be read.
    """
    with reader(engine).begin() as connection:
        return _heads(connection) == {newest_revision()}


@cache
def newest_revision() -> str:
    """The last migration that this release knows."""
    (head,) = _scripts().get_heads()
    return head


def _refuse_newer(connection: Connection) -> None:
    known = {script.revision for script in _scripts().walk_revisions()}
    unknown = sorted(_heads(connection) - known)
    if unknown:
        url = connection.engine.url.render_as_string()
        raise StoreUnavailableError(
            f"the database {url!r} has migration {', '.join(unknown)}, but this release knows "
            f"them up to {newest_revision()} only; a newer release has written it: "
            "install that one, or give another database"
        )


def _heads(connection: Connection) -> set[str]:
    return set(MigrationContext.configure(connection).get_current_heads())


def _config() -> Config:
    config = Config()
    # Percent signs would be taken for interpolations.
    folder = str(Path(__file__).with_name("migrations")).replace("%", "%%")
    config.set_main_option("script_location", folder)
    return config


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
