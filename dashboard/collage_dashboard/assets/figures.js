// New figures take over the reader's zoom. Dash writes a zoom into the figure itself, where Plotly's uirevision
// no longer recognises it as the reader's; so it is carried from the figure on the screen to the one that replaces it.
(function () {
  const AXES = ["xaxis", "yaxis"];

  function carry(next, current) {
    const before = (current && current.layout) || {};
    if (!next.layout || before.uirevision !== next.layout.uirevision) return next;
    const narrowed = (shown) => (shown.xaxis || {}).uirevision;
    if (narrowed(before) && !narrowed(next.layout)) return next; // The address's zoom is undone, up and down too.
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

  // The charts of a page share their x axis: a zoom of one is that of all.
  function linkZoom() {
    const no = window.dash_clientside.no_update;
    const [trigger] = window.dash_clientside.callback_context.triggered;
    const zoom = trigger && zoomOf(trigger.value);
    if (!zoom) return no;
    zoomAll("[id^='compare-chart-']", zoom);
    return no;
  }

  function zoomAll(graphs, zoom) {
    for (const plot of document.querySelectorAll(`${graphs} .js-plotly-plot`)) {
      if (plot.data.length && !shows(plot, zoom)) window.Plotly.relayout(plot, zoom);
    }
  }

  // A zoom over steps stands in the run page's address, from which all its charts are read anew; the server narrows
  // by steps alone, so on another axis it moves the charts as they are. The histogram runs over sizes.
  function zoomRun() {
    const no = window.dash_clientside.no_update;
    const [trigger] = window.dash_clientside.callback_context.triggered;
    const zoom = trigger && !trigger.prop_id.includes('"kind":"histogram"') && zoomOf(trigger.value);
    if (!zoom) return no;
    if (!new URLSearchParams(window.location.search).has("axis")) return zoom;
    zoomAll(`#run-panel .dash-graph:not([id*='"kind":"histogram"'])`, zoom);
    return no;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    collage: {
      keepZoom: (figure, current) => (figure ? carry(figure, current) : window.dash_clientside.no_update),
      linkZoom,
      zoomRun,
    },
  });
})();
