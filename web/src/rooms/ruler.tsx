import { useRef } from "preact/hooks";
import { print, short } from "../format";
import { mean, transpose } from "../math/linear";
import { centred, jacobian, normalize, rms } from "../math/norms";
import { room } from "../room";
import { Choice } from "../ui/choice";
import { draggable } from "../ui/drag";
import { Slider } from "../ui/slider";
import "./ruler.css";

type Axis = "batch" | "layer" | "rms";
type State = { x: number[]; axis: Axis; cell: string; eps: number };
type Numbers = {
  output: number[][];
  pull: number[][]; // ∂ output / ∂ the chosen number
  moves: number;
  own: number;
  ruler_mean: number;
  ruler_deviation: number;
  output_mean: number;
  output_square: number;
};

const SIDE = 4;
const MOVES = 1e-9;
const TOKENS = ["a", "b", "c", "d"];

const table = (x: number[]) => Array.from({ length: SIDE }, (_, i) => x.slice(SIDE * i, SIDE * (i + 1)));
const place = (cell: string) => cell.split("-").map((digit) => Number(digit) - 1) as [number, number];

function numbers({ x, axis, cell, eps }: State): Numbers {
  const [row, column] = place(cell);
  const kind = axis === "rms" ? "rms" : "layer";
  const rows = axis === "batch" ? transpose(table(x)) : table(x); // each a ruler
  const [own, other] = axis === "batch" ? [column, row] : [row, column];
  const turned = (m: number[][]) => (axis === "batch" ? transpose(m) : m);
  const output = rows.map((each) => normalize(kind, each, eps, 1));
  const slope = jacobian(kind, rows[own]!, eps);
  const pull = rows.map((each, i) => each.map((_, j) => (i === own ? slope[j]![other]! : 0)));
  return {
    output: turned(output),
    pull: turned(pull),
    moves: pull.flat().filter((v) => Math.abs(v) > MOVES).length,
    own: pull[own]![other]!,
    ruler_mean: mean(rows[own]!),
    ruler_deviation: rms(centred(rows[own]!)),
    output_mean: mean(output[own]!),
    output_square: mean(output[own]!.map((v) => v * v)),
  };
}

const BOX = 84;
const LEFT = 34;
const TOP = 30;

interface GridProps {
  label: string;
  values: number[][];
  pulls?: number[][];
  state: State;
  move?(cell: string, value: number): void;
  choose?(cell: string): void;
}

function Grid({ label, values, pulls, state, move, choose }: GridProps) {
  const start = useRef(0);
  const top = Math.max(1e-9, ...values.flat().map(Math.abs));
  const [row, column] = place(state.cell);
  const shares = (i: number, j: number) => (state.axis === "batch" ? j === column : i === row);
  return (
    <svg class="drawing" viewBox={`0 0 ${LEFT + SIDE * BOX + 8} ${TOP + SIDE * BOX + 8}`} role="group" aria-label={label}>
      <g class="heads" aria-hidden="true">
        {TOKENS.map((token, i) => (
          <text key={token} x={LEFT / 2} y={TOP + BOX * (i + 0.55)}>
            {token}
          </text>
        ))}
        {TOKENS.map((_, j) => (
          <text key={j} x={LEFT + BOX * (j + 0.5)} y={TOP - 10}>
            {j + 1}
          </text>
        ))}
      </g>
      {values.map((line, i) =>
        line.map((value, j) => {
          const cell = `${i + 1}-${j + 1}`;
          const pull = pulls?.[i]![j]!;
          const moved = pull !== undefined && Math.abs(pull) > MOVES;
          const drag =
            move &&
            draggable({
              start: () => {
                start.current = value;
                choose!(cell);
              },
              to: (_x, _y, _dx, dy) => move(cell, start.current - dy / 30),
              by: (right, up) => move(cell, value + 0.1 * (right + up)),
            });
          return (
            <g
              key={cell}
              class={`cell ${move ? "handle" : ""} ${shares(i, j) ? "shared" : ""} ${cell === state.cell ? "chosen" : ""}`}
              transform={`translate(${LEFT + BOX * j} ${TOP + BOX * i})`}
              {...(drag && {
                ...drag,
                tabindex: 0,
                role: "slider",
                "aria-label": `Token ${TOKENS[i]}, feature ${j + 1}: drag up or down, or arrow keys`,
                "aria-valuenow": value,
                "aria-valuetext": print(value, 3),
                onFocus: () => choose!(cell),
              })}
            >
              <rect
                x={3}
                y={3}
                width={BOX - 6}
                height={BOX - 6}
                rx={6}
                style={{ fill: `color-mix(in srgb, var(--${value < 0 ? "orange" : "blue"}) ${(35 * Math.abs(value)) / top}%, var(--surface))` }}
              />
              <text x={BOX / 2} y={BOX / 2 + (pulls ? -1 : 7)}>
                {short(value)}
              </text>
              {pulls && (
                <text class="pull" x={BOX / 2} y={BOX / 2 + 22}>
                  {moved ? `${pull > 0 ? "▲" : "▼"} ${print(Math.abs(pull), 2)}` : "still"}
                </text>
              )}
            </g>
          );
        }),
      )}
    </svg>
  );
}

export const ruler = room<State, Numbers>({
  name: "ruler",
  title: "Which numbers share a ruler",
  text: (
    <>
      BatchNorm measures a feature over the tokens of a batch, LayerNorm and RMSNorm measure a token over its features: drag a
      number, and every output that was measured with it moves. What LayerNorm says of a token no other token can change.
    </>
  ),
  source: "Ioffe & Szegedy 2015; Ba, Kiros & Hinton 2016; gaugekit.geometry.normalization.standardize",
  numbers,
  rows: (n, { axis, cell, x }) => {
    const [i, j] = place(cell);
    return [
      { label: "the chosen number", value: `${TOKENS[i]}${j + 1}: ${print(table(x)[i]![j]!, 3)}` },
      { label: "outputs that it moves, of 16", value: String(n.moves) },
      { label: "its own output’s slope", value: n.own },
      { label: "mean along its ruler", value: n.ruler_mean },
      { label: "deviation along its ruler", value: n.ruler_deviation },
      { label: "mean of the outputs there", value: n.output_mean, invariant: axis !== "rms" },
      { label: "their mean square", value: n.output_square },
    ];
  },
  View: ({ state, numbers: n, set }) => {
    const move = (cell: string, value: number) => {
      const [i, j] = place(cell);
      set({ cell, x: state.x.map((v, k) => (k === SIDE * i + j ? value : v)) });
    };
    return (
      <>
        <div class="side">
          <figure class="plain">
            <figcaption>Input: tokens a to d, features 1 to 4</figcaption>
            <Grid label="Input, four tokens with four features" values={table(state.x)} state={state} move={move} choose={(cell) => set({ cell })} />
          </figure>
          <figure class="plain">
            <figcaption>Output, and how much the chosen number moves it</figcaption>
            <Grid label="Output, and which of it moves" values={n.output} pulls={n.pull} state={state} />
          </figure>
        </div>
        <div class="controls">
          <Choice
            label="Norm"
            value={state.axis}
            options={{ batch: "BatchNorm ↓", layer: "LayerNorm →", rms: "RMSNorm →" }}
            set={(axis) => set({ axis })}
          />
          <Slider label="eps" value={state.eps} low={0} high={10} log set={(eps) => set({ eps })} />
        </div>
      </>
    );
  },
});
