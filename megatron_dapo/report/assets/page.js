// Draws the report from the JSON in the page. No framework and no network: the page must open from a disk.
"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const THEMES = {
  light: { text: "#18202f", muted: "#5d6778", grid: "#e9ebf1", card: "#ffffff", middle: "#f3f4f7", cold: "#2563b8", hot: "#c2410c",
    colors: ["#2459d6", "#e0701a", "#0b8f63", "#8b46d8", "#d1344b", "#0891a8", "#b98a06", "#c9458f", "#64748b", "#5c7f2b"] },
  dark: { text: "#e6e9f0", muted: "#98a3b5", grid: "#262d39", card: "#161b24", middle: "#232a36", cold: "#4f93ff", hot: "#ff7a3d",
    colors: ["#6aa1ff", "#ff9f58", "#41cf99", "#c08bff", "#ff7488", "#3fd0e6", "#f2c94c", "#f78cc4", "#9aa7ba", "#a6cf66"] },
};
const many = D.runs.length > 1, hidden = new Set(), drawn = new Map();
const theme = () => THEMES[document.documentElement.dataset.theme];
const smoothing = () => Number(document.getElementById("smoothing").value);
const $ = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key === "class" ? (node.className = value) : (node[key] = value);
  node.append(...children.filter((child) => child !== null));
  return node;
};
const alpha = (hex, a) => hex + Math.round(a * 255).toString(16).padStart(2, "0");
const figure = (x, digits = 4) => (x === null || x === undefined ? "" : Number.isInteger(x) ? String(x) : String(Number(x.toPrecision(digits))));
const visible = () => D.runs.map((run, i) => ({ run, i })).filter(({ i }) => !hidden.has(i));

// ---- lines and bars over steps -------------------------------------------------------------------------------------
function smooth(values, weight) {
  let mean = 0, mass = 0; // debiased exponential average; gaps stay gaps
  return values.map((v) => {
    if (v === null) return null;
    mean = weight * mean + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
function points(run, name) {
  const x = [], y = [];
  (run.columns[name] || []).forEach((v, i) => { if (v !== null) { x.push(run.steps[i]); y.push(v); } });
  return { x, y };
}
function line(run, name, label, color, smoothed) {
  const { x, y } = points(run, name);
  if (!x.length) return [];
  const few = x.length < 30, weight = few || !smoothed ? 0 : smoothing(), shared = { x, type: "scatter", legendgroup: label };
  const main = { ...shared, name: label, y: weight ? smooth(y, weight) : y, mode: few ? "lines+markers" : "lines",
    line: { color, width: 2 }, marker: { size: 5, color }, hovertemplate: "%{y:.4~g}" };
  if (!weight) return [main];
  return [{ ...shared, y, mode: "lines", line: { color: alpha(color, 0.28), width: 1 }, hoverinfo: "skip", showlegend: false }, main];
}
function band(run, [low, high], color) {
  const a = points(run, low), b = points(run, high), edge = { type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false };
  return [{ ...edge, ...a, name: "min", hovertemplate: "%{y:.4~g}" },
    { ...edge, ...b, name: "max", fill: "tonexty", fillcolor: alpha(color, 0.13), hovertemplate: "%{y:.4~g}" }];
}
function lineTraces(chart) {
  const colors = theme().colors;
  if (many) {
    const [label, name] = chart.series[0];
    return visible().flatMap(({ run, i }) => line(run, name, run.name, colors[i % colors.length], chart.smooth));
  }
  const run = D.runs[0];
  return [...(chart.band ? band(run, chart.band, colors[0]) : []),
    ...chart.series.flatMap(([label, name], i) => line(run, name, label, colors[i % colors.length], chart.smooth))];
}
function stackTraces(chart) {
  const colors = theme().colors;
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  return chart.series.map(([label, name], i) => {
    const color = colors[i % colors.length], shared = { name: label, hovertemplate: "%{y:.4~g}" };
    if (many) {
      const rows = visible().map(({ run }) => [run.name, points(run, name).y]).filter(([, y]) => y.length);
      return { ...shared, type: "bar", marker: { color }, width: 0.5, x: rows.map(([n]) => n), y: rows.map(([, y]) => mean(y)) };
    }
    const run = D.runs[0], column = run.columns[name] || [], some = run.steps.map((_, k) => chart.series.some(([, n]) => (run.columns[n] || [])[k] != null));
    const at = { x: run.steps.filter((_, k) => some[k]), y: column.filter((_, k) => some[k]).map((v) => v ?? 0) };
    if (at.x.length <= 40) return { ...shared, ...at, type: "bar", marker: { color } };
    return { ...shared, ...at, type: "scatter", mode: "lines", stackgroup: "all", line: { width: 0, color }, fillcolor: alpha(color, 0.85) };
  });
}
function layout(extra = {}) {
  const t = theme(), axis = { gridcolor: t.grid, zerolinecolor: t.grid, linecolor: t.grid, automargin: true, tickfont: { size: 11, color: t.muted } };
  const merge = (own) => ({ ...axis, ...own });
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 12, color: t.text },
    margin: { l: 44, r: 10, t: 6, b: 28 }, hovermode: "x unified", hoverlabel: { bgcolor: t.card, bordercolor: t.grid, font: { color: t.text } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11, color: t.muted } }, ...extra,
    xaxis: merge({ ...extra.xaxis }), yaxis: merge({ ...extra.yaxis }) };
}
const CONFIG = { responsive: true, displayModeBar: false };

function drawChart(node, chart) {
  const stacked = chart.kind === "stacked", percent = chart.scale === "percent";
  const traces = stacked ? stackTraces(chart) : lineTraces(chart);
  const values = traces.flatMap((t) => t.y).filter((v) => v !== null), largest = Math.max(...values.map(Math.abs), 0);
  const above = values.filter((v) => v > 0), log = chart.scale === "log" && above.length > 0; // zeros do not show there
  const decades = log ? Math.log10(Math.max(...above) / Math.min(...above)) : 0;
  const named = traces.filter((t) => t.showlegend !== false).length;
  Plotly.react(node, traces, layout({ barmode: "stack", bargap: 0.15, showlegend: named > 1, legend: { ...layout().legend, traceorder: "normal" },
    xaxis: many && stacked ? {} : stepAxis(traces.flatMap((t) => t.x)),
    yaxis: { type: log ? "log" : "linear", tickformat: percent ? ".2~%" : "", exponentformat: log || largest < 1e-2 ? "power" : "SI",
      rangemode: percent || stacked ? "tozero" : "normal", dtick: !log ? undefined : decades > 2 ? 1 : "D2", ...(log || stacked ? {} : flatRange(values, percent)), nticks: 6 } }), CONFIG);
}
function stepAxis(steps) {
  const low = Math.min(...steps), high = Math.max(...steps), few = high - low < 8;
  return { hoverformat: "d", tickformat: "d", dtick: few ? 1 : undefined, range: low === high ? [low - 1, low + 1] : undefined,
    unifiedhovertitle: { text: "step %{x}" } };
}
function flatRange(values, percent) { // Plotly would draw a constant of 3e-5 between -1 and 1, indistinguishable from 0
  const low = Math.min(...values), high = Math.max(...values);
  if (!values.length || high - low > 1e-12 * Math.abs(high)) return {};
  return { range: high === 0 ? [0, percent ? 0.1 : 1] : [Math.min(0, 1.5 * high), Math.max(0, 1.5 * high)] };
}
function card(title, about, draw, wide = false, plotClass = "plot") {
  const plot = $("div", { class: plotClass });
  const node = $("article", { class: wide ? "card wide" : "card" }, $("h3", {}, title), $("p", { class: "about" }, about), plot);
  const save = () => Plotly.downloadImage(plot, { format: "png", scale: 2, filename: title.replace(/\W+/g, "_").toLowerCase() });
  const grow = () => { node.classList.toggle("wide"); Plotly.Plots.resize(plot); };
  node.append($("div", { class: "buttons" }, $("button", { title: "Save as PNG", onclick: save }, "⤓"),
    wide ? null : $("button", { title: "Enlarge", onclick: grow }, "⤢")));
  watch(plot, draw);
  return node;
}
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && !drawn.get(entry.target).done) show(entry.target);
}, { rootMargin: "600px" });
function watch(plot, draw) { drawn.set(plot, { draw, done: false }); seen.observe(plot); }
function show(plot) { const state = drawn.get(plot); state.done = true; state.draw(plot); }
function redraw() { for (const [plot, state] of drawn) if (state.done && plot.isConnected) state.draw(plot); }

// ---- overview --------------------------------------------------------------------------------------------------------
function overview() {
  const parts = [$("h2", {}, "Overview")];
  if (many) {
    const labels = [...new Set(D.runs.flatMap((run) => run.figures.map((f) => f.label)))];
    const cell = (run, label) => {
      const f = run.figures.find((one) => one.label === label);
      return $("td", {}, f ? $("b", {}, f.value) : "", f && f.before ? $("span", { class: "label", style: "color:var(--muted)" }, ` ${f.before}`) : null);
    };
    parts.push($("div", { class: "card" }, $("table", {}, $("tr", {}, $("th", {}, ""), ...D.runs.map((run, i) =>
      $("th", { style: `color:${theme().colors[i % 10]}` }, run.name))),
    ...labels.map((label) => $("tr", {}, $("td", { style: "color:var(--muted)" }, label), ...D.runs.map((run) => cell(run, label)))))));
  } else {
    parts.push($("div", { class: "tiles" }, ...D.runs[0].figures.map((f) => $("div", { class: "tile" }, $("div", { class: "label" }, f.label),
      $("div", { class: "value" }, f.value), $("div", { class: `before ${f.good === null ? "" : f.good ? "up" : "down"}` }, f.before)))));
  }
  const rows = D.runs.flatMap((run) => run.notes.map((note) => $("div", { class: `note ${note.level}` }, many ? $("b", {}, run.name) : null, note.text)));
  return [...parts, $("div", { class: "notes" }, ...rows)];
}

// ---- experts ---------------------------------------------------------------------------------------------------------
const diverging = () => { const t = theme(); return [[0, t.cold], [0.5, t.middle], [1, t.hot]]; };
function heat(node, z, options) {
  const flat = z.flat().filter((v) => v !== null).sort((a, b) => a - b), high = Math.max(1.5, flat[Math.floor(flat.length * 0.995)] || 0);
  const text = options.text ? { text: z.map((row) => row.map((v) => (v === null ? "" : v.toFixed(2)))), texttemplate: "%{text}", textfont: { size: 10 } } : {};
  Plotly.react(node, [{ type: "heatmap", z, colorscale: scaled(high), zmin: 0, zmax: high, xgap: options.gap, ygap: options.gap,
    hovertemplate: options.hover, colorbar: { thickness: 10, outlinewidth: 0, title: { text: "load", side: "right", font: { size: 11 } }, tickfont: { size: 10 } }, ...text }],
  layout({ hovermode: "closest", margin: { l: 46, r: 6, t: 6, b: 40 }, xaxis: { title: { text: options.x, font: { size: 11 } }, dtick: options.dx, showgrid: false, zeroline: false },
    yaxis: { title: { text: options.y, font: { size: 11 } }, autorange: "reversed", dtick: options.dy, showgrid: false, zeroline: false } }), CONFIG);
}
function scaled(high) { // even load, 1, keeps the middle colour wherever the scale ends
  const [cold, middle, hot] = diverging().map(([, color]) => color);
  return [[0, cold], [1 / high, middle], [1, hot]];
}
function byNode(load, perNode) {
  const mean = load.reduce((a, b) => a + b, 0) / load.length || 1, rows = [];
  for (let i = 0; i < load.length; i += perNode) rows.push(Array.from({ length: perNode }, (_, j) => (i + j < load.length ? load[i + j] / mean : null)));
  return rows;
}
const nodeOptions = (rows) => ({ x: "GPU in node", y: "node", dx: 1, dy: 1, gap: 2, text: rows[0].length <= 8, hover: "node %{y}, GPU %{x}: %{z:.3f} × even<extra></extra>" });
function experts(run) {
  const parts = [];
  for (const [source, reports] of Object.entries(run.moe)) {
    const slider = $("input", { type: "range", min: 0, max: reports.length - 1, step: 1, value: reports.length - 1 });
    const label = $("span", {}), now = () => reports[Number(slider.value)];
    const say = () => { label.textContent = `step ${now().step}, ${now().assignments.toLocaleString("en")} assignments`; };
    const map = $("div", { class: "plot" }), gpu = $("div", { class: "plot" });
    const drawMap = () => heat(map, now().load, { x: "expert", y: "MoE layer", hover: "layer %{y}, expert %{x}: %{z:.2f} × even<extra></extra>", gap: now().load[0].length > 64 ? 0 : 1 });
    const drawGpu = () => { if (now().gpu_load) { const rows = byNode(now().gpu_load, now().gpus_per_node); heat(gpu, rows, nodeOptions(rows)); } };
    slider.oninput = () => { say(); drawMap(); drawGpu(); };
    say();
    watch(map, drawMap);
    const left = $("div", {}, $("h3", {}, "Layer × expert"), $("p", { class: "about" }, "Load of each expert; 1 is its even share."), map);
    const right = now().gpu_load ? $("div", {}, $("h3", {}, "Node × GPU"), $("p", { class: "about" }, "All layers together; 1 is even."), gpu) : null;
    if (right) watch(gpu, drawGpu);
    parts.push($("article", { class: "card wide" }, $("div", { class: "controls" }, $("b", {}, `${many ? run.name + ": " : ""}what the ${source === "rollout" ? "rollout engines" : "training routers"} routed`),
      reports.length > 1 ? slider : null, label), right ? $("div", { class: "pair" }, left, right) : left));
  }
  if (run.what_if.variants) parts.push(whatIf(run));
  return parts;
}
function whatIf(run) {
  const { variants, step, fitted_on_step: fitted } = run.what_if;
  const choose = $("select", {}, ...variants.map((v, i) => $("option", { value: i }, v.name)));
  const bars = $("div", { class: "plot" }), map = $("div", { class: "plot" });
  const drawBars = () => {
    const t = theme(), shared = { type: "bar", orientation: "h", y: variants.map((v) => v.name), hovertemplate: "%{x:.3f}<extra></extra>", textposition: "auto" };
    Plotly.react(bars, [
      { ...shared, name: "GPU", x: variants.map((v) => v.overhead), text: variants.map((v) => v.overhead.toFixed(2)), marker: { color: t.colors[0] } },
      { ...shared, name: "node", x: variants.map((v) => v.node_overhead), text: variants.map((v) => v.node_overhead.toFixed(2)), marker: { color: t.colors[2] } },
    ], layout({ hovermode: "closest", barmode: "group", xaxis: { title: { text: "slowest / mean (1 = even)", font: { size: 11 } } }, yaxis: { autorange: "reversed" }, margin: { l: 60, r: 10, t: 6, b: 40 } }), CONFIG);
  };
  const drawMap = () => { const v = variants[choose.selectedIndex], rows = byNode(v.gpu_load, v.gpus_per_node); heat(map, rows, nodeOptions(rows)); };
  choose.onchange = drawMap;
  watch(bars, drawBars); watch(map, drawMap);
  const basis = fitted === null ? "placed on the same counts (flatters the fitted ones)" : `placed on step ${fitted}, judged on step ${step}`;
  return $("article", { class: "card wide" }, $("div", { class: "controls" }, $("b", {}, `${many ? run.name + ": " : ""}what if experts were placed otherwise`),
    `${variants[0].gpus} GPUs; ${basis}`), $("div", { class: "pair" },
    $("div", {}, $("h3", {}, "Time of expert layers"), $("p", { class: "about" }, "Predicted slowest over mean, by placement."), bars),
    $("div", {}, $("h3", {}, "Node × GPU under ", choose), $("p", { class: "about" }, "1 is even."), map)));
}

// ---- samples ---------------------------------------------------------------------------------------------------------
function sampleCard(s, kind) {
  const fact = (name, value) => (value === null || value === "" ? null : $("span", {}, `${name} `, $("b", {}, figure(value))));
  const text = (title, value) => $("div", {}, $("div", { class: "who" }, title), $("pre", {}, value));
  return $("div", { class: `sample ${kind}` }, $("div", { class: "facts" }, fact("reward", s.reward), s.raw !== s.reward ? fact("before shaping", s.raw) : null,
    $("span", {}, s.acc ? "right" : "wrong"), fact("tokens", s.length), s.finish_reason ? $("span", {}, `ended: ${s.finish_reason}`) : null, $("span", {}, s.uid)),
  text("prompt", s.prompt), text("response", s.response), text("expected", s.ground_truth));
}
function samples(run) {
  if (!run.samples.length) return [];
  const choose = $("select", {}, ...run.samples.map((s) => $("option", {}, `step ${s.step}`)));
  choose.selectedIndex = run.samples.length - 1;
  const body = $("div", { class: "samples" }), count = $("span", {});
  const fill = () => {
    const s = run.samples[choose.selectedIndex];
    count.textContent = `${s.trajectories} trajectories`;
    body.replaceChildren($("div", {}, $("h4", {}, "Best"), ...s.best.map((one) => sampleCard(one, "best"))),
      $("div", {}, $("h4", {}, "Worst"), ...(s.worst.length ? s.worst.map((one) => sampleCard(one, "worst")) : ["—"])));
  };
  choose.onchange = fill;
  fill();
  return [$("article", { class: "card wide" }, $("div", { class: "controls" }, many ? $("b", {}, run.name) : null, choose, count), body)];
}

// ---- every metric, configuration ---------------------------------------------------------------------------------------
function explorer() {
  const names = [...new Set(D.runs.flatMap((run) => Object.keys(run.columns)))];
  if (!names.length) return [];
  let current = names.find((n) => n === "critic/score/mean") || names[0];
  const search = $("input", { type: "search", placeholder: `filter ${names.length} metrics` }), table = $("table", {}), plot = $("div", { class: "plot" });
  const title = $("h3", { class: "mono" }, current);
  const draw = () => drawChart(plot, { series: [[current, current]], band: null, scale: "linear", kind: "lines", smooth: true });
  const last = (run, name) => points(run, name).y.at(-1);
  const fill = () => table.replaceChildren($("tr", {}, $("th", {}, "metric"), ...D.runs.map((run) => $("th", {}, many ? run.name : "last"))),
    ...names.filter((n) => n.includes(search.value)).map((n) => $("tr", { class: n === current ? "on" : "", onclick: () => { current = n; title.textContent = n; fill(); draw(); } },
      $("td", { class: "mono" }, n), ...D.runs.map((run) => $("td", {}, figure(last(run, n)))))));
  search.oninput = fill;
  fill();
  watch(plot, draw);
  return [$("article", { class: "card wide" }, $("div", { class: "explorer" }, $("div", {}, $("div", { class: "controls" }, search), $("div", { class: "scroll" }, table)),
    $("div", {}, title, plot)))];
}
function configuration() {
  const parts = [];
  if (many) {
    const table = $("table", {}, $("tr", {}, $("th", {}, "key"), ...D.runs.map((run) => $("th", {}, run.name))),
      ...D.difference.map(({ key, values }) => $("tr", {}, $("td", { class: "mono" }, key), ...values.map((v) => $("td", { class: "mono" }, v)))));
    parts.push($("article", { class: "card wide" }, $("h3", {}, D.difference.length ? "Keys that differ" : "The configurations are the same"), D.difference.length ? table : null));
  }
  const full = D.runs.filter((run) => run.config).map((run) => $("details", {}, $("summary", {}, `${run.name}: whole configuration`), $("pre", {}, run.config)));
  if (full.length) parts.push($("article", { class: "card wide" }, ...full));
  return parts;
}

// ---- the page --------------------------------------------------------------------------------------------------------
function build() {
  const main = document.getElementById("main"), nav = document.getElementById("nav");
  const add = (key, title, ...nodes) => {
    if (!nodes.length) return;
    main.append($("section", { id: key }, ...(key === "overview" ? nodes : [$("h2", {}, title), $("div", { class: "grid" }, ...nodes)])));
    nav.append($("a", { href: `#${key}` }, title));
  };
  add("overview", "Overview", ...overview());
  const cards = (section) => section.charts.map((chart) => {
    const label = many && chart.series.length > 1 ? (chart.kind === "stacked" ? " Mean over steps." : ` Shown: ${chart.series[0][0]}.`) : "";
    const wide = chart.kind === "stacked" && section.key === "speed";
    return card(chart.title, chart.about + label, (node) => drawChart(node, chart), wide, wide ? "plot stack" : "plot");
  });
  for (const section of D.sections) if (section.key !== "moe") add(section.key, section.title, ...cards(section));
  const moe = D.sections.find((section) => section.key === "moe");
  add("moe", "Experts", ...D.runs.flatMap(experts), ...(moe ? cards(moe) : []));
  add("samples", "Samples", ...D.runs.flatMap(samples));
  add("all", "Every metric", ...explorer());
  add("config", "Configuration", ...configuration());
  const links = [...nav.children], here = () => {
    const at = links.findLast((a) => document.querySelector(a.hash).getBoundingClientRect().top < 160) || links[0];
    links.forEach((a) => a.classList.toggle("here", a === at));
  };
  document.addEventListener("scroll", here, { passive: true });
  here();
}
function head() {
  const one = D.runs[0], brand = document.getElementById("brand");
  brand.append(many ? `${D.runs.length} runs` : one.name, $("small", {}, many ? "megatron_dapo" : one.path));
  document.title = `${D.runs.map((run) => run.name).join(", ")} · megatron_dapo`;
  if (many) document.getElementById("chips").append(...D.runs.map((run, i) => $("button", { class: "chip", title: run.path, onclick: (event) => {
    hidden.has(i) ? hidden.delete(i) : hidden.add(i);
    event.currentTarget.classList.toggle("off", hidden.has(i));
    redraw();
  } }, $("i", { style: `background:${theme().colors[i % 10]}` }), run.name)));
  const longest = Math.max(...D.runs.map((run) => run.steps.length)), slider = document.getElementById("smoothing");
  slider.value = longest > 60 ? 0.8 : longest > 25 ? 0.5 : 0;
  slider.oninput = redraw;
  document.getElementById("theme").onclick = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    redraw();
  };
  document.getElementById("footer").textContent = `Written ${D.written}. Drag in a plot to zoom, double-click to reset.`;
}
head();
build();
