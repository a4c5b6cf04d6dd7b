// A zstd decoder for streams: WebAssembly, compiled once, one small instance for each stream that is being read.

const ERRORS = new Map([
  [10, "this isn't zstd"],
  [16, "the stream looks back further than 128 KiB"],
  [20, "the stream is damaged"],
  [22, "the stream is damaged (checksum)"],
  [30, "the dictionary is damaged"],
  [32, "the stream was made with another dictionary"],
]);
const KEPT_INSTANCES = 2;

let compiled;
const kept = [];

/**
 * Load and compile the decoder, so that the first answer doesn't wait for it. Later calls cost nothing.
 * @returns {Promise<void>}
 */
export async function warmUp() {
  compiled ??= compile(new URL("zstd.wasm", import.meta.url)).catch((error) => {
    compiled = undefined; // the next call tries again
    throw error;
  });
  const module = await compiled;
  if (kept.length === 0) kept.push((await WebAssembly.instantiate(module)).exports);
}

async function compile(url) {
  if (url.protocol === "file:") {
    const { readFile } = await import("node:fs/promises");
    return WebAssembly.compile(await readFile(url));
  }
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url.pathname}: HTTP ${response.status}`);
  return WebAssembly.compile(await response.arrayBuffer());
}

/** Decodes one zstd frame as its bytes arrive. Its memory is 2 MiB, whatever the stream's length. */
export class ZstdDecoder {
  #zstd;
  #memory;
  #isComplete = false;

  /**
   * @param {Uint8Array} [dictionary] what the stream was compressed with; at most 1 MiB.
   * @returns {Promise<ZstdDecoder>}
   */
  static async create(dictionary = new Uint8Array()) {
    await warmUp();
    const zstd = kept.pop() ?? (await WebAssembly.instantiate(await compiled)).exports;
    return new ZstdDecoder(zstd, dictionary);
  }

  constructor(zstd, dictionary) {
    this.#zstd = zstd;
    this.#memory = new Uint8Array(zstd.memory.buffer); // never detached: the memory doesn't grow
    if (dictionary.length > zstd.dictionary_size()) throw new RangeError("the dictionary is larger than 1 MiB");
    this.#memory.set(dictionary, zstd.dictionary());
    check(zstd.begin(dictionary.length));
  }

  /** Whether the end of the frame was decoded. A stream that ends before that was cut. */
  get isComplete() {
    return this.#isComplete;
  }

  /**
   * All that `bytes` complete.
   * @param {Uint8Array} bytes
   * @returns {Uint8Array}
   */
  decode(bytes) {
    const step = this.#zstd.input_size();
    const parts = [];
    for (let start = 0; start < bytes.length; start += step) this.#decode(bytes.subarray(start, start + step), parts);
    return parts.length === 1 ? parts[0] : joined(parts);
  }

  #decode(bytes, parts) {
    const zstd = this.#zstd;
    this.#memory.set(bytes, zstd.input());
    let used = 0;
    let isFull = false;
    while (used < bytes.length || isFull) {
      if (this.#isComplete) throw new Error("zstd: there is more behind the end of the stream");
      const size = check(zstd.decode(used, bytes.length));
      if (size > 0) parts.push(this.#memory.slice(zstd.output(), zstd.output() + size));
      used = zstd.used();
      isFull = size === zstd.output_size();
      this.#isComplete = zstd.complete() === 1;
      if (this.#isComplete && used === bytes.length) return;
    }
  }

  /** Give the instance back. The decoder can't be used after that. */
  close() {
    if (this.#zstd !== undefined && kept.length < KEPT_INSTANCES) kept.push(this.#zstd);
    this.#zstd = undefined;
  }
}

function check(result) {
  if (result < 0) throw new Error(`zstd: ${ERRORS.get(-result) ?? `error ${-result}`}`);
  return result;
}

function joined(parts) {
  const all = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}
