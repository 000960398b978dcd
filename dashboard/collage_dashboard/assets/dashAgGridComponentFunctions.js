// Cells that are more than text. A run's name leads to its page without loading the application again.
var dagcomponentfuncs = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

// On a phone a row is a card: its name, then the other columns as labels with their values, two in a line.
const PHONE = window.matchMedia("(max-width: 560px)");
const WHOLE_LINE = ["strategy", "updated_at", "kind"];
const IN_WORDS = ["health", "trend"];
const CARD_LINE = 20;
const watchedGrids = new WeakSet();

function labelled(api, own) {
  return api.getAllGridColumns().filter((column) => column !== own && !IN_WORDS.includes(column.getColId()));
}

function asCard(props, name) {
  const { api, column, node } = props;
  if (!watchedGrids.has(api)) setTimeout(() => watchGrid(api, column.getColId()), 0);
  if (!PHONE.matches) return name;
  const columns = labelled(api, column);
  const verdict = api.getColumn("health") && dagcomponentfuncs.JudgementCell(props);
  const pairs = columns.map((other) => {
    const text = api.getCellValue({ rowNode: node, colKey: other, useFormatter: true });
    const value = text === null || text === undefined || text === "" ? "–" : String(text).replace("\n", " · ");
    return React.createElement(
      "div",
      { key: other.getColId(), className: WHOLE_LINE.includes(other.getColId()) ? "whole" : "", title: value },
      React.createElement("span", { className: "quiet" }, other.getColDef().headerName),
      React.createElement("span", null, value)
    );
  });
  return React.createElement("div", { className: "row-card" }, name, verdict, React.createElement("div", { className: "row-values" }, pairs));
}

// The other columns go while the screen is narrow, and rows are as high as their cards.
function watchGrid(api, own) {
  if (watchedGrids.has(api) || api.isDestroyed()) return;
  watchedGrids.add(api);
  const usual = api.getGridOption("rowHeight");
  let arranged = "";
  const arrange = () => {
    if (api.isDestroyed()) return PHONE.removeEventListener("change", arrange);
    const column = api.getColumn(own);
    const others = api.getAllGridColumns().filter((other) => other !== column).map((other) => other.getColId());
    const wanted = PHONE.matches ? others.join() : "";
    if (wanted === arranged) return;
    arranged = wanted;
    const { pinned = null, flex = null, width } = column.getColDef();
    const first = PHONE.matches ? { colId: own, pinned: null, flex: 1 } : { colId: own, pinned, flex, width };
    api.applyColumnState({ state: [first, ...others.map((colId) => ({ colId, hide: PHONE.matches }))] });
    const columns = labelled(api, column);
    const whole = columns.filter((other) => WHOLE_LINE.includes(other.getColId())).length;
    const lines = whole + Math.ceil((columns.length - whole) / 2) + (api.getColumn("health") ? 3.2 : 1.2);
    api.setGridOption("rowHeight", PHONE.matches ? CARD_LINE * lines + 16 : usual);
    if (api.getGridOption("rowModelType") === "infinite") api.purgeInfiniteCache();
    else api.resetRowHeights();
    api.refreshCells({ force: true, columns: [own] });
  };
  PHONE.addEventListener("change", arrange);
  api.addEventListener("gridColumnsChanged", arrange);
  arrange();
}

dagcomponentfuncs.LayerCell = function (props) {
  return props.data ? asCard(props, React.createElement("span", { className: "layer-cell from-its-end", title: props.value }, React.createElement("bdi", null, props.value))) : null;
};

dagcomponentfuncs.RunCell = function (props) {
  const row = props.data;
  if (!row) return React.createElement("span", { className: "loading-cell" }, "…");
  return asCard(props, runName(props, row));
};

function runName(props, row) {
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
          row.label
        )
  );
}

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
  const now = window.collageNumbers.ratio(values.findLast((value) => value !== null) ?? null);
  // One scale for all rows: from nothing that arrives to a tenth too much.
  const at = (value, place) => `${((42 * place) / (values.length - 1)).toFixed(1)} ${(22 - 20 * Math.min(Math.max(value / 1.1, 0), 1)).toFixed(1)}`;
  const step = (value, place) => (value === null ? "" : (place && values[place - 1] !== null ? "L" : "M") + at(value, place));
  return React.createElement(
    "svg",
    { viewBox: "0 0 82 24", width: 82, height: 24, style: { display: "block" }, role: "img", "aria-label": `EDQ over the run, now ${now}` },
    React.createElement("text", { x: 47, y: 16, fill: "currentColor", fontSize: 12 }, now),
    React.createElement("path", { d: values.map(step).join(""), fill: "none", stroke: props.data.colour, strokeWidth: 1.6 })
  );
};
