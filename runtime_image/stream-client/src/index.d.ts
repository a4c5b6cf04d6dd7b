export type Compression = "sse-zstd" | "http" | "identity";
export type Form = "identity" | "gzip" | "zstd" | "dcz" | "sse-zstd";

export interface StreamClientOptions {
  baseUrl: string | URL;
  apiKey?: string;
  compression?: Compression;
  fetch?: typeof globalThis.fetch;
}

export interface StreamOptions {
  signal?: AbortSignal;
  headers?: Record<string, string>;
}

export class StreamClient {
  constructor(options: StreamClientOptions);
  baseUrl: string;
  apiKey: string;
  compression: Compression;
  fetch: typeof globalThis.fetch;
  readonly authorization: Record<string, string>;
  warmUp(): Promise<void>;
  stream(path: "chat/completions" | "completions", body: object, options?: StreamOptions): Promise<StreamedAnswer>;
}

export class StreamedAnswer implements AsyncIterable<any> {
  readonly response: Response;
  readonly form: Form;
  readonly usesDictionary: boolean;
  readonly level: number;
  readonly rawBytes: number;
  readonly sentBytes: number | null;
  readonly firstByteMs: number | null;
  readonly startedAt: number;
  readonly usage: any | null;
  [Symbol.asyncIterator](): AsyncGenerator<any, void, void>;
  measureSent(): Promise<number | null>;
}

export class StreamError extends Error {
  constructor(message: string, details?: { status?: number; code?: string; param?: string | null; cause?: unknown });
  readonly status: number;
  readonly code: string;
  readonly param: string | null;
}

export interface ServerSentEvent {
  type: string;
  data: string;
}

export class EventParser {
  push(text: string): ServerSentEvent[];
}

export interface EventOptions {
  onText?: (bytes: number) => void;
}

export function plainEvents(body: AsyncIterable<Uint8Array>, options?: EventOptions): AsyncGenerator<ServerSentEvent>;
export function decodedEvents(
  body: AsyncIterable<Uint8Array>,
  options?: EventOptions & { dictionary?: Uint8Array },
): AsyncGenerator<ServerSentEvent>;

export class IdleWriter<Item> {
  constructor(write: (items: Item[]) => void);
  add(item: Item): void;
  flush(): void;
}

export function warmUp(): Promise<void>;

export class ZstdDecoder {
  private constructor();
  static create(dictionary?: Uint8Array): Promise<ZstdDecoder>;
  readonly isComplete: boolean;
  decode(bytes: Uint8Array): Uint8Array;
  close(): void;
}
