// The chat: one streamed answer at a time, shown as it arrives, with what it cost.

import { IdleWriter } from "./stream-client/index.js";
import { announce, byId, bytes, clearEmpty, element, follow, milliseconds, problem, show } from "./page.js";

const FORMS = {
  identity: "plain events",
  gzip: "gzip",
  zstd: "zstd",
  dcz: "zstd with a dictionary",
  "sse-zstd": "zstd inside the events",
};

export function startChat(client, settings) {
  const empty = byId("empty");
  let messages = [];
  let conversation = newConversation();
  let running = null; // AbortController of the answer that is arriving

  async function send() {
    const text = byId("prompt").value.trim();
    if (text === "" || running !== null) return;
    byId("prompt").value = "";
    clearEmpty("empty");
    const turns = messages; // "New chat" may replace them meanwhile
    turns.push({ role: "user", content: text });
    addMessage("user", "You", text);
    const view = new AnswerView();
    running = new AbortController();
    setBusy(true);
    try {
      await answer(view, running.signal);
      view.end("");
      announce(`Answer complete. ${view.facts}`);
    } catch (error) {
      if (running.signal.aborted) {
        view.end("stopped");
        announce("Stopped.");
      } else {
        view.fail(error);
      }
    } finally {
      if (view.text !== "") turns.push({ role: "assistant", content: view.text });
      else turns.pop(); // templates want roles to take turns
      running = null;
      setBusy(false);
    }
  }

  async function answer(view, signal) {
    const { model, headers, maxTokens, temperature, speculative, reuse } = settings();
    const body = { model, messages, stream_options: { include_usage: true } };
    if (maxTokens >= 1) body.max_tokens = maxTokens;
    if (temperature >= 0) body.temperature = temperature;
    if (!speculative) body.speculative = false;
    if (!reuse) body.kv_cache_reuse = false;
    const options = { signal, headers: { ...headers, "X-Conversation-Id": conversation } };
    const stream = await client.stream("chat/completions", body, options);
    view.begin(stream);
    for await (const chunk of stream) view.add(chunk.choices?.[0]?.delta?.content ?? "");
    await stream.measureSent();
  }

  function setBusy(isBusy) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    if (hadFocus) byId(isBusy ? "stop" : "prompt").focus(); // a hidden button loses it to the top of the page
  }

  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    conversation = newConversation();
    byId("log").replaceChildren(empty);
    announce("New chat.");
    byId("prompt").focus();
  });
}

/** One answer on the page. */
class AnswerView {
  constructor() {
    this.text = "";
    this.facts = "";
    this._startedAt = performance.now();
    this._firstTokenMs = null;
    this._pieces = 0;
    this._stream = null;
    this._node = new Text();
    this._message = addMessage("assistant", "Model", this._node);
    this._message.setAttribute("aria-busy", "true");
    this._writer = new IdleWriter((parts) => {
      follow(byId("log"), () => this._node.appendData(parts.join("")));
      this._measure();
    });
  }

  begin(stream) {
    this._stream = stream;
    byId("level").textContent = Number.isNaN(stream.level) ? "–" : stream.level;
  }

  add(text) {
    if (text === "") return;
    this._firstTokenMs ??= performance.now() - this._startedAt;
    this._pieces += 1;
    this.text += text;
    this._writer.add(text);
  }

  end(remark) {
    this._writer.flush();
    this._message.setAttribute("aria-busy", "false");
    if (this._stream === null) {
      this._addFacts(remark);
      return;
    }
    const tokens = this._measure();
    const sent = this._stream.sentBytes;
    const parts = [remark, milliseconds(performance.now() - this._startedAt), `${tokens} tokens`];
    if (sent !== null && sent < this._stream.rawBytes) parts.push(`${ratio(this._stream)} smaller`);
    this.facts = parts.filter((part) => part !== "").join(" · ");
    this._addFacts(this.facts);
  }

  fail(error) {
    this._writer.flush();
    this._message.setAttribute("aria-busy", "false");
    follow(byId("log"), () => this._message.append(problem(error)));
  }

  _addFacts(text) {
    follow(byId("log"), () => this._message.append(element("p", "facts", text)));
  }

  /** Show what is known so far. Returns the number of tokens: pieces of text until the usage says it exactly. */
  _measure() {
    const stream = this._stream;
    const usage = stream.usage;
    const tokens = usage?.completion_tokens ?? this._pieces;
    const seconds = (performance.now() - this._startedAt - (this._firstTokenMs ?? 0)) / 1000;
    const sent = stream.sentBytes;
    show({
      ttfb: milliseconds(stream.firstByteMs),
      ttft: milliseconds(this._firstTokenMs),
      tokens: String(tokens),
      speed: tokens > 1 ? `${((tokens - 1) / seconds).toFixed(0)} / s` : "–",
      bytes: sent === null ? `${bytes(stream.rawBytes)} raw` : `${bytes(stream.rawBytes)} → ${bytes(sent)}, ${ratio(stream)}`,
      form: FORMS[stream.form] + (stream.form === "sse-zstd" && stream.usesDictionary ? ", with a dictionary" : ""),
      accepted: usage === null ? "–" : drafts(usage.completion_tokens_details ?? {}),
      cached: usage === null ? "–" : `${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens}`,
    });
    byId("saved").value = sent === null || stream.rawBytes === 0 ? 0 : Math.max(0, 1 - sent / stream.rawBytes);
    return tokens;
  }
}

function addMessage(kind, who, content) {
  const body = element("div", "text", content);
  const message = element("article", `message ${kind}`, element("h3", "who", `${who}:`), body);
  follow(byId("log"), () => byId("log").append(message));
  if (kind === "user") byId("log").scrollTop = byId("log").scrollHeight;
  return message;
}

function drafts({ accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 }) {
  return accepted + rejected === 0 ? "none" : `${accepted} of ${accepted + rejected}`;
}

function ratio(stream) {
  return stream.sentBytes > 0 ? `${(stream.rawBytes / stream.sentBytes).toFixed(1)}×` : "–";
}

/** 128 random bits. crypto.randomUUID is only there on secure origins. */
function newConversation() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
