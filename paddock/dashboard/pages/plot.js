// Plotly charts in the colours of the page, light and dark.

let loading = null;
function plotly() {
  loading ??= new Promise((done, fail) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = () => fail(new Error("/plotly.js could not be loaded"));
    document.head.append(script);
  });
  return loading;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const series = (number) => ({
  color: colour(`c${number % 4}`),
  dash: ["solid", "dash", "dot"][Math.floor(number / 4) % 3],
});
// From background to full colour.
export const heat = () => [[0, colour("sheet")], [1, colour("heat")]];

// Plotly interprets some markup in names and labels; text of a run is escaped.
export const plain = (text) =>
  String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("\n", " ");

const axis = () => ({
  gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("soft"), tickcolor: colour("soft"),
  automargin: true, title: { font: { size: 12, color: colour("soft") }, standoff: 8 },
});

function merged(base, more) {
  const made = { ...base };
  for (const [key, value] of Object.entries(more ?? {}))
    made[key] = value && typeof value === "object" && !Array.isArray(value) ? merged(base[key] ?? {}, value) : value;
  return made;
}

export async function draw(place, traces, layout = {}, { high = 300, clicked } = {}) {
  const Plotly = await plotly();
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: high,
    font: { family: "system-ui, sans-serif", size: 12, color: colour("ink") },
    margin: { l: 52, r: 16, t: 12, b: 40 }, hovermode: "closest", bargap: 0.06,
    hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("soft"), font: { color: colour("ink") }, align: "left" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: colour("ink") } },
    colorway: [0, 1, 2, 3].map((i) => colour(`c${i}`)), xaxis: axis(), yaxis: axis(),
  };
  for (const name of ["xaxis2", "yaxis2"]) if (layout[name]) base[name] = axis();
  if (!place.isConnected) return;
  const config = { displayModeBar: false, responsive: true, doubleClick: "reset" };
  await Plotly.react(place, traces, merged(base, layout), config);
  if (clicked && !place.dataset.clickable) {
    place.dataset.clickable = "yes";
    place.on("plotly_click", (event) => clicked(event.points[0]));
  }
}
