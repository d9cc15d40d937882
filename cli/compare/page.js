"use strict";
// Draws the curves of #curves into #charts: one chart for each metric, over steps or over time, and one of the
// throughput over the number of processes, if that varies between groups.
(() => {
  const { dashes, num_colours: numColours, metrics, scaling } = JSON.parse(document.getElementById("curves").textContent);
  const width = 460, height = 230, left = 52, right = 10, top = 12, bottom = 30;
  const maxMarked = 30; // Points of a curve that are marked by dots.
  const hidden = new Set();
  let axis = "step";

  const colour = (curve) => curve.colour ?? `var(--series-${curve.column % numColours})`;
  const dash = (curve) => curve.dash ?? dashes[curve.column];

  function element(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
    return found;
  }

  function text(value) {
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }

  function duration(seconds) {
    if (seconds < 120) return text(seconds) + " s";
    return seconds < 7200 ? text(seconds / 60) + " min" : text(seconds / 3600) + " h";
  }

  // Time is marked in seconds, minutes or hours, and the scale's marks are round numbers of that unit.
  function unit(axis, high) {
    if (axis !== "seconds") return [1, ""];
    return high < 120 ? [1, " s"] : high < 7200 ? [60, " min"] : [3600, " h"];
  }

  function range(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    return low < high ? [low, high] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  }

  function draw(figure, name, curves, axis) {
    figure.querySelector("svg")?.remove();
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} over ${axis}` });
    figure.append(svg);
    if (!curves.length) return;
    let [x0, x1] = range(curves.flatMap((curve) => curve[axis]));
    if (axis === "processes" || (x0 > 0 && x0 < x1 / 2)) x0 = 0; // Charts of values that are logged at other steps then have the same scale.
    let [y0, y1] = range(curves.flatMap((curve) => curve.value));
    const margin = 0.04 * (y1 - y0);
    [y0, y1] = [y0 >= 0 ? Math.max(0, y0 - margin) : y0 - margin, y1 + margin];
    const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
    const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);

    for (const tick of ticks(y0, y1, 4)) {
      svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
      svg.append(element("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, text(tick)));
    }
    const [size, suffix] = unit(axis, x1);
    for (const tick of ticks(x0 / size, x1 / size, 5)) {
      const place = x(tick * size);
      svg.append(element("line", { class: "grid", x1: place, x2: place, y1: height - bottom, y2: height - bottom + 4 }));
      svg.append(element("text", { class: "tick", x: place, y: height - 10, "text-anchor": "middle" }, text(tick) + suffix));
    }
    for (const curve of curves) {
      const points = curve[axis].map((place, index) => [x(place).toFixed(1), y(curve.value[index]).toFixed(1)]);
      const style = `stroke: ${colour(curve)}`;
      svg.append(element("path", {
        class: "curve", style, "stroke-dasharray": dash(curve), d: "M" + points.map((point) => point.join(" ")).join("L"),
      }));
      if (points.length > maxMarked) continue;
      for (const [cx, cy] of points) svg.append(element("circle", { cx, cy, r: 2.3, style: `fill: ${colour(curve)}` }));
    }
    svg.addEventListener("pointermove", (event) => point(event, figure, svg, curves, axis, x, [x0, x1]));
    svg.addEventListener("pointerleave", () => figure.querySelectorAll(".tip, .cursor").forEach((node) => node.remove()));
  }

  // Shows the value of every curve at the point that is nearest to the pointer.
  function point(event, figure, svg, curves, axis, x, [x0, x1]) {
    figure.querySelectorAll(".tip, .cursor").forEach((node) => node.remove());
    const box = svg.getBoundingClientRect(), scale = width / box.width;
    const wanted = x0 + (((event.clientX - box.left) * scale - left) / (width - left - right)) * (x1 - x0);
    const places = curves.map((curve) => nearest(curve[axis], wanted));
    const at = curves.map((curve, index) => curve[axis][places[index]])
      .reduce((best, place) => (Math.abs(place - wanted) < Math.abs(best - wanted) ? place : best));
    svg.append(element("line", { class: "cursor", x1: x(at), x2: x(at), y1: top, y2: height - bottom }));
    const tip = document.createElement("div");
    tip.className = "tip";
    const title = document.createElement("b");
    title.textContent = axis === "seconds" ? duration(at) : axis === "step" ? `step ${text(at)}` : `${text(at)} processes`;
    tip.append(title);
    curves.forEach((curve, index) => {
      const line = document.createElement("div");
      const mark = document.createElement("span");
      mark.textContent = "● ";
      mark.style.color = colour(curve);
      line.append(mark, `${text(curve.value[places[index]])}  ${curve.run}`);
      tip.append(line);
    });
    figure.append(tip);
    const isRight = x(at) > width / 2, place = x(at) / scale + 12;
    tip.style.top = "34px";
    tip.style.left = `${isRight ? place - tip.offsetWidth : place + 12}px`;
  }

  function nearest(places, wanted) {
    let best = 0;
    places.forEach((place, index) => { if (Math.abs(place - wanted) < Math.abs(places[best] - wanted)) best = index; });
    return best;
  }

  function addFigure(name) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = name;
    figure.append(caption);
    document.getElementById("charts").append(figure);
    return figure;
  }

  if (scaling) {
    const { metric, sizes, ideal, measured } = scaling;
    const curves = [
      { run: "ideal", colour: "var(--faint)", dash: "6 3", processes: sizes, value: ideal },
      { run: "measured", colour: "var(--ink)", dash: "", processes: sizes, value: measured },
    ];
    draw(addFigure(`${metric} over processes`), metric, curves, "processes");
  }
  const figures = new Map(Object.keys(metrics).map((name) => [name, addFigure(name)]));
  const shown = (name) => metrics[name].filter((curve) => !hidden.has(curve.column));
  const drawAll = () => figures.forEach((figure, name) => draw(figure, name, shown(name), axis));
  document.querySelectorAll("#legend button").forEach((button) => button.addEventListener("click", () => {
    const column = Number(button.dataset.column), isHidden = !hidden.delete(column);
    if (isHidden) hidden.add(column);
    button.setAttribute("aria-pressed", String(!isHidden));
    drawAll();
  }));
  document.querySelectorAll("#axis button").forEach((button) => button.addEventListener("click", () => {
    axis = button.dataset.axis;
    document.querySelectorAll("#axis button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
    drawAll();
  }));
  drawAll();
})();
