"""The key with which a caller shows who they are."""

import os
import stat
from pathlib import Path

import platformdirs

from autoshard.errors import OptionError

KEY_VARIABLE = "AUTOSHARD_API_KEY"
FILE_VARIABLE = "AUTOSHARD_API_KEY_FILE"


def find_api_key(given: str | None) -> str | None:
    """The key that was given; else that of the environment, else that of the user's file.

    The environment names a key (AUTOSHARD_API_KEY) or a file with one (AUTOSHARD_API_KEY_FILE,
    as containers mount secrets). The user's file is `api-key` in their folder of settings.

    Raises:
        OptionError: the file cannot be read, others may read it, or the key is no key.
    """
    key = given or os.environ.get(KEY_VARIABLE)
    if not key:
        named = os.environ.get(FILE_VARIABLE)
        key = _read(Path(named)) if named else _own()
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError("the API key is empty, or has characters that no key has")
    return key


def _own() -> str | None:
    path = platformdirs.user_config_path("autoshard") / "api-key"
    if not path.exists():
        return None
    if os.name == "posix" and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OptionError(f"others may read the API key in {path}; run: chmod 600 {path}")
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the API key in {path} cannot be read: {error}") from error
