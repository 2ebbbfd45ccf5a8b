// Top-k selection of the indexers, load of the experts, MTP acceptance rate.

import { get, h, link, note, section, select, short, tiles } from "./dom.js";
import { colour, draw, heat, plain } from "./plot.js";

export async function show(page, query) {
  const { run } = query;
  const found = await get("/api/network", { run });
  page.classList.add("wide");
  page.append(h("h1", {}, "Network"));
  if (!found.rows.length) page.append(note(`No network data: run paddock look ${run}`));
  if (found.expert_imbalance.length) {
    const imbalance = h("div");
    page.append(section("Expert imbalance", note("Max load / mean load in the worst layer of each step; 1: balanced."), imbalance));
    await draw(imbalance, [{ type: "scatter", mode: "lines", x: found.expert_imbalance.map(([step]) => step), y: found.expert_imbalance.map(([, value]) => value), line: { color: colour("c0"), width: 1.5 }, hovertemplate: "%{y:.3g}<extra>step %{x}</extra>" }],
      { xaxis: { title: { text: "steps" } }, yaxis: { title: { text: "max load / mean load" } } }, { high: 220 });
  }
  if (!found.rows.length) return;
  const row = found.rows.find((one) => String(one.step) === query.step) ?? found.rows.at(-1);
  const layers = row.indexer ?? [];
  const layer = layers.find((one) => String(one.layer) === query.layer) ?? layers[0];
  const go = (change) => { location.hash = link("network", { ...query, ...change }); };
  page.append(h("div", { class: "choices" },
    select("after step", found.rows.map((one) => [one.step, short(one.step)]), row.step, (step) => go({ step })),
    layers.length ? select("layer", layers.map((one) => [one.layer, String(one.layer)]), layer.layer, (value) => go({ layer: value })) : null));
  if (layer) await topk(page, row, layer);
  else page.append(section("Indexer", note("This model has no indexer, or the text is so short that every key is selected.")));
  await expertLoad(page, row);
  if (row.acceptance_rate?.length) {
    const drafts = h("div");
    page.append(section("MTP acceptance rate by depth", note("Greedy decoding; each depth is conditional on acceptance at all smaller depths."), drafts));
    await draw(drafts, [{ type: "bar", x: row.acceptance_rate.map((_, i) => String(i + 1)), y: row.acceptance_rate, width: row.acceptance_rate.map(() => 0.5), marker: { color: colour("c2") }, hovertemplate: "%{y:.3f}<extra></extra>" }],
      { xaxis: { title: { text: "depth" }, type: "category" }, yaxis: { title: { text: "acceptance rate" }, range: [0, 1.05] } }, { high: 220 });
  }
}

// One bit per query and key, row by row, as base64.
function matrix(packed, queries, keys) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  return Array.from({ length: queries }, (_, q) => Array.from({ length: keys }, (_, k) => {
    const bit = q * keys + k;
    return (bytes[bit >> 3] >> (7 - (bit & 7))) & 1;
  }));
}

async function topk(page, row, layer) {
  const tokens = row.tokens, keys = tokens.length, queries = layer.queries;
  const selected = matrix(layer.selected, queries.length, keys);
  // null: after the query, 1: not selected, 2: selected
  const z = selected.map((line, q) => line.map((bit, k) => (k > queries[q] ? null : bit ? 2 : 1)));
  const often = Array.from({ length: keys }, (_, k) => selected.reduce((sum, line, q) => sum + (k <= queries[q] ? line[k] : 0), 0) / Math.max(1, queries.filter((q) => q >= k).length));
  const place = h("div"), text = h("div", { class: "tokens picked" }), which = h("p", { class: "lead" });
  page.append(section(`Selected (top-k) tokens, layer ${layer.layer}`,
    note(`Rows: queries. Columns: keys. At most ${layer.topk} keys are selected; earlier queries, which attend to all keys, are not shown. Click a row to mark its keys in the text below.`), place, which, text));
  const name = (i) => JSON.stringify(tokens[i]);
  const spans = tokens.map((piece, i) => h("span", { title: `${i}` }, piece === "" ? "·" : piece.replaceAll("\n", "↵\n")));
  text.append(...spans);
  function mark(q) {
    which.textContent = q === null ? "All queries; stronger colour: selected more often." : `Query ${queries[q]} ${name(queries[q])}: ${selected[q].reduce((a, b) => a + b, 0)} keys selected.`;
    spans.forEach((one, k) => {
      const share = q === null ? often[k] : selected[q][k];
      one.style.setProperty("background", `color-mix(in oklab, var(--c0) ${Math.round(60 * share)}%, transparent)`);
      one.classList.toggle("query", q !== null && queries[q] === k);
      one.classList.toggle("later", q !== null && k > queries[q]);
    });
  }
  mark(null);
  await draw(place, [{
    type: "heatmap", z, zmin: 0, zmax: 2, showscale: false, colorscale: [[0, colour("sheet")], [0.5, colour("sheet")], [1, colour("heat")]], xgap: keys < 200 ? 1 : 0, ygap: queries.length < 120 ? 1 : 0,
    text: z.map((line, q) => line.map((value, k) => (value === null ? "" : plain(`query ${queries[q]} ${name(queries[q])}, key ${k} ${name(k)}`) + (value === 2 ? ": selected" : ": not selected")))), hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
  }], {
    xaxis: { title: { text: "key" }, showgrid: false, constrain: "domain" },
    yaxis: { title: { text: "query" }, autorange: "reversed", showgrid: false, tickvals: ticks(queries.length), ticktext: ticks(queries.length).map((i) => String(queries[i])) },
  }, { high: Math.max(260, Math.min(620, 90 + 4 * queries.length)), clicked: (point) => mark(point.pointNumber[0]) });
}

const ticks = (count) => Array.from({ length: Math.min(count, 8) }, (_, i) => Math.floor((i * (count - 1)) / Math.max(1, Math.min(count, 8) - 1)));

async function expertLoad(page, row) {
  const layers = row.experts ?? [];
  if (!layers.length) { page.append(section("Expert load", note("This model has no experts."))); return; }
  const shares = layers.map(({ expert_load: load }) => { const mean = load.reduce((a, b) => a + b, 0) / load.length || 1; return load.map((one) => one / mean); });
  const busiest = shares.map((line) => Math.max(...line)), idle = shares.reduce((sum, line) => sum + line.filter((v) => v === 0).length, 0);
  const place = h("div");
  page.append(section("Expert load", note("Expert load: tokens / layer mean, for the text above."),
    tiles([["MoE layers", String(layers.length)], ["max load", `${short(Math.max(...busiest), 3)} x`, "layer mean"], ["unused", String(idle), `of ${shares.length * shares[0].length} experts`]]), place));
  await draw(place, [{
    type: "heatmap", z: shares, y: layers.map((one) => `layer ${one.layer}`), x: shares[0].map((_, i) => i), colorscale: heat(), zmin: 0, zmax: Math.max(2, ...busiest), xgap: 1, ygap: 1,
    customdata: layers.map((one) => one.expert_load), hovertemplate: "%{y}, expert %{x}<br>%{customdata} tokens, %{z:.2f} x layer mean<extra></extra>", colorbar: { thickness: 10, outlinewidth: 0 },
  }], { xaxis: { title: { text: "expert" }, showgrid: false, dtick: shares[0].length <= 32 ? 1 : null }, yaxis: { showgrid: false } }, { high: 90 + 34 * layers.length });
}
