/** Why a tensor or operator has its layout: what it costs, and the command that prices all others. */
import { useMemo, useState } from "preact/hooks";
import { Command, quoted } from "./command.js";
import { percent, seconds, shape } from "./format.js";
import { html } from "./html.js";
import { layoutWords } from "./layouts.js";
import { stepText } from "./model.js";
import { Scrollable } from "./scrollable.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Stage} Stage
 * @typedef {{name: string, stage: Stage, value: string, words: () => string}} Subject
 */

const MOST_OFFERED = 100;

/** @param {{plan: Plan, report: import("./types").Report}} props */
export function WhyView({ plan, report }) {
  const subjects = useMemo(() => subjectsOf(plan), [plan]);
  const [text, setText] = useState(() => subjects.keys().next().value ?? "");
  const subject = subjects.get(text);
  const offered = [...subjects.keys()].filter((name) => name.includes(text)).slice(0, MOST_OFFERED);
  return html`
    <p>What a parameter or an operator costs as it is, and the command that prices every other layout.</p>
    <label class="picker">Parameter or operator
      <input list="subjects" value=${text} size="44" spellcheck=${false}
        oninput=${(/** @type {Event} */ event) => setText(/** @type {HTMLInputElement} */ (event.target).value)} />
    </label>
    <datalist id="subjects">${offered.map((name) => html`<option key=${name} value=${name} />`)}</datalist>
    ${subject ? html`<${Chosen} plan=${plan} subject=${subject} source=${report.source} />` : html`<p aria-live="polite">The plan has nothing of that name.</p>`}
  `;
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

/** @param {{plan: Plan, subject: Subject, source: string}} props */
function Chosen({ plan, subject, source }) {
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
    <p>The price of every alternative, each with the best plan around it:</p>
    <${Command} text=${`autoshard explain ${quoted(source)} ${quoted(name)}`} />
  `;
}
