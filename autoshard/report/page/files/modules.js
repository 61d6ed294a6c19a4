/** The tree of the model's modules, with what its operators and parameters cost. */

/**
 * @typedef {import("./types").Module} Module
 * @typedef {import("./types").Totals} Totals
 * @typedef {import("./types").Row} Row
 * @typedef {import("./types").Plan} Plan
 * @typedef {import("./types").Report} Report
 * @typedef {import("./types").Stage} Stage
 */

/** @returns {Totals} */
function noTotals() {
  return {
    compute: 0,
    communication: 0,
    overlapped: 0,
    parameterBytes: 0,
    work: new Map(),
    stored: new Map(),
    moved: new Map(),
  };
}

/**
 * @param {string} path
 * @param {string} name
 * @returns {Module}
 */
function newModule(path, name) {
  const lists = { operators: [], parameters: [], moved: [] };
  return { path, name, children: new Map(), ...lists, totals: noTotals(), signature: 0 };
}

/**
 * The root of the tree, with totals of all modules.
 * @param {Plan} plan
 * @param {Report} report
 */
export function moduleTree(plan, report) {
  const root = newModule("", "whole model");
  plan.stages.forEach((stage, number) => addStage(root, stage, report.roles[number], number));
  finish(root, plan, new Map());
  return root;
}

/**
 * @param {Module} root
 * @param {string} path
 */
function moduleAt(root, path) {
  let module = root;
  for (const name of path ? path.split(".") : []) {
    let child = module.children.get(name);
    if (!child) {
      child = newModule(module.path ? `${module.path}.${name}` : name, name);
      module.children.set(name, child);
    }
    module = child;
  }
  return module;
}

/** @param {string} target a name in the state dict */
function parentPath(target) {
  return target.slice(0, Math.max(target.lastIndexOf("."), 0));
}

/**
 * @param {Module} root
 * @param {Stage} stage
 * @param {import("./types").StageRoles} roles
 * @param {number} number of the stage
 */
function addStage(root, stage, roles, number) {
  /** @type {Map<string, Module>} modules of operators by name */
  const readers = new Map();
  /** @type {Map<string, Module>} modules of values by name */
  const owners = new Map();
  stage.program.nodes.forEach((node, i) => {
    const module = moduleAt(root, node.module ?? "");
    const placed = stage.nodes[i];
    module.operators.push({ node, placed, stage: number, roles: roles.operators[node.name] ?? [] });
    readers.set(node.name, module);
    node.outputs.forEach((value) => owners.set(value, module));
  });
  /** @type {Map<string, string>} */
  const parameters = new Map();
  for (const input of stage.inputs) {
    if (input.kind !== "parameter") continue;
    const module = moduleAt(root, parentPath(input.target));
    const nbytes = elements(input.local_shape) * itemSize(input.dtype);
    const storage = roles.parameters[input.name] ?? [];
    module.parameters.push({ input, stage: number, nbytes, storage });
    parameters.set(input.name, input.target);
    owners.set(input.name, module);
  }
  for (const resharding of stage.reshardings) {
    const parameter = parameters.get(resharding.value);
    const owner = owners.get(resharding.value) ?? root;
    const reader = resharding.consumer ? readers.get(resharding.consumer) : undefined;
    const module = (parameter === undefined ? reader : undefined) ?? owner;
    const of = parameter === undefined ? "activation" : "parameter";
    module.moved.push({ resharding, stage: number, of, name: parameter ?? resharding.value });
  }
}

/** @param {number[]} shape */
function elements(shape) {
  return shape.reduce((product, size) => product * size, 1);
}

/** @param {string} dtype */
export function itemSize(dtype) {
  return dtype === "bool" ? 1 : Number(/\d+/.exec(dtype)?.[0] ?? 8) / 8;
}

/**
 * Add up the totals, and number equal modules equally.
 * @param {Module} module
 * @param {Plan} plan
 * @param {Map<string, number>} signatures
 */
function finish(module, plan, signatures) {
  const { totals } = module;
  for (const child of module.children.values()) {
    finish(child, plan, signatures);
    addTotals(totals, child.totals);
  }
  for (const { placed, stage, roles } of module.operators) {
    totals.compute += placed.time;
    for (const step of placed.inside) {
      totals.communication += step.time;
      addMoved(totals, movedName([step.action], step.axis));
    }
    const axes = plan.stages[stage].axes.filter(([, size]) => size > 1);
    roles.forEach((role, axis) => addTo(totals.work, axes[axis][0], role, placed.time));
  }
  for (const { storage, nbytes, stage } of module.parameters) {
    totals.parameterBytes += nbytes;
    const axes = plan.stages[stage].axes.filter(([, size]) => size > 1);
    storage.forEach((kept, axis) => addTo(totals.stored, axes[axis][0], kept, nbytes));
  }
  for (const { resharding, of } of module.moved) {
    totals.overlapped += resharding.overlapped;
    for (const step of resharding.steps) {
      totals.communication += step.time;
      const actions = collectives(step, plan.options.mode === "training");
      if (of === "activation" && actions.length) addMoved(totals, movedName(actions, step.axis));
    }
  }
  module.signature = signatureOf(module, signatures);
}

/**
 * The collectives of a step, without local actions; backward ones run in training only.
 * @param {import("./types").PlannedStep} step
 * @param {boolean} training
 */
export function collectives(step, training) {
  const local = new Set(["nothing", "slice", "mask", "pad"]);
  const actions = training ? [step.forward, step.backward] : [step.forward];
  return actions.filter((action) => !local.has(action));
}

/**
 * @param {Module} module
 * @param {Map<string, number>} signatures
 */
function signatureOf(module, signatures) {
  const text = JSON.stringify([
    [...module.children].map(([name, child]) => [name, child.signature]),
    module.operators.map(({ node, placed, roles }) => [
      node.operator,
      placed.inputs,
      placed.outputs,
      roles,
    ]),
    module.parameters.map(({ input }) => [
      input.target.slice(input.target.lastIndexOf(".") + 1),
      input.shape,
      input.layout,
      input.dtype,
    ]),
    module.moved.map(({ resharding }) => [
      resharding.source,
      resharding.target,
      resharding.frequency,
      resharding.regather,
    ]),
  ]);
  const number = signatures.get(text) ?? signatures.size;
  signatures.set(text, number);
  return number;
}

/**
 * @param {Totals} totals
 * @param {Totals} others
 */
function addTotals(totals, others) {
  totals.compute += others.compute;
  totals.communication += others.communication;
  totals.overlapped += others.overlapped;
  totals.parameterBytes += others.parameterBytes;
  for (const [axis, roles] of others.work) {
    for (const [role, value] of roles) addTo(totals.work, axis, role, value);
  }
  for (const [axis, kinds] of others.stored) {
    for (const [kept, value] of kinds) addTo(totals.stored, axis, kept, value);
  }
  for (const [name, number] of others.moved) addMoved(totals, name, number);
}

/**
 * @param {Map<string, Map<string, number>>} table
 * @param {string} axis
 * @param {string} key
 * @param {number} value
 */
function addTo(table, axis, key, value) {
  const row = table.get(axis) ?? new Map();
  table.set(axis, row.set(key, (row.get(key) ?? 0) + value));
}

/**
 * @param {string[]} actions
 * @param {string} axis
 */
function movedName(actions, axis) {
  return `${[...new Set(actions)].sort().join("/")} over ${axis}`;
}

/**
 * @param {Totals} totals
 * @param {string} name
 * @param {number} number
 */
function addMoved(totals, name, number = 1) {
  totals.moved.set(name, (totals.moved.get(name) ?? 0) + number);
}

/**
 * The children of a module as rows: equal ones with consecutive numbers are one row.
 * @param {Module} module
 * @returns {Row[]}
 */
export function rowsOf(module) {
  /** @type {Module[][]} */
  const runs = [];
  for (const child of module.children.values()) {
    const last = runs[runs.length - 1];
    const previous = last?.[last.length - 1];
    const follows =
      previous?.signature === child.signature &&
      /^\d+$/.test(child.name) &&
      Number(child.name) === Number(previous.name) + 1;
    if (follows) last.push(child);
    else runs.push([child]);
  }
  return runs.map((members) => {
    const [first, last] = [members[0], members[members.length - 1]];
    const label = members.length === 1 ? first.name : `${first.name} to ${last.name}`;
    const totals = noTotals();
    members.forEach((member) => addTotals(totals, member.totals));
    return { key: first.path, label, members, totals };
  });
}

/**
 * The largest shares of a table's row, as `[name, share]`, largest first.
 * @param {Map<string, number> | undefined} row
 */
export function sharesOf(row) {
  const entries = [...(row ?? [])];
  const total = entries.reduce((sum, [, value]) => sum + value, 0);
  return entries
    .map(([name, value]) => /** @type {[string, number]} */ ([name, total ? value / total : 0]))
    .filter(([, share]) => share >= 0.005)
    .sort((a, b) => b[1] - a[1]);
}
