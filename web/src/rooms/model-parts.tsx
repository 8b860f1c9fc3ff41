// Small parts of the model's room: numbers that may be missing, tables, and the drawing of a spectrum.
import { print } from "../format";
import type { ComponentChildren } from "preact";
import type { Cell, Circuit, CircuitRow, Figure, Layer } from "./model-reports";

export const NONE = "–";

export const figure = (value: Figure | undefined, digits = 4): string =>
  value === null || value === undefined ? NONE : print(value, digits);

export const count = (value: number): string => value.toLocaleString("en");

/** A share as a percentage. */
export const percent = (value: Figure | undefined): string =>
  value === null || value === undefined ? NONE : `${print(100 * value, 3)}\u00a0%`;

/** What a reader would call what lies there: reports hold what was typed on the command line (as `path_name` in Python). */
export function nameOf(path: string): string {
  const parts = path.split(/[\\/]/).filter(Boolean);
  const hub = parts.map((part) => /^models--(.+?)--(.+)$/.exec(part)).find((found) => found);
  if (hub) return `${hub[1]}/${hub[2]}`;
  const last = parts.at(-1) ?? path;
  return ["model", "checkpoint"].includes(last) ? parts.slice(-2).join("/") : last;
}

interface ListingProps {
  caption: string;
  columns?: string[];
  rows: [ComponentChildren, ...ComponentChildren[]][]; // a heading, and what stands behind it
}

/** A table whose rows have names, and whose columns may. */
export function Listing({ caption, columns, rows }: ListingProps) {
  return (
    <div class="scroll">
      <table class="listing">
        <caption>{caption}</caption>
        {columns && (
          <thead>
            <tr>
              <td />
              {columns.map((each, i) => (
                <th key={i} scope="col">
                  {each}
                </th>
              ))}
            </tr>
          </thead>
        )}
        <tbody>
          {rows.map(([head, ...cells], i) => (
            <tr key={i}>
              <th scope="row">{head}</th>
              {cells.map((cell, j) => (
                <td key={j}>{cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export const TITLES: Record<Circuit, string> = { qk: "G_QK", vo: "G_VO" };

const WIDTH = 300;
const HEIGHT = 94;
const LEFT = 38;
const RIGHT = 292;
const TOP = 16;
const BOTTOM = 78;
const DECADES = 8; // that are told apart below the largest value; there is little but rounding below

/** Singular values of one circuit of a head, on a logarithmic scale, with those of the layer's other heads behind. */
export function Spectrum({ which, cell, layer }: { which: Circuit; cell: Cell; layer: Layer }) {
  const row = cell[which];
  if (!row) return null;
  const others = layer.cells.filter((each) => each.head % layer.share === 0 && each.kv !== cell.kv).map((each) => each[which]);
  const all = [row, ...others.filter((each) => each !== undefined)].flatMap((each) => each.spectrum);
  const top = Math.max(...all);
  const positive = all.filter((s) => s > top * 10 ** -DECADES);
  const least = Math.min(...positive);
  // A little room, and an axis of its own where all values are one.
  const [low, high] = least < top ? [Math.log10(least), Math.log10(top)] : [Math.log10(top) - 1, Math.log10(top)];
  const length = row.spectrum.length;
  const x = (i: number) => LEFT + ((RIGHT - LEFT) * (i - 1)) / Math.max(1, length - 1); // i from 1
  const y = (s: number) => BOTTOM - ((BOTTOM - TOP) * (Math.max(low, Math.log10(s)) - low)) / (high - low);
  const path = ({ spectrum }: CircuitRow) =>
    spectrum
      .flatMap((s, i) => (s > top * 10 ** -DECADES ? [`${x(i + 1).toFixed(1)} ${y(s).toFixed(1)}`] : []))
      .map((point, i) => (i ? "L" : "M") + point)
      .join("");
  const colour = which === "qk" ? "blue" : "orange";
  const said = `Singular values of ${TITLES[which]}, falling from ${figure(row.spectrum[0], 3)} to ${figure(row.spectrum.at(-1), 3)}`;
  if (!(top > 0)) return <p class="source">{TITLES[which]} is zero.</p>;
  const at = x(Math.max(1, row.effective_rank));
  // Where the curve is not: it is still high on the left of the middle, and low on the right.
  const left = at > LEFT + (RIGHT - LEFT) / 2;
  return (
    <svg class="spectrum" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${said}; effective rank ${figure(row.effective_rank, 3)}`}>
      <g class="axis">
        <line x1={LEFT} x2={RIGHT} y1={BOTTOM} y2={BOTTOM} />
        <line x1={LEFT} x2={LEFT} y1={TOP} y2={BOTTOM} />
      </g>
      {others.map((each, i) => each && <path key={i} class="curve other" d={path(each)} />)}
      <path class={`curve stroke-${colour}`} d={path(row)} />
      {length === 1 && <circle class={`fill-${colour}`} cx={x(1)} cy={y(top)} r={3} />}
      <line class="mark" x1={at} x2={at} y1={TOP} y2={BOTTOM} />
      <text x={at + (left ? -4 : 4)} y={left ? BOTTOM - 5 : TOP + 8} text-anchor={left ? "end" : "start"}>
        effective rank {figure(row.effective_rank, 3)}
      </text>
      <text x={LEFT - 4} y={TOP + 4} text-anchor="end">
        {figure(10 ** high, 2)}
      </text>
      <text x={LEFT - 4} y={BOTTOM} text-anchor="end">
        {figure(10 ** low, 2)}
      </text>
      <text x={x(1)} y={HEIGHT - 4}>
        1
      </text>
      <text x={RIGHT} y={HEIGHT - 4} text-anchor="end">
        {length}
      </text>
      <text class={`fill-${colour}`} x={RIGHT} y={TOP - 4} text-anchor="end">
        {TITLES[which]}
      </text>
    </svg>
  );
}
