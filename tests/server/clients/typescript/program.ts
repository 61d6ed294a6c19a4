// Uploads a graph, plans it, looks the plan up and reads it, with a client generated from the
// specification. Arguments: address of a service, a key, file of a graph. Prints
// the plan's id.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { argv } from "node:process";

import createClient from "openapi-fetch";

import type { components, paths } from "./schema.js";

type Plan = components["schemas"]["Plan"];
type Problem = components["schemas"]["Problem"];

const [address, key, file] = argv.slice(2) as [string, string, string];
const client = createClient<paths>({
  baseUrl: address,
  headers: { Authorization: `Bearer ${key}` },
});

function check(condition: unknown, message: string): asserts condition {
  if (!condition) throw new Error(message);
}

function isPlan(document: object | undefined): document is Plan {
  return document !== undefined && "certificate" in document;
}

const graph = readFileSync(file);
const digest = createHash("sha256").update(graph).digest("hex");
const request = { graph_sha256: digest, mesh: { shape: [2, 4] } };

const stored = await client.PUT("/v1/graphs/{digest}", {
  params: { path: { digest } },
  body: "", // the type of bytes is string in a specification; these are sent instead:
  bodySerializer: () => graph,
  headers: { "Content-Type": "application/octet-stream" },
});
check(stored.data?.sha256 === digest, "the graph was not stored");

const created = await client.POST("/v1/plans", {
  params: { header: { Prefer: "wait=60" } },
  body: request,
});
check(isPlan(created.data), `no plan: ${JSON.stringify(created.error ?? created.data)}`);

const found = await client.POST("/v1/plans:lookup", { body: request });
check(found.data !== undefined && found.data.id === created.data.id, "another plan was found");

const read = await client.GET("/v1/plans/{plan_id}", {
  params: { path: { plan_id: found.data.id } },
});
check(read.data?.certificate.bound === created.data.certificate.bound, "another plan was read");

const unknown = await client.GET("/v1/plans/{plan_id}", {
  params: { path: { plan_id: "0".repeat(64) } },
});
const problem: Problem | undefined = unknown.error;
check(problem?.status === 404, "an unknown plan is not a problem with status 404");

console.log(found.data.id);
