"""Reports of sizing: whether a model fits, what takes the memory, how many devices it needs."""

from collections.abc import Iterator, Mapping

from autoshard.base.quantities import format_bytes
from autoshard.plan.predictions import three_digits
from autoshard.report.tables import Column, Report, Sentence, Table, Unit
from autoshard.sizing.results import DeviceCount, Fit, FitRow, HeldMemory, Largest, Size

_RESIZING = frozenset({"gpus", "batch_size", "batch-size", "seq_length", "seq-length"})
"""Names of what changes the work of a device, so that step times cannot be compared."""
_LISTED = 6
"""Modules that a table lists."""


def fit_report(found: Fit) -> Report:
    """The verdict, and a table: of the parts of the memory, or of the rows."""
    parts: list[Table | Sentence] = [Sentence(_header(found))]
    if len(found.rows) == 1:
        (row,) = found.rows
        parts += [Sentence(_verdict(row, found.budget), style="bold"), *_details(row)]
    else:
        parts += [Sentence(_verdict_of_rows(found), style="bold"), _rows(found)]
        parts += [Sentence(text) for text in _remarks(found.rows)]
    if not _RESIZING.intersection(found.rows[0].varied):
        parts.append(Sentence(f"In any layout: {found.least_statement}."))
    return Report(tuple(parts))


def largest_report(found: Largest) -> Report:
    """The largest size, with the parts of its memory, and what is beyond."""
    name = "batch" if found.name == "batch_size" else "sequence"
    words = "samples" if found.name == "batch_size" else "tokens"
    if found.size is None:
        text = f"No {name} fits: {found.unit} {words}, the fewest that the ranks can share, do not."
    else:
        text = (
            f"Largest {name}: {found.size} {words}, peak {format_bytes(found.row.peak or 0)}. "
            f"{_beyond(found, words)}"
        )
    return Report((Sentence(text, style="bold"), *_details(found.row)))


def _beyond(found: Largest, words: str) -> str:
    further = (found.size or 0) + found.unit
    if found.beyond is None:
        return f"{further} {words} were not priced: {found.remark}."
    return f"{further} {words} do not fit: {found.beyond.remark}."


def size_report(found: Size) -> Report:
    """The fewest and the cheapest number of devices, and a table of those that were priced."""
    unit = "price" if found.tokens else "price per 1e9 tokens"
    columns = [Column("devices", Unit.COUNT), Column("layout"), Column("micro-batches", Unit.COUNT)]
    columns += [Column("step", Unit.SECONDS), Column("tokens/s", Unit.COUNT)]
    columns += [Column("memory", Unit.BYTES), Column("days"), Column(unit), Column("enough")]
    table = Table("devices", "", tuple(columns))
    for row in found.rows:
        rate = None if row.tokens_per_second is None else round(row.tokens_per_second)
        days = None if row.days is None else f"{row.days:.1f}"
        price = None if row.price is None else f"{row.price:,.0f}"
        first = (row.num_devices, row.layout or None, row.micro_batches, row.step_time)
        bold = row.num_devices in (found.fewest, found.cheapest)
        table.add(*first, rate, row.peak, days, price, row.reaches, bold=bold)
    lines = [Sentence(text, style="bold") for text in _size_verdict(found)]
    remarks = [
        Sentence(f"{row.num_devices} devices: {row.remark}") for row in found.rows if row.remark
    ]
    bounds = (
        f"At least {found.least_by_memory:,} devices hold the parameters, gradients and optimizer "
        f"state, and {found.least_by_arithmetic:,} are fast enough at their peak rate."
    )
    return Report((*lines, table, *remarks, Sentence(bounds)))


def _size_verdict(found: Size) -> Iterator[str]:
    target = f"{found.target:,.0f} tokens/s"
    batch = f"a batch of {found.batch_size:,} x {found.seq_length:,} tokens"
    if found.fewest is None:
        yield f"No number of devices that was priced reaches {target} with {batch}."
        return
    row = next(row for row in found.rows if row.num_devices == found.fewest)
    yield (
        f"{found.model}: {found.fewest:,} devices reach {target} with {batch}, the fewest of those "
        f"priced: {_speed(row)}."
    )
    if found.cheapest is not None and found.cheapest != found.fewest:
        row = next(row for row in found.rows if row.num_devices == found.cheapest)
        yield f"The cheapest of those that reach it: {found.cheapest:,} devices, {_speed(row)}."


def _speed(row: DeviceCount) -> str:
    assert row.step_time is not None
    return (
        f"{row.layout}, {three_digits(row.step_time)} a step, {row.tokens_per_second:,.0f} tokens/s"
    )


def _header(found: Fit) -> str:
    return (
        f"{found.model}, {found.num_parameters:,} parameters, on {found.hardware}, "
        f"{found.precision}, {found.mode}"
    )


def _verdict(row: FitRow, budget: int) -> str:
    if row.verdict == "unknown" or row.peak is None:
        return f"Not priced: {row.remark}"
    largest = "" if row.held is None else f" {_binding(row.held)}"
    if row.verdict == "does not fit":
        return f"Does not fit with {row.layout}: {row.remark}.{largest}"
    step = "" if row.step_time is None else f", predicted step {three_digits(row.step_time)}"
    peak, free = format_bytes(row.peak), format_bytes(budget - row.peak)
    again = f" with {row.num_recomputed} modules recomputed" if row.num_recomputed else ""
    host = (
        ""
        if row.host_memory is None
        else (
            f" The host holds {format_bytes(row.host_memory)} of optimizer state for each device; "
            "the step has neither its update nor its transfers."
        )
    )
    return (
        f"Fits with {row.layout}{again}: peak {peak} of {format_bytes(budget)} per device, {free} "
        f"free{step}.{largest}{host}"
    )


def _binding(held: HeldMemory) -> str:
    part, nbytes = next(iter(held.parts.items()))
    at = f" at {held.at}" if held.at else ""
    return f"The peak is in {held.phase}{at}; most of it: {part}, {format_bytes(nbytes)}."


def _details(row: FitRow) -> Iterator[Table]:
    """The tables of one configuration."""
    held = row.held
    if held is None:
        if row.kinds:
            yield _table("peak", "Memory at the peak, by kind", "kind", row.kinds)
        return
    yield _table("peak", "Memory at the peak, by part", "part", held.parts)
    if held.activations:
        title = "Activations that are kept between forward and backward, by module"
        yield _table("activations", title, "module", held.activations)
    if held.unsharded:
        title = "Most unsharded parameters and gradients at a time, by module"
        yield _table("unsharded", title, "module", held.unsharded)
    if held.kept_despite:
        title = "Activations that recomputation does not release"
        yield _table("kept", title, "kept", held.kept_despite)


def _table(key: str, title: str, heading: str, rows: Mapping[str, int]) -> Table:
    columns = Column(heading, Unit.NAME), Column("memory", Unit.BYTES), Column("share", Unit.SHARE)
    limit = None if key == "peak" else _LISTED
    table = Table(key, title, columns, limit=limit)
    total = sum(rows.values())
    for name, nbytes in rows.items():
        if nbytes:
            table.add(name, nbytes, nbytes / total)
    return table


def _verdict_of_rows(found: Fit) -> str:
    priced = [row for row in found.rows if row.peak is not None]
    fitting = [row for row in priced if row.verdict == "fits"]
    if not fitting:
        least = f"; any layout needs {format_bytes(found.least)} at least"
        return f"None of the {len(found.rows)} fits {format_bytes(found.budget)} per device{least}."
    if _RESIZING.intersection(found.rows[0].varied):
        return f"{len(fitting)} of {len(found.rows)} fit {format_bytes(found.budget)} per device."
    fastest = min(fitting, key=lambda row: row.step_time or 0.0)
    return (
        f"{len(fitting)} of {len(found.rows)} fit {format_bytes(found.budget)} per device; the "
        f"fastest: {_name(fastest)}, {three_digits(fastest.step_time or 0.0)} a step."
    )


def _name(row: FitRow) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.varied.items()) or row.layout


def _rows(found: Fit) -> Table:
    names = [Column(name) for name in found.rows[0].varied]
    columns = [*names, Column("fits"), Column("peak", Unit.BYTES)]
    columns += [Column(kind, Unit.BYTES) for kind in _KINDS]
    columns += [Column("recomputed", Unit.COUNT), Column("step", Unit.SECONDS)]
    table = Table("fit", "", tuple(columns))
    for row in found.rows:
        verdict = {"fits": "yes", "does not fit": "no", "unknown": "-"}[row.verdict]
        kinds = [row.kinds.get(kind) for kind in _KINDS]
        table.add(
            *row.varied.values(), verdict, row.peak, *kinds, row.num_recomputed, row.step_time
        )
    return table


_KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries")


def _remarks(rows: tuple[FitRow, ...]) -> Iterator[str]:
    for row in rows:
        if row.remark:
            yield f"{_name(row)}: {row.remark}"
        if row.host_memory is not None:
            yield (
                f"{_name(row)}: the host holds {format_bytes(row.host_memory)} of optimizer state "
                "for each device; the step has neither its update nor its transfers"
            )
