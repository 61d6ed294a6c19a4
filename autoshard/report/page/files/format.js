/** Numbers in the words of the command line: decimal units, three significant digits. */

/** @param {number} value */
function digits(value) {
  const size = Math.abs(value);
  const places = size === 0 ? 0 : Math.min(Math.max(2 - Math.floor(Math.log10(size)), 0), 6);
  return numberFormat(Math.min(places, 2), places).format(value);
}

/** @type {Map<string, Intl.NumberFormat>} */
const FORMATS = new Map();

/**
 * A format of numbers, of which each is made once: to make one takes long.
 * @param {number} least digits after the point
 * @param {number} most digits after the point
 */
function numberFormat(least, most) {
  const key = `${least} ${most}`;
  const digits = { minimumFractionDigits: least, maximumFractionDigits: most };
  const format = FORMATS.get(key) ?? new Intl.NumberFormat("en-US", digits);
  FORMATS.set(key, format);
  return format;
}

/**
 * The number in the largest unit that it reaches.
 * @param {number} value
 * @param {[number, string][]} units largest first
 */
function scaled(value, units) {
  const size = Math.abs(value);
  const [scale, unit] = units.find(([least]) => size >= least) ?? units[units.length - 1];
  return `${digits(value / scale)} ${unit}`;
}

/** @type {[number, string][]} */
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
/** @type {[number, string][]} */
const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

/** @param {number} value */
export function seconds(value) {
  return value === 0 ? "0" : scaled(value, TIMES);
}

/** @param {number} value */
export function bytes(value) {
  return value === 0 ? "0" : scaled(value, SIZES);
}

/** @param {number} share */
export function percent(share) {
  const text = (100 * share).toFixed(0);
  if (text === "0" && share > 0) return "<1\u00a0%";
  return text === "100" && share < 1 ? ">99\u00a0%" : `${text}\u00a0%`;
}

/** @param {number} value */
export function count(value) {
  return numberFormat(0, 3).format(value);
}

/** @param {number[]} shape */
export function shape(shape) {
  return shape.length ? shape.join(" × ") : "scalar";
}

/**
 * @param {number} number
 * @param {string} noun
 */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/**
 * An action as the command line writes it: `reduce-scatter`.
 * @param {string} action
 */
export function words(action) {
  return action.replaceAll("_", "-");
}

/**
 * Round numbers from 0 to a largest one, about `most` of them.
 * @param {number} largest
 * @param {number} most
 */
export function ticks(largest, most = 5) {
  if (!(largest > 0)) return [0];
  const rough = largest / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  return Array.from({ length: Math.floor(largest / step + 1e-9) + 1 }, (_, i) => i * step);
}
