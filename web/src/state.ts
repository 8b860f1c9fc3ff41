// The state of the page is its URL: #room?parameter=value, without what stands at its default.
import { parameters, type Parameter, type State, type Value } from "./room";


export function defaults(room: string): State {
  return Object.fromEntries(Object.entries(parameters(room)).map(([name, p]) => [name, p.default]));
}

/** A value as near as its parameter allows; the default for what is no value at all. */
export function within(p: Parameter, value: Value): Value {
  if (p.kind === "choice") return p.options.includes(String(value)) ? String(value) : p.default;
  const clamp = (x: number) => Math.min(p.high, Math.max(p.low, x));
  if (p.kind === "number") return typeof value === "number" && isFinite(value) ? clamp(value) : p.default;
  const whole = Array.isArray(value) && value.length === p.default.length && value.every(isFinite);
  return whole ? value.map(clamp) : p.default;
}

const DIGITS = 4; // of numbers in a URL, behind the point
const rounded = (x: number) => Number(x.toFixed(DIGITS)) + 0; // no negative zero

/** What the URL will say: so that a shared view has the numbers that were seen. */
export function settled(value: Value): Value {
  if (typeof value === "number") return rounded(value);
  return Array.isArray(value) ? value.map(rounded) : value;
}

export function query(room: string, state: State): string {
  const parts: string[] = [];
  for (const [name, p] of Object.entries(parameters(room))) {
    const value = state[name]!;
    if (String(value) !== String(p.default)) parts.push(`${name}=${Array.isArray(value) ? value.join(",") : value}`);
  }
  return parts.join("&");
}

export function parse(room: string, text: string): State {
  const state = defaults(room);
  const said = new URLSearchParams(text);
  for (const [name, p] of Object.entries(parameters(room))) {
    const word = said.get(name);
    if (word === null) continue;
    const number = (part: string) => (part.trim() === "" ? NaN : Number(part));
    const value = p.kind === "choice" ? word : p.kind === "number" ? number(word) : word.split(",").map(number);
    state[name] = settled(within(p, value));
  }
  return state;
}

export function address(room: string, state: State): string {
  const said = query(room, state);
  return `#${room}${said && `?${said}`}`;
}
