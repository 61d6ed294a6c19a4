/** What to take away: the plan, commands, and code of other frameworks. */
import { Command, quoted } from "./command.js";
import { embeddedText } from "./data.js";
import { html } from "./html.js";

/**
 * @param {string} name of the file
 * @param {string} text
 */
function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** @param {{plan: import("./types").Plan, report: import("./types").Report}} props */
export function TakeAway({ plan, report }) {
  const source = quoted(report.source);
  const savePlan = async () => save(`plan-${plan.id.slice(0, 12)}.json`, await embeddedText("plan"));
  return html`
    <p>This page has the whole plan document in it.</p>
    <p><button type="button" class="copy" onclick=${savePlan}>Save the plan document</button></p>
    <h3>Run it</h3>
    <${Command} text=${`autoshard launch --plan ${source} train.py`} />
    <h3>Read it as tables, and check it</h3>
    <${Command} text=${`autoshard show ${source} --all`} />
    <${Command} text=${`autoshard check model.pt2 ${source}`} />
    ${report.exports.length > 0 && html`<h3>In other frameworks</h3>`}
    ${report.exports.map(({ target, text, reason }) =>
      text
        ? html`<details key=${target}><summary>${target}</summary><${Command} text=${text} /></details>`
        : html`<p key=${target} class="hint">${`${target}: ${reason}`}</p>`,
    )}
  `;
}
