// Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html, and the coding inside them.

import { ZstdDecoder } from "./zstd.js";

/** Takes an event stream's text apart as it arrives. */
export class EventParser {
  #rest = "";
  #data = [];
  #type = "";
  #isFirst = true;

  /**
   * The events that `text` completes.
   * @param {string} text
   * @returns {{type: string, data: string}[]}
   */
  push(text) {
    if (this.#isFirst && text !== "") {
      this.#isFirst = false;
      text = text.replace(/^\uFEFF/, "");
    }
    let pending = this.#rest + text;
    // A CR at the end may be half of a CRLF.
    const held = pending.endsWith("\r") ? "\r" : "";
    pending = pending.slice(0, pending.length - held.length);
    const lines = pending.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + held;
    const events = [];
    for (const line of lines) this.#line(line, events);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push({ type: this.#type || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#type = "";
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#type = value;
  }
}

/**
 * The events of an answer in the form `sse-zstd`: base64 in outer events, one zstd frame for the whole answer. Each step
 * gives the events that one outer event completed, as soon as it is there.
 *
 * @param {AsyncIterable<Uint8Array>} body
 * @param {{dictionary?: Uint8Array, onText?: (bytes: number) => void}} [options] `onText` hears of decoded bytes.
 */
export async function* decodedEvents(body, { dictionary, onText = () => {} } = {}) {
  const decoder = await ZstdDecoder.create(dictionary);
  const text = new TextDecoder();
  const parser = new EventParser();
  try {
    for await (const outer of plainEvents(body)) {
      const bytes = decoder.decode(fromBase64(outer.data));
      onText(bytes.length);
      yield* parser.push(text.decode(bytes, { stream: true }));
    }
    if (!decoder.isComplete) throw new Error("the stream was cut before its end");
  } finally {
    decoder.close();
  }
}

/**
 * The events of an answer that is plain text by the time it is here.
 *
 * @param {AsyncIterable<Uint8Array>} body
 * @param {{onText?: (bytes: number) => void}} [options]
 */
export async function* plainEvents(body, { onText = () => {} } = {}) {
  const text = new TextDecoder();
  const parser = new EventParser();
  for await (const bytes of body) {
    onText(bytes.length);
    yield* parser.push(text.decode(bytes, { stream: true }));
  }
}

function fromBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index += 1) bytes[index] = binary.charCodeAt(index);
  return bytes;
}
