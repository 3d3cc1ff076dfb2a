"use strict";
// The page's values are in `data`, as report/page_data.py makes them; what the reader chose is in `chosen`.
let data = JSON.parse(document.getElementById("data").textContent);
const chosen = { axis: "rounds", scaleX: "linear", scaleY: "", hidden: new Set(), sort: null, descending: true, cells: {} };
const DASHES = ["solid", "dash", "dashdot", "dot"];
const POLL_MILLISECONDS = 1000;  // so that what is new is seen within two seconds

const words = (name) => name.replaceAll("_", " ");
const isDark = () => document.documentElement.classList.contains("dark");
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

const drawn = {};

// Whether these values are to be drawn: they, or the colours, are not those of the last time.
function isNew(name, values) {
  const now = JSON.stringify([isDark(), values]);
  const before = drawn[name];
  drawn[name] = now;
  return now !== before;
}

function command(text) {
  const copy = element("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "copied";
  } }, "copy");
  const parts = text.split(" ").flatMap((word) => [" ", element("span", {}, word)]).slice(1);  // no line ends within an option
  return element("div", { class: "command" }, element("code", {}, ...parts), ...(navigator.clipboard ? [copy] : []));
}

// --- the runs' table -------------------------------------------------------------------------------------------------

function statusOf(line) {
  const runs = line.runs.map((k) => data.runs[k]);
  const { status, unit, done, of } = runs.reduce((slowest, run) => (run.done < slowest.done ? run : slowest));
  if (status === "unfinished") return `${unit} ${done} of ${of}`;
  return status === "diverged" ? `diverged after ${unit} ${done}` : status;
}

function statusCell(line) {
  const runs = line.runs.map((k) => data.runs[k]);
  const warnings = runs.reduce((count, run) => count + run.warnings.length, 0);
  const cell = element("td", { class: `status ${runs[0].status}`, "data-column": "status" }, statusOf(line));
  if (warnings) cell.append(", ", element("a", { href: "#notes" }, `${warnings} warning${warnings === 1 ? "" : "s"}`));
  return cell;
}

function showTable() {
  const { columns, lines } = data.table;
  const order = lines.map((_, k) => k);
  if (chosen.sort !== null) {
    const sign = chosen.descending ? -1 : 1;
    const rank = (k) => (chosen.sort === "run" ? lines[k].label : lines[k].cells[columns.indexOf(chosen.sort)]?.value ?? null);
    order.sort((a, b) => {
      const [p, q] = [rank(a), rank(b)];
      if (p === null || q === null) return (p === null) - (q === null);
      return sign * (typeof p === "string" ? p.localeCompare(q) : p - q);
    });
  }
  const head = ["run", ...columns].map((name) => {
    const sort = () => {
      chosen.descending = chosen.sort === name ? !chosen.descending : name !== "run";
      chosen.sort = name;
      showTable();
    };
    const sorted = chosen.sort === name ? { "aria-sort": chosen.descending ? "descending" : "ascending" } : {};
    return element("th", { scope: "col", ...sorted }, element("button", { type: "button", onclick: sort }, name));
  });
  const body = order.map((k) => {
    const cells = lines[k].cells.map((cell, c) => {
      const attributes = { "data-column": columns[c], "data-value": cell.value ?? "", ...(cell.best ? { class: "best", title: "the best" } : {}) };
      return element("td", attributes, cell.text);
    });
    return element("tr", { "data-line": k }, element("td", { "data-column": "run" }, lines[k].label), ...cells, statusCell(lines[k]));
  });
  document.getElementById("runs").replaceChildren(
    element("thead", {}, element("tr", {}, ...head, element("th", { scope: "col", class: "status" }, "status"))),
    element("tbody", {}, ...body),
  );
}

// --- curves ----------------------------------------------------------------------------------------------------------

function look(k) {
  const colours = data.colours[isDark() ? "dark" : "light"];
  return { colour: colours[k % colours.length], dash: DASHES[Math.floor(k / colours.length) % DASHES.length] };
}

function transparent(colour, opacity) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}

function layout(horizontal, vertical, more = {}) {
  const axis = { gridcolor: colourOf("--line"), linecolor: colourOf("--line"), zeroline: false, automargin: true };
  return {
    margin: { l: 52, r: 16, t: 14, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colourOf("--ink"), family: "system-ui, sans-serif", size: 12 },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { namelength: -1, bgcolor: colourOf("--panel"), bordercolor: colourOf("--line"), font: { color: colourOf("--ink") } },
    xaxis: { ...axis, title: { text: horizontal, standoff: 8 } },
    yaxis: { ...axis, title: { text: vertical, standoff: 8 } },
    ...more,
  };
}

const CONFIG = { responsive: true, displayModeBar: false };

// The points of a curve that its axes can show: a logarithmic one has no place for zero, and no line comes from there.
function points(at, values, scaleY) {
  const has = (value, scale) => value !== null && value !== undefined && (scale !== "log" || value > 0);
  const kept = at.map((_, k) => k).filter((k) => has(at[k], chosen.scaleX) && (values[k] === null || has(values[k], scaleY)));
  return { x: kept.map((k) => at[k]), y: kept.map((k) => values[k]) };
}

function seriesOf(metric) {
  return data.series.map((series, k) => ({ series, k, band: (series.bands[chosen.axis] ?? {})[metric] })).filter(({ series }) => !chosen.hidden.has(series.label));
}

function columnsOf(run, metric) {
  const { [chosen.axis]: at, [metric]: values } = run.columns;
  return at && values ? { at, values } : { at: [], values: [] };
}

// The vertical scale: as chosen, or logarithmic where a metric falls a hundredfold, as in the pictures.
function scaleOf(metric) {
  if (chosen.scaleY) return chosen.scaleY;
  const values = seriesOf(metric).flatMap(({ series, band }) => band?.mean ?? series.runs.flatMap((r) => columnsOf(data.runs[r], metric).values));
  const found = values.filter((value) => value !== null);
  return found.length && Math.min(...found) > 0 && Math.min(...found) < Math.max(...found) / 100 ? "log" : "linear";
}

function traces(metric, scaleY) {
  const hover = chosen.axis === "rounds" ? "%{y:.4~g}" : "%{y:.4~g} at %{x:.4~g}";  // runs share rounds, and nothing else
  return seriesOf(metric).flatMap(({ series, k, band }) => {
    const { colour, dash } = look(k);
    const line = { color: colour, width: 2, dash };
    const curve = (name, { x, y }) => {
      const mode = y.filter((value) => value !== null).length > 1 ? "lines" : "markers";  // a point has no line
      return { x, y, name, mode, line, marker: { color: colour, size: 7 }, hovertemplate: hover };
    };
    const ends = series.runs.map((r) => data.runs[r]).filter((run) => run.status === "diverged").flatMap((run) => {
      const { at, values } = columnsOf(run, metric);
      const { x, y } = points(at, values, scaleY);
      const end = y.findLastIndex((value) => value !== null);
      const marker = { symbol: "x", size: 10, color: colour, line: { width: 1.5, color: colourOf("--paper") } };
      return end < 0 ? [] : [{ x: [x[end]], y: [y[end]], name: `${run.label}, then diverged`, mode: "markers", marker, hovertemplate: hover, cliponaxis: false }];
    });
    if (!band) {
      return series.runs.map((r) => data.runs[r]).map((run) => {
        const { at, values } = columnsOf(run, metric);
        return curve(series.runs.length > 1 ? run.label : series.label, points(at, values, scaleY));
      }).concat(ends);
    }
    const lowest = Math.min(...band.mean.filter((value) => value > 0)) / 10;  // where the band of a logarithmic chart ends
    const low = scaleY === "log" ? band.low.map((value) => Math.max(value, lowest)) : band.low;
    const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, ...points(band.at, low, scaleY) },
      { ...edge, ...points(band.at, band.high, scaleY), fill: "tonexty", fillcolor: transparent(colour, 0.2) },
      curve(series.label, points(band.at, band.mean, scaleY)),
      ...ends,
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
    const scaleY = scaleOf(metric);
    const horizontal = data.axes[chosen.axis] + (chosen.scaleX === "log" ? " (log scale, without 0)" : "");
    const shown = layout(horizontal, scaleY === "log" ? "log scale" : "", { hovermode: "x unified", hoverdistance: -1 });
    Object.assign(shown.xaxis, { type: chosen.scaleX, rangemode: "nonnegative", hoverformat: ",.4~g" });
    Object.assign(shown.yaxis, { type: scaleY, ...(scaleY === "log" ? { dtick: "D2", exponentformat: "power" } : {}) });
    Plotly.react(place(metric), traces(metric, scaleY), shown, CONFIG);
  }
}

// A short piece of the k-th line, for a legend.
function sample(k) {
  const { colour, dash } = look(k);
  const pattern = { solid: "none", dash: "7 4", dashdot: "7 3 2 3", dot: "2 3" }[dash];
  const piece = element("span", { class: "sample" });
  piece.innerHTML = `<svg viewBox="0 0 26 8"><path d="M0 4H26" stroke="${colour}" stroke-width="3" stroke-dasharray="${pattern}"/></svg>`;
  return piece;
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
    return element("button", { type: "button", "aria-pressed": !chosen.hidden.has(series.label), onclick: toggle }, sample(k), series.label);
  });
  const crosses = data.runs.some((run) => run.status === "diverged") ? [element("span", { class: "wrong" }, "× last measured before a run diverged")] : [];
  document.getElementById("legend").replaceChildren(...entries, ...crosses);
}

// --- liars -----------------------------------------------------------------------------------------------------------

function rangeOf(values, logarithmic) {
  const shown = logarithmic ? values.map(Math.log10) : values;
  const [least, most] = [Math.min(...shown), Math.max(...shown)];
  const margin = 0.06 * (most - least) || 0.1;
  return [least - margin, most + margin];
}

function showBreakdowns() {
  if (!isNew("breakdowns", data.breakdowns)) return;
  const section = document.getElementById("breakdowns");
  section.replaceChildren();
  if (data.breakdowns.length) section.append(element("h2", {}, "How many liars each rule bears"));
  for (const { name, metric, better, rules, panels } of data.breakdowns) {
    const points = panels.flatMap((panel) => panel.curves.flatMap((curve) => curve.points));
    const about = [`${words(metric)} at the end of runs, where ${better} is better, against the number of clients that lie. Each line is a rule by which answers are aggregated.`];
    if (points.some((point) => point.half !== null)) about.push("Bars are 95 % confidence intervals over seeds.");
    if (points.some((point) => point.diverged)) about.push("× is what was last measured before a run diverged.");
    const legend = rules.map((rule, k) => element("span", { class: "entry" }, sample(k), rule));
    const grid = element("div", { class: "grid" });
    section.append(...(data.breakdowns.length > 1 ? [element("h3", {}, name)] : []), element("p", {}, about.join(" ")), element("div", { class: "controls" }, ...legend), grid);
    const means = points.map((point) => point.mean);
    const logarithmic = Math.min(...means) > 0 && Math.min(...means) < Math.max(...means) / 100;
    const ends = points.flatMap(({ mean, half }) => [mean, mean - (half ?? 0), mean + (half ?? 0)]);
    const range = rangeOf(logarithmic ? means : ends, logarithmic);
    for (const { attack, curves } of panels) {
      const lines = curves.flatMap((curve) => {
        const { colour, dash } = look(rules.indexOf(curve.rule));
        const of = (kept) => ({ x: kept.map((p) => p.liars), y: kept.map((p) => p.mean), name: curve.rule, hovertemplate: "%{y:.4~g} with %{x} liars", cliponaxis: false });
        const ended = curve.points.filter((point) => !point.diverged);
        const line = {
          ...of(curve.points), y: curve.points.map((point) => (point.diverged ? null : point.mean)),
          mode: "lines+markers", line: { color: colour, width: 2, dash }, marker: { color: colour, size: 7 },
          error_y: { array: curve.points.map((point) => point.half ?? 0), visible: ended.some((point) => point.half !== null), color: colour, thickness: 1 },
        };
        const lost = curve.points.filter((point) => point.diverged);
        const cross = { ...of(lost), name: `${curve.rule}, then diverged`, mode: "markers", marker: { symbol: "x", size: 10, color: colour, line: { width: 1.5, color: colourOf("--paper") } } };
        return lost.length ? [line, cross] : [line];
      });
      const shown = layout("liars", words(metric) + (logarithmic ? " (log scale)" : ""));
      const most = Math.max(...points.map((point) => point.liars));
      Object.assign(shown.xaxis, { range: [-0.04 * most, 1.04 * most], tickformat: "d", ...(most <= 12 ? { dtick: 1 } : {}) });
      Object.assign(shown.yaxis, { type: logarithmic ? "log" : "linear", range, ...(logarithmic ? { dtick: "D2", exponentformat: "power" } : {}) });
      planned(grid, attack, lines, shown);
    }
  }
}

// --- sweeps ----------------------------------------------------------------------------------------------------------

// A heat map whose numbers are written in black or white, whichever is clearer on their cell.
function heatMap({ rows, columns, numbers, texts, hover, crosses = [] }) {
  const known = numbers.flat().filter((value) => value !== null);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const ends = [colourOf("--least"), colourOf("--most")];
  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const light = (share) => {
    const [from, to] = ends.map(parts);
    const linear = from.map((value, c) => ((value + share * (to[c] - value)) / 255) ** 2.2);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.18;
  };
  const written = texts.flatMap((row, r) => row.flatMap((text, c) => {
    if (crosses.includes(`${r},${c}`)) return [{ x: columns[c], y: rows[r], text: "×", colour: colourOf("--wrong"), size: 18 }];
    const share = most > least ? (numbers[r][c] - least) / (most - least) : 0;
    return text === "" ? [] : [{ x: columns[c], y: rows[r], text, colour: light(share) ? "#000000" : "#ffffff", size: 12 }];
  }));
  const map = {
    type: "heatmap", z: numbers, x: columns, y: rows, colorscale: ends.map((colour, k) => [k, colour]), xgap: 2, ygap: 2, showscale: false,
    customdata: texts, hovertemplate: hover,
  };
  const labels = {
    mode: "text", x: written.map((one) => one.x), y: written.map((one) => one.y), text: written.map((one) => one.text),
    textfont: { color: written.map((one) => one.colour), size: written.map((one) => one.size) }, hoverinfo: "skip",
  };
  return [map, labels];
}

// A frame around a cell, by its place in the rows and columns.
function frame([r, c]) {
  return { type: "rect", x0: c - 0.5, x1: c + 0.5, y0: r - 0.5, y1: r + 0.5, line: { color: colourOf("--ink"), width: 2.5 } };
}

function mapLayout(across, down, more = {}) {
  const shown = layout(across, down);
  Object.assign(shown.xaxis, { type: "category", showgrid: false });
  Object.assign(shown.yaxis, { type: "category", showgrid: false, autorange: "reversed", ...more });
  return shown;
}

function cellsTable(sweep, key) {
  const place = element("div");
  const choose = (k) => {
    chosen.cells[key] = k;
    const { texts, command: text } = sweep.cells[k];
    const names = sweep.head.slice(0, -3).map((name, c) => `${name} ${texts[c]}`).join(", ");
    const said = `${k === 0 ? "The best cell" : `Cell ${k + 1}`}, ${names}:`;
    place.replaceChildren(...(text ? [element("p", {}, said), command(text)] : []));
    rows.forEach((row, r) => row.classList.toggle("chosen", r === k));
  };
  const rows = sweep.cells.map(({ texts }, k) => {
    const [first, ...rest] = texts;
    const button = element("button", { type: "button", title: "show its command" }, first);
    return element("tr", { onclick: () => choose(k), "data-cell": k }, element("td", {}, button), ...rest.map((text) => element("td", {}, text)));
  });
  const head = element("thead", {}, element("tr", {}, ...sweep.head.map((name) => element("th", { scope: "col" }, name))));
  const table = element("div", { class: "wide tall" }, element("table", {}, head, element("tbody", {}, ...rows)));
  if (rows.length) choose(Math.min(chosen.cells[key] ?? 0, rows.length - 1));
  return { table, place };
}

function showSweeps() {
  if (!isNew("sweeps", data.sweeps)) return;
  const section = document.getElementById("sweeps");
  section.replaceChildren();
  for (const sweep of data.sweeps) {
    const metric = words(sweep.metric);
    const best = sweep.head.length > 5 ? ", of the best cell of each" : "";
    const done = sweep.done < sweep.of ? ` ${sweep.done} of ${sweep.of} cells have finished.` : "";
    section.append(element("h2", {}, sweep.title));
    section.append(element("p", {}, `${metric}, where ${sweep.better} is better: the final mean over seeds${best}. A frame marks the best cell, × a run that diverged.${done}`));
    if (!sweep.cells.length) continue;
    const failed = sweep.numbers.flatMap((row, r) => row.flatMap((value, c) => (value === null ? [`${r},${c}`] : [])));
    const map = heatMap({
      rows: sweep.rows, columns: sweep.columns, numbers: sweep.numbers, crosses: failed,
      texts: sweep.numbers.map((row) => row.map((value) => number(value, 3))),
      hover: `${sweep.down} %{y}, ${sweep.across} %{x}: %{customdata}<extra></extra>`,
    });
    const grid = element("div", { class: "grid" });
    section.append(grid);
    const shown = { ...mapLayout(sweep.across, sweep.down), shapes: sweep.best ? [frame(sweep.best)] : [] };
    planned(grid, `${metric} over the grid`, map, shown, Math.max(250, 90 + 44 * sweep.rows.length));
    const { table, place } = cellsTable(sweep, sweep.folder);
    grid.append(element("div", {}, element("h3", {}, `cells, best first`), table));
    section.append(place);
  }
}

// --- tunings ---------------------------------------------------------------------------------------------------------

function candidateLook(line) {
  const colours = data.colours[isDark() ? "dark" : "light"];
  if (line.numbers.at(-1) === null) return { color: transparent("#808080", 0.35), width: 1, dash: "dot" };
  if (line.best) return { color: colours[1], width: 4 };
  return line.last ? { color: colours[0], width: 2.5 } : { color: transparent(colours[0], 0.3), width: 1 };
}

function showTunings() {
  const section = document.getElementById("tunings");
  section.replaceChildren();
  if (!data.tunings.length) return;
  section.append(element("h2", {}, "Tuning"));
  section.append(element("p", {}, "Each line is a candidate: faint ones were left behind, dotted ones diverged, bold ones reached the last rung, and the widest is the best."));
  for (const tuning of data.tunings) {
    const grid = element("div", { class: "grid" });
    section.append(element("h3", {}, tuning.title), ...(tuning.command ? [command(tuning.command)] : []), grid);
    const named = (line) => tuning.names.map((name, k) => `${name} = ${number(line.values[k], 3)}`).join("<br>");
    const line = (of, x, y) => ({ x, y, mode: "lines+markers", marker: { size: 4 }, line: candidateLook(of), name: named(of) });
    const rungs = layout("communication rounds", words(tuning.metric));
    rungs.xaxis.type = "log";
    const known = tuning.lines.flatMap((of) => of.numbers.filter((value) => value !== null));
    if (known.length && Math.min(...known) > 0 && Math.max(...known) > 30 * Math.min(...known)) rungs.yaxis.type = "log";
    planned(grid, "Rungs", tuning.lines.map((of) => line(of, of.rounds, of.numbers)), rungs);
    if (!tuning.names.length) continue;
    const coordinates = layout("", "value");
    coordinates.xaxis.type = "category";
    coordinates.yaxis.type = "log";
    planned(grid, "Candidates", tuning.lines.map((of) => line(of, tuning.names, of.values)), coordinates);
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
    type: "bar", name: group, x: middle, y, width: edges[1] - edges[0], marker: { color: colours[k] ?? look(k).colour }, opacity: 0.7,
  }));
  const legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };
  const shown = layout(horizontal, vertical, { barmode: "overlay", showlegend: true, legend });
  shown.margin.t = 36;
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
  if (!isNew("learned", data.runs.map((run) => [run.label, run.learned]))) return;
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
  if (!isNew("holdings", data.holdings)) return;
  const section = document.getElementById("holdings");
  section.replaceChildren();
  if (data.holdings.length) section.append(element("h2", {}, "Who holds what"));
  for (const held of data.holdings) {
    if (data.holdings.length > 1) section.append(element("p", {}, `${held.task}: ${held.runs.join("; ")}`));
    const grid = element("div", { class: "grid" });
    section.append(grid);
    for (const [purpose, counts] of Object.entries(held.counts)) {
      const total = counts.flat().reduce((a, b) => a + b, 0);
      const few = counts.length <= 20 && held.classes.length <= 20;
      const map = heatMap({
        rows: counts.map((_, m) => String(m)), columns: held.classes, numbers: counts,
        texts: counts.map((row) => row.map((n) => (few && n ? String(n) : ""))),
        hover: `client %{y}, ${held.unit} %{x}: %{z}<extra></extra>`,
      });
      const height = Math.min(620, Math.max(250, 70 + 26 * counts.length));
      planned(grid, `${purpose}: ${number(total)} samples`, map, mapLayout(held.unit, "client", { nticks: 20 }), height);
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
  const section = document.getElementById("notes");
  const reasons = data.runs.filter((run) => run.reason).map((run) => element("p", { class: "note wrong" }, run.reason));
  const lists = data.runs.filter((run) => run.warnings.length).map((run) => {
    const lines = run.warnings.map((line) => element("li", {}, line));
    return element("div", { class: "note" }, element("h3", {}, run.label), element("ul", {}, ...lines));
  });
  const notes = [...data.notes, ...new Set(data.runs.flatMap((run) => run.caveats))].map((note) => element("p", { class: "note" }, note));
  const all = [...reasons, ...lists, ...notes];
  section.replaceChildren(...(all.length ? [element("h2", {}, "Warnings and notes"), ...all] : []));
}

function dated(started) {
  const format = { dateStyle: "long", timeStyle: "short", timeZone: "UTC" };
  return started ? [`started ${new Date(started).toLocaleString("en-GB", format)} UTC`] : [];
}

function showHeader() {
  const title = data.tasks.join(", ") || "nothing yet";
  document.title = `${title} · fedbilevel`;
  document.getElementById("title").textContent = title;
  document.getElementById("version").textContent = `fedbilevel ${data.version}`;
  const counted = (n, name) => (n ? [`${n} ${name}${n === 1 ? "" : "s"}`] : []);
  const going = data.table.lines.filter((line) => data.runs[line.runs[0]].status === "unfinished");
  const live = document.body.dataset.live && data.runs.length
    ? [going.length ? going.map((line) => `${line.label} at ${statusOf(line)}`).join(", ") : "all ended"] : [];
  const parts = [...counted(data.runs.length, "run"), ...counted(data.sweeps.length, "sweep"), ...counted(data.tunings.length, "tuning"), ...dated(data.started), ...live];
  document.getElementById("about").textContent = parts.join(" · ");
  if (isNew("commands", data.commands)) document.getElementById("commands").replaceChildren(...commandList(data.commands));
}

function commandList(commands) {
  const [first, ...rest] = commands.map(command);
  if (rest.length < 2) return [first, ...rest].filter(Boolean);
  return [first, element("details", {}, element("summary", {}, `${rest.length} more commands`), ...rest)];
}

function show() {
  showHeader();
  for (const id of ["table", "curves", "configuration"]) document.getElementById(id).hidden = !data.runs.length;
  showTable();
  showControls();
  showCurves();
  showBreakdowns();
  showSweeps();
  showTunings();
  showNotes();
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
for (const [id, field] of [["scale-x", "scaleX"], ["scale-y", "scaleY"]]) {
  document.getElementById(id).addEventListener("change", (event) => { chosen[field] = event.target.value; showCurves(); });
}
show();

if (document.body.dataset.live) {
  let before = null;
  const update = async () => {
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
  };
  const follow = () => setTimeout(() => update().finally(follow), POLL_MILLISECONDS);  // one question at a time
  follow();
}
