// New figures take over the reader's zoom. Dash writes a zoom into the figure itself, where Plotly's uirevision
// no longer recognises it as the reader's; so it is carried from the figure on the screen to the one that replaces it.
(function () {
  const AXES = ["xaxis", "yaxis"];

  function carry(next, current) {
    const before = (current && current.layout) || {};
    if (!next.layout || before.uirevision !== next.layout.uirevision) return next;
    const layout = { ...next.layout };
    for (const axis of AXES) {
      if (before[axis] && before[axis].autorange === false && before[axis].range) {
        layout[axis] = { ...layout[axis], range: before[axis].range, autorange: false };
      }
    }
    return { ...next, layout };
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    collage: {
      keepZoom: (figure, current) => (figure ? carry(figure, current) : window.dash_clientside.no_update),
    },
  });
})();
