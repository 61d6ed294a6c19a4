/** The model: its tree of modules, what each axis does in them, and what they cost. */
import { useMemo, useState } from "preact/hooks";
import { bytes, count, percent, plural, seconds, shape, words } from "./format.js";
import { html } from "./html.js";
import { layoutWords } from "./layouts.js";
import { collectives, moduleTree, rowsOf, sharesOf } from "./modules.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Row} Row
 * @typedef {import("./types").Module} Module
 * @typedef {import("./types").Totals} Totals
 */

const STORED = { gathered: "gathered for use", sharded: "used in shards", replicated: "whole" };
/** @type {Record<string, string>} */
const ROLE_COLOUR = {
  batch: "batch",
  sequence: "sequence",
  "heads/features": "features",
  experts: "experts",
  nothing: "idle",
};
const MOST_OPERATORS = 400;

/** @param {{plan: Plan, report: import("./types").Report}} props */
export function ModelView({ plan, report }) {
  const root = useMemo(() => moduleTree(plan, report), [plan, report]);
  const [open, setOpen] = useState(() => new Set([""]));
  const axes = plan.mesh.axes.map((axis) => axis.name).filter((name) => root.totals.work.has(name) || root.totals.stored.has(name));
  const toggle = (/** @type {string} */ key) => {
    const next = new Set(open);
    if (!next.delete(key)) next.add(key);
    setOpen(next);
  };
  /** @type {Row} */
  const top = { key: "", label: root.name, members: [root], totals: root.totals };
  return html`
    <p>
      ${plural(plan.graph.num_nodes, "operator")} and ${count(plan.graph.num_parameters)} parameters. Per axis:
      what it shards in the operators (by their time), and how parameters are kept (by their bytes).
      Modules with equal layouts are one row. Time and bytes are of one device.
    </p>
    <div class="scroll"><table class="tree">
      <thead><tr>
        <th>Module</th>
        ${axes.map((name) => html`<th key=${name}>${name}</th>`)}
        <th class="number">Compute</th><th class="number">Communication</th><th class="number">Parameters</th>
        <th>Activations moved</th>
      </tr></thead>
      <tbody>${treeRows(top, 0, { plan, axes, open, toggle, total: root.totals.compute + root.totals.communication })}</tbody>
    </table></div>
  `;
}

/**
 * @typedef {{plan: Plan, axes: string[], open: Set<string>, toggle: (key: string) => void, total: number}} Shown
 */

/**
 * @param {Row} row
 * @param {number} depth
 * @param {Shown} shown
 * @returns {unknown[]}
 */
function treeRows(row, depth, shown) {
  const [first] = row.members;
  const isOpen = shown.open.has(row.key);
  const found = [html`<${ModuleRow} key=${row.key} row=${row} depth=${depth} shown=${shown} isOpen=${isOpen} />`];
  if (isOpen) {
    for (const child of rowsOf(first)) found.push(...treeRows(child, depth + 1, shown));
    if (first.operators.length || first.parameters.length) {
      found.push(html`<${Own} key=${`${row.key}/own`} module=${first} depth=${depth + 1} shown=${shown} />`);
    }
  }
  return found;
}

/** @param {{row: Row, depth: number, shown: Shown, isOpen: boolean}} props */
function ModuleRow({ row, depth, shown, isOpen }) {
  const { totals, members } = row;
  const time = totals.compute + totals.communication;
  return html`<tr>
    <th scope="row">
      <button type="button" class="fold" style=${{ paddingLeft: `${depth * 1.1}em` }} aria-expanded=${isOpen}
        title=${members.map((member) => member.path).join(", ").slice(0, 400)} onclick=${() => shown.toggle(row.key)}>
        ${row.label}
      </button>
      ${members.length > 1 && html`<span class="times">× ${members.length}</span>`}
    </th>
    ${shown.axes.map((axis) => html`<td key=${axis}><${AxisCell} totals=${totals} axis=${axis} /></td>`)}
    <td class="number">
      ${seconds(totals.compute)}
      <meter min="0" max=${shown.total || 1} value=${time} aria-label=${`${percent(time / (shown.total || 1))} of compute and communication`}></meter>
    </td>
    <td class="number">${seconds(totals.communication)}${
      totals.overlapped > 0 && html`<span class="note"> ${percent(totals.overlapped / totals.communication)} hidden</span>`
    }</td>
    <td class="number">${bytes(totals.parameterBytes)}</td>
    <td>${[...totals.moved].map(([name, { count }]) => html`<span key=${name} class="badge">${count} ${words(name)}</span>`)}</td>
  </tr>`;
}

/** @param {{totals: Totals, axis: string}} props */
function AxisCell({ totals, axis }) {
  const work = sharesOf(totals.work.get(axis));
  const stored = sharesOf(totals.stored.get(axis));
  return html`
    ${work.slice(0, 2).map(
      ([role, share]) => html`<span key=${role} class="role"><span class=${`swatch fill-${ROLE_COLOUR[role]}`}></span>${role}${
        share < 0.995 ? ` ${percent(share)}` : ""
      }</span>`,
    )}
    ${stored.length > 0 &&
    html`<span class="note">weights ${stored
      .slice(0, 2)
      .map(([kept, share]) => `${STORED[/** @type {keyof typeof STORED} */ (kept)]}${share < 0.995 ? ` ${percent(share)}` : ""}`)
      .join(", ")}</span>`}
  `;
}

/** @param {{module: Module, depth: number, shown: Shown}} props */
function Own({ module, depth, shown }) {
  const { plan, axes } = shown;
  const training = plan.options.mode === "training";
  const operators = module.operators.slice(0, MOST_OPERATORS);
  return html`<tr class="own"><td colspan=${axes.length + 5} style=${{ paddingLeft: `${depth * 1.1}em` }}>
    ${module.parameters.length > 0 &&
    html`<table><thead><tr><th>Parameter</th><th>Shape</th><th>On a device</th><th>Layout</th><th class="number">Bytes</th></tr></thead>
      <tbody>${module.parameters.map(
        ({ input, stage, nbytes }) => html`<tr key=${input.name}>
          <th scope="row"><code>${input.target}</code></th><td>${shape(input.shape)} ${input.dtype}</td>
          <td>${shape(input.local_shape)}</td><td>${layoutWords(input.layout, plan.stages[stage].axes)}</td>
          <td class="number">${bytes(nbytes)}</td>
        </tr>`,
      )}</tbody></table>`}
    ${operators.length > 0 &&
    html`<table><thead><tr><th>Operator</th><th>Inputs</th><th>Outputs</th><th class="number">Compute</th><th>Inside</th></tr></thead>
      <tbody>${operators.map(
        ({ node, placed }) => html`<tr key=${node.name}>
          <th scope="row"><code>${node.name}</code> <span class="note">${node.operator}</span></th>
          <td>${placed.inputs.join(" · ")}</td><td>${placed.outputs.join(" · ")}</td>
          <td class="number">${seconds(placed.time)}</td>
          <td>${placed.inside.map((step, i) => html`<span key=${i} class="badge">${words(step.action)} over ${step.axis}, ${bytes(step.nbytes)}, ${seconds(step.time)}</span>`)}</td>
        </tr>`,
      )}</tbody></table>`}
    ${module.operators.length > MOST_OPERATORS && html`<p class="hint">The first ${MOST_OPERATORS} of ${count(module.operators.length)} operators.</p>`}
    ${module.moved.length > 0 &&
    html`<table><thead><tr><th>Redistributed</th><th>From</th><th>To</th><th>Steps</th><th class="number">Time</th></tr></thead>
      <tbody>${module.moved.map(({ resharding, name, stage }, i) => {
        const time = resharding.steps.reduce((total, step) => total + step.time, 0);
        return html`<tr key=${i}>
          <th scope="row"><code>${name}</code> <span class="note">${resharding.consumer ? `for ${resharding.consumer}` : "for all readers"}</span></th>
          <td title=${layoutWords(resharding.source, plan.stages[stage].axes)}>${resharding.source}</td>
          <td title=${layoutWords(resharding.target, plan.stages[stage].axes)}>${resharding.target}</td>
          <td>${resharding.steps.map(
            (step, i) => html`<span key=${i} class="badge">${step.source} → ${step.target}: ${
              collectives(step, training).map(words).join(", ") || "local copy"
            } over ${step.axis}, ${bytes(step.nbytes)}</span>`,
          )}</td>
          <td class="number">${seconds(time)}${resharding.overlapped > 0 && html`<span class="note"> ${percent(resharding.overlapped / time)} hidden</span>`}</td>
        </tr>`;
      })}</tbody></table>`}
  </td></tr>`;
}
