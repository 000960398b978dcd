// A page's view is its address. Its controls write their choices there, and show what stands there.
(function () {
  const HOW_TO_PICK = "Give a step, such as 800, or a range of steps, such as 800-900";
  const texts = (value) => [value ?? []].flat().map((text) => String(text).trim()).filter(Boolean);
  const same = (one, other) => JSON.stringify(texts(one)) === JSON.stringify(texts(other));
  const set = (id, props) => window.dash_clientside.set_props(id, props);
  const propsOf = (id) => (window.dash_component_api.getLayout(id) || {}).props;

  // The parameters that stand in a page's address; what was just put there counts, though the browser is yet to show it.
  const paramsOf = (page) => new URLSearchParams(propsOf(`${page}-address`).search || "");

  // What the reader types; it goes into the address at a pause, or with another choice.
  const PAUSE_MS = 400;
  let typed = {};

  function forgetTyped() {
    clearTimeout(typed.pause);
    typed = {};
  }

  // What was put into the address last, and the controls whose choices it holds: they may already show a newer one.
  let own = {};

  // Changes parameters of a page's address: to a value, to several, or to none; `movers` are the controls that asked.
  function put(page, asked, movers) {
    const given = paramsOf(page);
    const change = { ...typed.change, ...asked };
    const moved = movers ? [...(own.moved || []), typed.id, ...movers] : [];
    forgetTyped();
    Object.keys(change).forEach((name) => given.delete(name));
    Object.entries(change).forEach(([name, value]) => texts(value).forEach((text) => given.append(name, text)));
    const written = String(given);
    own = { search: written && `?${written}`, moved };
    set(`${page}-address`, { search: own.search });
  }

  // What a control shows of an address.
  function shownBy({ name, usual }, given) {
    const found = given.getAll(name);
    if (!found.length) return usual;
    if (Array.isArray(usual)) return found;
    return typeof usual === "number" ? Number(found[0]) : found[0];
  }

  // "800", "1,500" or "800–900" as an address has it; nothing for anything else.
  function stepsOf(text) {
    const plain = text.replace(/[,\s]/g, "").replace("–", "-");
    const [first, last = first] = plain.split("-");
    return /^\d{1,15}(-\d{1,15})?$/.test(plain) && Number(first) <= Number(last) ? plain : null;
  }

  // A column that was added last, and is none of the usual ones, comes to the front: it is seen without scrolling.
  function forward(chosen, before, { usual, behind }) {
    const added = chosen.at(-1);
    const place = before.indexOf(behind) + 1;
    if (!place || usual.includes(added) || !same(chosen.slice(0, -1), before)) return chosen;
    return [...before.slice(0, place), added, ...before.slice(place)];
  }

  // The reader has moved controls.
  function choose(...given) {
    const { page, controls } = given.at(-1);
    const stands = paramsOf(page);
    const change = {};
    const movers = [];
    for (const { prop_id, value } of window.dash_clientside.callback_context.triggered) {
      const id = prop_id.slice(0, -".value".length);
      const control = controls[id];
      const before = shownBy(control, stands);
      let chosen = texts(value);
      if (control.is_steps) {
        const steps = chosen.map(stepsOf);
        set(id, { error: steps.includes(null) ? HOW_TO_PICK : null });
        chosen = steps.includes(null) ? texts(before) : steps;
      }
      if (control.is_typed) {
        forgetTyped();
        if (!same(chosen, before)) {
          typed = { id, change: { [control.name]: chosen }, pause: setTimeout(() => put(page, {}, []), PAUSE_MS) };
        }
        continue;
      }
      if (same(chosen, before)) continue;
      if (control.behind) chosen = forward(chosen, texts(before), control);
      if (!same(chosen, value)) set(id, { value: Array.isArray(value) ? chosen : chosen[0] });
      movers.push(id);
      [control.name, ...control.drops].forEach((name) => (change[name] = null));
      if (!same(chosen, control.usual)) change[control.name] = chosen;
    }
    if (movers.length) put(page, change, movers);
  }

  // The address has changed: panels are told, and controls show what stands there now. An address of another page, on
  // the way to it, changes nothing here. `zooms` counts, so that each zoom's figures differ. What a reader has chosen or
  // typed since the last choice was put there stays; the way back leads to what was put there, not to what was about to be.
  function follow(search, { page, controls }, pathname, shown) {
    const isOwn = pathname === shown.pathname && (search || "") === own.search;
    if (!isOwn) {
      forgetTyped();
      own = {};
    }
    if (pathname !== shown.pathname) return;
    const [before, now] = [shown.search, search].map((each) => new URLSearchParams(each || ""));
    if (String(before) !== String(now)) {
      const isZoomed = ["from", "to"].some((end) => before.get(end) !== now.get(end));
      set(`${page}-shown`, { data: { pathname, search: search || "", zooms: shown.zooms + Number(isZoomed) } });
    }
    for (const [id, control] of Object.entries(controls)) {
      const [value, props] = [shownBy(control, now), propsOf(id)];
      const isNewer = isOwn && (own.moved.includes(id) || same(value, shownBy(control, before)));
      if (props && !isNewer && !same(value, props.value)) set(id, { value });
    }
    own.moved = [];
  }

  window.collageOnClick("[data-clears]", ({ dataset: { page, clears } }) => {
    put(page, Object.fromEntries(clears.split(" ").map((name) => [name, null])));
  });

  window.collageView = { put, paramsOf };
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    view: {
      choose,
      follow,
      // A click on a row of the table of layers chooses its layer.
      chooseLayer: (rows) => {
        const row = rows.find(Boolean);
        if (row) put("run", { layer: row.rowId, step: null });
      },
    },
  });
})();
