// Cells that are more than text. A run's name leads to its page without loading the application again.
var dagcomponentfuncs = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

dagcomponentfuncs.RunCell = function (props) {
  const row = props.data;
  if (!row) return React.createElement("span", { className: "loading-cell" }, "…");
  // The store alone knows what is picked: a copy beside it could lag behind, and a tick of it be lost.
  const wanted = row.picks || { [row.run_id]: row.name };
  const picked = () => (window.dash_component_api.getLayout("runs-picked") || { props: {} }).props.data || {};
  const isPicked = Object.keys(wanted).every((run) => run in picked());
  const pick = (event) => {
    const next = { ...picked() };
    if (event.target.checked) Object.assign(next, wanted);
    else Object.keys(wanted).forEach((run) => delete next[run]);
    window.dash_clientside.set_props("runs-picked", { data: next });
  };
  return React.createElement(
    "span",
    { className: "run-cell" + (row.member ? " member" : "") },
    row.group &&
      React.createElement(
        "button",
        {
          type: "button",
          className: "opens",
          "aria-expanded": row.open,
          "aria-label": `${row.runs} of ${row.name}`,
          onClick: () => window.collageFlow.toggle(row.run_id),
        },
        row.open ? "▾" : "▸"
      ),
    React.createElement("input", {
      type: "checkbox",
      className: "pick",
      "aria-label": `Pick ${row.name} to compare`,
      defaultChecked: isPicked,
      key: String(isPicked),
      onChange: pick,
    }),
    React.createElement("span", { className: "dot", style: { "--run-colour": row.colour } }),
    row.group
      ? React.createElement(
          "span",
          { className: "group-name", title: row.name },
          row.name,
          React.createElement("span", { className: "quiet" }, ` · ${row.runs}`)
        )
      : React.createElement(
          window.dash_core_components.Link,
          { href: row.address, refresh: false, title: row.name },
          row.name
        )
  );
};

dagcomponentfuncs.JudgementCell = function (props) {
  const row = props.data;
  if (!row) return null;
  return React.createElement(
    "span",
    { title: row.headline, className: "verdict-cell" },
    React.createElement("span", { className: `mark mark-${row.mark[1]}`, "aria-hidden": true }, row.mark[0]),
    row.brief
  );
};

dagcomponentfuncs.TrendCell = function (props) {
  const values = props.data && props.data.trend;
  if (!values || values.length < 2) return null;
  const least = Math.min(0.9, ...values.filter((value) => value !== null));
  const most = Math.max(1.02, ...values.filter((value) => value !== null));
  const at = (value, place) => `${((80 * place) / (values.length - 1)).toFixed(1)} ${(22 - (20 * (value - least)) / (most - least)).toFixed(1)}`;
  let path = "";
  values.forEach((value, place) => {
    if (value !== null) path += (place && values[place - 1] !== null ? "L" : "M") + at(value, place);
  });
  return React.createElement(
    "svg",
    { viewBox: "0 0 80 24", width: 80, height: 24, style: { display: "block" }, role: "img", "aria-label": "EDQ over the run" },
    React.createElement("path", { d: path, fill: "none", stroke: props.data.colour, strokeWidth: 1.6 })
  );
};
