// The flow of a page: one refresh at a time. The next tick is armed when every question of the last one is answered,
// so that a slow answer is never overtaken by its successor; and none is sent while the page is hidden.
// Dash's own hooks are not called for an answer without content or for none at all, so the requests are counted here.
(function () {
  const SAYS_AFTER = 1000;
  const HANGS_AFTER = 3000;
  const GIVES_UP_AFTER = 20000;
  const HEATMAP = '[id*=\'"kind":"heatmap"\']';
  const NEWEST = "-updated_at"; // The table's order, unless another one is chosen: the control says so, too.
  const SETTLES_AFTER = 60; // An answer may lead to a further question at once.
  const asked = new Map();
  const ask = window.fetch.bind(window);
  let timer = null;
  let clock = null;
  let due = false;
  let paused = false;
  let leaving = false;
  let ticks = 0;
  const answered = JSON.parse(document.getElementById("answers")?.textContent || "{}");

  window.fetch = function (resource, options) {
    const address = typeof resource === "string" ? resource : (resource && resource.url) || "";
    const known = Object.keys(answered).find((name) => address.includes(name));
    if (known) return Promise.resolve(answerWith(known));
    if (!address.includes("_dash-update-component")) return ask(resource, options);
    const answer = packed(options).then((smaller) => ask(resource, smaller));
    const question = {};
    asked.set(question, performance.now());
    clearTimeout(timer);
    clock = clock || setInterval(tell, 500);
    const done = () => {
      asked.delete(question);
      settle();
    };
    const shown = answer.then((given) => (given.status === 401 ? openAnew() : given));
    shown.then(done, done);
    return shown;
  };

  // A question of a page says mostly the same words: a third of it travels.
  async function packed(options) {
    if (!window.CompressionStream || typeof options.body !== "string") return options;
    const stream = new Blob([options.body]).stream().pipeThrough(new window.CompressionStream("gzip"));
    const headers = new Headers(options.headers);
    headers.set("Content-Encoding", "gzip");
    return { ...options, headers, body: await new Response(stream).arrayBuffer() };
  }

  // The session is over: opened anew, the page asks who is there, and until then the application is told nothing.
  function openAnew() {
    if (!leaving) window.location.reload();
    return new Promise(() => {});
  }

  // The address says what the server has picked, except on a phone: there the list comes before a run or several.
  const PHONE = window.matchMedia("(max-width: 800px)");
  const leads = document.getElementById("opening")?.dataset.leads;
  if (leads && PHONE.matches && window.location.pathname === "/" && !leads.startsWith("/runs")) {
    Object.assign(answered["_dash-layout"].props.children[0].props, { pathname: "/", search: "" });
    document.documentElement.dataset.list = "first";
  } else if (leads) window.history.replaceState(null, "", leads);

  // The list of runs beside a page: what the address picks is marked, and a tick compares it with what is picked.
  function picked() {
    const { pathname, search } = window.location;
    if (pathname.startsWith("/run/")) return [decodeURIComponent(pathname.slice("/run/".length))];
    return pathname === "/compare" ? new URLSearchParams(search).getAll("run") : [];
  }

  // What is ticked while the comparison is still on its way waits for it.
  let wanted = null;
  const isCompared = () => document.getElementById("compare-advice") !== null;

  function markPicked() {
    if (wanted && isCompared()) {
      const run = wanted;
      setTimeout(() => window.collageView.put("compare", { run, left_out: null }), 0);
      wanted = null;
    }
    const shown = wanted || picked();
    if (window.location.pathname !== "/") delete document.documentElement.dataset.list;
    for (const row of document.querySelectorAll("#rail [data-run]")) {
      const tick = row.querySelector(".tick");
      const isPicked = String(shown.includes(row.dataset.run));
      if (tick.getAttribute("aria-checked") !== isPicked) tick.setAttribute("aria-checked", isPicked);
    }
  }

  window.collageOnClick("#rail .tick", (tick) => {
    const { run } = tick.closest("[data-run]").dataset;
    const before = wanted || picked();
    const runs = before.includes(run) ? before.filter((other) => other !== run) : [...before, run];
    const asked = new URLSearchParams(runs.map((one) => ["run", one]));
    if (!runs.length) return;
    const isThere = runs.length > 1 && window.location.pathname === "/compare";
    wanted = isThere ? runs : null;
    if (!isThere) {
      window.history.pushState(null, "", runs.length > 1 ? `/compare?${asked}` : `/run/${encodeURIComponent(runs[0])}`);
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
    }
    setTimeout(markPicked, 0);
  });

  // The document holds what the application asks for first: the layout with its page, and the callbacks.
  function answerWith(name) {
    const body = JSON.stringify(answered[name]);
    delete answered[name];
    return new Response(body, { headers: { "content-type": "application/json" } });
  }

  // Once the application shows the page, its first rows too, the words that stood in for it go.
  const entry = document.getElementById("react-entry-point");
  let shownAt = null;
  const handover = new MutationObserver(() => {
    if (!document.querySelector("#page > *")) return;
    const table = document.getElementById("runs-table"); // The grid in it is loaded later.
    const names = [...document.querySelectorAll("#runs-table .ag-cell[col-id='name']")];
    const isDrawn = names.length && names.every((cell) => cell.querySelector(".run-cell"));
    shownAt = shownAt || performance.now();
    if (table && table.offsetParent && !isDrawn && performance.now() - shownAt < GIVES_UP_AFTER) return;
    handover.disconnect();
    const menus = [...entry.querySelectorAll("details")];
    for (const { textContent } of document.querySelectorAll("#opening details[open] > summary")) {
      const same = menus.find((menu) => menu.firstElementChild.textContent === textContent);
      if (same) same.open = true; // What a reader has opened meanwhile stays open.
    }
    document.getElementById("opening")?.remove();
    arrive();
    settle(); // A page that asks nothing while it opens ticks as well.
  });
  handover.observe(entry, { childList: true, subtree: true });

  function settle() {
    if (asked.size) return;
    clearInterval(clock);
    clock = null;
    tell();
    clearTimeout(timer);
    timer = setTimeout(arm, SETTLES_AFTER);
  }

  function arm() {
    const pace = document.querySelector(".pace");
    const wait = pace ? Number(pace.textContent) : 0;
    if (wait > 0) timer = setTimeout(tick, wait);
  }

  function tick() {
    due = document.hidden || paused;
    if (!due) window.dash_clientside.set_props("tick", { data: ++ticks });
  }

  // A group of runs opens or closes: the address says which are open.
  function toggle(key) {
    const open = window.collageView.paramsOf("runs").getAll("open");
    window.collageView.put("runs", { open: open.includes(key) ? open.filter((other) => other !== key) : [...open, key] });
  }

  // Picked runs are let go, or kept on top of the table: the address says which are.
  window.collageOnClick("[data-unpick], [data-keeps], [data-frees]", (button) => {
    const { unpick, keeps, frees } = button.dataset;
    if (unpick !== undefined) return window.dash_clientside.set_props("runs-picked", { data: {} });
    const given = window.collageView.paramsOf("runs");
    const [pin, baseline] = [given.getAll("pin"), given.get("baseline")];
    const picked = Object.keys((window.dash_component_api.getLayout("runs-picked") || { props: {} }).props.data || {});
    if (keeps === "baseline") window.collageView.put("runs", { baseline: picked[0] });
    else if (keeps === "pin") window.collageView.put("runs", { pin: [...new Set([...pin, ...picked])] });
    else window.collageView.put("runs", { pin: pin.filter((run) => run !== frees), baseline: baseline === frees ? null : baseline });
  });

  // A link arrives where it points: at a tab, or at what changed at a step.
  let changeShown = null;
  function arrive() {
    const given = new URLSearchParams(window.location.search);
    changeShown = given.get("at");
    if (given.has("tab")) reach("#run-tab");
    if (given.has("at")) reach("#run-change");
  }

  // The layer of a clicked cell comes into view.
  function reach(place) {
    const there = document.querySelector(place);
    if (there) there.scrollIntoView({ block: place === "#run-tab" ? "start" : "nearest" });
  }

  let pointedAt = -Infinity;
  document.addEventListener("pointerdown", (event) => {
    if (event.target.closest && event.target.closest(`${HEATMAP}, .layers-grid`)) pointedAt = performance.now();
  }, true);

  // Who chooses a layer types over the one that is chosen.
  document.addEventListener("focusin", (event) => {
    if (event.target.id === "run-layer") event.target.select();
  });

  // In the table of runs Enter opens the row's run or group, and the space bar picks it.
  document.addEventListener("keydown", (event) => {
    const cell = event.target;
    if (![" ", "Enter"].includes(event.key) || !cell.matches || !cell.matches("#runs-grid .ag-cell")) return;
    if (["tags", "notes"].includes(cell.getAttribute("col-id"))) return;
    const row = cell.closest(".ag-row").getAttribute("row-index");
    const run = document.querySelector(`#runs-grid .ag-row[row-index="${row}"] .run-cell`);
    const wanted = run && run.querySelector(event.key === " " ? "input.pick" : "button.opens, a");
    if (!wanted) return;
    event.preventDefault();
    event.stopPropagation();
    wanted.click();
  }, true);

  // In the table of layers Enter chooses the row's layer, as a click does.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches && event.target.matches(".layers-grid .ag-cell")) event.target.click();
  });

  // Times stand as the reader's clock has them, new ones as minutes and hours ago; on hover in UTC.
  function tellTimes() {
    for (const time of document.querySelectorAll("time[datetime]")) {
      const at = new Date(time.dateTime);
      const minutes = time.className === "ago" ? Math.max(Math.floor((Date.now() - at) / 60000), 0) : Infinity;
      const whole = minutes < 60 ? `${minutes} min ago` : `${Math.floor(minutes / 60)} h ago`;
      const ago = minutes < 1 ? "just now" : whole;
      const text = minutes < 1440 ? ago : at.toLocaleString("sv-SE", { dateStyle: "short", timeStyle: "short" });
      if (time.textContent !== text) time.firstChild.nodeValue = text;
    }
  }
  setInterval(tellTimes, 20000);
  new MutationObserver(() => {
    tellTimes();
    markPicked();
  }).observe(entry, { childList: true, subtree: true });

  window.collageFlow = { isDue: () => due, toggle, pointed: () => (pointedAt = performance.now()) };
  document.addEventListener("visibilitychange", () => due && tick());
  // Who signs out goes where the answer leads, although what the page still asks for is refused meanwhile.
  document.addEventListener("submit", (event) => (leaving = event.target.getAttribute("action") === "/sign-out"));

  // The address says all that is shown.
  window.collageOnClick("[data-copies]", (button) => {
    const tell = (text) => (button.nextElementSibling.textContent = text);
    // A page that did not come by TLS has no clipboard.
    const copied = navigator.clipboard ? navigator.clipboard.writeText(window.location.href) : Promise.reject();
    copied.then(() => tell(" copied"), () => tell(" Copy it from the address bar")).then(() => setTimeout(tell, 5000, ""));
  });

  // Paused, a page asks only for what its reader chooses.
  window.collageOnClick("#pause", (button) => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    tell();
    if (due) tick();
  });

  function tell() {
    const sign = document.getElementById("waiting");
    if (!sign) return;
    const longest = Math.max(0, ...[...asked.values()].map((since) => performance.now() - since));
    const idle = paused ? "Paused: nothing new is read" : "";
    const what = longest > HANGS_AFTER ? "The server does not answer" : "Waiting for the server";
    sign.textContent = longest > SAYS_AFTER ? `${what}, ${Math.round(longest / 1000)} s` : idle;
  }

  function filtersOf(search) {
    const given = new URLSearchParams(search || "");
    ["sort", "open", "pin"].forEach((name) => given.delete(name));
    return given.toString();
  }

  function sortOf(search) {
    const sort = new URLSearchParams(search || "").get("sort") || NEWEST;
    return { colId: sort.replace(/^-/, ""), sort: sort.startsWith("-") ? "desc" : "asc" };
  }

  function sortText(request) {
    const [chosen] = request.sortModel || [];
    if (chosen) return (chosen.sort === "desc" ? "-" : "") + chosen.colId;
    // What is sorted by a column that is not shown stays so.
    const asked = sortOf(window.location.search);
    const isShown = window.dash_ag_grid.getApi("runs-grid").getColumn(asked.colId);
    return isShown ? NEWEST : (asked.sort === "desc" ? "-" : "") + asked.colId;
  }

  // Who drags a column's header chooses their order.
  let listensTo = null;
  function keepOrder() {
    window.dash_ag_grid.getApiAsync("runs-grid").then((grid) => {
      if (grid === listensTo) return;
      listensTo = grid;
      grid.addEventListener("columnMoved", (event) => {
        if (!event.finished || event.source !== "uiColumnMoved") return;
        const value = grid.getColumnState().map((column) => column.colId).filter((id) => id !== "name");
        window.dash_clientside.set_props("runs-columns", { value });
      });
    });
  }

  // The whole sentence about a run stands below the table while its row is pointed at or focused.
  function tellSentence(event) {
    const row = event.target.closest && event.target.closest("#runs-grid .ag-row");
    const place = document.getElementById("runs-sentence");
    if (!row || !place) return;
    const said = document.querySelector(`#runs-grid .ag-row[row-index="${row.getAttribute("row-index")}"] .verdict-cell`);
    if (said && place.textContent !== said.title) place.textContent = said.title;
  }
  for (const kind of ["focusin", "mouseover"]) document.addEventListener(kind, tellSentence);

  let filtered = null;
  let ordered = null;
  let sorted = null;
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    flow: {
      title: (page) => {
        const title = page && page.props && page.props["data-title"];
        if (window.location.pathname.startsWith("/run/")) setTimeout(arrive, 0);
        // The server is there again: what it picks now has an address of its own.
        if (window.location.pathname === "/" && !PHONE.matches && page.props.className !== "problem") window.location.reload();
        document.title = title ? `${title} · Collage Monitor` : "Collage Monitor";
        return window.dash_clientside.no_update;
      },
      retry: (tick, waiting) => (waiting.length ? tick : window.dash_clientside.no_update),
      // The rows on the screen are read again; other filters make another table, and the way back another order.
      reload: (revision, { search }) => {
        window.dash_ag_grid.getApiAsync("runs-grid").then((grid) => {
          const filters = filtersOf(search);
          const sort = sortOf(search);
          const now = grid.getColumnState().find((column) => column.sort) || {};
          const isShown = grid.getColumn(sort.colId);
          const before = ordered;
          ordered = sort.colId + sort.sort;
          if (isShown && (now.colId !== sort.colId || now.sort !== sort.sort)) {
            filtered = filters;
            grid.applyColumnState({ state: [sort], defaultState: { sort: null } });
          } else if (filtered !== null && (filtered !== filters || (!isShown && before !== ordered))) {
            filtered = filters;
            grid.purgeInfiniteCache();
          } else if (revision) {
            filtered = filters;
            grid.refreshInfiniteCache();
          }
        });
      },
      // The page came with its first rows; all others are asked for.
      firstRows: (request, first) => {
        const no = window.dash_clientside.no_update;
        if (!request) return [no, no, no];
        keepOrder();
        const sort = sortText(request);
        if (first && request.startRow === 0 && first.sort === sort) return [first, null, no];
        return [no, null, { ...request, sort }];
      },
      // The runs that stay on top stand there whatever is asked for.
      showPinned: (rows) => {
        window.dash_ag_grid.getApiAsync("runs-grid").then((grid) => grid.setGridOption("pinnedTopRowData", rows || []));
      },
      keepSort: (request) => {
        if (!request || !request.sortModel) return;
        const wanted = sortText(request);
        // Asked again in the same order, the grid was not sorted by its reader: the address may be ahead of it.
        if (wanted === sorted) return;
        sorted = wanted;
        const now = window.collageView.paramsOf("runs").get("sort") || NEWEST;
        if (wanted !== now) window.collageView.put("runs", { sort: wanted === NEWEST ? null : wanted });
      },
      showLayer: () => {
        if (performance.now() - pointedAt < 10000) setTimeout(() => reach("#run-layer-card"), 0);
        pointedAt = -Infinity;
      },
      // What changed at a step that is picked anew comes into view.
      showChange: () => {
        const at = new URLSearchParams(window.location.search).get("at");
        if (at !== null && at !== changeShown) setTimeout(() => reach("#run-change"), 0);
        changeShown = at;
      },
      picked: () => {
        if (document.getElementById("runs-grid"))
          window.dash_ag_grid.getApiAsync("runs-grid").then((api) => api.refreshCells({ columns: ["name"], force: true }));
      },
    },
  });
})();
