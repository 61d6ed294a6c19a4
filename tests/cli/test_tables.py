"""Tables of commands: fitting, shortening, raw values."""

from io import StringIO

import pytest
from rich.console import Console

from autoshard.cli.rendering.tables import print_report, write_csv, write_json
from autoshard.report.tables import Column, Report, Sentence, Table, Unit, plain_lines, shorten

NAME = "model.layers.{0..31}.self_attn.q_proj.weight"


@pytest.fixture
def table() -> Table:
    columns = Column("parameter", Unit.NAME), Column("placement"), Column("size", Unit.BYTES)
    made = Table("parameters", "Parameters", columns, limit=1)
    made.add(NAME, "Shard(0), Replicate", 4_000_000)
    made.add("head", "Replicate, Replicate", None)
    return made


def terminal(report: Report, width: int) -> list[str]:
    stream = StringIO()
    print_report(report, Console(file=stream, width=width, force_terminal=True, color_system=None))
    return stream.getvalue().splitlines()


def test_names_lose_their_middle() -> None:
    assert shorten(NAME, 24) == "model.layer...roj.weight"
    assert shorten(NAME, len(NAME)) == NAME


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_fits_its_terminal(table: Table, width: int) -> None:
    lines = terminal(Report.of(table), width)
    assert all(len(line.rstrip()) <= width for line in lines)
    assert any("weight" in line for line in lines)


def test_nothing_is_shortened_elsewhere(table: Table) -> None:
    heading, row = list(plain_lines(table))[1:]
    assert row == f"{NAME}  Shard(0), Replicate  4 MB"
    assert heading.index("placement") == row.index("Shard(0)")
    assert heading.endswith("size")
    assert table.remainder == "and 1 more"


def test_csv_and_json_have_all_rows_and_units_in_names(table: Table) -> None:
    report = Report.of(Sentence("a sentence"), table)
    assert write_csv(report).splitlines() == [
        "parameter,placement,size_bytes",
        f'{NAME},"Shard(0), Replicate",4000000',
        'head,"Replicate, Replicate",',
    ]
    assert '"size_bytes": null' in write_json(report)
    assert '"notes": [\n  "a sentence"\n ]' in write_json(report)
