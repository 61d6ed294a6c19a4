/** The mesh: devices on their nodes, the groups of each axis, and which device holds which slice. */
import { useMemo, useState } from "preact/hooks";
import { bytes, plural, shape } from "./format.js";
import { html } from "./html.js";
import { coordinateOf, layoutWords, localSlices, parseLayout } from "./layouts.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Stage} Stage
 * @typedef {import("./types").PlacedInput} PlacedInput
 */

const MOST_DEVICES = 1024;
const CELL = 34;
const GRID = 300;

/** @param {{plan: Plan}} props */
export function MeshView({ plan }) {
  const { axes, topology } = plan.mesh;
  const sizes = axes.map((axis) => axis.size);
  const number = sizes.reduce((product, size) => product * size, 1);
  const [axis, setAxis] = useState(() => Math.max(sizes.findLastIndex((size) => size > 1), 0));
  const [device, setDevice] = useState(0);
  const group = groupOf(device, axis, sizes);
  const perNode = Math.min(topology.levels[0]?.size ?? number, number);
  const members = Array.from({ length: sizes[axis] }, (_, i) => group + i * stride(axis, sizes));
  return html`
    <p>${[
      `${plural(number, "device")}${perNode < number ? `, ${perNode} on each node` : ""}, numbered row-major over`,
      `${axes.map(({ name, size }) => `${name}=${size}`).join(" × ")}.`,
      `${topology.levels.map((level) => `${level.name}: ${bytes(level.bandwidth)}/s a device`).join("; ")}.`,
    ].join(" ")}</p>
    <fieldset class="choices"><legend>Groups of axis</legend>
      ${axes.map(
        ({ name, size }, i) => html`<label key=${name}><input type="radio" name="axis" checked=${i === axis} onchange=${() => setAxis(i)} />${name} (${size})</label>`,
      )}
    </fieldset>
    <div class="nodes" role="group" aria-label="Devices on their nodes">
      ${nodesOf(Math.min(number, MOST_DEVICES), perNode).map(
        (devices, node) => html`<div class="node" key=${node}>
          <span class="note">node ${node}</span>
          <div class="devices">${devices.map(
            (found) => html`<button type="button" key=${found} class=${`device group-${groupNumber(found, axis, sizes) % 6}${
              members.includes(found) ? " lit" : ""
            }`} aria-pressed=${found === device} onclick=${() => setDevice(found)} onpointerenter=${() => setDevice(found)}
              title=${`device ${found}: ${coordinateText(found, plan)}`}>${found}</button>`,
          )}</div>
        </div>`,
      )}
    </div>
    ${number > MOST_DEVICES && html`<p class="hint">The first ${MOST_DEVICES} devices.</p>`}
    <p aria-live="polite">${`Device ${device} is at ${coordinateText(device, plan)}. Its group on ${axes[axis].name}: devices ${members.join(", ")}.`}</p>
    <${Slices} plan=${plan} device=${device} />
  `;
}

/**
 * @param {number} number
 * @param {number} perNode
 */
function nodesOf(number, perNode) {
  return Array.from({ length: Math.ceil(number / perNode) }, (_, node) =>
    Array.from({ length: Math.min(perNode, number - node * perNode) }, (_, i) => node * perNode + i),
  );
}

/**
 * The distance of neighbours on an axis.
 * @param {number} axis
 * @param {number[]} sizes
 */
function stride(axis, sizes) {
  return sizes.slice(axis + 1).reduce((product, size) => product * size, 1);
}

/**
 * The first device of the group of a device on an axis.
 * @param {number} device
 * @param {number} axis
 * @param {number[]} sizes
 */
function groupOf(device, axis, sizes) {
  return device - coordinateOf(device, sizes)[axis] * stride(axis, sizes);
}

/**
 * @param {number} device
 * @param {number} axis
 * @param {number[]} sizes
 */
function groupNumber(device, axis, sizes) {
  const step = stride(axis, sizes);
  return Math.floor(device / (step * sizes[axis])) * step + (device % step);
}

/**
 * @param {number} device
 * @param {Plan} plan
 */
function coordinateText(device, plan) {
  const found = coordinateOf(device, plan.mesh.axes.map((axis) => axis.size));
  return plan.mesh.axes.map(({ name }, i) => `${name} ${found[i]}`).join(", ");
}

/** @param {{plan: Plan, device: number}} props */
function Slices({ plan, device }) {
  const parameters = useMemo(
    () => plan.stages.flatMap((stage) => stage.inputs.filter((i) => i.kind === "parameter").map((input) => ({ stage, input }))),
    [plan],
  );
  const [chosen, choose] = useState(() =>
    Math.max(parameters.findIndex(({ input }) => input.shape.length > 1 && input.layout.includes("S")), 0),
  );
  if (!parameters.length) return null;
  const { stage, input } = parameters[chosen];
  return html`
    <h3>Which device holds which slice</h3>
    <label class="picker">Parameter
      <select onchange=${(/** @type {Event} */ event) => choose(Number(/** @type {HTMLSelectElement} */ (event.target).value))}>
        ${parameters.map(({ input }, i) => html`<option key=${i} value=${i} selected=${i === chosen}>${input.target}</option>`)}
      </select>
    </label>
    <p><code>${input.target}</code>${`, ${shape(input.shape)} ${input.dtype}; on a device ${shape(input.local_shape)} (${
      layoutWords(input.layout, stage.axes) || "on one device"
    }).`}</p>
    <${TensorGrid} stage=${stage} input=${input} device=${device} />
  `;
}

/**
 * A tensor as a grid of its first two sharded dims, and the devices that hold each cell.
 * @param {{stage: Stage, input: PlacedInput, device: number}} props
 */
function TensorGrid({ stage, input, device }) {
  const cells = cellsOf(stage, input);
  const { rows, columns } = cells;
  const [width, height] = [Math.max(GRID, columns.length * CELL), Math.max(Math.min(GRID, rows.length * 60), rows.length * CELL)];
  const [w, h] = [width / columns.length, height / rows.length];
  return html`<figure>
    <${Scrollable} label="Slices"><svg class="tensor" width=${width + 90} height=${height + 30} role="img" aria-label=${`Slices of ${input.target}`}>
      ${rows.map((row, i) => html`<text key=${row} class="tick" x="86" y=${24 + (i + 0.5) * h} text-anchor="end">${row}</text>`)}
      ${columns.map((column, i) => html`<text key=${column} class="tick" x=${90 + (i + 0.5) * w} y="14" text-anchor="middle">${column}</text>`)}
      ${rows.flatMap((_, r) =>
        columns.map((_, c) => {
          const holders = cells.holders[r][c];
          return html`<g key=${`${r},${c}`}>
            <rect class=${`cell fill-group-${(r * columns.length + c) % 6}${holders.includes(device) ? " lit" : ""}`}
              x=${90 + c * w + 1} y=${20 + r * h + 1} width=${w - 2} height=${h - 2}><title>devices ${holders.join(", ")}</title></rect>
            <text class="cell-text" x=${90 + (c + 0.5) * w} y=${24 + (r + 0.5) * h} text-anchor="middle">${shortList(holders, w)}</text>
          </g>`;
        }),
      )}
    </svg><//>
    <figcaption>${`Rows: dim ${cells.dims[0]}${columns.length > 1 ? `; columns: dim ${cells.dims[1]}` : ""}. Numbers in cells: the devices that hold them.`}</figcaption>
  </figure>`;
}

/**
 * @param {number[]} devices
 * @param {number} width
 */
function shortList(devices, width) {
  const text = devices.join(",");
  return text.length * 7 <= width - 6 ? text : `${devices[0]} +${devices.length - 1}`;
}

/**
 * @param {Stage} stage
 * @param {PlacedInput} input
 */
function cellsOf(stage, input) {
  const layout = parseLayout(input.layout);
  const sizes = stage.axes.map(([, size]) => size);
  const number = sizes.reduce((product, size) => product * size, 1);
  const sharded = [...new Set(layout.types.filter((type) => type.kind === "S").map((type) => type.dim))].sort();
  const dims = [sharded[0] ?? 0, sharded[1] ?? (sharded[0] === 0 ? 1 : 0)];
  /** @type {{row: string, column: string, device: number}[]} */
  const held = [];
  for (let device = 0; device < number; device++) {
    const slices = localSlices(input.shape, layout, sizes, coordinateOf(device, sizes));
    const text = (/** @type {number} */ dim) => (slices[dim] ?? [[0, 1]]).map(([begin, end]) => `${begin}:${end}`).join("+");
    held.push({ row: text(dims[0]), column: sharded.length > 1 ? text(dims[1]) : "", device: stage.first_device + device });
  }
  const order = (/** @type {string} */ a, /** @type {string} */ b) => parseInt(a, 10) - parseInt(b, 10);
  const rows = [...new Set(held.map(({ row }) => row))].sort(order);
  const columns = [...new Set(held.map(({ column }) => column))].sort(order);
  const holders = rows.map((row) =>
    columns.map((column) => held.filter((entry) => entry.row === row && entry.column === column).map((entry) => entry.device)),
  );
  return { rows, columns, holders, dims };
}
