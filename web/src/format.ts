// Numbers as they are printed.

/** `digits` significant digits; powers of ten where the number is very small or large. A minus sign is a minus sign. */
export function print(x: number, digits = 4): string {
  if (Number.isNaN(x)) return "not a number";
  if (!isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (Math.abs(x) < 1e-12) return "0";
  const size = Math.abs(x);
  let text: string;
  if (size < 1e-3 || size >= 1e6) {
    const [mantissa, power] = x.toExponential(digits - 1).split("e");
    text = `${mantissa}\u00a0·\u00a010${superscript(Number(power))}`;
  } else {
    text = x.toPrecision(digits);
    if (text.includes("e")) text = String(Number(text));
  }
  return text.replace("-", "−");
}

/** Two digits behind the point, for tables of which all entries are near 1. */
export const short = (x: number): string => (Math.abs(x) < 0.005 ? "0.00" : x.toFixed(2).replace("-", "−"));

export function printed(value: number | number[] | string, digits?: number): string {
  if (typeof value === "string") return value;
  return Array.isArray(value) ? `(${value.map((x) => print(x, digits)).join(", ")})` : print(value, digits);
}

function superscript(n: number): string {
  return String(n).replace(/[-0-9]/g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]!));
}
