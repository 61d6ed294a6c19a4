/** The difference of the plan from another plan of the same program. */
import { StackedBars } from "./charts.js";
import { bytes, count, seconds, words } from "./format.js";
import { html } from "./html.js";
import { KINDS } from "./memory.js";
import { Scrollable } from "./scrollable.js";
import { costParts } from "./verdict.js";

/**
 * @typedef {import("./types").Figure} Figure
 * @typedef {import("./types").Change} Change
 */

const MOST = 200;
/** Costs that both plans do not have are not listed. */
const NO_COSTS = { total: 0, compute: 0, communication: 0, optimizer: 0, recompute: 0, overlapped: 0, idle: 0 };

/** @param {{report: import("./types").Report}} props */
export function DifferenceView({ report }) {
  const { difference } = report;
  if (!difference) return null;
  const sides = /** @type {const} */ (["before", "after"]);
  const titles = { before: `Other plan, ${difference.meshes[0]}`, after: `This plan, ${difference.meshes[1]}` };
  const costs = sides.map((side) => {
    const given = Object.fromEntries(difference.costs.map((figure) => [figure.name, figure[side]]));
    const found = { ...NO_COSTS, ...given };
    return { name: titles[side], parts: costParts(found), note: seconds(found.total), strong: side === "after" };
  });
  const memory = sides.map((side) => ({
    name: titles[side],
    parts: difference.memory
      .filter(({ name }) => KINDS.includes(/** @type {never} */ (name)))
      .map((figure) => ({ name: figure.name, colour: figure.name, value: figure[side] })),
    note: bytes(difference.memory.find(({ name }) => name === "peak")?.[side] ?? 0),
    strong: side === "after",
  }));
  return html`
    <p>${sentence(difference)}</p>
    <${StackedBars} label="Step time of both plans" bars=${costs} format=${seconds} />
    <${StackedBars} label="Memory at the peak of both plans" bars=${memory} format=${bytes} />
    <${Figures} title="Time" figures=${difference.costs} format=${seconds} />
    <${Figures} title="Memory" figures=${difference.memory} format=${bytes} />
    <${Collectives} changes=${difference.collectives} />
    <${Changes} title="Parameters and other inputs" changes=${difference.inputs} />
    <${Changes} title="Operators" changes=${difference.nodes} />
    <${Changes} title="Pipeline" changes=${difference.pipeline} />
  `;
}

/** @param {import("./types").Difference} difference */
function sentence(difference) {
  const total = difference.costs.find(({ name }) => name === "total");
  const by = (total?.after ?? 0) - (total?.before ?? 0);
  const time = by === 0 ? "takes as long as" : `is ${seconds(Math.abs(by))} a step ${by < 0 ? "faster" : "slower"} than`;
  return `This plan ${time} the other one; ${count(difference.inputs.length)} inputs and ${count(difference.nodes.length)} operators have other layouts.`;
}

/** @param {{title: string, figures: Figure[], format: (value: number) => string}} props */
function Figures({ title, figures, format }) {
  const shown = figures.filter(({ before, after }) => before || after);
  return html`<${Scrollable} label=${title}><table>
    <thead><tr><th>${title}</th><th class="number">Other plan</th><th class="number">This plan</th><th class="number">Difference</th></tr></thead>
    <tbody>${shown.map(
      ({ name, before, after }) => html`<tr key=${name}><th scope="row">${name}</th><td class="number">${format(before)}</td>
        <td class="number">${format(after)}</td><td class="number">${signed(after - before, format)}</td></tr>`,
    )}</tbody>
  </table><//>`;
}

/**
 * @param {number} value
 * @param {(value: number) => string} format
 */
function signed(value, format) {
  if (value === 0) return "0";
  return `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`;
}

/** @param {{changes: import("./types").CollectiveChange[]}} props */
function Collectives({ changes }) {
  if (!changes.length) return null;
  return html`<${Scrollable} label="Collectives"><table>
    <thead><tr><th>Collective</th><th>Axis</th><th>Pass</th><th class="number">Number</th><th class="number">Bytes</th></tr></thead>
    <tbody>${changes.map(
      (change) => html`<tr key=${`${change.kind} ${change.axis} ${change.direction}`}><th scope="row">${words(change.kind)}</th>
        <td>${change.axis}</td><td>${change.direction}</td><td class="number">${`${change.before} → ${change.after}`}</td>
        <td class="number">${`${bytes(change.bytes_before)} → ${bytes(change.bytes_after)}`}</td></tr>`,
    )}</tbody>
  </table><//>`;
}

/** @param {{title: string, changes: Change[]}} props */
function Changes({ title, changes }) {
  if (!changes.length) return null;
  return html`<details>
    <summary>${`${title} with other layouts: ${count(changes.length)}`}</summary>
    <${Scrollable} label=${title}><table>
      <thead><tr><th>Name</th><th>Other plan</th><th>This plan</th></tr></thead>
      <tbody>${changes.slice(0, MOST).map(
        ({ name, before, after }) => html`<tr key=${name}><th scope="row"><code>${name}</code></th><td>${before}</td><td>${after}</td></tr>`,
      )}</tbody>
    </table><//>
    ${changes.length > MOST && html`<p class="hint">${`The first ${MOST}.`}</p>`}
  </details>`;
}
