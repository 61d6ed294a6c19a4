/** The model: its tree of modules, what each axis does in them, and what they cost. */
import { useMemo, useState } from "preact/hooks";
import { bytes, count, percent, plural, seconds, shape, words } from "./format.js";
import { html } from "./html.js";
import { layoutWords } from "./layouts.js";
import { collectives, moduleTree, rowsOf, sharesOf } from "./modules.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Row} Row
 * @typedef {import("./types").Module} Module
 * @typedef {import("./types").Totals} Totals
 */

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
  const [open, setOpen] = useState(() => new Set(mainPath(root)));
  const axes = plan.mesh.axes.map((axis) => axis.name).filter((name) => root.totals.work.has(name) || root.totals.stored.has(name));
  const toggle = (/** @type {string} */ key) => {
    const next = new Set(open);
    if (!next.delete(key)) next.add(key);
    setOpen(next);
  };
  /** @type {Row} */
  const top = { key: "", label: root.name, members: [root], totals: root.totals };
  const total = timeOf(root.totals);
  return html`
    <p>${[
      `${plural(plan.graph.num_nodes, "operator")} and ${count(plan.graph.num_parameters)} parameters. Per axis:`,
      "what it shards in the operators (shares of their time), and the placement of weights (shares of their bytes;",
      "gathered: before operators read them).",
      "Modules with equal layouts are one row. Time is that of a step, bytes are those at rest, on one device",
      plan.pipeline ? "of each stage." : ".",
    ].join(" ").replace(" .", ".")}</p>
    <${Scrollable} label="Modules"><table class="tree">
      <thead><tr>
        <th>Module</th>
        ${axes.map((name) => html`<th key=${name}>Axis ${name}</th>`)}
        <th class="number">Compute</th><th class="number">Communication</th><th class="number">Parameters</th>
        <th>Activations redistributed</th>
      </tr></thead>
      <tbody>${treeRows(top, 0, { plan, axes, open, toggle, total })}</tbody>
    </table><//>
  `;
}

/** @param {Totals} totals */
function timeOf(totals) {
  return totals.compute + totals.communication;
}

/**
 * The keys of the rows from the root down to the layers: while one module has most of the time.
 * @param {Module} root
 */
function mainPath(root) {
  const keys = [];
  for (let module = /** @type {Module | undefined} */ (root); module; ) {
    keys.push(module.path);
    const least = timeOf(module.totals) / 2;
    const rows = rowsOf(module);
    module = rows.find((row) => row.members.length === 1 && timeOf(row.totals) > least)?.members[0];
  }
  return keys.slice(0, 4);
}

/**
 * @typedef {{plan: Plan, axes: string[], open: Set<string>, toggle: (key: string) => void, total: number}} Shown
 */

/**
 * @param {Row} row
 * @param {number} depth
 * @param {Shown} shown
 * @returns {any[]}
 */
function treeRows(row, depth, shown) {
  const [first] = row.members;
  const found = [html`<${ModuleRow} key=${row.key} row=${row} depth=${depth} shown=${shown} />`];
  if (!shown.open.has(row.key)) return found;
  for (const child of rowsOf(first)) found.push(...treeRows(child, depth + 1, shown));
  if (first.operators.length || first.parameters.length || first.moved.length) {
    found.push(html`<${Own} key=${`${row.key}/own`} module=${first} depth=${depth + 1} shown=${shown} />`);
  }
  return found;
}

/** @param {{row: Row, depth: number, shown: Shown}} props */
function ModuleRow({ row, depth, shown }) {
  const { totals, members } = row;
  const width = `${(100 * timeOf(totals)) / (shown.total || 1)}%`;
  return html`<tr>
    <th scope="row">
      <${Fold} name=${row.key} depth=${depth} shown=${shown} title=${members.map((member) => member.path).join(", ").slice(0, 400)}>
        ${row.label}
      <//>
      ${members.length > 1 && html`<span class="times">× ${members.length}</span>`}
    </th>
    ${shown.axes.map((axis) => html`<td key=${axis}><${AxisCell} totals=${totals} axis=${axis} /></td>`)}
    <td class="number">${seconds(totals.compute)}<div class="share"><div style=${{ width }}></div></div></td>
    <td class="number">${seconds(totals.communication)}${
      totals.overlapped > 0 && html`<br /><span class="note">${percent(totals.overlapped / totals.communication)} hidden</span>`
    }</td>
    <td class="number">${bytes(totals.parameterBytes)}</td>
    <td>${[...totals.moved].map(([name, number]) => html`<span key=${name} class="badge">${number} × ${words(name)}</span>`)}</td>
  </tr>`;
}

/**
 * A button that opens and closes the rows below it.
 * @param {{name: string, depth: number, shown: Shown, title?: string, children: any}} props
 */
function Fold({ name, depth, shown, title, children }) {
  return html`<button type="button" class="fold" style=${{ paddingLeft: `${depth * 1.1}em` }} title=${title}
    aria-expanded=${shown.open.has(name)} onclick=${() => shown.toggle(name)}>${children}</button>`;
}

/** @param {{totals: Totals, axis: string}} props */
function AxisCell({ totals, axis }) {
  const work = mainShares(totals.work.get(axis));
  const stored = mainShares(totals.stored.get(axis));
  return html`
    ${work.map(
      ([role, share]) => html`<span key=${role} class="role"><span class=${`swatch fill-${ROLE_COLOUR[role] ?? "idle"}`}></span>${shareText(role, share)}</span>`,
    )}
    ${stored.length > 0 && html`<span class="note">${`weights ${stored.map(([kept, share]) => shareText(kept, share)).join(", ")}`}</span>`}
  `;
}

/**
 * The two largest shares, and the sum of the others.
 * @param {Map<string, number> | undefined} row
 * @returns {[string, number][]}
 */
function mainShares(row) {
  const shares = sharesOf(row);
  if (shares.length <= 3) return shares;
  return [...shares.slice(0, 2), ["other", shares.slice(2).reduce((sum, [, share]) => sum + share, 0)]];
}

/**
 * @param {string} name
 * @param {number} share
 */
function shareText(name, share) {
  return share < 0.995 ? `${name} ${percent(share)}` : name;
}

/**
 * The operators and parameters that are in no module below this one, and what moves for them.
 * @param {{module: Module, depth: number, shown: Shown}} props
 */
function Own({ module, depth, shown }) {
  const key = `${module.path}/own`;
  const parts = [
    module.operators.length ? plural(module.operators.length, "operator") : "",
    module.parameters.length ? plural(module.parameters.length, "parameter") : "",
    module.moved.length ? plural(module.moved.length, "redistribution") : "",
  ];
  const columns = shown.axes.length + 5;
  return html`<tr><th scope="row" colspan=${columns}>
      <${Fold} name=${key} depth=${depth} shown=${shown}>${parts.filter(Boolean).join(", ")}<//>
    </th></tr>
    ${shown.open.has(key) &&
    html`<tr class="own"><td colspan=${columns} style=${{ paddingLeft: `${depth * 1.1}em` }}>
      <${Parameters} module=${module} plan=${shown.plan} />
      <${Operators} module=${module} />
      <${Redistributions} module=${module} plan=${shown.plan} />
    </td></tr>`}`;
}

/** @param {{module: Module, plan: Plan}} props */
function Parameters({ module, plan }) {
  if (!module.parameters.length) return null;
  return html`<table>
    <thead><tr><th>Parameter</th><th>Shape</th><th>On a device</th><th>Layout</th><th class="number">Bytes</th></tr></thead>
    <tbody>${module.parameters.map(
      ({ input, stage, nbytes }) => html`<tr key=${input.name}>
        <th scope="row"><code>${input.target}</code></th><td>${`${shape(input.shape)} ${input.dtype}`}</td>
        <td>${shape(input.local_shape)}</td><td>${layoutWords(input.layout, plan.stages[stage].axes)}</td>
        <td class="number">${bytes(nbytes)}</td>
      </tr>`,
    )}</tbody>
  </table>`;
}

/** @param {{module: Module}} props */
function Operators({ module }) {
  const { operators } = module;
  if (!operators.length) return null;
  return html`<table>
      <thead><tr><th>Operator</th><th>Inputs</th><th>Outputs</th><th class="number">Compute</th><th>Inside</th></tr></thead>
      <tbody>${operators.slice(0, MOST_OPERATORS).map(
        ({ node, placed }) => html`<tr key=${node.name}>
          <th scope="row"><code>${node.name}</code> <span class="note">${node.operator}</span></th>
          <td>${placed.inputs.join(" · ")}</td><td>${placed.outputs.join(" · ")}</td>
          <td class="number">${seconds(placed.time)}</td>
          <td>${placed.inside.map((step, i) => html`<span key=${i} class="badge">${`${words(step.action)} over ${step.axis}, ${bytes(step.nbytes)}, ${seconds(step.time)}`}</span>`)}</td>
        </tr>`,
      )}</tbody>
    </table>
    ${operators.length > MOST_OPERATORS && html`<p class="hint">${`The first ${MOST_OPERATORS} of ${count(operators.length)} operators.`}</p>`}`;
}

/** @param {{module: Module, plan: Plan}} props */
function Redistributions({ module, plan }) {
  if (!module.moved.length) return null;
  const training = plan.options.mode === "training";
  return html`<table>
    <thead><tr><th>Redistributed</th><th>From</th><th>To</th><th>Steps</th><th class="number">Time</th></tr></thead>
    <tbody>${module.moved.map(({ resharding, name, stage }, i) => {
      const time = resharding.steps.reduce((total, step) => total + step.time, 0);
      const { axes } = plan.stages[stage];
      return html`<tr key=${i}>
        <th scope="row"><code>${name}</code> <span class="note">${resharding.consumer ? `for ${resharding.consumer}` : "for all readers"}</span></th>
        <td title=${layoutWords(resharding.source, axes)}>${resharding.source}</td>
        <td title=${layoutWords(resharding.target, axes)}>${resharding.target}</td>
        <td>${resharding.steps.map((step, i) => html`<span key=${i} class="badge">${stepText(step, training)}</span>`)}</td>
        <td class="number">${seconds(time)}${resharding.overlapped > 0 && html`<br /><span class="note">${percent(resharding.overlapped / time)} hidden</span>`}</td>
      </tr>`;
    })}</tbody>
  </table>`;
}

/**
 * @param {import("./types").PlannedStep} step
 * @param {boolean} training
 */
export function stepText(step, training) {
  const actions = collectives(step, training).map(words).join(", ") || "local copy";
  return `${step.source} → ${step.target}: ${actions} over ${step.axis}, ${bytes(step.nbytes)}`;
}
