/** The plan page: its views in order. */
import { render } from "preact";
import { readDocuments } from "./data.js";
import { html } from "./html.js";
import { DifferenceView } from "./difference.js";
import { MemoryView } from "./memory.js";
import { MeshView } from "./mesh.js";
import { ModelView } from "./model.js";
import { StepView } from "./step.js";
import { TakeAway } from "./takeaway.js";
import { Verdict } from "./verdict.js";
import { WhyView } from "./why.js";

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 */

const VIEWS = [
  { id: "verdict", title: "Verdict", view: Verdict },
  { id: "memory", title: "Memory", view: MemoryView },
  { id: "model", title: "The model", view: ModelView },
  { id: "mesh", title: "The mesh", view: MeshView },
  { id: "why", title: "Why this?", view: WhyView },
  { id: "step", title: "The step", view: StepView },
  { id: "difference", title: "Difference", view: DifferenceView },
  { id: "take-away", title: "Take away", view: TakeAway },
];

/** @param {{plan: Plan, report: Report}} props */
function Page({ plan, report }) {
  const { answer } = report;
  const views = VIEWS.filter(({ id }) => id !== "difference" || report.difference);
  return html`
    <header>
      <h1>${document.title}</h1>
      ${report.asked.map((text) => html`<p key=${text} class="asked">${text}</p>`)}
      <p class="headline">${answer ? `${answer.prediction}.` : `There is no plan: ${plan.reason}`}</p>
      ${answer &&
      html`<nav aria-label="Views">${views.map(({ id, title }) => html`<a key=${id} href=${`#${id}`}>${title}</a>`)}</nav>`}
    </header>
    ${answer &&
    html`<main>${views.map(
      ({ id, title, view: View }) => html`<section key=${id} id=${id} aria-labelledby=${`${id}-title`}>
        <h2 id=${`${id}-title`}>${title}</h2>
        <${View} plan=${plan} report=${report} />
      </section>`,
    )}</main>`}
  `;
}

readDocuments().then((documents) => {
  const place = /** @type {HTMLElement} */ (document.getElementById("page"));
  render(html`<${Page} ...${documents} />`, place);
});
