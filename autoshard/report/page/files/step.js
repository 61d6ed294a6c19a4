/** The step: what one rank does when; of a pipeline, what all ranks do. */
import { useMemo } from "preact/hooks";
import { Legend } from "./charts.js";
import { bytes, percent, plural, seconds } from "./format.js";
import { html } from "./html.js";
import { Scrollable } from "./scrollable.js";
import { Timeline } from "./timeline.js";

/**
 * @typedef {import("./types").Lane} Lane
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").StepEvents} StepEvents
 * @typedef {import("./types").Schedule} Schedule
 */

const PHASES = [
  { name: "forward", colour: "forward" },
  { name: "backward", colour: "backward" },
  { name: "recompute", colour: "recompute" },
  { name: "optimizer", colour: "optimizer" },
];
/** @type {Record<string, {name: string, colour: string}>} */
const KINDS = {
  F: { name: "forward", colour: "forward" },
  B: { name: "backward", colour: "backward" },
  I: { name: "backward of inputs", colour: "backward" },
  W: { name: "backward of weights", colour: "weights" },
  end: { name: "end of step", colour: "idle" },
};

/** @param {{plan: Plan, report: Report}} props */
export function StepView({ plan, report }) {
  const { step, schedule } = report;
  if (step) return html`<${OneRank} step=${step} total=${plan.costs?.total ?? 0} />`;
  if (schedule) return html`<${AllStages} plan=${plan} schedule=${schedule} />`;
  return html`<p>There is no timeline: ${report.why_no_step}.</p>`;
}

/** @param {{step: StepEvents, total: number}} props */
function OneRank({ step, total }) {
  const lanes = useMemo(() => lanesOf(step), [step]);
  const busy = step.lanes.map((name, lane) => {
    const times = step.seconds.filter((_, i) => step.lane[i] === lane);
    const hidden = step.seconds.filter((_, i) => step.lane[i] === lane && step.overlapped[i]);
    return { name, number: times.length, time: sum(times), hidden: sum(hidden) };
  });
  return html`
    <p>One rank; all ranks do the same. What overlaps with compute is drawn below it; the rest of the communication stops compute.</p>
    <${Legend} parts=${PHASES.filter(({ name }) => step.phase.includes(name))} />
    <${Timeline} label="Events of a step on one rank" lanes=${lanes} seconds=${total} format=${seconds} />
    <${Scrollable} label="Lanes"><table>
      <thead><tr><th>Lane</th><th class="number">Events</th><th class="number">Time</th><th class="number">Of the step</th><th class="number">Hidden</th></tr></thead>
      <tbody>${busy.map(
        ({ name, number, time, hidden }) => html`<tr key=${name}><th scope="row">${name}</th><td class="number">${number}</td>
          <td class="number">${seconds(time)}</td><td class="number">${percent(time / total)}</td>
          <td class="number">${time && hidden ? percent(hidden / time) : ""}</td></tr>`,
      )}</tbody>
    </table><//>
  `;
}

/** @param {number[]} values */
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/**
 * @param {StepEvents} step
 * @returns {Lane[]}
 */
function lanesOf(step) {
  /** @type {Lane[]} */
  const lanes = step.lanes.map((name) => ({ name, blocks: [] }));
  step.start.forEach((start, i) => {
    const name = step.texts[step.name[i]];
    const details = () => [
      `${name} of ${step.texts[step.subject[i]]}`,
      step.phase[i],
      step.nbytes[i] ? bytes(step.nbytes[i]) : "",
      step.overlapped[i] ? "hidden" : "",
      step.micro_batch[i] ? `micro-batch ${step.micro_batch[i]}` : "",
    ];
    lanes[step.lane[i]].blocks.push({
      start,
      seconds: step.seconds[i],
      colour: step.phase[i],
      text: () => details().filter(Boolean).join(", "),
      short: name.replace(/^aten\./, ""),
    });
  });
  return lanes;
}

/** @param {{plan: Plan, schedule: Schedule}} props */
function AllStages({ plan, schedule }) {
  const lanes = useMemo(() => scheduleLanes(schedule), [schedule]);
  const kinds = [...new Set(schedule.kind)].map((kind) => KINDS[kind]);
  const shown = schedule.end.some((time) => time > 0) ? [...kinds, KINDS.end] : kinds;
  return html`
    <p>${[
      `${schedule.name}: ${plural(plan.stages.length, "stage")} on ${plural(schedule.finish.length, "pipeline rank")},`,
      `micro-batches: ${plan.pipeline?.micro_batches}. A step takes ${seconds(schedule.seconds)}, of which ranks are`,
      `idle ${percent(schedule.bubble)}. Numbers are those of micro-batches.`,
    ].join(" ")}</p>
    <${Legend} parts=${shown} />
    <${Timeline} label="Actions of all pipeline ranks in a step" lanes=${lanes} seconds=${schedule.seconds} format=${seconds} />
    <${Scrollable} label="Stages"><table>
      <thead><tr><th>Stage</th><th class="number">Operators</th><th class="number">Compute</th><th class="number">Communication</th>
        <th class="number">Optimizer</th><th class="number">Peak memory</th></tr></thead>
      <tbody>${plan.pipeline?.stages.map(
        ({ costs, memory }, i) => html`<tr key=${i}><th scope="row">${i}</th><td class="number">${plan.stages[i].nodes.length}</td>
          <td class="number">${seconds(costs.compute)}</td><td class="number">${seconds(costs.communication)}</td>
          <td class="number">${seconds(costs.optimizer)}</td><td class="number">${bytes(memory.peak)}</td></tr>`,
      )}</tbody>
    </table><//>
  `;
}

/**
 * @param {Schedule} schedule
 * @returns {Lane[]}
 */
function scheduleLanes(schedule) {
  /** @type {Lane[]} */
  const lanes = schedule.finish.map((_, rank) => ({ name: `rank ${rank}`, blocks: [] }));
  schedule.start.forEach((start, i) => {
    const { name, colour } = KINDS[schedule.kind[i]];
    const number = schedule.micro_batch[i];
    lanes[schedule.rank[i]].blocks.push({
      start,
      seconds: schedule.stop[i] - start,
      colour,
      text: () => `stage ${schedule.stage[i]}, ${name} of micro-batch ${number}`,
      short: String(number),
    });
  });
  lanes.forEach(({ blocks }, rank) => {
    blocks.sort((a, b) => a.start - b.start);
    const time = schedule.end[rank];
    if (time) blocks.push({ start: schedule.finish[rank], seconds: time, colour: "idle", text: () => "end of step" });
  });
  return lanes;
}
