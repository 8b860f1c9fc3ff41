import { eigh, minus, norm, plus, product, times, transpose, turning, type Matrix } from "../math/linear";
import { given, room } from "../room";
import { Arrow, Dot, useProjection } from "../ui/marks";
import { MatrixTable } from "../ui/numbers";
import { Handle, Plane } from "../ui/plane";
import { Slider } from "../ui/slider";

type State = { theta: number; gap: number };
type Numbers = {
  states: Matrix;
  weight: Matrix;
  gram: Matrix;
  output: Matrix;
  singular: number[];
  dressed: Matrix;
  nudged: Matrix;
  moved: number;
};

const G = given<{ left: Matrix; right: Matrix; weight: Matrix; nudge: Matrix; largest: number }>("frame");
const NEAR = Math.sqrt(2 ** -52); // entries that share the largest size, as gaugekit.geometry.dressing has it

/** X̂ = U Σ of X = U Σ Vᵀ, in every column the first of the largest entries positive. */
function dress(x: Matrix): Matrix {
  const frame = eigh(product(transpose(x), x)).vectors;
  const states = product(x, transpose(frame));
  const signs = transpose(states).map((column) => {
    const top = Math.max(...column.map(Math.abs));
    return Math.sign(column.find((v) => Math.abs(v) >= top * (1 - NEAR))!);
  });
  return states.map((row) => row.map((v, j) => v * signs[j]!));
}

function numbers({ theta, gap }: State): Numbers {
  const back = turning(-theta); // rows are turned from the right
  const sizes = [G.largest, G.largest - gap];
  const states = product(product(G.left.map((row) => row.map((v, j) => v * sizes[j]!)), G.right), back);
  const weight = product(G.weight, back);
  const nudge = product(G.nudge, back);
  const dressed = dress(states);
  const nudged = dress(plus(states, nudge));
  return {
    states,
    weight,
    gram: product(states, transpose(states)),
    output: product(states, transpose(weight)).map((row) => row.map(Math.tanh)),
    singular: sizes,
    dressed,
    nudged,
    moved: norm(nudged.flatMap((row, i) => minus(row, dressed[i]!))) / norm(nudge.flat()),
  };
}

const REACH = 2.6;
const HANDLE = 2;
const NAMES = "abcd";

function Tokens({ at, nudged }: { at: Matrix; nudged?: Matrix }) {
  return (
    <g>
      {at.map((x, i) => (
        <g key={i}>
          {nudged && <Arrow from={x} to={nudged[i]!} colour="red" />}
          <Dot at={x} colour="blue" label={NAMES[i]!} />
        </g>
      ))}
    </g>
  );
}

/** The two axes of the frame as it was, and the circle on which the first one's handle goes round. */
function Turned({ theta }: { theta: number }) {
  const { project, unit } = useProjection();
  const [x, y] = project([0, 0]);
  return (
    <g class="axis" aria-hidden="true">
      {turning(theta).map((axis, i) => {
        const [dx, dy] = [9 * unit * axis[0]!, 9 * unit * axis[1]!];
        return <line key={i} x1={x - dx} y1={y - dy} x2={x + dx} y2={y + dy} />;
      })}
      <circle class="outline stroke-grey" cx={x} cy={y} r={HANDLE * unit} />
    </g>
  );
}

export const frame = room<State, Numbers>({
  name: "frame",
  title: "Turn the frame",
  text: (
    <>
      Turn the residual stream and with it every weight that reads it: states and weights become others, but the Gram matrix
      X Xᵀ and what is computed stay. Dressing writes the states in axes of their own, the same from every frame, until two
      singular values meet: then a nudge turns them as far as it likes.
    </>
  ),
  source: "François & Ravera, arXiv 2602.18948; gaugekit.geometry.dressing",
  numbers,
  rows: (n) => [
    { label: "singular values of X", value: n.singular, digits: 3 },
    { label: "X̂ moves, by the nudge’s length", value: n.moved },
    { label: "X̂ of token a", value: n.dressed[0]!, digits: 3 },
  ],
  View: ({ state, numbers: n, set }) => {
    const first = times(HANDLE, transpose(turning(state.theta))[0]!);
    const rows = ["a", "b", "c", "d"];
    return (
      <>
        <div class="side small">
          <figure class="plain">
            <figcaption>States X: drag their frame round</figcaption>
            <Plane label="Four tokens in the frame of the stream" reach={REACH} grid={false}>
              <Turned theta={state.theta} />
              <Tokens at={n.states} />
              <Arrow to={first} colour="orange" />
              <Handle
                label="The frame’s first axis"
                at={first}
                move={([x, y]) => set({ theta: (Math.atan2(y, x) * 180) / Math.PI })}
              />
            </Plane>
          </figure>
          <figure class="plain">
            <figcaption>Dressed X̂, and where a nudge takes it</figcaption>
            <Plane label="The tokens in axes of their own, and behind a nudge" reach={REACH} grid={false}>
              <Turned theta={0} />
              <Tokens at={n.dressed} nudged={n.nudged} />
            </Plane>
          </figure>
        </div>
        <div class="controls">
          <Slider label="frame (°)" value={state.theta} low={-180} high={180} step={1} set={(theta) => set({ theta })} />
          <Slider label="gap of the singular values" value={state.gap} low={0.01} high={2} set={(gap) => set({ gap })} />
        </div>
        <div class="matrices">
          <MatrixTable label="X" value={n.states} rowNames={rows} />
          <MatrixTable label="W" value={n.weight} />
          <MatrixTable label="X Xᵀ" value={n.gram} invariant rowNames={rows} />
          <MatrixTable label="tanh(X Wᵀ)" value={n.output} invariant rowNames={rows} />
        </div>
      </>
    );
  },
});
