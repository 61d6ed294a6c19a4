"""The summary of a plan: the answer as plain text of about 40 lines for people.

In this order: what was asked, as understood; the verdict; a table of layouts; what each mesh axis
does to each kind of layer; costs and memory; where the figures come from; the certificate; commands
to run next.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import TextWrapper

from autoshard.base.quantities import format_bytes
from autoshard.plan.document import Plan
from autoshard.plan.predictions import step_time, three_digits
from autoshard.pricing.axis_roles import find_roles
from autoshard.report.answer import WITHIN, Answer, answer_of, asked
from autoshard.report.requirements import requirements
from autoshard.report.restriction_cost import restriction_sentences
from autoshard.report.tables import Column, Table, Unit, plain_lines

_MEMORY = {"temporaries": "gathered and temporary tensors"}
"""Kinds of memory in words, where they differ."""


def summarise(
    plan: Plan,
    *,
    width: int | None = None,
    commands: Sequence[str] = (),
    within: float = WITHIN,
) -> str:
    """The summary of a plan.

    Args:
        plan: a plan, or a document without one.
        width: columns at which sentences and tables are wrapped; None for one line each.
        commands: what to run next, one a line.
        within: share by which the simplest layout may be slower than the fastest.

    Returns:
        Lines without trailing spaces. Names, figures and commands are never wrapped.
    """
    if not plan.found:
        return "\n".join(_sentences([*asked(plan), f"No plan: {plan.reason}"], width))
    found = answer_of(plan, within=within)
    remarks = [f"Remark: {text}" for text in remarks_on(plan)]
    verdict = [f"Verdict: {found.verdict}.", f"{found.prediction}.", *restriction_sentences(plan)]
    ending = [found.sources, f"Certificate: {found.certificate}", *reuse_sentences(plan)]
    parts = [
        _sentences([*found.asked, *remarks, *verdict], width),
        [] if len(found.layouts) == 1 else plain_lines(layouts_table(found), width),
        [] if not found.layers else plain_lines(layers_table(found), width),
        _sentences(found.step, width),
        plain_lines(_costs(found), width),
        _sentences([_memory(found), *ending], width),
        ["Next:", *(f"  {text}" for text in commands)] if commands else [],
    ]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def summary_html(plan: Plan) -> str:
    """The verdict of a plan and its table of layouts, as HTML for notebooks."""
    if not plan.found:
        return f"<pre>{escape(summarise(plan))}</pre>"
    found = answer_of(plan)
    table = layouts_table(found)
    head = "".join(f"<th>{escape(column.heading)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>" for texts in table.texts
    )
    texts = (*found.asked, f"Verdict: {found.verdict}.", f"Certificate: {found.certificate}")
    shown = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f"{shown}<table><tr>{head}</tr>{rows}</table>"


def layouts_table(found: Answer) -> Table:
    """The table of layouts of an answer; the fastest and the simplest are marked."""
    performances = [row.performance for row in found.layouts if row.performance is not None]
    has_tokens = any(one.tokens_per_second is not None for one in performances)
    columns = (
        *(Column("layout"), Column("", Unit.TEXT), Column("step"), Column("MFU", Unit.SHARE)),
        Column(f"{'tokens' if has_tokens else 'samples'}/s/GPU", Unit.COUNT),
        *(Column("memory", Unit.BYTES), Column("needs")),
    )
    table = Table("layouts", "", columns)
    marks = {found.simplest: "simplest", found.best: "best"}
    if found.simplest == found.best:
        marks[found.best] = "best, simplest"
    for number, row in enumerate(found.layouts):
        performance = row.performance
        table.add(
            row.name,
            marks.get(number, ""),
            None if row.seconds is None else step_time(row.seconds, performance),
            None if performance is None else performance.mfu,
            None if row.rate is None else round(row.rate, None if has_tokens else 1),
            row.memory,
            row.needs,
            bold=number == found.simplest,
        )
    return table


def layers_table(found: Answer) -> Table:
    """The table of kinds of layers and axes of an answer, in DTensor's words."""
    columns = [Column("layers")]
    for axis in found.axes:
        columns += [Column(f"weights over {axis}"), Column(f"activations over {axis}")]
    table = Table("layers", "", tuple(columns))
    for row in found.layers:
        pairs = zip(row.weights, row.activations, strict=True)
        table.add(row.name, *(cell for pair in pairs for cell in pair))
    return table


def _costs(found: Answer) -> Table:
    table = Table("costs", "", (Column("time", Unit.COUNT), Column("share"), Column("of a step")))
    for item in found.costs:
        sign = "-" if item.seconds < 0 else ""
        table.add(f"{sign}{three_digits(abs(item.seconds))}", f"{item.percent:>3} %", item.name)
    return table


def _memory(found: Answer) -> str:
    parts = [
        f"{_MEMORY.get(kind, kind)} {format_bytes(size)}"
        for kind, size in found.memory.items()
        if size
    ]
    total = f"{format_bytes(found.peak)} of {format_bytes(found.budget)} per device"
    return f"Memory at the peak: {' + '.join(parts)} = {total}"


def remarks_on(plan: Plan) -> Iterator[str]:
    """Remarks before a plan is applied: misleading names of axes, idle axes, arguments."""
    yield from (use.remark for use in find_roles(plan).axes if use.remark)
    for number, stage in enumerate(plan.stages):
        if text := stage.idle_text:
            yield text if plan.pipeline is None else f"stage {number}: {text}"
    yield from requirements(plan)


def reuse_sentences(plan: Plan) -> Iterator[str]:
    """The part of the repeated blocks that had been solved for other plans, if any."""
    blocks = plan.provenance.blocks
    reused = sum(block.num_reused for block in blocks)
    tables = reused + sum(block.num_solved for block in blocks)
    if reused:
        repeated = max(block.num_repetitions for block in blocks)
        yield (
            f"Reused: {reused} of {tables} tables ({round(100 * reused / tables)} %) of the blocks "
            f"that the model repeats, up to {repeated} times, had been solved for other plans."
        )


def _sentences(texts: Iterable[str], width: int | None) -> list[str]:
    """One line for each text; on a given width, as many as it takes."""
    if width is None:
        return list(texts)
    wrapper = TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line for text in texts for line in wrapper.wrap(text)]
