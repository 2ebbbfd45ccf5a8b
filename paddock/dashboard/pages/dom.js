// Elements, number formats and API requests. Content of a run is inserted as text, never as markup.

export function h(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, text] of Object.entries(value)) made.style.setProperty(name, text);
    else if (key in made && typeof made[key] === "boolean") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...inside.flat().filter((part) => part !== null && part !== undefined && part !== ""));
  return made;
}

// A number with few digits and a suffix.
export function short(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (value === 0) return "0"; // also -0
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (size >= Math.max(unit, 1e4)) return +(value / unit).toPrecision(digits) + name;
  return size < 1e-3 ? (+value.toPrecision(digits - 1)).toExponential() : value.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function span(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  const whole = Math.floor(seconds);
  if (whole < 60) return `${+seconds.toPrecision(3)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 2 * 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole / 3600) % 24} h`;
}

export const link = (page, query = {}) => {
  const parameters = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  return `#/${page}${parameters.size ? "?" + parameters : ""}`;
};

export const tiles = (facts) =>
  h("dl", { class: "tiles" }, facts.map(([name, value, remark]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, String(value), remark ? h("small", {}, remark) : null))));

export const table = (head, rows, textColumns = 1) =>
  h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { class: i < textColumns ? null : "number" }, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: i < textColumns ? null : "number" }, cell)))))));

export function select(name, options, chosen, change) {
  const made = h("select", { "aria-label": name, onchange: (event) => change(event.target.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen ?? "") }, text)));
  return h("label", { class: "choice" }, `${name} `, made);
}

export const section = (title, ...inside) => h("section", {}, h("h2", {}, title), ...inside);
export const note = (text) => h("p", { class: "lead" }, text);

export async function get(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [key, value] of Object.entries(query))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined && one !== "") parameters.append(key, one);
  const response = await fetch(`${path}${parameters.size ? "?" + parameters : ""}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `${path}: ${response.status}`);
  return body;
}
