"""Settings from environment variables: misspelled ones, and other programs' variables."""

import re
from pathlib import Path

import pytest

from autoshard.errors import OptionError
from autoshard_server import Settings
from autoshard_server.environment import OTHER_VARIABLES, load_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NUM_WORKER", "5", "not a setting.*did you mean AUTOSHARD_NUM_WORKERS?"),
        ("MAX_QUEUD_JOBS", "5", "did you mean AUTOSHARD_MAX_QUEUED_JOBS?"),
        ("PORT", "5", "use the option --port of"),
        ("COLOUR", "red", "docs/settings.md lists all"),
        ("NUM_WORKERS", "five", "^AUTOSHARD_NUM_WORKERS='five': Input should be a valid integer"),
        ("CACHE_MAX_BYTES", "1 mile", "^AUTOSHARD_CACHE_MAX_BYTES='1 mile': "),
        ("STORE_URL", "postgres//me:secret@db", "^AUTOSHARD_STORE_URL: give a SQLAlchemy URL"),
        ("ROOT_PATH", "/plan/", "^AUTOSHARD_ROOT_PATH='/plan/': "),
        ("FORWARDED_ALLOW_IPS", "proxy", "^AUTOSHARD_FORWARDED_ALLOW_IPS='proxy': "),
        ("CORS_ORIGINS", "ml.example.com", "'ml.example.com' is not an origin"),
    ],
)
def test_a_mistake_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"AUTOSHARD_{name}", value)
    with pytest.raises(OptionError, match=message) as caught:
        load_settings()
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_variables_of_others_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Kubernetes, of clients and of the compose file."""
    for name, value in {
        "AUTOSHARD_PORT": "tcp://10.0.0.1:80",
        "AUTOSHARD_PORT_80_TCP_ADDR": "10.0.0.1",
        "AUTOSHARD_SERVICE_HOST": "10.0.0.1",
        "AUTOSHARD_SERVICE_PORT_HTTP": "80",
        "AUTOSHARD_DB_SERVICE_PORT": "5432",
        "AUTOSHARD_SERVER": "http://127.0.0.1:8000",
        "autoshard_num_workers": "3",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_settings().num_workers == 3
    assert load_settings(num_workers=4, root_path=None).num_workers == 4


def test_every_variable_of_the_library_is_known() -> None:
    settings = {f"AUTOSHARD_{name.upper()}" for name in Settings.model_fields}
    for folder in ("autoshard", "server", "solver_cache"):
        for file in (ROOT / folder).rglob("*.py"):
            named = set(re.findall(r"\bAUTOSHARD_[A-Z_]*[A-Z]\b", file.read_text()))
            assert named <= settings | OTHER_VARIABLES, file
