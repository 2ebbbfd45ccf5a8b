// Hover readout of report charts (also by arrow keys), and legends that toggle curves.
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".plot");
  const groups = figure.querySelectorAll("g.series");
  const keys = figure.querySelectorAll(".legend button");
  const make = (name) => Object.assign(document.createElement("div"), { className: name, hidden: true });
  const cursor = plot.appendChild(make("cursor"));
  const readout = plot.appendChild(make("readout"));
  readout.setAttribute("aria-live", "polite");

  const bend = (value, log) => (log ? Math.log(value) : value);
  const place = (value, [low, high, log]) =>
    (bend(value, log) - bend(low, log)) / (bend(high, log) - bend(low, log));
  const text = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
      if (size >= Math.max(unit, 1e4)) return +(value / unit).toPrecision(4) + name;
    return size < 1e-3 ? String(+value.toPrecision(4)) : (+value.toPrecision(4)).toLocaleString("en");
  };
  const nearest = (xs, share) => {
    let best = 0;
    xs.forEach((x, i) => {
      const off = (j) => Math.abs(place(xs[j], chart.x) - share);
      if (off(i) < off(best)) best = i;
    });
    return best;
  };

  let at = null; // position of the readout, as a fraction of the width
  function show(share) {
    const shown = chart.series.filter((one, i) => one.x.length && !groups[i].classList.contains("off"));
    if (!shown.length) return hide();
    const picks = shown.map((one) => [one, nearest(one.x, share)]);
    const gap = ([one, i]) => Math.abs(place(one.x[i], chart.x) - share);
    const [lead, index] = picks.reduce((a, b) => (gap(b) < gap(a) ? b : a));
    at = place(lead.x[index], chart.x);
    const smooth = document.getElementById("smooth")?.checked ?? true;
    const rows = picks.map(([one, i]) => {
      const row = document.createElement("div");
      const name = row.appendChild(document.createElement("i"));
      name.className = one.colour;
      name.textContent = one.name;
      const far = one.x[i] === lead.x[index] ? "" : ` at ${text(one.x[i])}`;
      const value = smooth && one.smooth ? `${text(one.smooth[i])} (${text(one.y[i])})` : text(one.y[i]);
      const band = one.low ? ` [${text(one.low[i])}, ${text(one.high[i])}]` : "";
      row.append(value + band + far);
      return row;
    });
    const step = lead.step ? `step ${lead.step[index].toLocaleString("en")}` : "";
    const where = chart.label === "steps" && step ? step : `${text(lead.x[index])} ${chart.label}${step && ", " + step}`;
    readout.replaceChildren(where, ...rows);
    cursor.hidden = readout.hidden = false;
    cursor.style.left = `${100 * at}%`;
    const width = plot.clientWidth, room = at * width + 12 + readout.offsetWidth;
    const left = room > width ? at * width - 12 - readout.offsetWidth : at * width + 12;
    readout.style.left = `${Math.max(0, Math.min(left, width - readout.offsetWidth))}px`;
  }
  function hide() {
    cursor.hidden = readout.hidden = true;
    at = null;
  }
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show((event.clientX - box.left) / box.width);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
    if (event.key === "Escape") return hide();
    if (!way) return;
    event.preventDefault();
    const from = at ?? (way > 0 ? 0 : 1);
    for (let share = from + way; share > -0.02 && share < 1.02; share += way) {
      show(share);
      if (at !== from) break; // sparse curves: continue to the next point
    }
  });
  keys.forEach((key, i) =>
    key.addEventListener("click", () => {
      const off = groups[i].classList.toggle("off");
      key.setAttribute("aria-pressed", String(!off));
    }),
  );
}
