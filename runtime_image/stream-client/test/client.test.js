// Against real HTTP: a server that answers as the gateway does, with streams that the gateway's encoder wrote.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { once } from "node:events";
import test, { after, before } from "node:test";

import { StreamClient, StreamError } from "../src/index.js";

const { plain, dictionary } = JSON.parse(await readFile(new URL("streams.json", import.meta.url), "utf8"));
const requests = [];
let server;
let baseUrl;
let answer; // (request, response) => void, set by each test

before(async () => {
  server = createServer((request, response) => {
    requests.push(request);
    answer(request, response);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  baseUrl = `http://127.0.0.1:${server.address().port}/v1`;
});

after(() => server.close());

function sends(headers, parts) {
  return (_, response) => {
    response.writeHead(200, { "Content-Type": "text/event-stream", "X-Sixfold-Level": "3", ...headers });
    response.end(parts.join(""));
  };
}

async function read(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const chunksOf = (events) => events.slice(0, -1).map((event) => JSON.parse(event.slice("data: ".length)));

test("each form gives the same chunks", async () => {
  const forms = [
    ["sse-zstd", plain.headers, plain.sent],
    ["identity", { "X-Stream-Compression": "identity" }, plain.events],
  ];
  for (const [compression, headers, parts] of forms) {
    answer = sends(headers, parts);
    const client = new StreamClient({ baseUrl, compression, apiKey: "secret" });
    const stream = await client.stream("chat/completions", { model: "m" });
    assert.deepEqual(await read(stream), chunksOf(plain.events));
    assert.equal(stream.form, compression);
    assert.equal(stream.level, 3);
    assert.equal(stream.usage.completion_tokens, 40);
    assert.equal(stream.rawBytes, Buffer.byteLength(plain.events.join("")));
    assert.equal(stream.sentBytes, Buffer.byteLength(parts.join("")));
    const { headers: sent, url } = requests.at(-1);
    assert.deepEqual([url, sent["x-stream-compression"], sent.authorization], ["/v1/chat/completions", compression, "Bearer secret"]);
  }
});

test("a dictionary is fetched once and named from then on", async () => {
  const bytes = Buffer.from(dictionary.bytes, "base64");
  const link = { Link: dictionary.headers.Link };
  answer = (request, response) => {
    if (request.method === "GET") response.end(bytes);
    else if (request.headers["x-stream-compression"] === "sse-zstd") sends({ ...plain.headers, ...link }, plain.sent)(request, response);
    else sends(dictionary.headers, dictionary.sent)(request, response);
  };
  const client = new StreamClient({ baseUrl });
  assert.equal((await read(await client.stream("completions", {}))).length, plain.events.length - 1);
  while (requests.at(-1).method !== "GET") await new Promise((resolve) => setTimeout(resolve, 5));
  await new Promise((resolve) => setTimeout(resolve, 50));
  for (let time = 0; time < 2; time += 1) {
    const stream = await client.stream("completions", {});
    assert.deepEqual(await read(stream), chunksOf(dictionary.events));
    assert.equal(stream.usesDictionary, true);
    assert.equal(requests.at(-1).headers["x-stream-compression"], dictionary.headers["X-Stream-Compression"]);
  }
});

test("refusals, errors in mid-stream and cuts are errors", async () => {
  const error = { message: "too many", type: "rate_limit_error", param: null, code: "rate_limit_exceeded" };
  const client = new StreamClient({ baseUrl });
  answer = (_, response) => response.writeHead(429).end(JSON.stringify({ error }));
  await assert.rejects(client.stream("completions", {}), (thrown) => {
    assert.ok(thrown instanceof StreamError);
    assert.deepEqual([thrown.status, thrown.code, thrown.message], [429, "rate_limit_exceeded", "too many"]);
    return true;
  });
  answer = (_, response) => response.writeHead(502).end("<html>");
  await assert.rejects(client.stream("completions", {}), /HTTP 502/);
  answer = sends({}, [plain.events[0], `data: ${JSON.stringify({ error })}\n\n`]);
  await assert.rejects(read(await client.stream("completions", {})), /too many/);
  answer = sends({}, plain.events.slice(0, 2));
  await assert.rejects(read(await client.stream("completions", {})), /cut/);
  answer = sends(plain.headers, plain.sent.slice(0, 5));
  await assert.rejects(read(await client.stream("completions", {})), /cut/);
});

test("leaving the loop and aborting close the connection", async () => {
  for (const isAbort of [false, true]) {
    const closed = new Promise((resolve) => {
      answer = (_, response) => {
        response.writeHead(200, plain.headers);
        response.write(plain.sent.slice(0, 3).join(""));
        response.on("close", resolve);
      };
    });
    const controller = new AbortController();
    const stream = await new StreamClient({ baseUrl }).stream("completions", {}, { signal: controller.signal });
    const reading = (async () => {
      for await (const chunk of stream) {
        assert.ok(chunk.choices);
        if (!isAbort) break;
        controller.abort();
      }
    })();
    if (isAbort) await assert.rejects(reading, { name: "AbortError" });
    await reading.catch(() => {});
    await closed;
  }
});
