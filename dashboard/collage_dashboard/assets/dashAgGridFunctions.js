// How numbers look in the grid: four significant digits, as collage_dashboard.formatting writes them.
var dagfuncs = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});

function digits(value, most) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return { Infinity: "∞", "-Infinity": "−∞" }[value] || String(value);
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(most)))));
  const text = size < -4 || size >= 7 ? value.toExponential(most - 1) : value.toFixed(Math.max(most - 1 - size, 0));
  return text.replace(/-/g, "−");
}

function fewDigits(spread) {
  return spread && spread < 1e-3 ? spread.toExponential(0).replace(/-/g, "−") : digits(spread, 2);
}

function spreadOf(params) {
  return ((params.data && params.data.over) || {})[params.colDef.field] || [0, null];
}

// A number; of a group of runs the mean over them, ± the standard deviation of a single run.
dagfuncs.fourDigitsOver = function (params) {
  const [, spread] = spreadOf(params);
  return digits(params.value, 4) + (spread === null ? "" : ` ±\u00a0${fewDigits(spread)}`) + versus(params, (value) => digits(value, 3));
};

// In a line of its own, how far the number is from the baseline's.
function versus(params, text) {
  const difference = ((params.data && params.data.versus) || {})[params.colDef.field];
  return difference === undefined ? "" : `\n${difference > 0 ? "+" : ""}${text(difference)}`;
}

// An entry of the configuration, under the path that heads its column.
dagfuncs.ofConfiguration = function (params) {
  const value = ((params.data && params.data.config) || {})[params.colDef.headerName];
  return value === undefined || value === null ? "–" : String(value);
};

dagfuncs.overRuns = function (params) {
  const [count, spread] = spreadOf(params);
  return count > 1 ? `Mean of ${count} runs ± ${fewDigits(spread)}, the standard deviation of a single run` : null;
};

// A share, with one digit behind the point.
dagfuncs.percent = function (value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 5e-4 ? "< 0.1\u00a0%" : `${(100 * value).toFixed(1)}\u00a0%`;
};

function grouped(value) {
  return value.toLocaleString("en-GB").replace(/-/g, "−");
}

dagfuncs.wholeNumber = function (params) {
  const value = params.value;
  return value === null || value === undefined ? "–" : grouped(value) + versus(params, grouped);
};

dagfuncs.minuteUtc = function (seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
};
