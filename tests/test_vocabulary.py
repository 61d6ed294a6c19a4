"""Retired words stay out of code, messages and pages; the glossary has the words to use."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

RETIRED = {
    r"reconver\w*": "reshard_after_forward, regather",
    r"conversions?|ConversionTable": "resharding",
    r"steering": "constraints",
    r"hubs?": "shared nodes",
    r"shelf|shelves": "namespaced cache",
    r"tape|bucket_tape": "lowering",
    r"hurr(y|ied)": "out of time",
    r"climb\w*": "maximise the bound",
    r"hiding": "overlap",
    r"beliefs": "min-marginals",
    r"narrowing": "restricted problem",
    r"thinning": "bucket elimination",
    r"paces?|Paces?": "OperatorFit",
    r"parameters_on_meta": "init_empty_weights",
    r"(?<!_)checkpointable": "dcp_state_dict",
    r"topology_names": "list_topologies",
    r"step_counter|StepCounter": "rng_step",
    r"rooms": "packages",
    r"made-up": "synthetic",
    r"hands? on|handed on": "pass",
}
"""Words that were ours alone, as regular expressions of whole words, and the term to use."""


def documents() -> list[Path]:
    folders = (
        "autoshard",
        "benchmarks",
        "deploy",
        "docs",
        "openapi",
        "server",
        "solver_cache",
        "tests",
    )
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    kinds = {".py", ".md", ".json", ".yaml", ".toml"}
    return [path for path in found if path.suffix in kinds and path != Path(__file__)]


def test_there_are_documents_to_look_at() -> None:
    assert len(documents()) > 100


@pytest.mark.matrix
@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_stays_out(word: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z]){word}(?![A-Za-z])")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in documents()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"say {RETIRED[word]!r} instead at {', '.join(found[:20])}"
