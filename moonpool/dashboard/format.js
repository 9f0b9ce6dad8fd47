// Figures for people, with units.

const round = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${round(value, 0)} s`;
  if (value >= 1) return `${round(value, 2)} s`;
  if (value >= 0.01) return `${round(value * 1e3, 0)} ms`;
  return `${round(value * 1e3, 1)} ms`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(value) >= size) return `${round(value / (unit === "k" ? 1e3 : size), 1)}\u00a0${unit}`;
  return round(value, Math.abs(value) < 10 ? 1 : 0);
}

export function bytes(value) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size * 0.9995) return `${round(value / size, 1)} ${unit}`;
  return `${round(value, 0)} B`;
}

export const rate = (value) => `${bytes(value)}/s`;
export const percent = (value) => (value === null || !Number.isFinite(value) ? "–" : `${round(value * 100, 1)} %`);
export const many = (value, noun) => `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
export const clock = (at_s) => new Date(at_s * 1e3).toLocaleTimeString("en-GB");

export function duration(value) {
  const total = Math.max(0, Math.floor(value));
  const days = Math.floor(total / 86400), hours = Math.floor(total / 3600) % 24, minutes = Math.floor(total / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

export const words = (name) => name.replaceAll("_", " ");
