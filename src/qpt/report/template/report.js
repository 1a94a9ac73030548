// The page: one state, one function that draws it.

const data = JSON.parse(document.getElementById("payload").textContent);
const by = (id) => document.getElementById(id);
const state = { task: Object.keys(data.tasks)[0], place: 0, rule: Object.keys(data.rules)[0] || "", hidden: new Set(), metric: "" };

const task = () => data.tasks[state.task] || { limits: [], plane: null };
const limit = () => task().limits[state.place];
const seen = (row) => row.task === state.task && !state.hidden.has(row.method);
const linesNow = () => data.lines.filter((l) => seen(l) && l.selection === state.rule);
const linesHere = () => linesNow().filter((l) => l.cost_limit === limit());
const grouped = (rows) => data.methods.map((_, i) => rows.filter((r) => r.method === i)).filter((g) => g.length);
const told = (l) => `${data.methods[l.method]}, limit ${short(l.cost_limit)}\ncost ${number(l.cost)}${interval(l.cost_interval)}`
  + `\nreturn ${number(l.mean_return)}${interval(l.return_interval)}`;

// -- tables ---------------------------------------------------------------------------------------------------------

function drawTables() {
  for (const t of by("tables").children)
    if (t.dataset.task !== undefined) t.hidden = t.dataset.task !== state.task || Number(t.dataset.limit) !== limit();
  for (const t of by("matrix").children) t.hidden = Number(t.dataset.limit) !== limit() || t.dataset.rule !== state.rule;
}

// -- what a limit brings --------------------------------------------------------------------------------------------

function drawZeroShot() {
  const rows = linesNow();
  if (!rows.length) {
    for (const id of ["cost-chart", "return-chart"]) nothing(by(id), "No evaluation at this choice.");
    by("readout").replaceChildren();
    return;
  }
  const limits = task().limits, x = extent(limits, { zero: true });
  const costs = rows.flatMap((l) => [l.cost, ...l.cost_interval]);
  const top = axes(by("cost-chart"), { x, y: extent([...costs, ...limits], { zero: true }), xName: "cost limit asked for",
    yName: "cost of an episode", label: "cost by cost limit" });
  const end = Math.min(x[1], top.y[1]);
  top.svg.append(make("polygon", { class: "zone", points: [[0, 0], [end, end], [end, top.y[1]], [0, top.y[1]]]
    .map(([a, b]) => `${top.X(a)},${top.Y(b)}`).join(" ") }));
  top.svg.append(make("line", { class: "ref", x1: top.X(0), y1: top.Y(0), x2: top.X(end), y2: top.Y(end) }));
  const returns = rows.flatMap((l) => [l.mean_return, ...l.return_interval]);
  const low = axes(by("return-chart"), { x, y: extent(returns), xName: "cost limit asked for", yName: "return of an episode",
    label: "return by cost limit" });
  for (const [plot, name, range] of [[top, "cost", "cost_interval"], [low, "mean_return", "return_interval"]]) {
    plot.svg.append(verticalLimit(plot, limit()));
    for (const own of grouped(rows)) {
      own.sort((a, b) => a.cost_limit - b.cost_limit);
      const group = make("g", { class: `m${own[0].method % 8}` });
      group.append(band(plot, own.map((l) => [l.cost_limit, ...l[range]])), line(plot, own.map((l) => [l.cost_limit, l[name]])));
      for (const l of own) group.append(mark(plot.X(l.cost_limit), plot.Y(l[name]), l.method, l.cost_limit === limit() ? 6 : 3.5, told(l)));
      plot.svg.append(group);
    }
  }
  by("readout").replaceChildren(...linesHere().map((l) => make("li", {},
    make("span", { class: "name" }, swatch(l.method), data.methods[l.method]),
    "cost ", make("b", {}, number(l.cost)), `${interval(l.cost_interval)}, return `, make("b", {}, number(l.mean_return)),
    interval(l.return_interval), ...(l.within === null ? [] : [", within the limit ", make("b", {}, `${Math.round(l.within * 100)} %`)]))));
}

// -- among the data -------------------------------------------------------------------------------------------------

function drawPlane() {
  const plane = task().plane, rows = linesNow(), here = linesHere();
  if (!plane && !rows.length) return nothing(by("plane"), "Neither logged episodes nor evaluations of this task are known.");
  const costs = [...(plane ? plane.costs : []), ...rows.map((l) => l.cost), ...here.flatMap((l) => l.costs), limit() || 0];
  const returns = [...(plane ? plane.returns : []), ...rows.map((l) => l.mean_return), ...here.flatMap((l) => l.returns)];
  const plot = axes(by("plane"), { x: extent(costs, { zero: true, air: 0.03 }), y: extent(returns), xName: "cost of an episode",
    yName: "return of an episode", height: 420, label: "cost and return of logged episodes and of the policies" });
  if (plane) {
    const dots = make("g", { class: "logged" });
    plane.costs.forEach((c, i) => dots.append(make("circle", { cx: plot.X(c).toFixed(1), cy: plot.Y(plane.returns[i]).toFixed(1), r: 2.5 })));
    const steps = plane.frontier.flatMap(([c, r], i) => (i ? [[c, plane.frontier[i - 1][1]], [c, r]] : [[c, r]]));
    if (steps.length) steps.push([plot.x[1], steps[steps.length - 1][1]]);
    plot.svg.append(dots, line(plot, steps, "frontier"));
  }
  if (limit() !== undefined) plot.svg.append(verticalLimit(plot, limit()));
  for (const own of grouped(rows)) {
    own.sort((a, b) => a.cost_limit - b.cost_limit);
    const group = make("g", { class: `m${own[0].method % 8}` }), now = own.find((l) => l.cost_limit === limit());
    if (now) now.costs.forEach((c, i) => group.append(make("circle", { class: "dot", cx: plot.X(c), cy: plot.Y(now.returns[i]), r: 3 })));
    group.append(line(plot, own.map((l) => [l.cost, l.mean_return])));
    for (const l of own) if (l !== now) group.append(mark(plot.X(l.cost), plot.Y(l.mean_return), l.method, 3.5, told(l)));
    if (now) {
      const [x, y] = [plot.X(now.cost), plot.Y(now.mean_return)], [c, r] = [now.cost_interval, now.return_interval];
      if (c[0] !== null) group.append(make("line", { class: "whisker", x1: plot.X(c[0]), x2: plot.X(c[1]), y1: y, y2: y }));
      if (r[0] !== null) group.append(make("line", { class: "whisker", x1: x, x2: x, y1: plot.Y(r[0]), y2: plot.Y(r[1]) }));
      group.append(mark(x, y, now.method, 7, told(now)));
    }
    plot.svg.append(group);
  }
  const thinned = plane && plane.costs.length < plane.episodes ? ` (${plane.costs.length} shown)` : "";
  by("plane-caption").textContent = (plane
    ? `Grey: ${plane.episodes} logged episodes${thinned} and the best return within each cost. `
    : "The logged episodes are not at hand; name them with --data. ")
    + "Each policy runs through the means at its limits; large: the chosen one, with its episodes.";
}

// -- episode by episode ---------------------------------------------------------------------------------------------

function drawHistograms() {
  const rows = linesHere().filter((l) => l.costs.length), at = limit();
  if (!rows.length) return nothing(by("histograms"), "There are no single episodes at this choice; `qpt evaluate --out` writes them.");
  const most = Math.max(at, ...rows.flatMap((l) => l.costs)) || 1;
  const step = ticks(0, most, 16)[1] || 1, bin = (cost) => Math.ceil((cost - at) / step - 1e-9); // 0: just within
  by("histograms").replaceChildren(...rows.map((l) => {
    const figure = make("figure");
    figure.append(make("figcaption", { class: `m${l.method % 8}` }, data.methods[l.method]), make("div"));
    return figure;
  }));
  rows.forEach((l, i) => {
    const counts = new Map();
    for (const cost of l.costs) counts.set(bin(cost), (counts.get(bin(cost)) || 0) + 1);
    const first = Math.min(bin(0), 0), left = Math.min(0, at + (first - 1) * step);
    const plot = axes(by("histograms").children[i].lastChild, { x: [left, Math.max(most, at + step) + step * 0.5],
      y: [0, Math.max(...counts.values()) * 1.15], xName: "cost", yName: "episodes", height: 180, whole: true,
      label: `costs of the episodes of ${data.methods[l.method]}: ${Math.round((l.within || 0) * 100)} % within the limit` });
    const group = make("g", { class: `m${l.method % 8}` });
    for (const [place, count] of counts) {
      const from = plot.X(at + (place - 1) * step) + 0.5, to = plot.X(at + place * step) - 0.5;
      group.append(make("rect", { class: place > 0 ? "over" : "bar", x: Math.max(from, plot.left), width: Math.max(to - Math.max(from, plot.left), 1),
        y: plot.Y(count), height: plot.bottom - plot.Y(count) }));
    }
    plot.svg.append(group, verticalLimit(plot, at));
  });
}

// -- learning -------------------------------------------------------------------------------------------------------

function drawCurves(figure, rows, name, yName, above) {
  const values = rows.flatMap((r) => [...r[`${name}_low`], ...r[`${name}_high`]]);
  const plot = axes(figure, { x: extent(rows.flatMap((r) => r.steps), { zero: true, air: 0.02 }),
    y: extent(above === undefined ? values : [...values, above]), xName: "training step", yName, label: `${yName} over training` });
  if (above !== undefined) plot.svg.append(horizontalLimit(plot, above));
  for (const r of rows) {
    const group = make("g", { class: `m${r.method % 8}` });
    if (r.seeds > 1) group.append(band(plot, r.steps.map((s, i) => [s, r[`${name}_low`][i], r[`${name}_high`][i]])));
    group.append(line(plot, r.steps.map((s, i) => [s, r[name][i]])));
    if (r.steps.length < 30) r.steps.forEach((s, i) => group.append(mark(plot.X(s), plot.Y(r[name][i]), r.method, 3.5,
      `${data.methods[r.method]}, step ${s}\n${yName} ${number(r[name][i], 2)}`)));
    plot.svg.append(group);
  }
}

function drawLearning() {
  const rows = data.curves.filter((r) => seen(r) && r.limit === limit());
  if (rows.length) {
    drawCurves(by("learning-cost"), rows, "cost", "cost of an episode", limit());
    drawCurves(by("learning-return"), rows, "return", "return of an episode");
  } else {
    nothing(by("learning-cost"), "There are no evaluations during training here; `qpt train --eval-every` makes them.");
    by("learning-return").replaceChildren();
  }
  const own = data.metrics.filter((r) => seen(r)), names = [...new Set(own.map((r) => r.metric))].sort();
  by("metric-choice").hidden = by("metric-chart").hidden = !names.length;
  if (!names.length) return;
  if (!names.includes(state.metric)) state.metric = names.includes("loss") ? "loss" : names[0];
  options(by("metric"), names.map((n) => [n, n]), state.metric);
  drawCurves(by("metric-chart"), own.filter((r) => r.metric === state.metric), "value", state.metric);
}

// -- diagnostics ----------------------------------------------------------------------------------------------------

function drawDiagnostics() {
  const rows = linesNow().filter((l) => l.fallback !== null);
  if (rows.length) {
    const plot = axes(by("fallback"), { x: extent(task().limits, { zero: true }), y: [0, Math.max(0.05, ...rows.map((l) => l.fallback)) * 1.1],
      xName: "cost limit", yName: "share of decisions", height: 260, label: "share of fallback decisions by cost limit" });
    plot.svg.append(verticalLimit(plot, limit()));
    for (const own of grouped(rows)) {
      own.sort((a, b) => a.cost_limit - b.cost_limit);
      const group = make("g", { class: `m${own[0].method % 8}` }, line(plot, own.map((l) => [l.cost_limit, l.fallback])));
      for (const l of own) group.append(mark(plot.X(l.cost_limit), plot.Y(l.fallback), l.method, 4.5,
        `${data.methods[l.method]}, limit ${short(l.cost_limit)}\nfallback ${number(l.fallback * 100)} %`));
      plot.svg.append(group);
    }
  } else nothing(by("fallback"), "No policy with a fallback was evaluated here.");

  const found = data.calibration.filter((r) => seen(r));
  if (!found.length) return nothing(by("calibration"), "There is no calibration; `qpt calibrate --out RUN/calibration.csv` makes one.");
  const all = found.flatMap((r) => [...r.predicted_cost, ...r.realised_cost]), range = extent(all, { zero: true });
  const plot = axes(by("calibration"), { x: range, y: range, xName: "predicted cost", yName: "cost of the episode", height: 260,
    label: "predicted and realised cost" });
  plot.svg.append(make("line", { class: "ref", x1: plot.X(range[0]), y1: plot.Y(range[0]), x2: plot.X(range[1]), y2: plot.Y(range[1]) }));
  for (const r of found) r.predicted_cost.forEach((p, i) => {
    const now = r.cost_limit[i] === limit();
    plot.svg.append(mark(plot.X(p), plot.Y(r.realised_cost[i]), r.method, now ? 5 : 2.5, ""));
  });
}

// -- controls -------------------------------------------------------------------------------------------------------

function options(select, pairs, chosen) {
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
  select.value = chosen;
}

function swatch(method) {
  const svg = make("svg", { viewBox: "-1.3 -1.3 2.6 2.6", "aria-hidden": "true", class: `m${method % 8}` });
  svg.append(make("path", { d: SHAPES[method % SHAPES.length], fill: "currentColor" }));
  return svg;
}

function chooseTask(name) {
  state.task = name;
  const limits = task().limits, wish = limits.indexOf(task().first);
  state.place = Math.max(wish, 0);
  by("limit").max = Math.max(limits.length - 1, 0);
  by("limit").disabled = limits.length < 2;
  by("limit").value = state.place;
  draw();
}

function draw() {
  hideTip();
  const at = limit();
  by("limit-value").textContent = at === undefined ? "–" : short(at);
  by("limit").setAttribute("aria-valuetext", at === undefined ? "none" : `cost limit ${short(at)}`);
  drawTables(); drawZeroShot(); drawPlane(); drawHistograms(); drawLearning(); drawDiagnostics();
}

function start() {
  options(by("task"), Object.keys(data.tasks).map((t) => [t, t]), state.task);
  options(by("rule"), Object.entries(data.rules), state.rule);
  by("task-choice").hidden = Object.keys(data.tasks).length < 2;
  by("rule-choice").hidden = Object.keys(data.rules).length < 2;
  by("methods").replaceChildren(...data.methods.map((name, i) => {
    const chip = make("button", { type: "button", class: "chip", "aria-pressed": "true" }, swatch(i), name);
    chip.addEventListener("click", () => {
      const show = state.hidden.delete(i);
      if (!show) state.hidden.add(i);
      chip.setAttribute("aria-pressed", String(show));
      draw();
    });
    return chip;
  }));
  by("task").addEventListener("change", (e) => chooseTask(e.target.value));
  by("rule").addEventListener("change", (e) => { state.rule = e.target.value; draw(); });
  by("metric").addEventListener("change", (e) => { state.metric = e.target.value; drawLearning(); });
  by("limit").addEventListener("input", (e) => { state.place = Number(e.target.value); draw(); });
  const themes = [["", "◐ auto", "as the system"], ["light", "☀ light", "light"], ["dark", "☾ dark", "dark"]];
  by("theme").addEventListener("click", (e) => {
    const at = themes.findIndex(([name]) => name === (document.documentElement.dataset.theme || ""));
    const [name, text, spoken] = themes[(at + 1) % 3];
    document.documentElement.dataset.theme = name;
    e.target.textContent = text;
    e.target.setAttribute("aria-label", `colours: ${spoken}`);
  });
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // phones also say so when their bars come and go
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(draw, 100);
  });
  chooseTask(state.task);
}

start();
