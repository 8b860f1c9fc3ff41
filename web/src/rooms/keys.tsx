import { dot, softmax, sum, times, type Matrix, type Vector } from "../math/linear";
import { given, room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Label, useProjection } from "../ui/marks";
import { Handle, Plane } from "../ui/plane";
import { Slider } from "../ui/slider";
import "./keys.css";

type State = { q: number[]; keys: "plain" | "layer"; along: number; sharpness: number };
type Numbers = { weights: number[]; winner: number; lead: number; entropy: number; never: number };

// Of LayerNorm's keys, which lie in a plane, the coordinates there: what a query has along 1 meets none of them.
const KEYS = given<{ plain: Matrix; layer: Matrix; never: number[] }>("keys");
const TIE = 1e-9;
const NAMES = "abcdefg";

const never = (keys: State["keys"]) => (keys === "plain" ? KEYS.never : KEYS.never.map(() => 0));

function numbers(state: State): Numbers {
  const scores = KEYS[state.keys].map((key) => state.sharpness * dot(key, state.q));
  const weights = softmax(scores);
  const best = [...scores].sort((a, b) => b - a);
  return {
    weights,
    winner: scores.findIndex((s) => s >= best[0]! - TIE),
    lead: best[0]! - best[1]!,
    entropy: -sum(weights.map((w) => (w > 0 ? w * Math.log(w) : 0))),
    never: sum(never(state.keys)),
  };
}

const REACH = 2.3;

/** The keys that can win, which are the corners of the hull, in order around it. */
function hull(keys: Matrix, never: number[]): number[] {
  const angle = (i: number) => Math.atan2(keys[i]![1]!, keys[i]![0]!);
  return keys
    .map((_, i) => i)
    .filter((i) => !never[i])
    .sort((i, j) => angle(i) - angle(j));
}

/** Between neighbours of the hull the queries that prefer neither: where one key's cone ends and the next begins. */
function borders(keys: Matrix, never: number[]): { key: number; from: Vector; to: Vector }[] {
  const order = hull(keys, never);
  const edge = (a: number, b: number): Vector => {
    const [x, y] = [keys[b]![0]! - keys[a]![0]!, keys[b]![1]! - keys[a]![1]!];
    return times(1 / Math.hypot(x, y), [y, -x]); // outwards, since the order is anticlockwise
  };
  return order.map((key, n) => ({
    key,
    from: edge(order.at(n - 1)!, key),
    to: edge(key, order[(n + 1) % order.length]!),
  }));
}

const CONES = { plain: borders(KEYS.plain, never("plain")), layer: borders(KEYS.layer, never("layer")) };

function Cones({ state, winner }: { state: State; winner: number }) {
  const { project } = useProjection();
  const far = 4 * REACH;
  const through = (points: Vector[]) => points.map((each) => project(each).join()).join(" ");
  return (
    <g aria-hidden="true">
      {CONES[state.keys].map(({ key, from, to }, n) => {
        const corners = [[0, 0], times(far, from), times(far, [from[0]! + to[0]!, from[1]! + to[1]!]), times(far, to)];
        return (
          <polygon
            key={key}
            class={`cone ${key === winner ? "fill-orange" : n % 2 ? "fill-grey" : "fill-grey alternate"}`}
            points={through(corners)}
          />
        );
      })}
      <polygon class="hull" points={through(CONES[state.keys].map(({ key }) => KEYS[state.keys][key]!))} />
    </g>
  );
}

function Keys({ state, numbers: n }: { state: State; numbers: Numbers }) {
  const { project } = useProjection();
  const lost = never(state.keys);
  return (
    <g>
      {KEYS[state.keys].map((key, i) => {
        const [x, y] = project(key);
        return (
          <g key={i}>
            <circle
              class={`${lost[i] ? "fill-red" : "fill-blue"} ${i === n.winner ? "winner" : ""}`}
              cx={x}
              cy={y}
              r={5 + 22 * Math.sqrt(n.weights[i]!)}
              opacity={0.75}
            />
            <Label at={key} text={`${NAMES[i]}${lost[i] ? " never" : ""}  ${Math.round(100 * n.weights[i]!)} %`} colour={lost[i] ? "red" : "blue"} />
          </g>
        );
      })}
    </g>
  );
}

export const keys = room<State, Numbers>({
  name: "keys",
  title: "Why attention cares",
  text: (
    <>
      A key can get the most attention only if it is a corner of the keys’ hull: turn the query all the way round, and those inside
      never win. Keys behind LayerNorm lie on a sphere, where each is a corner; and they all lie at right angles to 1, so that a
      query along 1 attends to all alike.
    </>
  ),
  source: "Brody, Alon & Yahav, arXiv 2305.02582; gaugekit.geometry.keys",
  numbers,
  rows: (n) => [
    { label: "winner", value: NAMES[n.winner]! },
    { label: "its lead, in scores", value: n.lead },
    { label: "weights a to d", value: n.weights.slice(0, 4), digits: 2 },
    { label: "weights e to g", value: n.weights.slice(4), digits: 2 },
    { label: "entropy (at most ln 7 = 1.946)", value: n.entropy },
    { label: "keys that can never win", value: String(n.never), invariant: true },
  ],
  View: ({ state, numbers: n, set }) => (
    <>
      <Plane label="Seven keys, their hull, and a query" reach={REACH} grid={false}>
        <Cones state={state} winner={n.winner} />
        <Keys state={state} numbers={n} />
        <Arrow to={state.q} colour="orange" label="query" />
        <Handle label="Query" at={state.q} move={(q) => set({ q })} />
      </Plane>
      <div class="controls">
        <Choice
          label="Keys"
          value={state.keys}
          options={{ plain: "as they are", layer: "behind LayerNorm" }}
          set={(kind) => set({ keys: kind })}
        />
        <Slider label="sharpness" value={state.sharpness} low={0.1} high={10} set={(sharpness) => set({ sharpness })} />
        {state.keys === "layer" && (
          <>
            <Slider label="query along 1" value={state.along} low={-3} high={3} set={(along) => set({ along })} />
            <button type="button" onClick={() => set({ q: [0, 0], along: 3 })}>
              The uniform query
            </button>
          </>
        )}
      </div>
    </>
  ),
});
