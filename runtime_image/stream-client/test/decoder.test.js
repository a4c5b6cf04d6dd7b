import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import test from "node:test";

import { decodedEvents, EventParser, IdleWriter, plainEvents, warmUp, ZstdDecoder } from "../src/index.js";

const streams = JSON.parse(await readFile(new URL("streams.json", import.meta.url), "utf8"));
const bytesOf = (base64) => new Uint8Array(Buffer.from(base64, "base64"));
const frames = (stream) => stream.sent.map((outer) => bytesOf(outer.slice("data: ".length)));
const utf8 = new TextEncoder();
const dataOf = (events) => events.map((event) => event.slice("data: ".length, -2));

/** The bytes of a text, in pieces of `size`. */
async function* pieces(text, size) {
  const bytes = utf8.encode(text);
  for (let at = 0; at < bytes.length; at += size) yield bytes.slice(at, at + size);
}

async function collect(events) {
  const all = [];
  for await (const event of events) all.push(event.data);
  return all;
}

test("the module imports nothing and its memory stays", async () => {
  const module = await WebAssembly.compile(await readFile(new URL("../src/zstd.wasm", import.meta.url)));
  assert.deepEqual(WebAssembly.Module.imports(module), []);
  assert.equal((await WebAssembly.instantiate(module)).exports.memory.buffer.byteLength, 2 ** 21);
});

test("each event decodes as soon as its bytes are there", async () => {
  await warmUp();
  const decoder = await ZstdDecoder.create();
  for (const [index, frame] of frames(streams.plain).entries()) {
    assert.equal(new TextDecoder().decode(decoder.decode(frame)), streams.plain.events[index]);
    assert.equal(decoder.isComplete, index === streams.plain.events.length - 1);
  }
  assert.throws(() => decoder.decode(utf8.encode("more")), /behind the end/);
  decoder.close();
});

for (const size of [1, 7, 100_000]) {
  test(`a body in pieces of ${size} bytes gives the same events`, async () => {
    let raw = 0;
    const body = pieces(streams.plain.sent.join(""), size);
    const data = await collect(decodedEvents(body, { onText: (bytes) => (raw += bytes) }));
    assert.deepEqual(data, dataOf(streams.plain.events));
    assert.equal(raw, utf8.encode(streams.plain.events.join("")).length);
    assert.deepEqual(await collect(plainEvents(pieces(streams.plain.events.join(""), size))), data);
  });
}

test("a dictionary is used, and missed where it is needed", async () => {
  const { sent, events, bytes } = streams.dictionary;
  const decoded = collect(decodedEvents(pieces(sent.join(""), 50), { dictionary: bytesOf(bytes) }));
  assert.deepEqual(await decoded, dataOf(events));
  await assert.rejects(collect(decodedEvents(pieces(sent.join(""), 50))), /zstd:/);
});

test("many streams at once don't disturb each other", async () => {
  const all = Array.from({ length: 20 }, (_, index) => collect(decodedEvents(pieces(streams.plain.sent.join(""), 3 + index))));
  for (const data of await Promise.all(all)) assert.deepEqual(data, dataOf(streams.plain.events));
});

test("a stream that is cut or damaged is an error, and the decoder works after it", async () => {
  const cut = streams.plain.sent.slice(0, -1).join("");
  await assert.rejects(collect(decodedEvents(pieces(cut, 100))), /cut before its end/);
  const damaged = [...streams.plain.sent];
  damaged[0] = `data: ${Buffer.from("not zstd at all").toString("base64")}\n\n`;
  await assert.rejects(collect(decodedEvents(pieces(damaged.join(""), 100))), /this isn't zstd/);
  assert.equal((await collect(decodedEvents(pieces(streams.plain.sent.join(""), 100)))).length, streams.plain.events.length);
});

test("any bytes decode or are refused", async () => {
  let state = 1;
  const random = () => (state = (state * 48271) % 2147483647);
  for (let round = 0; round < 300; round += 1) {
    const decoder = await ZstdDecoder.create();
    try {
      for (const frame of frames(streams.plain)) {
        const bytes = frame.slice();
        if (random() % 4 === 0) bytes[random() % bytes.length] = random() % 256;
        decoder.decode(bytes);
      }
    } catch (error) {
      assert.match(error.message, /^zstd: /);
    } finally {
      decoder.close();
    }
  }
});

test("more output than fits at once", async () => {
  // A frame of RLE blocks, 128 KiB each: RFC 8878, 3.1.1.2. Window descriptor: 128 KiB.
  const blocks = 5;
  const frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
  for (let index = 0; index < blocks; index += 1) {
    const header = (2 ** 17 << 3) | (1 << 1) | Number(index === blocks - 1);
    frame.push(header & 255, (header >> 8) & 255, header >> 16, 65 + index);
  }
  const decoder = await ZstdDecoder.create();
  const bytes = decoder.decode(new Uint8Array(frame));
  assert.equal(bytes.length, blocks * 2 ** 17);
  assert.deepEqual([bytes[0], bytes.at(-1)], [65, 64 + blocks]);
  assert.ok(decoder.isComplete);
  decoder.close();
});

test("events as the standard has them", () => {
  const parser = new EventParser();
  const events = [...parser.push("\uFEFFdata: a\r"), ...parser.push("\ndata:b\n\n: comment\n\nevent: x\ndata\n"), ...parser.push("\r\rdata: never")];
  assert.deepEqual(events, [
    { type: "message", data: "a\nb" },
    { type: "x", data: "" },
  ]);
});

test("what waits is written once, in order", async () => {
  const written = [];
  const writer = new IdleWriter((items) => written.push(items));
  for (const item of [1, 2, 3]) writer.add(item);
  assert.deepEqual(written, []);
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.deepEqual(written, [[1, 2, 3]]);
  writer.add(4);
  writer.flush();
  writer.flush();
  assert.deepEqual(written, [[1, 2, 3], [4]]);
});
