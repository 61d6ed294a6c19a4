/** Why a tensor or operator has its layout: what it costs, and the command that prices all others. */
import { useMemo, useState } from "preact/hooks";
import { Command, quoted } from "./command.js";
import { bytes, percent, seconds, shape } from "./format.js";
import { html } from "./html.js";
import { layoutWords } from "./layouts.js";
import { stepText } from "./model.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Stage} Stage
 * @typedef {{name: string, stage: Stage, value: string, words: () => string}} Subject
 */

const MOST_OFFERED = 100;

/** @param {{plan: Plan, report: Report}} props */
export function WhyView({ plan, report }) {
  const subjects = useMemo(() => subjectsOf(plan), [plan]);
  const [text, setText] = useState(() => {
    const names = [...subjects.keys()];
    return names.find((name) => explanationOf(report, subjects.get(name))) ?? names[0] ?? "";
  });
  const subject = subjects.get(text);
  const offered = [...subjects.keys()].filter((name) => name.includes(text)).slice(0, MOST_OFFERED);
  return html`
    <p>What a parameter or an operator costs as it is, and the command that prices every other layout.</p>
    <label class="picker">Parameter or operator
      <input list="subjects" value=${text} size="44" spellcheck=${false}
        oninput=${(/** @type {Event} */ event) => setText(/** @type {HTMLInputElement} */ (event.target).value)} />
    </label>
    <datalist id="subjects">${offered.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    ${subject ? html`<${Chosen} plan=${plan} subject=${subject} report=${report} />` : html`<p aria-live="polite">The plan has nothing of that name.</p>`}
  `;
}

/**
 * The explanation of a subject that the page has.
 * @param {Report} report
 * @param {Subject | undefined} subject
 */
function explanationOf(report, subject) {
  return report.explanations.find(({ name }) => name === subject?.value || name === subject?.name);
}

/**
 * Parameters, then operators, by name.
 * @param {Plan} plan
 */
function subjectsOf(plan) {
  /** @type {Map<string, Subject>} */
  const found = new Map();
  for (const stage of plan.stages) {
    for (const input of stage.inputs) {
      if (input.kind !== "parameter") continue;
      found.set(input.target, { name: input.target, stage, value: input.name, words: () => parameterWords(stage, input) });
    }
  }
  for (const stage of plan.stages) {
    stage.program.nodes.forEach((node, i) => {
      const words = () => operatorWords(node, stage.nodes[i]);
      if (!found.has(node.name)) found.set(node.name, { name: node.name, stage, value: node.outputs[0], words });
    });
  }
  return found;
}

/**
 * @param {Stage} stage
 * @param {import("./types").PlacedInput} input
 */
function parameterWords(stage, input) {
  const layout = layoutWords(input.layout, stage.axes) || "on one device";
  return `${shape(input.shape)} ${input.dtype}, ${shape(input.local_shape)} on a device: ${layout}.`;
}

/**
 * @param {import("./types").ProgramNode} node
 * @param {import("./types").PlacedNode} placed
 */
function operatorWords(node, placed) {
  const layouts = `${placed.inputs.join(" · ")} → ${placed.outputs.join(" · ")}`;
  return `${node.operator}: ${layouts}. Its compute takes ${seconds(placed.time)} of a step.`;
}

/** @param {{plan: Plan, subject: Subject, report: Report}} props */
function Chosen({ plan, subject, report }) {
  const { stage, name, value, words } = subject;
  const training = plan.options.mode === "training";
  const moved = stage.reshardings.filter((r) => r.value === value || r.consumer === name);
  const total = moved.reduce((sum, r) => sum + r.steps.reduce((time, step) => time + step.time, 0), 0);
  const hidden = moved.reduce((sum, r) => sum + r.overlapped, 0);
  return html`
    <p>${words()}</p>
    <p aria-live="polite">${`What is redistributed for it takes ${seconds(total)} of a step${
      hidden ? `, of which ${percent(hidden / total)} is hidden behind compute` : ""
    }.`}</p>
    ${moved.length > 0 &&
    html`<${Scrollable} label="Redistributed tensors"><table>
      <thead><tr><th>Tensor</th><th>Reader</th><th>Steps</th><th class="number">Time</th></tr></thead>
      <tbody>${moved.map(
        (r, i) => html`<tr key=${i}><th scope="row"><code>${r.value}</code></th><td>${r.consumer ?? "all"}</td>
          <td>${r.steps.map((step, i) => html`<span key=${i} class="badge">${stepText(step, training)}</span>`)}</td>
          <td class="number">${seconds(r.steps.reduce((time, step) => time + step.time, 0))}</td></tr>`,
      )}</tbody>
    </table><//>`}
    <${Alternatives} explanation=${explanationOf(report, subject)} />
    <p>The price of every alternative, each with the best plan around it:</p>
    <${Command} text=${`autoshard explain ${quoted(report.source)} ${quoted(name)}`} />
  `;
}

/** @param {{explanation: import("./types").Explanation | undefined}} props */
function Alternatives({ explanation }) {
  if (!explanation) return null;
  return html`
    <h3>Alternatives</h3>
    <${Scrollable} label="Alternatives"><table>
      <thead><tr><th>Layouts</th><th class="number">Its own time</th><th class="number">Memory</th>
        <th class="number">Best plan with it</th><th class="number">If only this changes</th></tr></thead>
      <tbody>${explanation.alternatives.map(
        (found) => html`<tr key=${found.layouts}><th scope="row">${found.layouts}</th>
          <td class="number">${found.time === null ? "" : seconds(found.time)}</td><td class="number">${bytes(found.memory)}</td>
          <td class="number">${regretText(found)}</td>
          <td class="number">${found.override === null ? "impossible" : signed(found.override)}</td></tr>`,
      )}</tbody>
    </table><//>
  `;
}

/** @param {import("./types").Explanation["alternatives"][number]} found */
function regretText(found) {
  if (found.chosen) return "chosen";
  if (found.forbidden.length) return `forbidden: ${found.forbidden.join("; ")}`;
  if (found.regret === null) return found.exact ? "impossible" : "unknown";
  return `${found.exact ? "" : "at most "}${signed(found.regret)}`;
}

/** @param {number} value seconds */
function signed(value) {
  if (value === 0) return "same";
  return `${value < 0 ? "−" : "+"}${seconds(Math.abs(value))}`;
}
