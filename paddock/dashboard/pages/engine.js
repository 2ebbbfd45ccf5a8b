// Queue, pages, prefix cache and drafts: as a run wrote them down, and of a server that is watched.

import { get, h, note, section, short, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  page.append(h("h1", {}, "Engine"));
  const looks = [];
  const { engine } = await get("/api/runs");
  if (engine) {
    const place = page.appendChild(h("div"));
    looks.push(() => watched(place));
  }
  if (query.run) {
    const place = page.appendChild(h("div")), tree = page.appendChild(h("div"));
    looks.push(() => written(place, query));
    await prefixes(tree, query).catch((error) => tree.append(section("Radix tree", note(error.message))));
  } else if (!engine) page.append(note("No engine is watched: start with --engine URL, or choose a run."));
  const look = async () => { for (const one of looks) await one(); };
  await look();
  return look;
}

// Between two rows, of what only grows.
const grown = (rows, name) => rows.slice(1).map((row, i) => Math.max(0, (row[name] ?? 0) - (rows[i][name] ?? 0)));
const share = (top, bottom) => top.map((value, i) => (bottom[i] ? value / bottom[i] : null));

async function charts(place, rows, names) {
  const low = rows[0].time, x = rows.map((row) => row.time - low), later = x.slice(1);
  const seconds = later.map((value, i) => value - x[i]);
  const made = {
    Queue: [["running", x, rows.map((r) => r[names.running])], ["waiting", x, rows.map((r) => r[names.waiting])]],
    "Page pool": names.pages(rows).map(([name, values]) => [name, x, values]),
    "Prefix cache": [["hit rate", later, share(grown(rows, names.hit), grown(rows, names.asked))]],
    Speed: [["tokens a second", later, share(grown(rows, names.generated), seconds)]],
  };
  const units = { Queue: "requests", "Page pool": names.unit, "Prefix cache": "of prompt tokens", Speed: "tokens a second" };
  for (const [title, traces] of Object.entries(made)) {
    const id = `chart-${title.replaceAll(" ", "-")}`;
    let chart = place.querySelector(`.${id}`);
    if (!chart) place.append(h("figure", {}, h("figcaption", {}, h("b", {}, title)), (chart = h("div", { class: id }))));
    await draw(chart, traces.map(([name, at, y], i) => ({ type: "scatter", mode: "lines", name, x: at, y, line: { color: colour(`c${i % 4}`), width: 1.75, shape: title === "Queue" ? "hv" : "linear" }, hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>" })), {
      showlegend: traces.length > 1, hovermode: "x unified", xaxis: { title: { text: "seconds" } },
      yaxis: { title: { text: units[title] }, rangemode: "tozero", ...(title === "Prefix cache" ? { range: [0, 1.02] } : {}) },
    }, { high: 230 });
  }
}

function acceptance(place, made) {
  let box = place.querySelector(".acceptance");
  if (!box) place.append((box = h("div", { class: "acceptance" })));
  if (!made.length) {
    box.replaceChildren(section("Drafts", note("No drafts were made, or their positions were not written down.")));
    return;
  }
  if (!box.firstChild) box.append(section("Drafts", note("How often the draft at each position was kept, of those that were made."), h("div", { class: "chart" })));
  return draw(box.querySelector(".chart"), [{ type: "bar", x: made.map(([name]) => name), y: made.map(([, value]) => value), width: made.map(() => 0.5), marker: { color: colour("c2") }, text: made.map(([, value]) => value.toFixed(3)), hovertemplate: "%{y:.4f}<extra></extra>" }],
    { xaxis: { title: { text: "position of the draft" }, type: "category" }, yaxis: { title: { text: "kept" }, range: [0, 1.05] } }, { high: 220 });
}

async function written(place, query) {
  const { rows } = await get("/api/engine", query);
  const whole = rows.filter((row) => Number.isFinite(row.time));
  if (whole.length < 2) {
    place.replaceChildren(section("While it ran", note("This run wrote nothing down about its engine (engine.jsonl).")));
    return;
  }
  const last = whole.at(-1);
  if (!place.firstChild) place.append(section("While it ran", h("div", { class: "facts" }), h("div", { class: "grid" })));
  place.querySelector(".facts").replaceChildren(tiles([
    ["requests", short(last.requests)], ["tokens written", short(last.generated_tokens)],
    ["from the prefix cache", `${((100 * last.hit_tokens) / Math.max(1, last.asked_tokens)).toFixed(1)} %`, "of prompt tokens"],
    ["pages", short(last.pages_total), `${last.page_tokens} tokens each`], ["dropped", short(last.evicted_tokens), "tokens of the prefix cache"],
    ["had to wait again", short(last.retractions), "requests"], ["weights", `version ${last.version}`],
  ]));
  await charts(place.querySelector(".grid"), whole, {
    running: "running", waiting: "waiting", hit: "hit_tokens", asked: "asked_tokens", generated: "generated_tokens", unit: "pages",
    pages: (all) => [["used", all.map((r) => r.pages_used)], ["prefix cache", all.map((r) => r.pages_cached)], ["of them spare", all.map((r) => r.pages_spare)]],
  });
  const made = last.drafts_at ?? [];
  const total = last.drafts_proposed ? [["all", last.drafts_accepted / last.drafts_proposed]] : [];
  await acceptance(place, made.length ? made.map(([tried, kept], i) => [String(i + 1), kept / Math.max(1, tried)]) : total);
}

async function watched(place) {
  const { url, rows, wrong } = await get("/api/engine/live");
  if (!place.firstChild) place.append(section(`Now: ${url}`, h("p", { class: "note" }), h("div", { class: "facts" }), h("div", { class: "grid" })));
  place.querySelector(".note").textContent = wrong;
  if (!rows.length) return;
  const last = rows.at(-1);
  place.querySelector(".facts").replaceChildren(tiles([
    ["running", short(last.num_running_reqs)], ["waiting", short(last.num_queue_reqs)],
    ["cache in use", `${(100 * last.token_usage).toFixed(1)} %`, `of ${short(last.max_total_num_tokens)} tokens`],
    ["from the prefix cache", `${(100 * last.cache_hit_rate).toFixed(1)} %`, "of prompt tokens, ever"],
    ["tokens a step", short(last.spec_accept_length, 3), `${(100 * last.spec_accept_rate).toFixed(0)} % of drafts kept`], ["weights", `version ${last.weight_version}`],
  ]));
  if (rows.length < 2) return;
  await charts(place.querySelector(".grid"), rows, {
    running: "num_running_reqs", waiting: "num_queue_reqs", hit: "cached_tokens", asked: "prompt_tokens", generated: "generation_tokens", unit: "share",
    pages: (all) => [["in use", all.map((r) => r.token_usage)]],
  });
  const kept = Object.entries(last).filter(([name]) => name.startsWith("spec_accept_position.")).map(([name, value]) => [name.split(".")[1], value]);
  await acceptance(place, kept.length ? kept : last.spec_accept_rate ? [["all", last.spec_accept_rate]] : []);
}

async function prefixes(place, query) {
  const found = await get("/api/prefixes", query);
  const picture = h("div");
  const spared = 1 - found.kept / Math.max(1, found.whole);
  place.append(section("Radix tree", note(`The newest ${found.attempts} attempts of ${found.groups} groups: ${short(found.whole)} tokens, ${short(found.kept)} of them once what they share is stored once (${(100 * spared).toFixed(1)} % spared). Width: how many attempts pass; a click goes deeper.`), picture));
  if (!found.attempts) return;
  await draw(picture, [{
    type: "icicle", branchvalues: "total", ids: found.nodes.map((n) => String(n.id)), parents: found.nodes.map((n) => (n.parent === null ? "" : String(n.parent))),
    labels: found.nodes.map((n) => (n.parent === null ? "all" : plain(n.text.trim().slice(0, n.attempts > found.attempts / 2 ? 80 : 14) || "·"))), values: found.nodes.map((n) => n.attempts),
    customdata: found.nodes.map((n) => [n.tokens, n.attempts, plain(n.text)]), tiling: { orientation: "v" }, maxdepth: 5, pathbar: { visible: true }, textposition: "middle left",
    marker: { colors: found.nodes.map((n) => n.attempts), colorscale: [[0, colour("sheet")], [1, colour("c0")]], line: { color: colour("paper"), width: 1 } },
    hovertemplate: "%{customdata[2]}<br>%{customdata[0]} tokens, %{customdata[1]} attempts<extra></extra>",
  }], { margin: { l: 4, r: 4, t: 24, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } }, { high: 420 });
}
