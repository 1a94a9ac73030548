"use strict";
// Little drawings: axes, lines with bands, marks. Texts are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = [ // of a method's marks, around 0 with a radius of 1
  "M-1 0A1 1 0 1 0 1 0A1 1 0 1 0 -1 0Z", "M-.9-.9H.9V.9H-.9Z", "M0-1.15L1.1.8H-1.1Z", "M0-1.25L1.25 0 0 1.25-1.25 0Z",
  "M0 1.15L1.1-.8H-1.1Z",
];

function make(name, attributes, ...children) {
  const svg = ["svg", "g", "path", "circle", "line", "rect", "text", "polygon"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function number(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value) >= 10000 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : value.toFixed(digits);
  return text.replace(/^-(0(\.0+)?)$/, "$1");
}

const interval = (range, digits = 1) =>
  range && range[0] !== null ? ` [${number(range[0], digits)}, ${number(range[1], digits)}]` : "";

function ticks(low, high, count) {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return size && size < 1e-3 ? value.toExponential(0) : `${+value.toPrecision(4)}`;
};

// The range of all finite numbers, with a little air.
function extent(values, { zero = false, air = 0.06 } = {}) {
  const known = values.filter((v) => v !== null && v !== undefined && Number.isFinite(v));
  if (zero) known.push(0);
  if (!known.length) return [0, 1];
  let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = (high - low) * air;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

// Axes in a figure at its real width, so that letters keep their size; gives the scales and the place to draw in.
function axes(figure, { x, y, xName, yName, height = 300, label, whole = false }) {
  const width = Math.max(figure.clientWidth, 240), left = 52, right = 14, top = 26, bottom = 40;
  const X = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (width - left - right);
  const Y = (v) => height - bottom - ((v - y[0]) / (y[1] - y[0])) * (height - top - bottom);
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  for (const v of ticks(y[0], y[1], 5).filter((v) => !whole || Number.isInteger(v))) {
    svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }));
    svg.append(make("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, short(v)));
  }
  for (const v of ticks(x[0], x[1], Math.max(3, Math.floor(width / 110)))) {
    svg.append(make("line", { class: "axis", x1: X(v), x2: X(v), y1: height - bottom, y2: height - bottom + 4 }));
    svg.append(make("text", { x: X(v), y: height - bottom + 18, "text-anchor": "middle" }, short(v)));
  }
  svg.append(make("text", { x: 4, y: 13 }, yName));
  svg.append(make("text", { x: width - right, y: height - 5, "text-anchor": "end" }, xName));
  figure.replaceChildren(svg);
  return { svg, X, Y, x, y, left, right: width - right, top, bottom: height - bottom, width, height };
}

function nothing(figure, sentence) {
  figure.replaceChildren(make("p", { class: "empty" }, sentence));
}

// A broken line through points [x, y]; a missing y ends the stroke.
function line(plot, points, className = "curve") {
  let d = "", pen = "M";
  for (const [x, y] of points) {
    if (y === null || y === undefined) { pen = "M"; continue; }
    d += `${pen}${plot.X(x).toFixed(1)} ${plot.Y(y).toFixed(1)}`;
    pen = "L";
  }
  return make("path", { class: className, d });
}

function band(plot, rows) { // rows [x, low, high]
  const known = rows.filter((r) => r[1] !== null && r[2] !== null);
  const there = known.map(([x, low]) => `${plot.X(x).toFixed(1)},${plot.Y(low).toFixed(1)}`);
  const back = known.reverse().map(([x, , high]) => `${plot.X(x).toFixed(1)},${plot.Y(high).toFixed(1)}`);
  return make("polygon", { class: "band", points: [...there, ...back].join(" ") });
}

function mark(x, y, method, size, text) {
  const shape = make("path", { class: `mark m${method % 8}${size < 5 ? " small" : ""}`, d: SHAPES[method % SHAPES.length],
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${size})`, "vector-effect": "non-scaling-stroke" });
  if (text) {
    shape.setAttribute("tabindex", "0");
    shape.setAttribute("role", "img");
    shape.setAttribute("aria-label", text);
    for (const event of ["pointerenter", "focus"]) shape.addEventListener(event, () => showTip(shape, text));
    for (const event of ["pointerleave", "blur"]) shape.addEventListener(event, hideTip);
  }
  return shape;
}

function verticalLimit(plot, limit) {
  const x = plot.X(limit), group = make("g");
  group.append(make("line", { class: "limit-line", x1: x, x2: x, y1: plot.top - 6, y2: plot.bottom }));
  const late = x > plot.width - 70;
  group.append(make("text", { class: "limit-text", x: x + (late ? -5 : 5), y: plot.top + 4, "text-anchor": late ? "end" : "start" },
    `limit ${short(limit)}`));
  return group;
}

function horizontalLimit(plot, limit) {
  const y = plot.Y(limit), group = make("g");
  group.append(make("line", { class: "limit-line", x1: plot.left, x2: plot.right, y1: y, y2: y }));
  group.append(make("text", { class: "limit-text", x: plot.right, y: y - 5, "text-anchor": "end" }, `limit ${short(limit)}`));
  return group;
}

const tip = () => document.getElementById("tip");
function showTip(node, text) {
  const box = node.getBoundingClientRect(), at = tip();
  at.textContent = text;
  at.hidden = false;
  at.style.left = `${Math.max(4, Math.min(box.right + 8, innerWidth - at.offsetWidth - 4))}px`;
  at.style.top = `${Math.max(4, box.top - at.offsetHeight - 6)}px`;
}
function hideTip() { tip().hidden = true; }
