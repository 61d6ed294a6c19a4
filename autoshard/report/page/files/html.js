/** Components are functions that return html`...` of htm. */
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);
