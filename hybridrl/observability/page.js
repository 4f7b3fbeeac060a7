"use strict";
/* What every page shares: its data, elements, numbers and the looks of charts. */

const pageData = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value) {
  if (value === undefined || value === null) return "n/a";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return size >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 10 ? 1 : 3);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function layout(extra) {
  const axis = {gridcolor: colour("grid"), zeroline: false, linecolor: colour("line"), tickfont: {size: 11}};
  return {
    margin: {l: 52, r: extra.yaxis2 ? 52 : 14, t: 30, b: 34}, hovermode: "x unified", showlegend: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: colour("soft"), size: 12},
    hoverlabel: {bgcolor: colour("card"), bordercolor: colour("line"), font: {color: colour("ink")}},
    legend: {orientation: "h", x: 0, y: 1.16, font: {size: 12}},
    xaxis: {...axis, showgrid: false, title: {text: "step", font: {size: 11}, standoff: 4}},
    yaxis: {...axis, ...(extra.yaxis || {})},
    ...(extra.yaxis2 ? {yaxis2: {...axis, overlaying: "y", side: "right", showgrid: false, tickmode: "auto", ...extra.yaxis2}} : {}),
  };
}

const plotSettings = {displaylogo: false, responsive: true, displayModeBar: false};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
