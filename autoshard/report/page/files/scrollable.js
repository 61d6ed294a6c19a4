/** A part that scrolls sideways where it is too wide, also by keyboard. */
import { useEffect, useRef, useState } from "preact/hooks";
import { html } from "./html.js";

/** @param {{label: string, children: any}} props */
export function Scrollable({ label, children }) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  const [wide, setWide] = useState(false);
  useEffect(() => {
    const part = element.current;
    if (!part) return undefined;
    // Only what scrolls is a stop of the tab key.
    const observer = new ResizeObserver(() => setWide(part.scrollWidth > part.clientWidth));
    for (const watched of [part, ...part.children]) observer.observe(watched);
    return () => observer.disconnect();
  }, []);
  const focusable = wide ? { tabindex: 0, role: "region", "aria-label": label } : {};
  return html`<div class="scroll" ref=${element} ...${focusable}>${children}</div>`;
}
