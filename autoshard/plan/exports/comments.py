"""The comment that every export starts with: where it comes from, and what it leaves out."""

import re
from collections.abc import Iterable
from textwrap import wrap

_WIDTH = 96
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def comment(paragraphs: Iterable[str]) -> str:
    """Lines of a `#` comment, wrapped; a paragraph that begins with `- ` is an item of a list."""
    lines: list[str] = []
    for paragraph in paragraphs:
        indent = "  " if paragraph.startswith("- ") else ""
        lines += wrap(
            paragraph,
            _WIDTH,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def not_expressed(items: Iterable[str]) -> list[str]:
    """Paragraphs that name what an export leaves out."""
    listed = [f"- {item}" for item in items]
    if not listed:
        return ["Everything that the plan says of parameters is expressed."]
    return ["Not expressed:", *listed]


def folded(names: Iterable[str]) -> str:
    """Names with a layer's number as `*`, each once, in first-seen order."""
    return ", ".join(dict.fromkeys(pattern(name) for name in names))


def pattern(name: str) -> str:
    """A dotted name with `*` for each number that is a whole part of it."""
    return _NUMBER.sub("*", name)
