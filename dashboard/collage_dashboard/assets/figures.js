// New figures take over the reader's zoom. Dash writes a zoom into the figure itself, where Plotly's uirevision
// no longer recognises it as the reader's; so it is carried from the figure on the screen to the one that replaces it.
(function () {
  const AXES = ["xaxis", "yaxis"];

  // What to do with an element of this kind that is clicked.
  const onClick = (window.collageOnClick = (selector, act, kind = "click") =>
    document.addEventListener(kind, (event) => {
      const found = event.target.closest && event.target.closest(selector);
      if (found) act(found, event);
    }));

  function carry(next, current) {
    const before = (current && current.layout) || {};
    if (!next.layout || before.uirevision !== next.layout.uirevision) return next;
    const zoom = (shown) => (shown.xaxis || {}).uirevision || "";
    const isUndone = zoom(next.layout).startsWith("whole") && zoom(before) !== zoom(next.layout);
    if (isUndone) return next; // Up and down too.
    const layout = { ...next.layout };
    for (const axis of AXES) {
      const was = before[axis] || {};
      const will = layout[axis] || {};
      if (was.uirevision === will.uirevision && was.autorange === false && was.range) {
        layout[axis] = { ...will, range: was.range, autorange: false };
      }
    }
    return { ...next, layout };
  }

  // Of curves that have grown only the newest points come; an interval's outline grows in its middle.
  function lengthened(part, current) {
    const data = current.data.map((trace, place) => {
      const [head, tail] = part.ends[place];
      const put = (old, newer) => newer && [...old.slice(0, head), ...newer, ...old.slice(old.length - tail)];
      const { size, ...others } = part.traces[place];
      const points = Object.fromEntries(Object.entries(others).map(([name, newer]) => [name, put(trace[name], newer)]));
      return { ...trace, ...points, ...(size && { marker: { ...trace.marker, size: put(trace.marker.size, size) } }) };
    });
    return { ...current, data };
  }

  // Of a heatmap that has grown only the newest columns come.
  function grown(part, current) {
    if (part.traces) return lengthened(part, current);
    const [before] = current.data;
    const cells = (name) => part[name] && { [name]: before[name].map((row, place) => [...row.slice(0, part.from), ...part[name][place]]) };
    const trace = { ...before, x: [...before.x.slice(0, part.from), ...part.x], ...cells("z"), ...cells("customdata") };
    return { ...current, data: [trace, ...current.data.slice(1)] };
  }

  // What a cell of a heatmap says, in the one form of numbers.
  function cellText({ customdata, x, z, meta }, row, column) {
    const value = (customdata || z)[row][column];
    const forms = window.collageNumbers; // Shares are drawn in percent.
    if (meta.form !== "share") return forms[meta.form](value);
    return forms.share(value === null ? null : value / 100) + (meta.bound ? story(x, z[row], meta.bound) : "");
  }

  // Since when a layer has lost more than the bound, to its last value, and what it lost until then.
  function story(steps, shares, bound) {
    const { share } = window.collageNumbers;
    const known = steps.map((step, place) => [step, shares[place]]).filter(([, lost]) => lost !== null);
    const within = known.findLastIndex(([, lost]) => lost <= 100 * bound);
    if (within === known.length - 1) return "";
    const since = `; more than ${share(bound)} since step ${known[within + 1][0].toLocaleString("en-GB")}`;
    return within < 0 ? since : `${since}, ${share(known[within][1] / 100)} before`;
  }

  // A heatmap has the scale of the page's ground: on a dark one the worst is brightest, too.
  const scaleOf = ({ meta, colorscale }) => (meta && meta[document.documentElement.dataset.mantineColorScheme]) || colorscale;
  new MutationObserver(() => {
    for (const plot of plotsOf("#run-panel")) {
      const [trace] = plot.data;
      if (trace.type === "heatmap" && trace.meta.dark) window.Plotly.restyle(plot, { colorscale: [scaleOf(trace)] });
    }
  }).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });

  // It is written when the cell is pointed at: a heatmap has up to a million.
  function withTexts(figure) {
    const [trace] = figure.data || [];
    if (!trace || trace.type !== "heatmap") return figure;
    const lazy = (count, read) =>
      new Proxy(new Array(count), {
        get: (target, key) => (typeof key === "string" && /^\d+$/.test(key) && key < count ? read(Number(key)) : target[key]),
      });
    const text = lazy(trace.y.length, (row) => lazy(trace.x.length, (column) => cellText(trace, row, column)));
    return { ...figure, data: [{ ...trace, text, colorscale: scaleOf(trace) }, ...figure.data.slice(1)] };
  }

  // What was zoomed to on the x axis; nothing for any other change of a layout.
  function zoomOf(change) {
    if (!change) return null;
    if (change["xaxis.autorange"]) return { "xaxis.autorange": true };
    const ends = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    return ends[0] === undefined ? null : { "xaxis.range": [...ends], "xaxis.autorange": false };
  }

  function shows(plot, zoom) {
    const axis = plot.layout.xaxis;
    if (zoom["xaxis.autorange"]) return axis.autorange !== false;
    return axis.autorange === false && axis.range.every((end, place) => end === zoom["xaxis.range"][place]);
  }

  // The charts of a page share their x axis: a zoom of one is that of all, and stands in the page's address. Of the
  // run page all charts are read anew for it; the histogram runs over sizes. Whoever zooms has touched the chart
  // first. Dash's own property of a chart would not do: the size that a chart tells takes the place of a zoom.
  document.addEventListener(
    "pointerdown",
    (event) => {
      const plot = event.target.closest && event.target.closest(".js-plotly-plot");
      const page = plot && plot.on && pageOfZoom(plot);
      if (!page) return;
      plot.tellZoom = plot.tellZoom || ((change) => tellZoom(page, zoomOf(change)));
      plot.removeListener("plotly_relayout", plot.tellZoom);
      plot.on("plotly_relayout", plot.tellZoom);
      plot.removeListener("plotly_click", pickStep);
      if (plot.closest("#run-stack")) plot.on("plotly_click", pickStep);
    },
    true,
  );

  // A click on a curve asks what changed there, beside a mark at the mark; a double click shows all steps again, and
  // asks nothing.
  const DOUBLE_CLICK = 350;
  const BESIDE = 6;
  let picking = null;
  let picks = 0;
  function pickStep({ points, event }) {
    const plot = event && event.target.closest(".js-plotly-plot");
    const second = picking !== null;
    clearTimeout(picking);
    picking = null;
    if (second) return;
    // Where it lies now: while a second click is waited for, new points may move the axis.
    const mark = plot ? markBeside(plot, event.clientX) : undefined;
    picking = setTimeout(() => {
      picking = null;
      ask(mark === undefined ? points[0].x : (plot.mark = mark));
    }, DOUBLE_CLICK);
  }

  function ask(x) {
    window.dash_clientside.set_props("run-pick", { data: { x, picks: ++picks } });
  }

  // Where a chart is marked, from left to right.
  function marksOf(plot) {
    const marks = (plot.layout.shapes || []).filter((shape) => shape.type === "line" && shape.x0 === shape.x1);
    return [...new Set(marks.map((shape) => shape.x0))].sort((one, other) => one - other);
  }

  function markBeside(plot, clientX) {
    const { xaxis } = plot._fullLayout;
    const from = plot.getBoundingClientRect().left + xaxis._offset;
    const away = (place) => Math.abs(from + xaxis.d2p(place) - clientX);
    const [nearest] = marksOf(plot).sort((one, other) => away(one) - away(other));
    return nearest !== undefined && away(nearest) <= BESIDE ? nearest : undefined;
  }

  // The mark after or before the one that was asked about last, among those on the screen.
  function markAfter(plot, forward) {
    const [first, last] = plot._fullLayout.xaxis.range;
    const shown = marksOf(plot).filter((place) => first <= place && place <= last);
    const further = forward ? shown : shown.reverse();
    const next = further.find((place) => plot.mark === undefined || (forward ? place > plot.mark : place < plot.mark));
    return next === undefined ? further[0] : next;
  }

  function pageOfZoom(plot) {
    if (plot.closest('[id*=\'"kind":"histogram"\']')) return null;
    if (plot.closest("#run-stack, #run-panel")) return "run";
    return plot.closest("[id^='compare-chart-']") ? "compare" : null;
  }

  // The address holds what is shown, in whole steps or tokens, or in milliseconds; after a double click nothing.
  function tellZoom(page, zoom) {
    if (!zoom) return;
    const [digits, least] = window.collageView.paramsOf(page).get("axis") === "time" ? [3, 0.001] : [0, 1];
    const ends = zoom["xaxis.autorange"] ? [] : zoom["xaxis.range"].map((end) => Math.max(Number(Number(end).toFixed(digits)), 0));
    const [from, last] = ends.sort((one, other) => one - other);
    window.collageView.put(page, { from, to: ends.length ? Math.max(last, Number((from + least).toFixed(digits))) : null });
  }

  // What a comparison shows was read already: its charts follow the address as they are.
  function showZoom({ search }) {
    const given = new URLSearchParams(search || "");
    const ends = [given.get("from"), given.get("to")];
    const zoom = ends.every((end) => end !== null)
      ? { "xaxis.range": ends.map(Number), "xaxis.autorange": false }
      : { "xaxis.autorange": true };
    for (const plot of plotsOf("[id^='compare-chart-']")) {
      if (!shows(plot, zoom)) window.Plotly.relayout(plot, zoom);
    }
  }

  function plotsOf(place) {
    return [...document.querySelectorAll(`${place} .js-plotly-plot`)].filter((plot) => plot.data && plot.data.length);
  }

  // The legend of a comparison hides lines, or shows one alone; what is drawn anew keeps to it. Which are hidden
  // stands in the legend's own place, and goes with the page.
  const plain = (text) => new DOMParser().parseFromString(text, "text/html").documentElement.textContent;
  const lines = () => [...document.querySelectorAll("#compare-legend [data-line]")];

  function hiddenLines() {
    const legend = document.getElementById("compare-legend");
    return new Set(JSON.parse((legend && legend.dataset.hidden) || "[]"));
  }

  function isHidden(trace, hidden) {
    const name = plain(trace.name || "");
    return [...hidden].some((line) => [line, `${line} (partial)`].includes(name) || name.startsWith(`${line}, `));
  }

  function chooseLine(button, alone) {
    const own = button.dataset.line;
    const hidden = hiddenLines();
    if (alone) lines().forEach(({ dataset: { line } }) => (line === own ? hidden.delete(line) : hidden.add(line)));
    else if (!hidden.delete(own)) hidden.add(own);
    document.getElementById("compare-legend").dataset.hidden = JSON.stringify([...hidden]);
    tellHidden(hidden);
    for (const plot of plotsOf("[id^='compare-chart-']"))
      window.Plotly.restyle(plot, { visible: plot.data.map((trace) => !isHidden(trace, hidden)) });
  }

  function tellHidden(hidden) {
    for (const line of lines()) line.setAttribute("aria-pressed", String(!hidden.has(line.dataset.line)));
  }

  for (const kind of ["click", "dblclick"])
    onClick("#compare-legend [data-line]", (button, event) => chooseLine(button, kind === "dblclick" || event.shiftKey), kind);

  function withLines(figure) {
    const hidden = hiddenLines();
    tellHidden(hidden);
    if (!hidden.size || !figure.data) return figure;
    return { ...figure, data: figure.data.map((trace) => (isHidden(trace, hidden) ? { ...trace, visible: false } : trace)) };
  }

  // A heatmap is walked with the arrow keys; Enter picks the cell, as a click does.
  document.addEventListener("focusin", (event) => {
    const plot = mapOf(event.target);
    if (plot && !plot.cell) walk(plot, 0, 0);
  });
  document.addEventListener("keydown", (event) => {
    const plot = mapOf(event.target);
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!plot || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    if (move) walk(plot, ...move);
    else pick(plot);
  });

  function mapOf(place) {
    const plot = place.matches && place.matches("[data-map]") && place.querySelector(".js-plotly-plot");
    return plot && plot.data && plot.data.length && plot.data[0].type === "heatmap" ? plot : null;
  }

  function walk(plot, down, right) {
    const { x, y } = plot.data[0];
    const within = (place, count) => Math.min(Math.max(place, 0), count - 1);
    const [row, column] = plot.cell || [0, x.length - 1];
    let next = within(row + down, y.length);
    // A group's name is no layer.
    while (y[next].startsWith("▾ ") && next + (down || 1) >= 0 && next + (down || 1) < y.length) next += down || 1;
    plot.cell = [next, within(column + right, x.length)];
    const [at, place] = plot.cell;
    window.Plotly.Fx.hover(plot, { xval: x[place], yval: at }, "xy");
    const said = document.getElementById("map-cell");
    if (said) said.textContent = `${y[at]}, step ${Number(x[place]).toLocaleString("en-GB")}: ${cellText(plot.data[0], at, place)}`;
  }

  function pick(plot) {
    if (!plot.cell) return;
    const [row, column] = plot.cell;
    const { x, y, z } = plot.data[0];
    const point = { curveNumber: 0, pointNumber: [row, column], x: x[column], y: y[row], z: z[row][column] };
    window.collageFlow.pointed();
    plot.emit("plotly_click", { points: [point] });
  }

  // Curves are zoomed with + and -, moved with the arrow keys, and shown whole with 0, as a drag and a double click do.
  // At their marks n and p ask what changed, as a click does.
  document.addEventListener("keydown", (event) => {
    const place = event.target.matches && event.target.matches("[data-curves]") && event.target;
    const plot = place && [...place.querySelectorAll(".js-plotly-plot")].find((one) => one.data && one.data.length);
    const isDrawn = plot && !event.ctrlKey && !event.metaKey && !event.altKey;
    const mark = isDrawn && plot.closest("#run-stack") && "np".includes(event.key) ? markAfter(plot, event.key === "n") : undefined;
    if (mark !== undefined) ask((plot.mark = mark));
    const zoom = isDrawn && zoomBy(event.key, plot._fullLayout.xaxis.range);
    if (!zoom) return;
    event.preventDefault();
    tellZoom(pageOfZoom(plot), zoom);
  });

  function zoomBy(key, [first, last]) {
    if (key === "0") return { "xaxis.autorange": true };
    const moves = { "+": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] }[key];
    const ends = moves && moves.map((share, place) => [first, last][place] + share * (last - first));
    return ends ? { "xaxis.range": ends, "xaxis.autorange": false } : null;
  }

  // Where one chart is pointed at, the others say what they have there.
  function shareHover() {
    const [trigger] = window.dash_clientside.callback_context.triggered;
    const point = trigger && trigger.value && trigger.value.points && trigger.value.points[0];
    const own = '.dash-graph:not([id*=\'"kind":"heatmap"\'], [id*=\'"kind":"histogram"\'])';
    for (const plot of plotsOf(`:is(#run-stack, #run-panel, .charts) ${own}`)) {
      if (plot.matches(":hover")) continue;
      if (point && typeof point.x === "number") window.Plotly.Fx.hover(plot, { xval: point.x }, plot._fullLayout._subplots.cartesian);
      else window.Plotly.Fx.unhover(plot);
    }
  }

  // A chart as a file: its picture, or the numbers that it draws.
  onClick("[data-save]", (button) => {
    const plot = button.closest(".card").querySelector(".js-plotly-plot");
    if (!plot || !plot.data || !plot.data.length) return;
    const { save, title } = button.dataset;
    const filename = ["collage", (document.querySelector("#page h1") || {}).textContent || "", title].map(dashed).join("-");
    const { numbers } = plot.layout.meta || {};
    if (save === "csv" && numbers) follow(numbers, ""); // All points from the server; what is drawn is thinned.
    else if (save !== "csv") window.Plotly.downloadImage(plot, { format: save, filename, scale: save === "png" ? 2 : 1 });
    else download(`${filename}.csv`, csvOf(plot));
  });

  // What a page shows as one picture, without its links elsewhere: a copy of its elements with all styles, in an SVG that
  // the browser draws. As wide as the window, or other widths' styles would count.
  onClick("[data-pictures]", async (button) => {
    const said = button.nextElementSibling;
    try {
      follow(await pictureOf(document.getElementById("page")), `${dashed(`collage ${document.title.replace(/ · [^·]*$/, "")}`)}.png`);
    } catch {
      said.textContent = " This browser cannot draw the page";
    }
  });

  async function pictureOf(page) {
    const place = document.createElement("body");
    const copy = place.appendChild(page.cloneNode(true));
    copy.style.cssText = `width: ${page.offsetWidth}px; box-sizing: border-box; margin: 0; padding-bottom: 16px`;
    const written = page.querySelectorAll("input");
    copy.querySelectorAll("input").forEach((input, at) => input.setAttribute("value", written[at].value));
    for (const grid of copy.querySelectorAll(".layers-place")) grid.style.height = `${page.querySelector(".layers-place").offsetHeight}px`;
    for (const panel of copy.querySelectorAll("#run-panel")) panel.style.minHeight = 0;
    for (const other of copy.querySelectorAll(".crumbs, .pandas")) other.remove();
    document.body.append(place);
    const height = Math.ceil(place.getBoundingClientRect().height);
    place.remove();

    const styles = document.createElement("style");
    styles.textContent = [...document.styleSheets, ...document.adoptedStyleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText)).join("\n");
    place.prepend(styles);
    const scheme = document.documentElement.dataset.mantineColorScheme;
    const image = new Image(innerWidth, height);
    image.src = `data:image/svg+xml,${encodeURIComponent(
      `<svg xmlns="http://www.w3.org/2000/svg" width="${innerWidth}" height="${height}" data-mantine-color-scheme="${scheme}">` +
        `<foreignObject width="100%" height="100%">${new XMLSerializer().serializeToString(place)}</foreignObject></svg>`,
    )}`;
    await image.decode();
    const scale = Math.min(2, 16000 / height);
    const canvas = Object.assign(document.createElement("canvas"), { width: scale * page.offsetWidth, height: scale * height });
    const drawing = canvas.getContext("2d");
    drawing.fillStyle = getComputedStyle(document.body).backgroundColor;
    drawing.fillRect(0, 0, canvas.width, canvas.height);
    drawing.drawImage(image, 0, 0, scale * innerWidth, scale * height);
    return canvas.toDataURL();
  }

  const dashed = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);

  function follow(address, name) {
    const link = document.createElement("a");
    link.href = address;
    link.download = name;
    link.click();
  }

  function download(name, text) {
    const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    follow(address, name);
    URL.revokeObjectURL(address);
  }

  function csvOf(plot) {
    const titleOf = (axis, other) => ((axis || {}).title || {}).text || other;
    const { xaxis, yaxis } = plot.layout;
    const rows = [];
    for (const trace of plot.data) {
      if (trace.fill === "toself") continue; // An interval's outline.
      if (trace.type === "heatmap") {
        const cells = trace.customdata || trace.z;
        trace.y.forEach((name, row) => trace.x.forEach((at, place) => rows.push([name, at, cells[row][place]])));
      } else {
        trace.x.forEach((at, place) => rows.push([trace.name || "", at, trace.y[place]]));
      }
    }
    rows.unshift(["name", titleOf(xaxis, "x"), plot.data[0].type === "heatmap" ? "value" : titleOf(yaxis, "value")]);
    return rows.map((row) => row.map(cellOf).join(",")).join("\n") + "\n";
  }

  // Names come from users, so a name that a spreadsheet would read as a formula is escaped as text.
  function cellOf(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    collage: {
      keepZoom: (figure, current) => {
        if (!figure) return window.dash_clientside.no_update;
        return withTexts(figure.newest ? grown(figure.newest, current) : withLines(carry(figure, current)));
      },
      showZoom,
      shareHover,
    },
  });
})();
