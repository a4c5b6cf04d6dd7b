// Labels of texts, and after how many layers the model was sure.

import { announce, byId, clearEmpty, element, meter, milliseconds, problem, show } from "./page.js";

const SHOWN_LABELS = 4;

export function startClassify(client, settings) {
  async function label() {
    const texts = byId("texts").value.split("\n").map((text) => text.trim()).filter((text) => text !== "");
    if (texts.length === 0 || byId("label").disabled) return;
    byId("label").disabled = true;
    clearEmpty("empty-classify");
    byId("results").setAttribute("aria-busy", "true");
    try {
      const { answer, level, took } = await classify(client, settings(), texts);
      byId("results").replaceChildren(...answer.data.map((result, index) => row(texts[index], result)));
      showFigures(answer, took);
      byId("level").textContent = level ?? "–";
      announce(answer.data.map((result) => result.label ?? "words labelled").join(", "));
    } catch (error) {
      byId("results").replaceChildren(problem(error));
    } finally {
      byId("results").setAttribute("aria-busy", "false");
      byId("label").disabled = false;
    }
  }

  byId("classify-form").addEventListener("submit", (event) => {
    event.preventDefault();
    label();
  });
  byId("texts").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    label();
  });
}

async function classify(client, { model, headers, earlyExit }, texts) {
  const body = earlyExit ? { model, input: texts } : { model, input: texts, early_exit: false };
  const startedAt = performance.now();
  const response = await fetch(new URL("classify", client.baseUrl), {
    method: "POST",
    headers: { "Content-Type": "application/json", ...client.authorization, ...headers },
    body: JSON.stringify(body),
  });
  const answer = await response.json();
  const took = performance.now() - startedAt;
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { code: answer.error.code });
  return { answer, level: response.headers.get("X-Sixfold-Level"), took };
}

function row(text, result) {
  const box = element("article", "result", element("p", "text", text));
  if (result.tokens !== undefined) box.append(words(result.tokens));
  else box.append(scores(result));
  const chips = element("p", "chips");
  if (result.layers !== null) {
    const layers = `${result.layers} layers`;
    chips.append(element("span", result.exited ? "chip good" : "chip", result.exited ? `left after ${layers}` : `all ${layers}`));
  }
  if (result.sanitized) chips.append(element("span", "chip", "cleaned"));
  if (result.escalated) chips.append(element("span", "chip", "asked the generating model"));
  if (chips.childElementCount > 0) box.append(chips);
  if (result.answer) box.append(element("p", "note", result.answer));
  if (result.escalation_error) box.append(problem(result.escalation_error));
  return box;
}

function scores({ scores }) {
  const list = element("div", "scores");
  for (const { label, score } of scores.slice(0, SHOWN_LABELS)) {
    const share = `${(score * 100).toFixed(1)} %`;
    list.append(element("div", "score", element("span", "", label), meter(score, `${label}: ${share}`), element("span", "share", share)));
  }
  return list;
}

function words(tokens) {
  const named = tokens.filter((word) => !/^(o|other)$/i.test(word.label));
  const chips = named.map((word) => element("span", "chip good", `${word.text} · ${word.label}`));
  return element("p", "chips", ...(chips.length > 0 ? chips : [element("span", "chip", "nothing found")]));
}

function showFigures({ data, usage }, took) {
  const counted = data.map((result) => result.layers).filter((layers) => layers !== null);
  const mean = counted.reduce((sum, layers) => sum + layers, 0) / counted.length;
  show({
    took: milliseconds(took),
    exits: `${data.filter((result) => result.exited).length} of ${data.length}`,
    layers: counted.length === 0 ? "–" : `${mean.toFixed(mean % 1 === 0 ? 0 : 1)} each`,
    read: String(usage.prompt_tokens),
  });
}
