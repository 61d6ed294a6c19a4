/** Layouts such as `S(0),R` or `S(0),S(0);1>0`: their text, and the slices that devices hold. */

/**
 * @typedef {{kind: string, dim: number, subShards: number[]}} AxisType
 * @typedef {{types: AxisType[], nesting: number[][]}} Layout
 */

/**
 * @param {string} text
 * @returns {Layout}
 */
export function parseLayout(text) {
  const [types, ...orders] = text.split(";");
  return {
    types: types.split(",").map(parseType),
    nesting: orders.map((order) => order.split(">").map(Number)),
  };
}

/**
 * @param {string} text
 * @returns {AxisType}
 */
function parseType(text) {
  const found = /^S\((\d+)\)(?:\/(.+))?$/.exec(text);
  if (!found) return { kind: text, dim: -1, subShards: [] };
  return { kind: "S", dim: Number(found[1]), subShards: found[2]?.split("+").map(Number) ?? [] };
}

/**
 * The mesh axes that shard a dim, outermost first.
 * @param {Layout} layout
 * @param {number} dim
 */
export function shardingAxes(layout, dim) {
  const axes = layout.types.flatMap((type, axis) => (type.dim === dim ? [axis] : []));
  const same = (/** @type {number[]} */ order) =>
    order.length === axes.length && order.every((axis) => axes.includes(axis));
  return layout.nesting.find(same) ?? axes;
}

/**
 * The slices of each dim that a device holds: several of an interleaved dim, else one.
 * @param {number[]} shape
 * @param {Layout} layout
 * @param {number[]} sizes of the axes
 * @param {number[]} coordinate of the device
 * @returns {[number, number][][]}
 */
export function localSlices(shape, layout, sizes, coordinate) {
  return shape.map((size, dim) => {
    const axes = shardingAxes(layout, dim);
    const local = axes.reduce((left, axis) => Math.ceil(left / sizes[axis]), size);
    const index = axes.reduce((outer, axis) => outer * sizes[axis] + coordinate[axis], 0);
    const given = layout.types.find((type) => type.dim === dim)?.subShards ?? [];
    const relative = given.length ? given : [1];
    const total = relative.reduce((sum, part) => sum + part, 0);
    let start = 0;
    return relative.map((part) => {
      const length = Math.floor((local * part) / total);
      const end = start + Math.floor((size * part) / total);
      /** @type {[number, number]} */
      const slice = [start + index * length, Math.min(start + (index + 1) * length, end)];
      start = end;
      return slice;
    });
  });
}

/**
 * The coordinate of a device in row-major order.
 * @param {number} device
 * @param {number[]} sizes
 */
export function coordinateOf(device, sizes) {
  const found = new Array(sizes.length);
  for (let axis = sizes.length - 1; axis >= 0; axis--) {
    found[axis] = device % sizes[axis];
    device = Math.floor(device / sizes[axis]);
  }
  return found;
}

/**
 * A layout in words, an axis at a time: `dp: dim 0 in shards; tp: whole`.
 * @param {string} text
 * @param {[string, number][]} axes
 */
export function layoutWords(text, axes) {
  const { types } = parseLayout(text);
  return axes
    .map(([name, size], axis) => (size > 1 ? `${name}: ${typeWords(types[axis])}` : ""))
    .filter(Boolean)
    .join("; ");
}

/** @param {AxisType} type */
function typeWords(type) {
  if (type.kind === "S") return `dim ${type.dim} in shards`;
  return type.kind === "P" ? "partial sums" : "whole";
}
