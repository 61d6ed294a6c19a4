/** The verdict: how long a step takes, what takes the time, and what usual layouts would take. */
import { StackedBars } from "./charts.js";
import { bytes, percent, seconds } from "./format.js";
import { html } from "./html.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Costs} Costs
 * @typedef {import("./types").Part} Part
 * @typedef {{name: string, costs: Costs, performance: import("./types").Performance | null,
 *   memory: import("./types").Memory | null, own: boolean}} Entry
 */

const SIMPLEST = ["ddp", "fsdp2", "hsdp", "megatron", "megatron-sp"];
const NEAR = 0.02;

/** @param {{plan: Plan, report: Report}} props */
export function Verdict({ plan, report }) {
  const entries = entriesOf(plan);
  const near = simplestNear(plan);
  const bars = entries.map((entry) => ({
    name: entry.name,
    parts: costParts(entry.costs),
    error: entry.performance?.error,
    note: `${seconds(entry.costs.total)}${entry.name === near ? `, simpler and within ${percent(NEAR)}` : ""}`,
    strong: entry.own,
  }));
  return html`
    ${report.sentences.map((text) => html`<p key=${text}>${text}</p>`)}
    <${StackedBars} label="Predicted step time of the plan and of usual layouts" bars=${bars} format=${seconds} />
    ${plan.performance && html`<p class="hint">${`Whiskers: the error of such predictions. Of this plan: ${plan.performance.comparison}.`}</p>`}
    <${Families} plan=${plan} entries=${entries} />
    <${StepShares} report=${report} />
    <${Proof} plan=${plan} report=${report} />
    ${report.remarks.map((text) => html`<p key=${text} class="remark">Remark: ${text}</p>`)}
  `;
}

/**
 * The plan and the baselines that are possible, the fastest first.
 * @param {Plan} plan
 * @returns {Entry[]}
 */
function entriesOf(plan) {
  const { costs, performance, memory } = plan;
  const own = costs ? [{ name: "This plan", costs, performance, memory, own: true }] : [];
  const others = plan.baselines.flatMap(({ name, costs, performance, memory }) =>
    costs ? [{ name, costs, performance, memory, own: false }] : [],
  );
  return [...own, ...others].sort((a, b) => a.costs.total - b.costs.total);
}

/**
 * The name of the simplest usual layout that takes at most 2 % longer than the plan.
 * @param {Plan} plan
 */
function simplestNear(plan) {
  const most = (plan.costs?.total ?? 0) * (1 + NEAR);
  return plan.baselines
    .filter((baseline) => baseline.costs && baseline.costs.total <= most)
    .sort((a, b) => SIMPLEST.indexOf(a.algo) - SIMPLEST.indexOf(b.algo))[0]?.name;
}

/**
 * The parts that add up to a step.
 * @param {Costs} costs
 * @returns {Part[]}
 */
export function costParts(costs) {
  const exposed = costs.communication + costs.recompute - costs.overlapped;
  const moved = costs.recompute > 0 ? "communication and recomputation not hidden" : "communication not hidden";
  return [
    { name: "compute", colour: "compute", value: costs.compute },
    { name: moved, colour: "communication", value: Math.max(exposed, 0) },
    { name: "optimizer", colour: "optimizer", value: costs.optimizer },
    { name: "waiting for other pipeline ranks", colour: "idle", value: costs.idle },
  ];
}

/** @param {{plan: Plan, entries: Entry[]}} props */
function Families({ plan, entries }) {
  const best = plan.costs?.total ?? 0;
  const missing = plan.baselines.filter((baseline) => !baseline.costs);
  return html`<${Scrollable} label="Layouts"><table>
    <thead><tr><th>Layout</th><th class="number">Step</th><th class="number">Against the plan</th>
      <th class="number">MFU</th><th class="number">Peak memory</th></tr></thead>
    <tbody>
      ${entries.map(
        ({ name, costs, performance, memory, own }) => html`<tr key=${name}>
          <th scope="row">${name}</th>
          <td class="number">${seconds(costs.total)}</td>
          <td class="number">${own ? "" : `${(costs.total / best).toFixed(2)} ×`}</td>
          <td class="number">${performance?.mfu == null ? "" : percent(performance.mfu)}</td>
          <td class="number">${memory ? bytes(memory.peak) : ""}</td>
        </tr>`,
      )}
      ${missing.map(
        ({ name, needed_memory, reason }) => html`<tr key=${name}>
          <th scope="row">${name}</th>
          <td colspan="4">${needed_memory ? `does not fit: needs ${bytes(needed_memory)}` : `not possible: ${reason}`}</td>
        </tr>`,
      )}
    </tbody>
  </table><//>`;
}

/** @param {{report: Report}} props */
function StepShares({ report }) {
  const { step } = report;
  const colours = ["axis-a", "axis-b", "axis-c", "axis-d"];
  /** @type {Map<string, Part>} */
  const parts = new Map();
  const add = (/** @type {string} */ name, /** @type {string} */ colour, /** @type {number} */ value) => {
    const part = parts.get(name) ?? { name, colour, value: 0 };
    parts.set(name, { ...part, value: part.value + value });
  };
  step?.seconds.forEach((value, i) => {
    if (step.overlapped[i]) return;
    const lane = step.lane[i];
    if (lane) add(`exposed on ${step.lanes[lane]}`, colours[(lane - 1) % colours.length], value);
    else add(step.category[i], step.category[i], value);
  });
  const bar = { name: "The step of one rank", parts: [...parts.values()], note: "" };
  return html`
    <h3>Where the time goes</h3>
    ${step && html`<${StackedBars} label="Step time by compute and by exposed communication on each axis" bars=${[bar]} format=${seconds} />`}
    <${Scrollable} label="Items of the step"><table>
      <thead><tr><th>Item</th><th class="number">Time</th><th class="number">Share</th></tr></thead>
      <tbody>
        ${report.costs.map(
          (item) => html`<tr key=${item.name}>
            <th scope="row">${item.name}</th>
            <td class="number">${seconds(item.seconds)}</td>
            <td class="number">${item.share < 0 ? `−${percent(-item.share)}` : percent(item.share)}</td>
          </tr>`,
        )}
      </tbody>
    </table><//>
  `;
}

/** @param {{plan: Plan, report: Report}} props */
function Proof({ plan, report }) {
  const { objective, bound } = plan.certificate;
  return html`
    <h3>Certificate</h3>
    <p>${report.certificate}</p>
    ${objective != null &&
    bound != null &&
    html`<${StackedBars} label="Step time and its proven lower bound" format=${seconds} bars=${[
      { name: "This plan", parts: [{ name: "step time", colour: "compute", value: objective }], note: seconds(objective) },
      { name: "No plan is faster than", parts: [{ name: "proven lower bound", colour: "idle", value: bound }], note: seconds(bound) },
    ]} />`}
  `;
}
