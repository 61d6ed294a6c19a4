/** The plan document and its report, which the page has in it. This module alone reads them. */

/**
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 */

/**
 * The text of an embedded document.
 * @param {"plan" | "report"} id
 * @returns {Promise<string>}
 */
export async function embeddedText(id) {
  const encoded = document.getElementById(id)?.textContent ?? "";
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** @returns {Promise<{plan: Plan, report: Report}>} */
export async function readDocuments() {
  const [plan, report] = await Promise.all([embeddedText("plan"), embeddedText("report")]);
  return { plan: JSON.parse(plan), report: JSON.parse(report) };
}
