// Streamed answers of a Sixfold gateway.

import { decodedEvents, plainEvents } from "./events.js";
import { warmUp } from "./zstd.js";

const FORM = "X-Stream-Compression";
const LATEST_ENTRY_MS = 500;
const SAME_REQUEST_MS = 50; // what lies between our clock and the browser's start of the same request

/** An answer that is an error, or a stream that failed. */
export class StreamError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, param?: string | null, cause?: unknown}} [details]
   */
  constructor(message, { status = 0, code = "", param = null, cause } = {}) {
    super(message, { cause });
    this.name = "StreamError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** Asks one gateway, and remembers its dictionary. */
export class StreamClient {
  #dictionary; // {sha256, bytes} of the last answer's Link

  /**
   * @param {object} options
   * @param {string | URL} options.baseUrl as OpenAI's clients take it: ends with /v1.
   * @param {string} [options.apiKey]
   * @param {"sse-zstd" | "http" | "identity"} [options.compression] base64 zstd inside the events, whatever the HTTP
   *   client negotiates by itself, or nothing.
   * @param {typeof globalThis.fetch} [options.fetch]
   */
  constructor({ baseUrl, apiKey = "", compression = "sse-zstd", fetch = globalThis.fetch.bind(globalThis) }) {
    this.baseUrl = String(baseUrl).replace(/\/*$/, "/");
    this.apiKey = apiKey;
    this.compression = compression;
    this.fetch = fetch;
  }

  /** Load the decoder before the first answer needs it. */
  async warmUp() {
    await warmUp();
  }

  /**
   * Send a request whose answer is streamed. Resolves when the answer begins.
   *
   * @param {"chat/completions" | "completions"} path
   * @param {object} body as OpenAI's API takes it; `stream` is set here.
   * @param {{signal?: AbortSignal, headers?: Record<string, string>}} [options]
   * @returns {Promise<StreamedAnswer>}
   * @throws {StreamError} the gateway refuses; network errors and aborts are those of fetch.
   */
  async stream(path, body, { signal, headers = {} } = {}) {
    const dictionary = this.#dictionary; // the one that this request names
    const request = {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.authorization, ...this.#asked(), ...headers },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    };
    const startedAt = performance.now();
    const response = await this.fetch(new URL(path, this.baseUrl), request);
    if (!response.ok) throw await refusal(response);
    const answer = new StreamedAnswer(response, startedAt, dictionary);
    if (this.compression === "sse-zstd") this.#follow(response);
    return answer;
  }

  get authorization() {
    return this.apiKey === "" ? {} : { Authorization: `Bearer ${this.apiKey}` };
  }

  #asked() {
    if (this.compression === "http") return {};
    if (this.compression === "identity") return { [FORM]: "identity" };
    return { [FORM]: this.#dictionary ? `sse-zstd; dictionary=${this.#dictionary.sha256}` : "sse-zstd" };
  }

  /** Get the dictionary that an answer links to, for the next ones. Without it they are only larger. */
  async #follow(response) {
    const link = /<([^>]*\/([0-9a-f]{64}))>\s*;[^,]*rel="?compression-dictionary/.exec(response.headers.get("Link") ?? "");
    if (link === null || this.#dictionary?.sha256 === link[2]) return;
    try {
      const answer = await this.fetch(new URL(link[1], response.url), { headers: this.authorization });
      if (!answer.ok) return;
      this.#dictionary = { sha256: link[2], bytes: new Uint8Array(await answer.arrayBuffer()) };
    } catch {
      // as it was
    }
  }
}

/**
 * A streamed answer: `for await (const chunk of answer)` gives each event as the object that it holds, when it arrives.
 * Leaving the loop closes the connection, and the gateway stops generating.
 */
export class StreamedAnswer {
  #events;
  #transfer = null;

  constructor(response, startedAt, dictionary) {
    const asked = (response.headers.get(FORM) ?? "").split(";");
    /** The HTTP answer; its body is read here. */
    this.response = response;
    /** How it travels: identity, gzip, zstd, dcz or sse-zstd. */
    this.form = asked[0].trim() || "identity";
    if (this.form === "identity") this.form = response.headers.get("Content-Encoding") ?? "identity";
    /** Whether the form uses a dictionary. */
    this.usesDictionary = this.form === "dcz" || asked.length > 1;
    /** The rollback level that the request ran at; NaN where a header says none. */
    this.level = Number.parseInt(response.headers.get("X-Sixfold-Level") ?? "", 10);
    /** Bytes of events so far, as plain text. */
    this.rawBytes = 0;
    /** Bytes of the body so far as they travelled; null while only the browser knows. See `measureSent`. */
    this.sentBytes = this.form === "identity" || this.form === "sse-zstd" ? 0 : null;
    if (this.sentBytes === null) this.#transfer = new Transfer(response.url, startedAt);
    /** Milliseconds from the request to the first byte of the body; null before. */
    this.firstByteMs = null;
    /** The usage of the whole answer, where `stream_options.include_usage` asked for it; null before. */
    this.usage = null;
    this.startedAt = startedAt;
    const options = { onText: (bytes) => (this.rawBytes += bytes), dictionary: dictionary?.bytes };
    if (asked.length === 1) delete options.dictionary;
    this.#events = (this.form === "sse-zstd" ? decodedEvents : plainEvents)(this.#body(), options);
  }

  async *[Symbol.asyncIterator]() {
    let isDone = false;
    for await (const { data } of this.#events) {
      if (data === "[DONE]") {
        isDone = true; // what is left ends the compressed stream
        continue;
      }
      const chunk = parsed(data);
      if (chunk.error) throw new StreamError(chunk.error.message, chunk.error);
      this.usage = chunk.usage ?? this.usage;
      yield chunk;
    }
    if (!isDone) throw new StreamError("the stream was cut before its end", { code: "stream_cut" });
  }

  /**
   * Bytes of the body as they travelled, after its end. Under a Content-Encoding only the browser's resource timing
   * knows; null where it doesn't say.
   */
  async measureSent() {
    if (this.#transfer !== null) this.sentBytes = await this.#transfer.bytes;
    return this.sentBytes;
  }

  async *#body() {
    const reader = this.response.body.getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        this.firstByteMs ??= performance.now() - this.startedAt;
        if (this.sentBytes !== null) this.sentBytes += value.length;
        yield value;
      }
    } finally {
      await reader.cancel().catch(() => {}); // of a stream that is over: nothing
      this.#transfer?.end();
    }
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch (cause) {
    throw new StreamError("an event isn't JSON", { code: "invalid_event", cause });
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new StreamError(error.message, { ...error, status: response.status });
  } catch {
    return new StreamError(`HTTP ${response.status}: ${text.slice(0, 200)}`, { status: response.status });
  }
}

/** How large a body was on its way: resource timing says so a little after its end. */
class Transfer {
  #resolve;
  #observer;

  constructor(url, startedAt) {
    /** Resolves with the size, or with null where the browser doesn't say. */
    this.bytes = new Promise((resolve) => (this.#resolve = resolve));
    this.#observer = new PerformanceObserver((list) => {
      const isOurs = ({ startTime }) => startTime >= startedAt && startTime < startedAt + SAME_REQUEST_MS;
      const entry = list.getEntriesByName(url).find(isOurs);
      if (entry !== undefined) this.#settle(entry.encodedBodySize || null);
    });
    this.#observer.observe({ type: "resource" });
  }

  /** The body has ended. */
  end() {
    setTimeout(() => this.#settle(null), LATEST_ENTRY_MS);
  }

  #settle(bytes) {
    this.#observer.disconnect();
    this.#resolve(bytes);
  }
}
