/** A command or code, with a button that copies it. */
import { useState } from "preact/hooks";
import { html } from "./html.js";

/** @param {{text: string}} props */
export function Command({ text }) {
  const [copied, setCopied] = useState(false);
  const copy = () => navigator.clipboard.writeText(text).then(() => setCopied(true));
  return html`<div class="command">
    <pre tabindex="0">${text}</pre>
    <button type="button" class="copy" onclick=${copy}>${copied ? "Copied" : "Copy"}</button>
  </div>`;
}

/**
 * A word as a shell reads it.
 * @param {string} text
 */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;
}
