"use strict";
// Values under the pointer: each chart carries its numbers as JSON; text is only ever set as text, never as HTML.
const tooltip = document.getElementById("tooltip");

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - steps[low] <= steps[high] - wanted ? low : high;
}

function show(value, percent) {
  if (percent) return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

function row(color, name, value) {
  const line = document.createElement("div");
  line.className = "c" + color;
  const mark = document.createElement("i");
  const label = document.createElement("span");
  const number = document.createElement("b");
  label.textContent = name;
  number.textContent = value;
  line.append(mark, label, number);
  return line;
}

function attach(figure) {
  const svg = figure.querySelector("svg");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const group = svg.querySelector(".hover");
  const cursor = group.querySelector("line");
  const [left, right, top, bottom] = data.plot;
  const dots = data.curves.map((curve, index) => {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("r", "3.5");
    dot.setAttribute("class", "dot c" + (index % 6));
    group.append(dot);
    return dot;
  });
  const toX = (step) => left + (step - data.steps[0]) / (data.steps[1] - data.steps[0]) * (right - left);
  const toY = (value) => {
    const inside = Math.min(Math.max(value, data.range[0]), data.range[1]);
    return top + (data.range[1] - inside) / (data.range[1] - data.range[0]) * (bottom - top);
  };

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const wanted = data.steps[0] + (x - left) / (right - left) * (data.steps[1] - data.steps[0]);
    const first = data.curves[0];
    const step = first.steps[nearest(first.steps, wanted)];
    const title = document.createElement("div");
    title.textContent = "step " + step.toLocaleString("en");
    tooltip.replaceChildren(title);
    data.curves.forEach((curve, index) => {
      const at = nearest(curve.steps, step);
      dots[index].setAttribute("cx", toX(curve.steps[at]));
      dots[index].setAttribute("cy", toY(curve.smooth[at]));
      const mean = show(curve.smooth[at], data.percent);
      const value = show(curve.values[at], data.percent);
      tooltip.append(row(index % 6, curve.name, mean === value ? value : value + "  (mean " + mean + ")"));
    });
    cursor.setAttribute("x1", toX(step));
    cursor.setAttribute("x2", toX(step));
    group.setAttribute("visibility", "visible");
    tooltip.hidden = false;
    const beside = event.clientX + 16 + tooltip.offsetWidth > window.innerWidth
      ? event.clientX - 16 - tooltip.offsetWidth : event.clientX + 16;
    tooltip.style.left = Math.max(4, beside) + "px";
    tooltip.style.top = Math.max(4, event.clientY - 12 - tooltip.offsetHeight / 2) + "px";
  });
  svg.addEventListener("pointerleave", () => {
    group.setAttribute("visibility", "hidden");
    tooltip.hidden = true;
  });
}

document.querySelectorAll("figure.chart").forEach(attach);
