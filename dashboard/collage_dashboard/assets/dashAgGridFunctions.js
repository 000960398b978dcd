// How numbers look in the grid: four significant digits, as collage_dashboard.formatting writes them.
var dagfuncs = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});

dagfuncs.fourDigits = function (value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return { Infinity: "∞", "-Infinity": "−∞" }[value] || String(value);
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(4)))));
  const text = size < -4 || size >= 7 ? value.toExponential(3) : value.toFixed(Math.max(3 - size, 0));
  return text.replace(/-/g, "−");
};

dagfuncs.wholeNumber = function (value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-GB");
};

dagfuncs.minuteUtc = function (seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
};
