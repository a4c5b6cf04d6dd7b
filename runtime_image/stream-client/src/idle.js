// Writing to the page when the browser has time for it.

const LATEST_MS = 100;

/**
 * Collects what arrives and writes it in the browser's idle time, once for all that came since: tokens can come faster
 * than a page is laid out, and typing and scrolling go first. Nothing waits longer than about 100 ms.
 */
export class IdleWriter {
  #write;
  #items = [];
  #cancel = null;

  /** @param {(items: unknown[]) => void} write called with what was added since the last time, in order. */
  constructor(write) {
    this.#write = write;
  }

  add(item) {
    this.#items.push(item);
    this.#cancel ??= whenIdle(() => this.flush());
  }

  /** Write what waits, now. */
  flush() {
    this.#cancel?.();
    this.#cancel = null;
    const items = this.#items;
    this.#items = [];
    if (items.length > 0) this.#write(items);
  }
}

/** Safari has no requestIdleCallback; pages in the background have no animation frames. */
function whenIdle(run) {
  if (globalThis.requestIdleCallback !== undefined) {
    const id = requestIdleCallback(run, { timeout: LATEST_MS });
    return () => cancelIdleCallback(id);
  }
  if (globalThis.requestAnimationFrame === undefined) {
    const id = setTimeout(run, 0);
    return () => clearTimeout(id);
  }
  let timer;
  const frame = requestAnimationFrame(() => {
    clearTimeout(timer);
    run();
  });
  timer = setTimeout(() => {
    cancelAnimationFrame(frame);
    run();
  }, LATEST_MS);
  return () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
  };
}
