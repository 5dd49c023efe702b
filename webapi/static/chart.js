// Charts as inline SVG; the rules under "Charts" in app.css give them colours and sizes.
//
//   sparkline(values, { label, bad, marks, span })      an <svg>: a line over its area
//   chart(layers, { label, bar, marks, span, format })  a <figure>: larger, with axes and tooltips
//
// values  numbers, the oldest first; null is unknown: a gap
// label   for screen readers, whole: "Ended per minute in the last hour: 120 at most"
// bad     the part of `values` to draw in red
// layers  [{ name, values, color }]; color: finish, failed, error, cancelled or working
// bar     stack the layers as bars; else each is an area
// span    [since, until] of the values; by default marks count values
// marks   [{ at, text }]: vertical lines
// format  the text of a value

import { el } from "./dom.js";
import { locale } from "./i18n.js";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const ms = (at) => +new Date(at);
const most = (values) => Math.max(0, ...values) || 1;
const y = (value, top) => (99 - (96 * value) / top).toFixed(1);

/** A line over its area, which ends where a value is unknown. */
function area(values, top, color) {
  const known = (i) => (values[i] ?? null) !== null;
  const path = values.map((value, i) =>
    known(i) ? `${known(i - 1) ? "" : `M${i} 100V${y(value, top)}`}L${i + 0.5} ${y(value, top)}${known(i + 1) ? "" : `H${i + 1}V100`}` : "");
  return svg("path", { class: `area ${color}`, d: path.join("") });
}

/** Bars on what `base` holds, to which they are added. */
function bars(values, top, color, base) {
  const path = values.map((v, i) => v && `M${i + 0.1} ${y(base[i], top)}V${y((base[i] += v), top)}h.8V${y(base[i] - v, top)}Z`);
  return svg("path", { class: `solid ${color}`, d: path.filter(Boolean).join("") });
}

function picture(name, length, { label, marks = [], span = [0, length] }, ...children) {
  const [since, until] = span.map(ms);
  const lines = marks.map(({ at, text }) =>
    svg("path", { class: "mark", d: `M${(length * (ms(at) - since)) / (until - since)} 0V100` }, svg("title", {}, text)));
  const said = [label, ...marks.map(({ text }) => text)].join("; ");
  return svg("svg", { class: name, role: "img", "aria-label": said, viewBox: `0 0 ${length} 100`, preserveAspectRatio: "none" }, ...children, ...lines);
}

export function sparkline(values, options) {
  const { bad = [] } = options;
  const top = most(values);
  return picture("spark", values.length, options, area(values, top, "working"), bars(bad, top, "error", bad.map(() => 0)));
}

export function chart(layers, options) {
  const { bar, span, format = (value) => value.toLocaleString(locale) } = options;
  const base = layers[0].values.map(() => 0);
  const sums = base.map((_, i) => layers.reduce((sum, { values }) => sum + values[i], 0));
  const high = most(bar ? sums : layers.flatMap(({ values }) => values));
  const power = 10 ** Math.floor(Math.log10(high));
  const top = power * [1, 2, 5, 10].find((n) => n * power >= high);
  const time = (part) => span && new Date(ms(span[0]) + part * (ms(span[1]) - ms(span[0]))).toLocaleString(locale);
  const said = (i) => layers.map(({ name, values }) => `${name}: ${values[i] === null ? "–" : format(values[i])}`);
  const tips = sums.map((_, i) => svg("rect", { class: "tip", x: i, width: 1, height: 100 }, svg("title", {}, [time(i / sums.length), ...said(i)].join("\n"))));
  const shapes = layers.map(({ values, color }) => (bar ? bars : area)(values, top, color, base));
  const texts = (name, each) => el("div", { class: name, "aria-hidden": "true" }, each.map((text) => el("span", {}, text ?? "")));
  return el("figure", { class: "chart" }, texts("upright", [top, top / 2, 0].map((value) => format(value))),
    picture("plot", sums.length, options, ...shapes, ...tips), texts("along", [0, 0.5, 1].map(time)),
    el("figcaption", {}, layers.map(({ name, color }) => el("span", { class: color }, name))));
}
