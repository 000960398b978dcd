// How numbers look in the grid: as collage_monitor.number_text writes them everywhere else.
var dagfuncs = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});

function grouped(value, digits = 0) {
  const form = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return Number(value.toFixed(digits)).toLocaleString("en-GB", form).replace(/-/g, "−");
}

// What is no finite number, in words; undefined for one.
function noNumber(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? undefined : { Infinity: "∞", "-Infinity": "−∞" }[value] || String(value);
}

function digits(value, most = 4) {
  if (noNumber(value) || value === 0) return noNumber(value) || "0";
  const rounded = Number(value.toPrecision(most));
  const size = Math.floor(Math.log10(Math.abs(rounded)));
  if (size >= -4 && size < 7) return grouped(rounded, Math.max(most - 1 - size, 0));
  const [mantissa, exponent] = rounded.toExponential(most - 1).split("e");
  const power = `${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
  return `${mantissa}e${power}`.replace(/-/g, "−");
}

// A part of a whole, in percent: one decimal, two where one would say none or all of it.
function share(value) {
  if (noNumber(value)) return noNumber(value);
  if (value < 0) return `−${share(-value)}`;
  if (value === 0 || value === 1) return `${100 * value}\u00a0%`;
  const fitting = [1, 2].find((count) => ![0, 100].includes(Number((100 * value).toFixed(count))));
  if (fitting) return `${grouped(100 * value, fitting)}\u00a0%`;
  return value < 0.5 ? "< 0.01\u00a0%" : "> 99.99\u00a0%";
}

// EDQ, and what else is 1 in a run that loses nothing.
function ratio(value) {
  return noNumber(value) || value === 0 || Math.abs(value) >= 1e4 ? digits(value) : grouped(value, 3);
}

function margin(value) {
  if (noNumber(value) || (value > -23 && value < 9)) return digits(value);
  return value < 0 ? "−23 or less" : "9 or more"; // Beyond the histogram's octaves.
}

// Of a parameter: 12, not 12.00.
function bytes(value) {
  const isPlain = !noNumber(value) && Math.abs(value) >= 0.01 && Math.abs(value) < 100;
  return isPlain ? String(Number(value.toPrecision(3))).replace(/-/g, "−") : digits(value);
}

window.collageNumbers = { number: digits, share, ratio, margin, bytes };

function fewDigits(spread) {
  return spread && spread < 1e-3 ? spread.toExponential(0).replace(/-/g, "−") : digits(spread, 2);
}

function spreadOf(params) {
  return ((params.data && params.data.over) || {})[params.colDef.field] || [0, null];
}

// A number; of a group of runs the mean over them, ± the standard deviation of a single run if a digit shows it.
function over(params, text, ofSpread, ofDifference) {
  const [, spread] = spreadOf(params);
  const isSeen = spread !== null && [-spread, spread].some((by) => text(params.value + by) !== text(params.value));
  return text(params.value) + (isSeen ? ` ±\u00a0${ofSpread(spread)}` : "") + versus(params, ofDifference);
}

dagfuncs.fourDigitsOver = (params) => over(params, digits, fewDigits, (value) => digits(value, 3));
dagfuncs.ofRatio = (params) => over(params, ratio, fewDigits, ratio);
dagfuncs.ofShare = (params) => over(params, share, share, share);
dagfuncs.ofBytes = (params) => over(params, bytes, fewDigits, bytes);
dagfuncs.ofMargin = (params) => margin(params.value);

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
  const text = params.colDef.field === "lost_update_ratio" ? share : fewDigits;
  return count > 1 ? `Mean of ${count} runs ± ${text(spread)}, the standard deviation of a single run` : null;
};

dagfuncs.wholeNumber = function (params) {
  const value = params.value;
  return value === null || value === undefined ? "–" : grouped(value) + versus(params, grouped);
};

dagfuncs.minuteUtc = function (seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
};
