"""Pages of the manual that are made from the code: settings and problem types.

`python -m autoshard_server.reference` writes them under docs/; another folder may follow.
"""

import sys
from pathlib import Path

from autoshard_server.problems import PROBLEM_TYPES
from autoshard_server.settings import Settings

_SETTINGS = """# Settings of the service

Environment variables, read when the service starts. `python -m autoshard_server` takes
`--host`, `--port`, `--store-url` and `--log-level` besides. This page is made by
`python -m autoshard_server.reference`.

| variable | default | meaning |
|---|---|---|
"""

_PROBLEMS = """# Problems

Every error of the service is `application/problem+json` (RFC 9457). The `type` ends in the
name below and never changes; `detail` says what is wrong this time. This page is made by
`python -m autoshard_server.reference`.
"""


def settings_page() -> str:
    """The settings as a Markdown table."""
    prefix = Settings.model_config["env_prefix"]
    rows = []
    for name, field in Settings.model_fields.items():
        default = "see right" if field.default_factory else f"`{field.default}`"
        rows.append(f"| `{prefix}{name.upper()}` | {default} | {field.description} |\n")
    return _SETTINGS + "".join(rows)


def problems_page() -> str:
    """The problem types, one section each, so that a `type` leads to its section."""
    sections = [
        f"\n## {kind.slug}\n\n{kind.status}, “{kind.title}”. {kind.meaning}\n"
        for kind in PROBLEM_TYPES
    ]
    return _PROBLEMS + "".join(sections)


PAGES = {"settings.md": settings_page, "problems.md": problems_page}
"""What is under docs/, by file name."""


def main() -> None:
    """Write the pages."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, page in PAGES.items():
        (folder / name).write_text(page())


if __name__ == "__main__":
    main()
