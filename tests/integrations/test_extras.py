"""What is said where an optional package is missing."""

import subprocess
import sys

import pytest

CODE = """
import sys
from importlib import import_module

sys.modules["accelerate"] = sys.modules["transformers"] = None
for name in ("accelerate", "transformers", "generation"):
    try:
        import_module(f"autoshard.integrations.{name}")
    except ImportError as error:
        assert "pip install 'autoshard[transformers]'" in str(error), error
    else:
        raise SystemExit("imported")
"""


@pytest.mark.thorough
def test_a_missing_package_is_named_with_the_extra() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], check=True)  # noqa: S603  ours
