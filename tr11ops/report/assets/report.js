// Pointing at a curve says what is there; dragging zooms; a double click, or the button, shows all again.
"use strict";
const charts = {};
for (const chart of document.querySelectorAll(".chart.lines")) {
  const data = charts[chart.id] = JSON.parse(chart.querySelector("script").textContent);
  if (data.like) data.texts = charts[data.like].texts;
  else for (const column of data.texts) column.forEach((text, i) => { if (text === 0) column[i] = column[i - 1]; });
  const readout = chart.querySelector(".readout"), axis = chart.querySelector(".axis");
  const plots = [...chart.querySelectorAll(".plot")], names = [...chart.querySelectorAll(".markers span")];
  const ticks = [...axis.children], labels = plots.map(plot => [...plot.querySelectorAll(".y")]);
  const button = Object.assign(document.createElement("button"), {textContent: "show all", type: "button", hidden: true, onclick: () => reset()});
  // where each panel's points stand, 0 to 1 from the left and from the bottom
  const points = plots.map(plot => [...plot.querySelectorAll(".line")].flatMap(line =>
    [...line.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map(found => [found[1] / 1000, 1 - found[2] / 100])));
  let zoom = [0, 1], start = null;
  readout.after(button);
  const place = x => (x - zoom[0]) / (zoom[1] - zoom[0]);
  const short = v => Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
  const nearest = x => {
    let best = 0;
    data.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(data.x[best] - x)) best = i; });
    return best;
  };
  const span = (text, css, name) => Object.assign(document.createElement("span"), {textContent: text, style: css, className: name});

  function draw() {
    const all = zoom[0] === 0 && zoom[1] === 1;
    plots.forEach((plot, k) => {
      const panel = data.panels[k];
      let low = 0, high = 1;
      if (!all) {
        const seen = points[k].filter(([x]) => x >= zoom[0] && x <= zoom[1]).map(([, y]) => y);
        if (seen.length) { low = Math.min(...seen); high = Math.max(...seen); }
        const room = Math.max(0.05 * (high - low), 0.002);
        low -= room; high += room;
      }
      plot.querySelector("svg").setAttribute("viewBox",
        `${1000 * zoom[0]} ${100 * (1 - high)} ${1000 * (zoom[1] - zoom[0])} ${100 * (high - low)}`);
      plot.querySelectorAll(".y").forEach(label => label.remove());
      const value = y => panel.log ? panel.low * Math.pow(panel.high / panel.low, y) : panel.low + (panel.high - panel.low) * y;
      plot.append(...(all ? labels[k] : [0, 0.5, 1].map(y => span(short(value(low + y * (high - low))), `bottom:${100 * y}%`, "y"))));
    });
    const ends = () => [span(data.texts[data.label][nearest(zoom[0])], "left:0", "from"), span(data.texts[data.label][nearest(zoom[1])], "left:100%", "to")];
    axis.replaceChildren(...(all ? ticks : ends()));
    for (const name of names) {
      const x = place(Number(name.dataset.x));
      name.style.left = `${100 * x}%`;
      name.hidden = x < 0 || x > 1;
    }
    button.hidden = all;
  }
  function reset() { zoom = [0, 1]; draw(); }
  function say(i) {
    readout.textContent = data.names.map((name, k) => `${name} ${data.texts[k][i]}`.trim()).join(" · ");
    for (const plot of plots) {
      const cursor = plot.querySelector(".cursor");
      cursor.style.left = `${100 * place(data.x[i])}%`;
      cursor.style.display = "block";
    }
  }
  for (const plot of plots) {
    const share = event => {
      const box = plot.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    const ranges = plots.map(other => other.querySelector(".range"));
    plot.onpointermove = event => {
      const at = share(event);
      if (data.x.length) say(nearest(zoom[0] + at * (zoom[1] - zoom[0])));
      if (start !== null) for (const range of ranges) {
        range.style.cssText = `display:block;left:${100 * Math.min(start, at)}%;width:${100 * Math.abs(at - start)}%`;
      }
    };
    plot.onpointerdown = event => {
      if (event.pointerType === "mouse" && event.button === 0) { start = share(event); plot.setPointerCapture(event.pointerId); }
    };
    plot.onpointerup = event => {
      if (start === null) return;
      const [from, to] = [start, share(event)].sort((a, b) => a - b), width = zoom[1] - zoom[0];
      start = null;
      ranges.forEach(range => range.style.display = "none");
      if (to - from > 0.01) { zoom = [zoom[0] + from * width, zoom[0] + to * width]; draw(); }
    };
    plot.ondblclick = reset;
  }
}
