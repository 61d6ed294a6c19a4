/** The parts of the plan document (plan.schema.json) and of the report that the page reads. */

export interface Costs {
  total: number;
  compute: number;
  communication: number;
  optimizer: number;
  recompute: number;
  overlapped: number;
  idle: number;
}

export interface Memory {
  peak: number;
  budget: number | null;
  phase: string;
  at: string;
  parameters: number;
  gradients: number;
  optimizer: number;
  buffers: number;
  inputs: number;
  activations: number;
  temporaries: number;
}

export interface Performance {
  samples_per_second: number | null;
  tokens_per_second: number | null;
  mfu: number | null;
  error: number | null;
  comparison: string;
}

export interface Certificate {
  status: string;
  objective: number | null;
  bound: number | null;
  gap: number | null;
}

export interface Baseline {
  algo: string;
  costs: Costs | null;
  memory: Memory | null;
}

export interface PlacedInput {
  name: string;
  kind: string;
  target: string;
  dtype: string;
  shape: number[];
  local_shape: number[];
  layout: string;
  placements: string[];
}

export interface InnerStep {
  axis: string;
  action: string;
  direction: string;
  nbytes: number;
  time: number;
}

export interface PlacedNode {
  name: string;
  inputs: string[];
  outputs: string[];
  time: number;
  inside: InnerStep[];
}

export interface PlannedStep {
  axis: string;
  source: string;
  target: string;
  forward: string;
  backward: string;
  nbytes: number;
  time: number;
}

export interface Resharding {
  value: string;
  consumer: string | null;
  source: string;
  target: string;
  steps: PlannedStep[];
  regather: boolean;
  frequency: string;
  overlapped: number;
}

export interface ProgramNode {
  name: string;
  operator: string;
  outputs: string[];
  module?: string;
}

export interface Stage {
  name: string;
  axes: [string, number][];
  first_device: number;
  micro_batches: number;
  in_flight: number;
  program: { nodes: ProgramNode[]; model?: { name?: string } | null };
  inputs: PlacedInput[];
  nodes: PlacedNode[];
  reshardings: Resharding[];
}

export interface Pipeline {
  schedule: string;
  micro_batches: number;
  ranks: number[][];
  stages: { costs: Costs; memory: Memory }[];
  bubble: number;
}

export interface Level {
  name: string;
  size: number | null;
  bandwidth: number;
}

export interface Plan {
  id: string;
  certificate: Certificate;
  reason: string;
  graph: { num_nodes: number; num_parameters: number; precision: string };
  mesh: {
    axes: { name: string; size: number }[];
    topology: { name: string; device: { name: string; memory: number }; levels: Level[] };
  };
  options: { mode: string; training: { micro_batches: number }; runtime: { name: string } };
  costs: Costs | null;
  memory: Memory | null;
  stages: Stage[];
  pipeline: Pipeline | null;
  baselines: Baseline[];
  unrestricted: { costs: Costs | null; memory: Memory | null } | null;
}

export interface LayoutRow {
  name: string;
  algo: string | null;
  seconds: number | null;
  performance: Performance | null;
  rate: number | null;
  memory: number | null;
  needs: string;
}

/** What the summary of a plan prints: `autoshard.report.answer.Answer`. */
export interface Answer {
  verdict: string;
  prediction: string;
  within: number;
  layouts: LayoutRow[];
  best: number;
  simplest: number;
  axes: string[];
  layers: { layers: string[]; weights: string[]; activations: string[] }[];
  step: string[];
  costs: { name: string; seconds: number; percent: number }[];
  sources: string;
  certificate: string;
}

export interface StageRoles {
  axes: string[];
  operators: Record<string, string[]>;
  parameters: Record<string, string[]>;
}

export interface StepEvents {
  lanes: string[];
  texts: string[];
  lane: number[];
  name: number[];
  subject: number[];
  start: number[];
  seconds: number[];
  nbytes: number[];
  overlapped: boolean[];
  phase: string[];
  category: string[];
  micro_batch: number[];
}

export interface Schedule {
  name: string;
  seconds: number;
  bubble: number;
  finish: number[];
  end: number[];
  rank: number[];
  stage: number[];
  kind: string[];
  micro_batch: number[];
  start: number[];
  stop: number[];
}

/** `autoshard.planner.Explanation`: all strategies of one choice. */
export interface Explanation {
  name: string;
  alternatives: {
    layouts: string;
    chosen: boolean;
    time: number | null;
    memory: number;
    regret: number | null;
    exact: boolean;
    override: number | null;
    forbidden: string[];
  }[];
}

export interface Change {
  name: string;
  before: string;
  after: string;
}

export interface Figure {
  name: string;
  before: number;
  after: number;
}

export interface CollectiveChange {
  kind: string;
  axis: string;
  direction: string;
  before: number;
  after: number;
  bytes_before: number;
  bytes_after: number;
}

export interface Difference {
  meshes: [string, string];
  inputs: Change[];
  nodes: Change[];
  outputs: Change[];
  collectives: CollectiveChange[];
  costs: Figure[];
  memory: Figure[];
  pipeline: Change[];
}

export interface Report {
  asked: string[];
  answer: Answer | null;
  restricted: string[];
  remarks: string[];
  roles: StageRoles[];
  step: StepEvents | null;
  memory: { start: number[]; nbytes: Record<string, number[]> } | null;
  schedule: Schedule | null;
  why_no_step: string;
  exports: { target: string; text: string; reason: string }[];
  explanations: Explanation[];
  source: string;
  difference: Difference | null;
}

/** One coloured part of a bar: its colour is a custom property of the style sheet. */
export interface Part {
  name: string;
  colour: string;
  value: number;
}

export interface Bar {
  name: string;
  parts: Part[];
  /** Relative error of the sum. */
  error?: number | null;
  note: string;
  strong?: boolean;
}

/** A rectangle of a timeline. */
export interface Block {
  start: number;
  seconds: number;
  colour: string;
  /** What it is: a sentence for few of many blocks. */
  text: () => string;
  /** Short text that is drawn in the rectangle if there is space for it. */
  short?: string;
}

export interface Lane {
  name: string;
  /** In the order of their start. */
  blocks: Block[];
}

export interface Parameter {
  input: PlacedInput;
  stage: number;
  nbytes: number;
  storage: string[];
}

export interface Operator {
  node: ProgramNode;
  placed: PlacedNode;
  stage: number;
  roles: string[];
}

/** A resharding, and the module to whose communication it counts. */
export interface Moved {
  resharding: Resharding;
  stage: number;
  of: "parameter" | "activation";
  /** Name of the parameter in the state dict, or of the value. */
  name: string;
}

export interface Totals {
  compute: number;
  communication: number;
  overlapped: number;
  parameterBytes: number;
  /** Seconds of compute by axis and role. */
  work: Map<string, Map<string, number>>;
  /** Bytes of parameters by axis and storage. */
  stored: Map<string, Map<string, number>>;
  /** Number of redistributions of activations, by "actions over axis". */
  moved: Map<string, number>;
}

export interface Module {
  path: string;
  name: string;
  children: Map<string, Module>;
  operators: Operator[];
  parameters: Parameter[];
  moved: Moved[];
  totals: Totals;
  signature: number;
}

/** A row of the tree: one module, or equal ones that follow each other. */
export interface Row {
  key: string;
  label: string;
  members: Module[];
  totals: Totals;
}
