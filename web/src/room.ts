// What a room is. Its parameters, their bounds and its fixed data come from Python (data.json), and so do its numbers:
// `numbers` says the same as `gaugekit.lab.rooms` does, for as long as a hand drags and no server can be asked.
import type { ComponentChildren, FunctionComponent } from "preact";
import data from "./data.json";

export type Value = number | string | number[];
export type State = Record<string, Value>;
export type Numbers = Record<string, number | number[] | number[][]>;

export type Parameter =
  | { kind: "number"; default: number; low: number; high: number }
  | { kind: "vector"; default: number[]; low: number; high: number }
  | { kind: "choice"; default: string; options: string[] };

export interface Row {
  label: string;
  value: number | number[] | string;
  invariant?: boolean; // does not change, whatever is dragged: shown as such, and tested
  digits?: number; // significant digits that are printed
}

export interface ViewProps<S extends State = State, N extends Numbers = Numbers> {
  state: S;
  numbers: N;
  set(change: Partial<S>): void;
}

export interface Room {
  name: string; // in the URL, and of the API
  title: string;
  text: ComponentChildren; // two sentences
  source: ComponentChildren;
  numbers(state: State): Numbers;
  rows(numbers: Numbers, state: State): Row[];
  View: FunctionComponent<ViewProps>;
}

interface Given {
  parameters: Record<string, Parameter>;
  given: Record<string, unknown>;
}

const rooms = data as unknown as Record<string, Given>;

export function parameters(room: string): Record<string, Parameter> {
  return rooms[room]!.parameters;
}

/** Fixed data of a room, computed by Python. */
export function given<T>(room: string): T {
  return rooms[room]!.given as T;
}

/** A room with states and numbers of its own types. */
export function room<S extends State, N extends Numbers>(made: {
  name: string;
  title: string;
  text: ComponentChildren;
  source: ComponentChildren;
  numbers(state: S): N;
  rows(numbers: N, state: S): Row[];
  View: FunctionComponent<ViewProps<S, N>>;
}): Room {
  return made as unknown as Room;
}
