// The page: its tabs, its settings, and what both of its halves share.

import { StreamClient } from "./stream-client/index.js";
import { startChat } from "./chat.js";
import { startClassify } from "./classify.js";
import { byId, option } from "./page.js";

const client = new StreamClient({ baseUrl: new URL("v1", document.baseURI) });
let models = [];

function settings() {
  client.apiKey = byId("key").value.trim(); // here and nowhere else: no storage, no cookie
  client.compression = byId("compression").value;
  const task = byId("task").value;
  return {
    model: byId("model").value,
    headers: task === "" ? {} : { "X-Task": task },
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    speculative: byId("speculative").checked,
    reuse: byId("reuse").checked,
    earlyExit: byId("early-exit").checked,
  };
}

async function loadModels() {
  settings();
  const note = byId("key-note");
  try {
    const response = await fetch(new URL("models", client.baseUrl), { headers: client.authorization });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    models = answer.data;
    note.textContent = "Kept in this page only; gone when you reload.";
  } catch (error) {
    models = [];
    note.textContent = `No models: ${error.message}`;
    byId("settings").open = true;
  }
  note.classList.toggle("wrong", models.length === 0);
  byId("model").replaceChildren(...models.map((model) => option(model.id)));
  listTasks();
}

function listTasks() {
  const isChat = selected() === "chat";
  const model = models.find((entry) => entry.id === byId("model").value);
  const tasks = (model?.tasks ?? []).filter((entry) => (entry.task === "Generation") === isChat);
  const before = byId("task").value;
  byId("task").replaceChildren(option("", "none"), ...tasks.map((entry) => option(entry.name)));
  byId("task").value = tasks.some((entry) => entry.name === before) ? before : "";
  byId("task").closest(".field").hidden = tasks.length === 0;
}

// tabs: arrow keys move between them, as https://www.w3.org/WAI/ARIA/apg/patterns/tabs/ has it
const tabs = [...document.querySelectorAll("[role=tab]")];

function selected() {
  return tabs.find((tab) => tab.getAttribute("aria-selected") === "true").id.replace("tab-", "");
}

function select(chosen) {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isChosen;
  }
  const name = selected();
  for (const field of document.querySelectorAll("[data-for]")) field.hidden = field.dataset.for !== name;
  for (const half of ["chat", "classify"]) byId(`measured-${half}`).hidden = half !== name;
  document.querySelector(".skip").href = name === "chat" ? "#prompt" : "#texts";
  listTasks();
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = tabs.at((index + step) % tabs.length);
    select(next);
    next.focus();
  });
});

byId("settings-form").addEventListener("submit", (event) => {
  event.preventDefault(); // Enter in a field; what changed is taken anyway
});
byId("key").addEventListener("change", loadModels);
byId("model").addEventListener("change", listTasks);
byId("settings").open = !matchMedia("(max-width: 60rem)").matches;
startChat(client, settings);
startClassify(client, settings);
select(tabs[0]);
loadModels();
// Not before the page can be used, and before the first answer.
client.warmUp().catch((error) => console.error(error));
