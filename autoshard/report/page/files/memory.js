/** Memory of a device: what it holds at the peak, against its capacity, and over a step. */
import { StackedAreas, StackedBars } from "./charts.js";
import { bytes, percent, seconds } from "./format.js";
import { html } from "./html.js";
import { Scrollable } from "./scrollable.js";
import { detailsOf } from "./verdict.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Memory} Memory
 */

/** @type {(keyof Memory & string)[]} */
export const KINDS = ["parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "temporaries"];

/** @param {{plan: Plan, report: Report}} props */
export function MemoryView({ plan, report }) {
  const { memory } = plan;
  if (!memory) return null;
  const capacity = plan.mesh.topology.device.memory;
  const most = memory.budget ?? capacity;
  const entries = entriesOf(plan, report);
  const bars = entries.map(({ name, memory, own }) => ({
    name,
    parts: KINDS.map((kind) => ({ name: kind, colour: kind, value: Number(memory[kind]) })),
    note: bytes(memory.peak),
    strong: own,
  }));
  const limit = { name: most < capacity ? "memory budget" : "capacity", value: most };
  return html`
    <p>${[
      `At the peak a device holds ${bytes(memory.peak)}, ${percent(memory.peak / most)} of the ${bytes(most)} that it may hold`,
      memory.budget && memory.budget < capacity ? ` (it has ${bytes(capacity)})` : "",
      `. The peak is in the phase ${memory.phase}`,
    ].join("")}${memory.at ? html`, at <code>${memory.at}</code>` : ""}.</p>
    <${StackedBars} label="Memory at the peak by kind, against the limit" bars=${bars} format=${bytes} limit=${limit} />
    <p class="hint">Dashed line: the ${limit.name}, ${bytes(most)}.</p>
    <${Curve} report=${report} plan=${plan} limit=${limit} />
    <${Scrollable} label="Memory by kind"><table>
      <thead><tr><th>Kind</th>${entries.map(({ name }) => html`<th key=${name} class="number">${name}</th>`)}</tr></thead>
      <tbody>
        ${[...KINDS, /** @type {const} */ ("peak")].map(
          (kind) => html`<tr key=${kind}>
            <th scope="row">${kind}</th>
            ${entries.map(({ name, memory }) => html`<td key=${name} class="number">${bytes(Number(memory[kind]))}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table><//>
  `;
}

/**
 * The stages of a pipeline; else the plan and the usual layouts that were compared.
 * @param {Plan} plan
 * @param {Report} report
 * @returns {{name: string, memory: Memory, own: boolean}[]}
 */
function entriesOf(plan, report) {
  if (plan.pipeline) {
    return plan.pipeline.stages.map(({ memory }, i) => ({ name: `Stage ${i}`, memory, own: false }));
  }
  const { answer } = report;
  return (answer?.layouts ?? []).flatMap(({ name }, number) => {
    const memory = answer && detailsOf(plan, answer, number)?.memory;
    return memory ? [{ name, memory, own: number === 0 }] : [];
  });
}

/** @param {{report: Report, plan: Plan, limit: {name: string, value: number}}} props */
function Curve({ report, plan, limit }) {
  const { memory } = report;
  if (!memory || !plan.costs) return null;
  const layers = KINDS.map((kind) => ({ name: kind, colour: kind, values: memory.nbytes[kind] }));
  const largest = Math.max(...memory.start.map((_, i) => layers.reduce((n, layer) => n + layer.values[i], 0)));
  return html`
    <h3>Over a step</h3>
    <${StackedAreas} label="Memory over the time of a step" start=${memory.start} end=${plan.costs.total}
      layers=${layers} limit=${largest > limit.value / 2 ? limit : undefined} xFormat=${seconds} yFormat=${bytes} />
  `;
}
