"""Names of the Python API in messages, put as options of the command line."""

import re

from autoshard.plan.options import option_groups

_OTHER_NAMES = {
    "mode": "--mode",
    "comparisons": "--comparisons",
    "num_devices": "--devices",
    "num_workers": "--workers",
    "max_axes": "--max-axes",
    "intra_bandwidth": "--intra-bandwidth",
    "inter_bandwidth": "--inter-bandwidth",
    "nodes": "--nodes",
    "min_expressed": "--min-expressed",
    "batch_size": "--batch-size",
    "seq_length": "--seq-length",
    "dtype": "--dtype",
}
_FLAGS = {
    keyword: flags[0]
    for kind in option_groups().values()
    for keyword, flags in kind.flags().items()
} | _OTHER_NAMES

_ANY = "|".join(_FLAGS)
_LONG = "|".join(name for name in _FLAGS if "_" in name)
_WITH_VALUE = re.compile(rf"`?\b({_ANY})(?: ?= ?| (?=['\"]))(['\"]?)([\w.-]+)\2`?")
"""`stages=1`, `mode 'inference'`."""
_BEFORE_COLON = re.compile(rf"^({_ANY})(?=[.:])")
"""The option that a message is about: `mode: Input should be ...`."""
_BY_ITSELF = re.compile(rf"`?(?<![-\w.])(?<!FSDP's )({_LONG})\b`?|`({_ANY})`")
"""`memory_budget`; the name of an option that is also a word only in backticks."""


def in_flags(message: str) -> str:
    """A message of the library with its options named as on the command line.

    >>> in_flags("raise memory_budget, or plan with mode 'inference'")
    'raise --memory, or plan with --mode inference'
    """
    message = _WITH_VALUE.sub(lambda m: f"{_FLAGS[m[1]]} {m[3]}", message)
    message = _BEFORE_COLON.sub(lambda m: _FLAGS[m[1]], message)
    return _BY_ITSELF.sub(lambda m: _FLAGS[m[1] or m[2]], message)
