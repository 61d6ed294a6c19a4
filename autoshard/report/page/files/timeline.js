/** A timeline: rectangles on lanes, drawn on a canvas, to zoom and to walk through by keyboard. */
import { useEffect, useRef, useState } from "preact/hooks";
import { plural, ticks } from "./format.js";
import { html } from "./html.js";

/**
 * @typedef {import("./types").Lane} Lane
 * @typedef {import("./types").Block} Block
 * @typedef {{from: number, to: number}} View
 * @typedef {{lane: number, block: number}} Choice
 */

const ROW = 26;
const TOP = 20;
const LABEL = 92;

/**
 * @param {{label: string, lanes: Lane[], seconds: number, format: (value: number) => string}} props
 */
export function Timeline({ label, lanes, seconds, format }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [view, setView] = useState(/** @type {View} */ ({ from: 0, to: seconds }));
  const [chosen, choose] = useState(/** @type {Choice | null} */ (null));
  const [size, setSize] = useState(0);
  useEffect(() => {
    const redraw = () => setSize((old) => old + 1);
    const observer = new ResizeObserver(redraw);
    if (canvas.current) observer.observe(canvas.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", redraw);
    };
  }, []);
  useEffect(() => {
    if (canvas.current) draw(canvas.current, lanes, view, chosen, format);
  }, [lanes, view, chosen, size]);
  const zoom = (/** @type {number} */ factor, centre = (view.from + view.to) / 2) =>
    setView(zoomed(view, factor, centre, seconds));
  const key = (/** @type {KeyboardEvent} */ event) => {
    const next = walked(event.key, lanes, chosen);
    if (next) {
      choose(next);
      setView(following(view, lanes[next.lane].blocks[next.block], seconds));
    } else if (event.key === "+") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") setView({ from: 0, to: seconds });
    else return;
    event.preventDefault();
  };
  const block = chosen && lanes[chosen.lane].blocks[chosen.block];
  return html`<figure>
    <div class="tools">
      <button type="button" onclick=${() => zoom(0.5)}>Zoom in</button>
      <button type="button" onclick=${() => zoom(2)}>Zoom out</button>
      <button type="button" onclick=${() => setView({ from: 0, to: seconds })}>Whole step</button>
      <span class="hint">Arrow keys walk from event to event; drag to move.</span>
    </div>
    <canvas ref=${canvas} class="timeline" tabindex="0" role="application" aria-label=${label}
      aria-roledescription="timeline" style=${{ height: `${TOP + lanes.length * ROW}px` }} onkeydown=${key}
      onpointermove=${(/** @type {PointerEvent} */ event) => {
        if (event.buttons && canvas.current) setView(dragged(view, event, canvas.current, seconds));
        else if (canvas.current) choose(blockAt(event, canvas.current, lanes, view) ?? chosen);
      }}></canvas>
    <figcaption aria-live="polite">
      ${block
        ? `${lanes[chosen.lane].name}: ${block.text()}; ${format(block.seconds)} from ${format(block.start)}`
        : `${plural(lanes.reduce((n, lane) => n + lane.blocks.length, 0), "event")} in ${format(seconds)}.`}
    </figcaption>
  </figure>`;
}

/**
 * @param {View} view
 * @param {number} factor
 * @param {number} centre
 * @param {number} seconds
 */
function zoomed(view, factor, centre, seconds) {
  const length = Math.min((view.to - view.from) * factor, seconds);
  const from = Math.min(Math.max(centre - length / 2, 0), seconds - length);
  return { from, to: from + length };
}

/**
 * The view, moved so that a block is in it.
 * @param {View} view
 * @param {Block} block
 * @param {number} seconds
 */
function following(view, block, seconds) {
  const middle = block.start + block.seconds / 2;
  return middle < view.from || middle > view.to ? zoomed(view, 1, middle, seconds) : view;
}

/**
 * @param {View} view
 * @param {PointerEvent} event
 * @param {HTMLCanvasElement} canvas
 * @param {number} seconds
 */
function dragged(view, event, canvas, seconds) {
  const perPixel = (view.to - view.from) / (canvas.clientWidth - LABEL);
  const middle = (view.from + view.to) / 2 - event.movementX * perPixel;
  return zoomed(view, 1, middle, seconds);
}

/**
 * The block to which a key leads; null for another key.
 * @param {string} key
 * @param {Lane[]} lanes
 * @param {Choice | null} chosen
 * @returns {Choice | null}
 */
function walked(key, lanes, chosen) {
  if (!/^Arrow/.test(key)) return null;
  if (!chosen) {
    const lane = lanes.findIndex((found) => found.blocks.length);
    return lane < 0 ? null : { lane, block: 0 };
  }
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const block = chosen.block + (key === "ArrowRight" ? 1 : -1);
    return lanes[chosen.lane].blocks[block] ? { lane: chosen.lane, block } : chosen;
  }
  const time = lanes[chosen.lane].blocks[chosen.block].start;
  const by = key === "ArrowDown" ? 1 : -1;
  let lane = chosen.lane + by;
  while (lanes[lane] && !lanes[lane].blocks.length) lane += by;
  return lanes[lane] ? { lane, block: lastBefore(lanes[lane].blocks, time) } : chosen;
}

/**
 * The number of the last block that starts at a time or before it; 0 if there is none.
 * @param {Block[]} blocks
 * @param {number} time
 */
function lastBefore(blocks, time) {
  let [low, high] = [0, blocks.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (blocks[middle].start <= time) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}

/**
 * @param {PointerEvent} event
 * @param {HTMLCanvasElement} canvas
 * @param {Lane[]} lanes
 * @param {View} view
 * @returns {Choice | null}
 */
function blockAt(event, canvas, lanes, view) {
  const box = canvas.getBoundingClientRect();
  const lane = Math.floor((event.clientY - box.top - TOP) / ROW);
  const share = (event.clientX - box.left - LABEL) / (box.width - LABEL);
  if (!lanes[lane]?.blocks.length || share < 0) return null;
  const time = view.from + share * (view.to - view.from);
  const block = lastBefore(lanes[lane].blocks, time);
  const found = lanes[lane].blocks[block];
  return time <= found.start + found.seconds ? { lane, block } : null;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Lane[]} lanes
 * @param {View} view
 * @param {Choice | null} chosen
 * @param {(value: number) => string} format
 */
function draw(canvas, lanes, view, chosen, format) {
  const pen = canvas.getContext("2d");
  const width = canvas.clientWidth;
  if (!pen || !width) return;
  const height = TOP + lanes.length * ROW;
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  pen.scale(scale, scale);
  const styles = getComputedStyle(document.documentElement);
  const colour = (/** @type {string} */ name) => styles.getPropertyValue(`--${name}`).trim();
  const x = (/** @type {number} */ time) =>
    LABEL + ((time - view.from) / (view.to - view.from)) * (width - LABEL);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = colour("muted");
  for (const tick of ticks(view.to - view.from, width < 500 ? 3 : 6)) {
    const left = x(view.from + tick);
    pen.fillRect(left, TOP - 5, 1, height);
    if (left < width - 50) pen.fillText(format(view.from + tick), left + 3, 8);
  }
  lanes.forEach((lane, number) => {
    const top = TOP + number * ROW;
    pen.fillStyle = colour("row");
    pen.fillRect(LABEL, top + 1, width - LABEL, ROW - 3);
    drawBlocks(pen, lane.blocks, top + 1, x, width, colour);
    pen.fillStyle = colour("text");
    pen.fillText(lane.name, 0, top + ROW / 2, LABEL - 8);
  });
  if (!chosen) return;
  const block = lanes[chosen.lane].blocks[chosen.block];
  const left = Math.max(x(block.start), LABEL);
  pen.strokeStyle = colour("text");
  pen.lineWidth = 2;
  pen.strokeRect(left, TOP + chosen.lane * ROW + 1, Math.max(x(block.start + block.seconds) - left, 2), ROW - 3);
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {Block[]} blocks
 * @param {number} top
 * @param {(time: number) => number} x
 * @param {number} width
 * @param {(name: string) => string} colour
 */
function drawBlocks(pen, blocks, top, x, width, colour) {
  /** @type {Map<string, string>} */
  const known = new Map();
  let drawn = LABEL;
  for (const block of blocks) {
    const right = x(block.start + block.seconds);
    const left = Math.max(x(block.start), LABEL);
    // What ends within the pixel that is drawn already cannot be seen.
    if (right < LABEL || right - drawn < 0.2) continue;
    if (left > width) break;
    const fill = known.get(block.colour) ?? colour(block.colour);
    known.set(block.colour, fill);
    pen.fillStyle = fill;
    const space = right - left > 3 ? 0.5 : 0;
    pen.fillRect(left, top, Math.max(right - left - space, 0.5), ROW - 3);
    drawn = Math.max(drawn, right);
    if (block.short && right - left > 8 + 7 * block.short.length) {
      pen.fillStyle = colour("on-fill");
      pen.fillText(block.short, left + 4, top + ROW / 2 - 1);
    }
  }
}
