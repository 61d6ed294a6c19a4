"""What a process really reads."""

from pathlib import Path

COUNTERS = Path("/proc/self/io")
"""Of Linux; other systems do not count reads."""


def bytes_read_by_process() -> int:
    """Bytes that this process has read from files, whether they were in memory or not."""
    fields = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    return int(fields["rchar"])
