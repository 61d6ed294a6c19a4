"""Writes the OpenAPI specification, which is committed and compared by a test.

`python -m autoshard_server.openapi` writes openapi/openapi.json; another path may follow.
"""

import json
import sys
from pathlib import Path

from autoshard_server.app import create_app


def openapi_text() -> str:
    """The specification as the text of a file."""
    return json.dumps(create_app().openapi(), indent=2) + "\n"


def main() -> None:
    """Write the specification."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "openapi/openapi.json")
    path.write_text(openapi_text())


if __name__ == "__main__":
    main()
