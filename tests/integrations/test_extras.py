"""What is said where an optional package is missing."""

import subprocess
import sys

import pytest

MODULES = {"accelerate": "accelerate", "transformers": "accelerate"}


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_package_is_named_with_the_extra(module: str) -> None:
    code = f"""
import sys
sys.modules[{MODULES[module]!r}] = None
import autoshard.integrations
try:
    import autoshard.integrations.{module}
except ImportError as error:
    assert "pip install 'autoshard[transformers]'" in str(error), error
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)  # noqa: S603  ours
