export { StreamClient, StreamedAnswer, StreamError } from "./client.js";
export { decodedEvents, EventParser, plainEvents } from "./events.js";
export { IdleWriter } from "./idle.js";
export { warmUp, ZstdDecoder } from "./zstd.js";
