"use strict";
// The page's values are in `data`, as report/page_data.py makes them; what the reader chose is in `chosen`.
let data = JSON.parse(document.getElementById("data").textContent);
const chosen = { axis: "rounds", logX: false, logY: false, hidden: new Set(), sort: null, descending: true };
const DASHES = ["solid", "dash", "dashdot", "dot"];
const POLL_MILLISECONDS = 2000;

const words = (name) => name.replaceAll("_", " ");
const last = (values) => values[values.length - 1];
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(digits))) : value.toExponential(2);
}

// --- the runs' table -------------------------------------------------------------------------------------------------

function tableColumns() {
  const metric = (name) => ({ name: words(name), value: (run) => last(run.columns[name] ?? [null]) });
  const fixed = (name, value) => ({ name, value });
  return [
    { name: "run", value: (run) => run.label, text: true },
    ...data.metrics.filter((name) => !data.losses.includes(name)).map(metric),
    fixed("rounds", (run) => last(run.columns.rounds)),
    fixed("MB up", (run) => run.megabytes_up),
    fixed("MB down", (run) => run.megabytes_down),
    fixed("gradients", (run) => last(run.columns.gradients ?? [null])),
    fixed("second-order products", (run) => last(run.columns.second_order ?? [null])),
    fixed("seconds", (run) => last(run.columns.seconds)),
    { name: "status", value: (run) => run.status, text: true, status: true },
  ];
}

function showTable() {
  const columns = tableColumns();
  const order = data.runs.map((_, k) => k);
  const by = columns.find((column) => column.name === chosen.sort);
  if (by) {
    const sign = chosen.descending ? -1 : 1;
    const rank = (k) => by.value(data.runs[k]);
    const missing = (value) => value === null || value === undefined;
    order.sort((a, b) => {
      const [p, q] = [rank(a), rank(b)];
      if (missing(p) || missing(q)) return missing(p) - missing(q);
      return sign * (by.text ? p.localeCompare(q) : p - q);
    });
  }
  const head = columns.map((column) => {
    const sort = () => {
      chosen.descending = chosen.sort === column.name ? !chosen.descending : !column.text;
      chosen.sort = column.name;
      showTable();
    };
    const sorted = chosen.sort === column.name ? { "aria-sort": chosen.descending ? "descending" : "ascending" } : {};
    return element("th", { scope: "col", ...sorted }, element("button", { type: "button", onclick: sort }, column.name));
  });
  const body = order.map((k) => {
    const run = data.runs[k];
    const cells = columns.map((column) => {
      const value = column.value(run);
      const attributes = { "data-column": column.name, "data-value": value ?? "" };
      if (column.status) Object.assign(attributes, { class: `status ${run.status}`, title: run.reason });
      return element("td", attributes, column.text ? value : number(value));
    });
    return element("tr", { "data-run": k }, ...cells);
  });
  document.getElementById("runs").replaceChildren(
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body),
  );
}

// --- curves ----------------------------------------------------------------------------------------------------------

function look(k) {
  const colour = data.colours[k % data.colours.length];
  const dash = DASHES[Math.floor(k / data.colours.length) % DASHES.length];
  return { colour: colour === "#000000" ? colourOf("--ink") : colour, dash };
}

function transparent(colour, opacity) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}

function layout(horizontal, vertical, more = {}) {
  const axis = { gridcolor: colourOf("--line"), linecolor: colourOf("--line"), zeroline: false, automargin: true };
  return {
    margin: { l: 58, r: 14, t: 12, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colourOf("--ink"), family: "system-ui, sans-serif", size: 12 },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { namelength: -1 },
    xaxis: { ...axis, title: { text: horizontal, standoff: 8 } },
    yaxis: { ...axis, title: { text: vertical, standoff: 8 } },
    ...more,
  };
}

const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

function traces(metric) {
  return data.series.flatMap((series, k) => {
    if (chosen.hidden.has(series.label)) return [];
    const { colour, dash } = look(k);
    const line = { color: colour, width: 2, dash };
    const band = (series.bands[chosen.axis] ?? {})[metric];
    if (!band) {
      return series.runs.filter((r) => data.runs[r].columns[metric] && data.runs[r].columns[chosen.axis]).map((r) => {
        const columns = data.runs[r].columns;
        const name = series.runs.length > 1 ? data.runs[r].label : series.label;
        return { x: columns[chosen.axis], y: columns[metric], name, mode: "lines", line };
      });
    }
    const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, x: band.at, y: band.low },
      { ...edge, x: band.at, y: band.high, fill: "tonexty", fillcolor: transparent(colour, 0.2) },
      { x: band.at, y: band.mean, name: series.label, mode: "lines", line },
    ];
  });
}

function showCurves() {
  const place = (metric) => document.getElementById(`chart-${metric}`);
  const grids = { charts: data.metrics, diagnostics: data.diagnostics };
  document.getElementById("reported").hidden = !data.diagnostics.length;
  for (const [grid, names] of Object.entries(grids)) {
    for (const name of names.filter((name) => !place(name))) {  // all places first: they share the width
      const chart = element("div", { id: `chart-${name}`, class: "chart" });
      document.getElementById(grid).append(element("div", {}, element("h3", {}, words(name)), chart));
    }
  }
  const open = document.getElementById("reported").open;
  for (const metric of [...data.metrics, ...(open ? data.diagnostics : [])]) {
    const shown = layout(data.axes[chosen.axis], words(metric));
    if (chosen.logX) shown.xaxis.type = "log";
    if (chosen.logY) shown.yaxis.type = "log";
    Plotly.react(place(metric), traces(metric), shown, CONFIG);
  }
}

function showControls() {
  const axes = Object.entries(data.axes).map(([axis, name]) => {
    const choose = () => { chosen.axis = axis; showControls(); showCurves(); };
    const attributes = { type: "button", role: "radio", "aria-checked": chosen.axis === axis, "data-axis": axis, onclick: choose };
    return element("button", attributes, name);
  });
  document.getElementById("axes").replaceChildren(...axes);
  const entries = data.series.map((series, k) => {
    const toggle = () => {
      if (!chosen.hidden.delete(series.label)) chosen.hidden.add(series.label);
      showControls();
      showCurves();
    };
    const { colour, dash } = look(k);
    const pattern = { solid: "none", dash: "7 4", dashdot: "7 3 2 3", dot: "2 3" }[dash];
    const entry = element("button", { type: "button", "aria-pressed": !chosen.hidden.has(series.label), onclick: toggle });
    entry.innerHTML = `<svg viewBox="0 0 26 8"><path d="M0 4H26" stroke="${colour}" stroke-width="3" stroke-dasharray="${pattern}"/></svg>`;
    entry.append(series.label);
    return entry;
  });
  document.getElementById("legend").replaceChildren(...entries);
}

// --- sweeps ----------------------------------------------------------------------------------------------------------

function showSweeps() {
  const section = document.getElementById("sweeps");
  section.replaceChildren();
  if (!data.sweeps.length) return;
  section.append(element("h2", {}, "Sweeps"));
  section.append(element("p", {}, "The final mean over seeds, of the best cell if the grid has more than two names; × where a run diverged."));
  const grid = element("div", { class: "grid" });
  section.append(grid);
  for (const sweep of data.sweeps) {
    const map = {
      type: "heatmap", z: sweep.numbers, x: sweep.columns, y: sweep.rows, colorscale: "Cividis", xgap: 1, ygap: 1,
      text: sweep.numbers.map((row) => row.map((value) => number(value, 3))), texttemplate: "%{text}",
      hovertemplate: `${sweep.down} %{y}, ${sweep.across} %{x}: %{text}<extra></extra>`,
      colorbar: { thickness: 10, outlinewidth: 0, title: { text: words(sweep.metric), side: "right" } },
    };
    const failed = sweep.numbers.flatMap((row, r) => row.flatMap((value, c) => (value === null ? [[sweep.columns[c], sweep.rows[r]]] : [])));
    const crosses = {
      mode: "text", x: failed.map(([column]) => column), y: failed.map(([, row]) => row), text: failed.map(() => "×"),
      textfont: { color: colourOf("--wrong"), size: 18 }, hoverinfo: "skip",
    };
    const shown = layout(sweep.across, sweep.down);
    Object.assign(shown.xaxis, { type: "category", showgrid: false });
    Object.assign(shown.yaxis, { type: "category", showgrid: false, autorange: "reversed" });
    planned(grid, sweep.title, [map, crosses], shown, Math.max(250, 90 + 44 * sweep.rows.length));
  }
}

// --- what x says -----------------------------------------------------------------------------------------------------

const waiting = [];  // charts that have a place but are not drawn yet

function planned(into, name, chartTraces, chartLayout, height) {
  const chart = element("div", { class: "chart" });
  if (height) chart.style.height = `${height}px`;
  into.append(element("div", {}, element("h3", {}, name), chart));
  waiting.push(() => Plotly.newPlot(chart, chartTraces, chartLayout, CONFIG));
}

function drawPlanned() {
  for (const draw of waiting.splice(0)) draw();
}

function drawHistogram(into, name, { horizontal, vertical, edges, groups }) {
  const middle = edges.slice(1).map((edge, k) => (edges[k] + edge) / 2);
  const colours = [colourOf("--accent"), colourOf("--wrong")];
  const bars = Object.entries(groups).map(([group, y], k) => ({
    type: "bar", name: group, x: middle, y, width: edges[1] - edges[0], marker: { color: colours[k] ?? look(k).colour }, opacity: 0.65,
  }));
  const legend = { orientation: "h", x: 0, y: 1.16 };
  const shown = layout(horizontal, vertical, { barmode: "overlay", showlegend: true, legend });
  shown.margin.t = 34;
  planned(into, name, bars, shown);
}

function gallery(name, pictures) {
  const figures = pictures.map(({ image, caption, description, marked }) => {
    const picture = element("img", { src: image, alt: description, title: description });
    return element("figure", marked ? { class: "marked" } : {}, picture, caption);
  });
  return element("div", {}, element("h3", {}, name), element("div", { class: "pictures" }, ...figures));
}

function drawBars(into, title, ofRuns) {
  const bars = ofRuns.map(({ run, names, numbers }) => {
    const k = data.series.findIndex((series) => series.runs.includes(data.runs.indexOf(run)));
    return { type: "bar", name: run.label, x: names, y: numbers, marker: { color: look(k).colour } };
  });
  const shown = layout(ofRuns[0].horizontal, title, { barmode: "group" });
  Object.assign(shown.xaxis, { type: "category", dtick: 1 });
  planned(into, title, bars, shown);
}

function showLearned() {
  const section = document.getElementById("learned");
  section.replaceChildren();
  const sections = data.runs.flatMap((run) => (run.learned ?? []).map((one) => ({ run, key: `${one.heading}\n${one.text}`, ...one })));
  for (const key of new Set(sections.map((one) => one.key))) {
    const alike = sections.filter((one) => one.key === key);
    section.append(element("h2", {}, alike[0].heading), element("p", {}, alike[0].text));
    for (const { run, parts } of alike) {
      const grid = element("div", { class: "grid" });
      section.append(grid);
      const [histograms, galleries] = ["histogram", "gallery"].map((kind) => parts.filter((part) => part.kind === kind));
      for (const part of histograms) drawHistogram(grid, run.label, part);
      const label = histograms.length ? "" : `${run.label}: `;
      if (galleries.length) grid.append(element("div", {}, ...galleries.map((part) => gallery(label + part.title, part.pictures))));
    }
    const grid = element("div", { class: "grid" });
    section.append(grid);
    const bars = alike.flatMap(({ run, parts }) => parts.filter((part) => part.kind === "bars").map((part) => ({ run, ...part })));
    for (const title of new Set(bars.map((part) => part.title))) drawBars(grid, title, bars.filter((part) => part.title === title));
  }
}

// --- who holds what --------------------------------------------------------------------------------------------------

function showHoldings() {
  const section = document.getElementById("holdings");
  section.replaceChildren();
  if (data.holdings.length) section.append(element("h2", {}, "Who holds what"));
  for (const held of data.holdings) {
    if (data.holdings.length > 1) section.append(element("p", {}, `${held.task}: ${held.runs.join("; ")}`));
    const grid = element("div", { class: "grid" });
    section.append(grid);
    const scale = [[0, colourOf("--panel")], [1, colourOf("--accent")]];
    for (const [purpose, counts] of Object.entries(held.counts)) {
      const total = counts.flat().reduce((a, b) => a + b, 0);
      const few = counts.length <= 20 && held.classes.length <= 20;
      const map = {
        type: "heatmap", z: counts, x: held.classes, y: counts.map((_, m) => String(m)), colorscale: scale, zmin: 0, xgap: 1, ygap: 1,
        hovertemplate: "client %{y}, class %{x}: %{z}<extra></extra>", showscale: !few,
        text: counts.map((row) => row.map((n) => (few && n ? String(n) : ""))), texttemplate: "%{text}",
        colorbar: { thickness: 10, outlinewidth: 0, title: { text: "samples", side: "right" } },
      };
      const shown = layout("class", "client");
      Object.assign(shown.xaxis, { type: "category", showgrid: false });
      Object.assign(shown.yaxis, { type: "category", showgrid: false, autorange: "reversed", nticks: 20 });
      planned(grid, `${purpose}: ${number(total)} samples`, [map], shown, Math.min(620, Math.max(250, 70 + 26 * counts.length)));
    }
  }
}

// --- configuration ---------------------------------------------------------------------------------------------------

function settingsTable(names, runs) {
  const text = (value) => (value === null || value === undefined ? "–" : String(value));
  const head = element("tr", {}, element("th", {}, "setting"), ...runs.map((run) => element("th", { scope: "col" }, run.label)));
  const rows = names.map((name) => {
    const values = runs.map((run) => element("td", {}, text(run.configuration[name] ?? run.versions[name])));
    return element("tr", {}, element("th", { scope: "row" }, name), ...values);
  });
  const table = element("table", { class: "settings" }, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "wide" }, table);
}

function showConfiguration() {
  const section = document.getElementById("configuration");
  const open = new Set([...section.querySelectorAll("details[open]")].map((d) => d.id));
  section.replaceChildren(element("h2", {}, "Configuration"));
  if (data.differences.length) {
    const differ = element("details", { id: "differences", open: "" }, element("summary", {}, "what differs between the runs"));
    differ.append(settingsTable(data.differences, data.runs));
    section.append(differ);
  }
  data.runs.forEach((run, k) => {
    const names = [...Object.keys(run.configuration), ...Object.keys(run.versions)];
    const whole = element("details", { id: `whole-${k}` }, element("summary", {}, `${run.label}: everything (${run.folder})`));
    if (open.has(whole.id)) whole.open = true;
    whole.append(settingsTable(names, [run]));
    section.append(whole);
  });
}

// --- all of it -------------------------------------------------------------------------------------------------------

function showNotes() {
  const notes = [...data.notes, ...new Set(data.runs.flatMap((run) => [run.reason, ...run.caveats]).filter(Boolean))];
  document.getElementById("notes").replaceChildren(...notes.map((note) => element("p", { class: "note" }, note)));
}

function showWarnings() {
  const lists = data.runs.filter((run) => run.warnings.length).map((run) => {
    const lines = run.warnings.map((line) => element("li", {}, line));
    return element("div", { class: "note" }, element("h3", {}, run.label), element("ul", {}, ...lines));
  });
  document.getElementById("warnings").replaceChildren(...lists);
}

function show() {
  const going = data.runs.filter((run) => run.status === "unfinished").length;
  const counted = (n, name) => (n ? [`${n} ${name}${n === 1 ? "" : "s"}`] : []);
  const live = document.body.dataset.live && data.runs.length ? [going ? `${going} unfinished` : "all ended"] : [];
  const parts = [...counted(data.runs.length, "run"), ...counted(data.sweeps.length, "sweep"), ...live];
  document.getElementById("about").textContent = `${data.version} · ${parts.join(", ") || "nothing yet"}`;
  for (const id of ["table", "curves", "configuration"]) document.getElementById(id).hidden = !data.runs.length;
  showNotes();
  showTable();
  showWarnings();
  showControls();
  showCurves();
  showSweeps();
  showLearned();
  showHoldings();
  drawPlanned();
  showConfiguration();
}

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches);
prefersDark.addEventListener("change", (event) => { setTheme(event.matches); show(); });
document.getElementById("theme").addEventListener("click", () => {
  setTheme(!document.documentElement.classList.contains("dark"));
  show();
});
document.getElementById("reported").addEventListener("toggle", showCurves);
for (const [id, field] of [["log-x", "logX"], ["log-y", "logY"]]) {
  document.getElementById(id).addEventListener("change", (event) => { chosen[field] = event.target.checked; showCurves(); });
}
show();

if (document.body.dataset.live) {
  let before = null;
  setInterval(async () => {
    let text;
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      text = await answer.text();
      if (!answer.ok) throw new Error(text);
    } catch (error) {
      document.getElementById("about").textContent = `no longer served, this is the last state: ${error.message}`;
      before = null;
      return;
    }
    if (text === before) return;
    before = text;
    data = JSON.parse(text);
    show();
  }, POLL_MILLISECONDS);
}
