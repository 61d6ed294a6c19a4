/** Pictures in SVG: stacked bars, and areas over time. */
import { useEffect, useState } from "preact/hooks";
import { ticks } from "./format.js";
import { html } from "./html.js";

/**
 * @typedef {import("./types").Bar} Bar
 * @typedef {import("./types").Part} Part
 */

const WIDEST = 900;
const MARGINS = 32;
const BAR = 22;
const ROW = 44;

/** The width of charts in pixels, so that their text has its size on a phone too. */
function useWidth() {
  const measured = () => Math.min(document.documentElement.clientWidth - MARGINS, WIDEST);
  const [width, setWidth] = useState(measured);
  useEffect(() => {
    const resized = () => setWidth(measured());
    addEventListener("resize", resized);
    return () => removeEventListener("resize", resized);
  }, []);
  return width;
}

/** @param {{parts: {name: string, colour: string}[]}} props */
export function Legend({ parts }) {
  const shown = [...new Map(parts.map((part) => [part.name, part])).values()];
  return html`<ul class="legend">
    ${shown.map(
      (part) => html`<li key=${part.name}><span class=${`swatch fill-${part.colour}`}></span>${part.name}</li>`,
    )}
  </ul>`;
}

/**
 * Bars of parts, one below the other, with a legend.
 * @param {{label: string, bars: Bar[], format: (value: number) => string,
 *   limit?: {value: number, name: string}}} props
 */
export function StackedBars({ label, bars, format, limit }) {
  const width = useWidth();
  const ends = bars.map((bar) => sum(bar.parts) * (1 + (bar.error ?? 0)));
  const largest = Math.max(...ends, limit?.value ?? 0) * 1.02;
  const height = bars.length * ROW + 24;
  const x = (/** @type {number} */ value) => (largest ? (value / largest) * width : 0);
  return html`<figure>
    <${Legend} parts=${bars.flatMap((bar) => bar.parts.filter((part) => part.value > 0))} />
    <svg width=${width} height=${height} role="img" aria-label=${label} class="chart">
      ${ticks(largest, width / 150).map(
        (tick) => html`<g key=${tick}>
          <line class="grid" x1=${x(tick)} x2=${x(tick)} y1="0" y2=${height - 18} />
          <text class="tick" x=${x(tick)} y=${height - 4} text-anchor=${anchor(x(tick), width)}>${format(tick)}</text>
        </g>`,
      )}
      ${bars.map((bar, i) => html`<${BarRow} key=${bar.name} bar=${bar} top=${i * ROW} x=${x} format=${format} />`)}
      ${limit &&
      html`<line class="limit" x1=${x(limit.value)} x2=${x(limit.value)} y1="0" y2=${height - 18}>
        <title>${limit.name}: ${format(limit.value)}</title>
      </line>`}
    </svg>
  </figure>`;
}

/**
 * @param {number} x
 * @param {number} width
 */
function anchor(x, width) {
  if (x < 20) return "start";
  return x > width - 20 ? "end" : "middle";
}

/** @param {Part[]} parts */
function sum(parts) {
  return parts.reduce((total, part) => total + part.value, 0);
}

/** @param {{bar: Bar, top: number, x: (value: number) => number, format: (value: number) => string}} props */
function BarRow({ bar, top, x, format }) {
  let start = 0;
  const total = sum(bar.parts);
  const rectangles = bar.parts.map((part) => {
    const left = x(start);
    start += part.value;
    return html`<rect key=${part.name} class=${`part fill-${part.colour}`} x=${left} y=${top + 18}
      width=${Math.max(x(start) - left, 0)} height=${BAR - 2}>
      <title>${bar.name}, ${part.name}: ${format(part.value)}</title>
    </rect>`;
  });
  const error = bar.error ?? 0;
  const middle = top + 18 + BAR / 2 - 1;
  const [low, high] = [x(total * (1 - error)), x(total * (1 + error))];
  return html`<g>
    <text class=${bar.strong ? "name strong" : "name"} x="0" y=${top + 13}>
      ${bar.name}<tspan class="note" dx="8">${bar.note}</tspan>
    </text>
    ${rectangles}
    ${error > 0 &&
    html`<path class="whisker"
      d=${`M${low} ${middle - 5}v10M${low} ${middle}H${high}M${high} ${middle - 5}v10`}>
      <title>${bar.name}: ${format(total * (1 - error))} to ${format(total * (1 + error))}</title>
    </path>`}
  </g>`;
}

/**
 * Amounts over time, stacked, with a readout of the moment under the pointer or the arrow keys.
 * @param {{label: string, start: number[], end: number, layers: {name: string, colour: string,
 *   values: number[]}[], limit?: {value: number, name: string}, xFormat: (value: number) => string,
 *   yFormat: (value: number) => string}} props
 */
export function StackedAreas({ label, start, end, layers, limit, xFormat, yFormat }) {
  const width = useWidth();
  const totals = start.map((_, i) => layers.reduce((total, layer) => total + layer.values[i], 0));
  const peak = totals.indexOf(Math.max(...totals));
  const [chosen, choose] = useState(peak);
  const largest = Math.max(totals[peak], limit?.value ?? 0) * 1.05;
  const [height, bottom] = [260, 236];
  const x = (/** @type {number} */ time) => (time / end) * width;
  const y = (/** @type {number} */ value) => bottom - (value / largest) * (bottom - 8);
  const point = (/** @type {MouseEvent} */ event) => {
    const box = /** @type {Element} */ (event.currentTarget).getBoundingClientRect();
    const time = ((event.clientX - box.left) / box.width) * end;
    const next = start.findIndex((moment) => moment > time);
    choose(Math.max((next < 0 ? start.length : next) - 1, 0));
  };
  const move = (/** @type {KeyboardEvent} */ event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose((old) => Math.min(Math.max(old + by, 0), start.length - 1));
  };
  return html`<figure>
    <${Legend} parts=${layers.filter((layer) => Math.max(...layer.values) > 0)} />
    <svg width=${width} height=${height} class="chart" role="slider" tabindex="0"
      aria-label=${label} aria-valuemin="0" aria-valuemax=${start.length - 1} aria-valuenow=${chosen}
      aria-valuetext=${`${xFormat(start[chosen])}: ${yFormat(totals[chosen])}`}
      onpointermove=${point} onkeydown=${move}>
      ${ticks(largest).map(
        (tick) => html`<g key=${`y${tick}`}>
          <line class="grid" x1="0" x2=${width} y1=${y(tick)} y2=${y(tick)} />
          <text class="tick" x="2" y=${y(tick) - 3}>${tick ? yFormat(tick) : ""}</text>
        </g>`,
      )}
      ${areas(start, end, layers, x, y)}
      ${ticks(end, width / 150).map(
        (tick) => html`<text key=${tick} class="tick" x=${x(tick)} y=${height - 6} text-anchor=${anchor(x(tick), width)}>${xFormat(tick)}</text>`,
      )}
      ${limit && html`<line class="limit" x1="0" x2=${width} y1=${y(limit.value)} y2=${y(limit.value)} />`}
      <line class="cursor" x1=${x(start[chosen])} x2=${x(start[chosen])} y1="0" y2=${bottom} />
    </svg>
    <figcaption>${[
      `At ${xFormat(start[chosen])}${chosen === peak ? " (the peak)" : ""}: ${yFormat(totals[chosen])}, of which`,
      `${layers
        .filter((layer) => layer.values[chosen] > 0)
        .map((layer) => `${layer.name} ${yFormat(layer.values[chosen])}`)
        .join(", ")}.`,
    ].join(" ")}</figcaption>
  </figure>`;
}

/**
 * @param {number[]} start
 * @param {number} end
 * @param {{name: string, colour: string, values: number[]}[]} layers
 * @param {(time: number) => number} x
 * @param {(value: number) => number} y
 */
function areas(start, end, layers, x, y) {
  let base = start.map(() => 0);
  return layers.map((layer) => {
    const top = base.map((value, i) => value + layer.values[i]);
    const edge = (/** @type {number[]} */ values) =>
      values.map((value, i) => {
        const next = x(start[i + 1] ?? end);
        return [`${x(start[i]).toFixed(1)} ${y(value).toFixed(1)}`, `${next.toFixed(1)} ${y(value).toFixed(1)}`];
      });
    const forward = edge(top).flat();
    const backward = edge(base).flat().reverse();
    base = top;
    const path = `M${forward.join("L")}L${backward.join("L")}Z`;
    return html`<path key=${layer.name} class=${`area fill-${layer.colour}`} d=${path}><title>${layer.name}</title></path>`;
  });
}
