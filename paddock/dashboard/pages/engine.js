// Queue, KV cache, prefix cache and speculative decoding: as recorded by a run, and of a live engine.

import { get, h, note, section, short, tiles } from "./dom.js";
import { colour, draw, plain } from "./plot.js";

export async function show(page, query) {
  page.append(h("h1", {}, "Engine"));
  const refreshes = [];
  const { engine } = await get("/api/runs");
  if (engine) {
    const place = page.appendChild(h("div"));
    refreshes.push(() => live(place));
  }
  if (query.run) {
    const place = page.appendChild(h("div")), tree = page.appendChild(h("div"));
    refreshes.push(() => recorded(place, query));
    await prefixTree(tree, query).catch((error) => tree.append(section("Prefix tree", note(error.message))));
  } else if (!engine) page.append(note("No live engine: start with --engine-url URL, or select a run."));
  const refresh = async () => { for (const one of refreshes) await one(); };
  await refresh();
  return refresh;
}

// Increase of a counter between two rows.
const increase = (rows, name) => rows.slice(1).map((row, i) => Math.max(0, (row[name] ?? 0) - (rows[i][name] ?? 0)));
const ratio = (top, bottom) => top.map((value, i) => (bottom[i] ? value / bottom[i] : null));

async function charts(place, rows, names) {
  const low = rows[0].time, x = rows.map((row) => row.time - low), later = x.slice(1);
  const seconds = later.map((value, i) => value - x[i]);
  const made = {
    Queue: [["running", x, rows.map((r) => r[names.running])], ["waiting", x, rows.map((r) => r[names.waiting])]],
    "KV cache pages": names.pages(rows).map(([name, values]) => [name, x, values]),
    "Prefix cache": [["hit rate", later, ratio(increase(rows, names.hit), increase(rows, names.queried))]],
    Throughput: [["output tok/s", later, ratio(increase(rows, names.generated), seconds)]],
  };
  const units = { Queue: "requests", "KV cache pages": names.unit, "Prefix cache": "hit rate", Throughput: "output tok/s" };
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
    box.replaceChildren(section("Speculative decoding", note("No speculative decoding, or positions not recorded.")));
    return;
  }
  if (!box.firstChild) box.append(section("Speculative decoding", note("Acceptance rate by draft position."), h("div", { class: "chart" })));
  return draw(box.querySelector(".chart"), [{ type: "bar", x: made.map(([name]) => name), y: made.map(([, value]) => value), width: made.map(() => 0.5), marker: { color: colour("c2") }, text: made.map(([, value]) => value.toFixed(3)), hovertemplate: "%{y:.4f}<extra></extra>" }],
    { xaxis: { title: { text: "draft position" }, type: "category" }, yaxis: { title: { text: "acceptance rate" }, range: [0, 1.05] } }, { high: 220 });
}

async function recorded(place, query) {
  const { rows } = await get("/api/engine", query);
  const whole = rows.filter((row) => Number.isFinite(row.time));
  if (whole.length < 2) {
    place.replaceChildren(section("During the run", note("No engine metrics in this run (engine.jsonl not found).")));
    return;
  }
  const last = whole.at(-1);
  if (!place.firstChild) place.append(section("During the run", h("div", { class: "facts" }), h("div", { class: "grid" })));
  place.querySelector(".facts").replaceChildren(tiles([
    ["requests", short(last.requests)], ["output tokens", short(last.generated_tokens)],
    ["prefix-cache hit rate", `${((100 * last.prefix_cache_hit_tokens) / Math.max(1, last.prefix_cache_query_tokens)).toFixed(1)} %`, "of prompt tokens"],
    ["KV cache pages", short(last.pages_total), `${last.page_size} tokens each`], ["evicted", short(last.evicted_tokens), "prefix-cache tokens"],
    ["preempted requests", short(last.preemptions)], ["weight version", String(last.version)],
  ]));
  await charts(place.querySelector(".grid"), whole, {
    running: "running", waiting: "waiting", hit: "prefix_cache_hit_tokens", queried: "prefix_cache_query_tokens", generated: "generated_tokens", unit: "pages",
    pages: (all) => [["used", all.map((r) => r.pages_used)], ["prefix cache", all.map((r) => r.pages_cached)], ["evictable", all.map((r) => r.pages_evictable)]],
  });
  const positions = last.draft_acceptance_per_position ?? [];
  const total = last.draft_tokens ? [["all", last.accepted_draft_tokens / last.draft_tokens]] : [];
  await acceptance(place, positions.length ? positions.map(([drafted, accepted], i) => [String(i + 1), accepted / Math.max(1, drafted)]) : total);
}

async function live(place) {
  const { url, rows, error } = await get("/api/engine/live");
  if (!place.firstChild) place.append(section(`Live engine: ${url}`, h("p", { class: "note" }), h("div", { class: "facts" }), h("div", { class: "grid" })));
  place.querySelector(".note").textContent = error;
  if (!rows.length) return;
  const last = rows.at(-1);
  place.querySelector(".facts").replaceChildren(tiles([
    ["running", short(last.num_running_reqs)], ["waiting", short(last.num_queue_reqs)],
    ["KV cache usage", `${(100 * last.token_usage).toFixed(1)} %`, `of ${short(last.max_total_num_tokens)} tokens`],
    ["prefix-cache hit rate", `${(100 * last.cache_hit_rate).toFixed(1)} %`, "of all prompt tokens"],
    ["accepted length", short(last.spec_accept_length, 3), `acceptance rate ${(100 * last.spec_accept_rate).toFixed(0)} %`], ["weight version", String(last.weight_version)],
  ]));
  if (rows.length < 2) return;
  await charts(place.querySelector(".grid"), rows, {
    running: "num_running_reqs", waiting: "num_queue_reqs", hit: "cached_tokens", queried: "prompt_tokens", generated: "generation_tokens", unit: "usage",
    pages: (all) => [["in use", all.map((r) => r.token_usage)]],
  });
  const positions = Object.entries(last).filter(([name]) => name.startsWith("spec_accept_position.")).map(([name, value]) => [name.split(".")[1], value]);
  await acceptance(place, positions.length ? positions : last.spec_accept_rate ? [["all", last.spec_accept_rate]] : []);
}

async function prefixTree(place, query) {
  const found = await get("/api/prefix_tree", query);
  const chart = h("div");
  const saved = 1 - found.unique_tokens / Math.max(1, found.total_tokens);
  place.append(section("Prefix tree", note(`The newest ${found.rollouts} rollouts of ${found.groups} groups: ${short(found.total_tokens)} tokens, ${short(found.unique_tokens)} with shared prefixes stored once (${(100 * saved).toFixed(1)} % saved by prefix sharing). Width: number of rollouts. Click a node to zoom in.`), chart));
  if (!found.rollouts) return;
  await draw(chart, [{
    type: "icicle", branchvalues: "total", ids: found.nodes.map((n) => String(n.id)), parents: found.nodes.map((n) => (n.parent === null ? "" : String(n.parent))),
    labels: found.nodes.map((n) => (n.parent === null ? "all" : plain(n.text.trim().slice(0, n.rollouts > found.rollouts / 2 ? 80 : 14) || "·"))), values: found.nodes.map((n) => n.rollouts),
    customdata: found.nodes.map((n) => [n.tokens, n.rollouts, plain(n.text)]), tiling: { orientation: "v" }, maxdepth: 5, pathbar: { visible: true }, textposition: "middle left",
    marker: { colors: found.nodes.map((n) => n.rollouts), colorscale: [[0, colour("sheet")], [1, colour("c0")]], line: { color: colour("paper"), width: 1 } },
    hovertemplate: "%{customdata[2]}<br>%{customdata[0]} tokens, %{customdata[1]} rollouts<extra></extra>",
  }], { margin: { l: 4, r: 4, t: 24, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } }, { high: 420 });
}
