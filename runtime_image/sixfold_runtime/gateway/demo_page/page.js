// Small things that both halves of the page need.

export const byId = (id) => document.getElementById(id);

/** An element with a class and children: strings become text, never markup. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

export function option(value, label = value) {
  return new Option(label, value);
}

export function meter(share, label) {
  const made = document.createElement("meter");
  made.max = 1;
  made.value = share;
  made.setAttribute("aria-label", label);
  return made;
}

export function problem(error) {
  const box = element("div", "problem", error.message || String(error));
  if (error.code) box.append(" ", element("code", "", error.code));
  box.setAttribute("role", "alert");
  return box;
}

/** Keep the end in sight, unless the reader scrolled away from it. */
export function follow(log, change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

export function show(figures) {
  for (const [id, text] of Object.entries(figures)) byId(id).textContent = text;
}

export function announce(text) {
  byId("status").textContent = text;
}

export function milliseconds(value) {
  if (value === null) return "–";
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} kB` : `${(value / 1e6).toFixed(2)} MB`;
}

/** Of a log of messages: what stands there before the first one goes. */
export function clearEmpty(id) {
  byId(id)?.remove();
}
