/** The verdict: how long a step takes, what takes the time, and what usual layouts would take. */
import { StackedBars } from "./charts.js";
import { bytes, percent, seconds } from "./format.js";
import { html } from "./html.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Answer} Answer
 * @typedef {import("./types").Costs} Costs
 * @typedef {import("./types").Part} Part
 */

/** @param {{plan: Plan, report: Report}} props */
export function Verdict({ plan, report }) {
  const { answer } = report;
  if (!answer) return null;
  const bars = answer.layouts.flatMap((row, number) => {
    const costs = detailsOf(plan, answer, number)?.costs;
    const marks = marksOf(answer, number);
    const note = `${seconds(row.seconds ?? 0)}${marks ? `, ${marks}` : ""}`;
    const strong = number === answer.simplest;
    return costs ? [{ name: row.name, parts: costParts(costs), error: row.performance?.error, note, strong }] : [];
  });
  return html`
    <p>${`${answer.verdict.charAt(0).toUpperCase()}${answer.verdict.slice(1)}.`}</p>
    ${report.restricted.map((text) => html`<p key=${text}>${text}</p>`)}
    <${StackedBars} label="Predicted step time of the plan and of usual layouts" bars=${bars} format=${seconds} />
    <p class="hint">${`Whiskers: the error of such predictions. ${answer.sources}`}</p>
    <${Layouts} answer=${answer} />
    ${report.remarks.map((text) => html`<p key=${text} class="remark">Remark: ${text}</p>`)}
    <${Layers} answer=${answer} />
    <${StepShares} report=${report} answer=${answer} />
    <${Proof} plan=${plan} answer=${answer} />
  `;
}

/**
 * The costs and the memory of a layout of the answer, of which the plan itself is the first.
 * @param {Plan} plan
 * @param {Answer} answer
 * @param {number} number
 */
export function detailsOf(plan, answer, number) {
  if (number === 0) return plan;
  const { algo } = answer.layouts[number];
  return algo === null ? plan.unrestricted : plan.baselines.find((baseline) => baseline.algo === algo);
}

/**
 * @param {Answer} answer
 * @param {number} number
 */
function marksOf(answer, number) {
  const marks = [
    number === answer.best ? "fastest" : "",
    number === answer.simplest && answer.layouts[number].algo !== null ? `simplest within ${percent(answer.within)}` : "",
  ];
  return answer.layouts.length > 1 ? marks.filter(Boolean).join(", ") : "";
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

/** @param {{answer: Answer}} props */
function Layouts({ answer }) {
  if (answer.layouts.length === 1) return null;
  const fastest = answer.layouts[answer.best].seconds ?? 1;
  return html`<${Scrollable} label="Layouts"><table>
    <thead><tr><th>Layout</th><th class="number">Step</th><th class="number">Of the fastest</th>
      <th class="number">MFU</th><th class="number">Peak memory</th><th>Needs</th></tr></thead>
    <tbody>
      ${answer.layouts.map(
        (row, number) => html`<tr key=${number}>
          <th scope="row">${row.name}</th>
          <td class="number">${row.seconds === null ? "" : seconds(row.seconds)}</td>
          <td class="number">${row.seconds === null ? "" : `${(row.seconds / fastest).toFixed(2)} ×`}</td>
          <td class="number">${row.performance?.mfu == null ? "" : percent(row.performance.mfu)}</td>
          <td class="number">${row.memory === null ? "" : bytes(row.memory)}</td>
          <td>${row.needs}</td>
        </tr>`,
      )}
    </tbody>
  </table><//>`;
}

/** @param {{answer: Answer}} props */
function Layers({ answer }) {
  if (!answer.layers.length) return null;
  return html`
    <h3>What each axis does</h3>
    <${Scrollable} label="Layers and axes"><table>
      <thead><tr><th>Layers</th>${answer.axes.map(
        (axis) => html`<th key=${`${axis} weights`}>${`Weights over ${axis}`}</th><th key=${axis}>${`Activations over ${axis}`}</th>`,
      )}</tr></thead>
      <tbody>${answer.layers.map(
        ({ layers, weights, activations }) => html`<tr key=${layers.join()}>
          <th scope="row">${layers.join(", ")}</th>
          ${weights.map((text, axis) => html`<td key=${`${axis} weights`}>${text}</td><td key=${axis}>${activations[axis]}</td>`)}
        </tr>`,
      )}</tbody>
    </table><//>
    ${answer.step.map((text) => html`<p key=${text}>${text}</p>`)}
  `;
}

/** @param {{report: Report, answer: Answer}} props */
function StepShares({ report, answer }) {
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
        ${answer.costs.map(
          (item) => html`<tr key=${item.name}>
            <th scope="row">${item.name}</th>
            <td class="number">${item.seconds < 0 ? `−${seconds(-item.seconds)}` : seconds(item.seconds)}</td>
            <td class="number">${`${item.percent} %`.replace("-", "−")}</td>
          </tr>`,
        )}
      </tbody>
    </table><//>
  `;
}

/** @param {{plan: Plan, answer: Answer}} props */
function Proof({ plan, answer }) {
  const { objective, bound } = plan.certificate;
  return html`
    <h3>Certificate</h3>
    <p>${answer.certificate}</p>
    ${objective != null &&
    bound != null &&
    html`<${StackedBars} label="Step time and its proven lower bound" format=${seconds} bars=${[
      { name: "This plan", parts: [{ name: "step time", colour: "compute", value: objective }], note: seconds(objective) },
      { name: "No plan is faster than", parts: [{ name: "proven lower bound", colour: "idle", value: bound }], note: seconds(bound) },
    ]} />`}
  `;
}
