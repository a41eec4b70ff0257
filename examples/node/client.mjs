// Talks to Atoll from JavaScript with nothing but the .proto files:
//
//   node client.mjs chain  <registry host:port> <scenario>
//   node client.mjs report <gateway gRPC host:port> <scenario> <receipt> <score> <group>
//   node client.mjs score  <teacher host:port> <prompt ids> <response ids> [top k]      ids: 1,2,3
//
// Prints one JSON document; a refusal is {"refused": {"status", "reason", "message"}} and exit status 1.
// The token is read from ATOLL_TOKEN.

import { readdirSync } from "node:fs";
import { join } from "node:path";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTOS = join(import.meta.dirname, "../../protos");
const DEADLINE_MS = 30_000;
const ERROR_DETAILS = "grpc-status-details-bin";

// longs as strings: a version number may pass what a JavaScript number holds exactly.
const definitions = loader.loadSync(
  readdirSync(join(PROTOS, "atoll"), { recursive: true })
    .filter((name) => name.endsWith(".proto"))
    .map((name) => join("atoll", name)),
  { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true },
);
const api = grpc.loadPackageDefinition(definitions).atoll.api;

function open(Client, address) {
  return new Client(address, grpc.credentials.createInsecure());
}

function metadata() {
  const entries = new grpc.Metadata();
  if (process.env.ATOLL_TOKEN) entries.set("authorization", `Bearer ${process.env.ATOLL_TOKEN}`);
  return entries;
}

const options = () => ({ deadline: Date.now() + DEADLINE_MS });

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, metadata(), options(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

async function chain(address, scenario) {
  const client = open(api.registry.v1.VersionService, address);
  const versions = [];
  let page_token = "";
  do {
    const page = await call(client, "ListVersions", { scenario, page_token });
    versions.push(...page.versions);
    page_token = page.next_page_token;
  } while (page_token);
  return versions.map(({ number, parent, weight_version, operation, model_digest }) => ({
    number: Number(number),
    parent: parent === undefined || parent === null ? null : Number(parent),
    weight_version,
    operation,
    model_digest,
  }));
}

async function report(address, scenario, receipt, score, group) {
  const client = open(api.gateway.v1.ReportService, address);
  const answer = await call(client, "CreateReport", {
    request_id: `node-${receipt}`,
    scenario,
    receipts: [receipt],
    score: Number(score),
    metadata: { fields: { group: { stringValue: group } } },
  });
  return { report_id: answer.report.report_id, job_id: answer.job_id || null };
}

// Packed tensors are little-endian without padding. A slice is not aligned, so it is copied before it is viewed.
const VIEWS = { D_TYPE_FLOAT32: Float32Array, D_TYPE_INT32: Int32Array, D_TYPE_UINT8: Uint8Array };

function unpack(specs, bytes) {
  const tensors = {};
  let start = 0;
  for (const { name, dtype, shape } of specs) {
    const View = VIEWS[dtype];
    const length = shape.reduce((product, extent) => product * Number(extent), 1) * View.BYTES_PER_ELEMENT;
    const copy = Uint8Array.prototype.slice.call(bytes, start, start + length);
    tensors[name] = { shape: shape.map(Number), values: Array.from(new View(copy.buffer)) };
    start += length;
  }
  return tensors;
}

const pack = (ids) => Buffer.from(Int32Array.from(ids.split(","), Number).buffer);

// Reads and writes at the same time: the service stops reading while too many tokens are in flight.
function score(address, prompt, response, topK = "0") {
  const stream = open(api.teacher.v1.TeacherService, address).Score(metadata(), options());
  return new Promise((resolve, reject) => {
    let header = null;
    const chunks = [];
    stream.on("error", reject);
    stream.on("data", (piece) => {
      if (piece.piece === "header") header = piece.header;
      else chunks.push(piece.chunk);
    });
    stream.on("end", () => {
      if (header === null) reject(new Error("the stream ended without a result"));
      else if (header.error) resolve({ id: header.id, error: header.error });
      else resolve({ id: header.id, ...unpack(header.tensors, Buffer.concat(chunks)) });
    });
    stream.write({ id: "only", prompt_ids: pack(prompt), response_ids: pack(response), top_k: Number(topK) });
    stream.end();
  });
}

// The reason stands in the google.rpc.Status of the trailer. Its ErrorInfo begins with field 1, the reason as a string,
// so two small steps over the wire format save a dependency on google/rpc/*.proto.
function reasonOf(error) {
  const [status] = error.metadata?.get(ERROR_DETAILS) ?? [];
  const type = status?.indexOf("google.rpc.ErrorInfo") ?? -1;
  if (type < 0) return null;
  const value = status.subarray(type + "google.rpc.ErrorInfo".length);
  // 0x12: field 2 of google.protobuf.Any, its value; then the length; 0x0a: field 1 of ErrorInfo; its length; the text.
  if (value[0] !== 0x12 || value[2] !== 0x0a) return null;
  return value.subarray(4, 4 + value[3]).toString();
}

const COMMANDS = { chain, report, score };
const [name, ...words] = process.argv.slice(2);
if (!COMMANDS[name]) {
  console.error(`expected one of ${Object.keys(COMMANDS).join(", ")}; see the top of client.mjs`);
  process.exit(2);
}
try {
  console.log(JSON.stringify(await COMMANDS[name](...words)));
} catch (error) {
  if (error.code === undefined) throw error;
  const refused = { status: grpc.status[error.code], reason: reasonOf(error), message: error.details };
  console.log(JSON.stringify({ refused }));
  process.exitCode = 1;
}
