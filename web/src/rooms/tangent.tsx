import { add, apply, dot, eigh, norm, sum, times, transpose, unit, type Matrix } from "../math/linear";
import { centred, jacobian as slope, normalize } from "../math/norms";
import { given, room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Dot, Loop } from "../ui/marks";
import { Slider } from "../ui/slider";
import { Axes, circle, Handle3, PlanePatch, Space, Sphere } from "../ui/space";

type State = { x: number[]; g: number[]; norm: "layer" | "rms" | "dyt"; eps: number };
type Numbers = {
  output: number[];
  singular: number[];
  rank: number;
  behind: number[];
  before_length: number;
  behind_length: number;
  along_ones: number;
  along_ray: number;
};

const { alpha } = given<{ alpha: number }>("tangent");
const NOTHING = 1e-9;
const ONES = [1, 1, 1];

function jacobian({ x, norm: kind, eps }: State): Matrix {
  if (kind === "dyt") return x.map((v, i) => x.map((_, j) => (i === j ? alpha / Math.cosh(alpha * v) ** 2 : 0)));
  return slope(kind, x, eps);
}

/** Singular values of a symmetric matrix, falling, as good as its eigenvalues are. */
const sizes = (a: Matrix) => eigh(a).values.map(Math.abs).sort((p, q) => q - p);

function numbers(state: State): Numbers {
  const { x, g, norm: kind, eps } = state;
  const J = jacobian(state);
  const behind = apply(transpose(J), g);
  const radial = kind === "layer" ? centred(x) : x;
  const singular = sizes(J); // J is symmetric here
  const size = norm(radial);
  return {
    output: normalize(kind, x, eps, alpha),
    singular,
    rank: singular.filter((s) => s > NOTHING).length,
    behind,
    before_length: norm(g),
    behind_length: norm(behind),
    along_ones: sum(behind) / Math.sqrt(3),
    along_ray: size ? dot(behind, radial) / size : 0,
  };
}

export const tangent = room<State, Numbers>({
  name: "tangent",
  title: "What moves",
  text: (
    <>
      Near a point a norm is its Jacobian: LayerNorm’s has rank d − 2, for neither a step along 1 nor along P x moves the output,
      and what it lets through it divides by the size of x. So the gradient g that arrives at y leaves without both directions,
      tangent to the sphere, and the shorter the longer x is.
    </>
  ),
  source: "Xu et al. 2019; Xiong et al. 2020; gaugekit.geometry.jacobians",
  numbers,
  rows: (n, { norm: kind, eps }) => [
    { label: "singular values", value: n.singular, digits: 3 },
    { label: "rank", value: String(n.rank) },
    { label: "gradient g at y, length", value: n.before_length },
    { label: "Jᵀ g at x", value: n.behind, digits: 3 },
    { label: "its length", value: n.behind_length },
    { label: "Jᵀ g along 1", value: n.along_ones, invariant: kind === "layer" },
    {
      label: kind === "layer" ? "Jᵀ g along P x" : "Jᵀ g along x",
      value: n.along_ray,
      invariant: kind !== "dyt" && eps === 0,
    },
  ],
  View: ({ state, numbers: n, set }) => {
    const radius = Math.sqrt(3);
    const J = jacobian(state);
    // What a small ball around x becomes around y.
    const image = (axis: number[]) => circle(axis, 0.8).map((u) => add(n.output, apply(J, u)));
    const flat = state.norm !== "dyt" && norm(n.output) > 0;
    return (
      <>
        <Space label="A vector x, its output y with the tangent there, and a gradient before and behind the norm" reach={3.4} turn={[-28, 16]}>
          <Axes reach={3} />
          {state.norm !== "dyt" && <Sphere radius={radius} />}
          {state.norm === "layer" && <Loop points={circle(ONES, radius)} colour="blue" />}
          {state.norm === "rms" && flat && <PlanePatch axis={n.output} size={0.9} at={n.output} colour="blue" />}
          {state.norm === "layer" && flat && <TangentLine at={n.output} />}
          {[0, 1, 2].map((i) => (
            <Loop key={i} points={image([0, 1, 2].map((j) => +(i === j)))} colour="green" />
          ))}
          <Arrow to={n.output} colour="green" label="y" />
          <Arrow from={n.output} to={add(n.output, state.g)} colour="purple" label="g" />
          <Arrow from={state.x} to={add(state.x, n.behind)} colour="red" label="Jᵀ g" />
          <Arrow to={state.x} colour="orange" label="x" />
          <Dot at={n.output} colour="green" size={3} />
          <Handle3 label="Input x" at={state.x} move={(x) => set({ x })} />
          <Handle3
            label="Gradient g"
            at={add(n.output, state.g)}
            colour="purple"
            move={(to) => set({ g: to.map((v, i) => v - n.output[i]!) })}
          />
        </Space>
        <div class="controls">
          <Choice
            label="Norm"
            value={state.norm}
            options={{ layer: "LayerNorm", rms: "RMSNorm", dyt: "DyT" }}
            set={(kind) => set({ norm: kind })}
          />
          {state.norm !== "dyt" && <Slider label="eps" value={state.eps} low={0} high={10} log set={(eps) => set({ eps })} />}
        </div>
      </>
    );
  },
});

/** Along which y can move: at right angles to 1 and to y. */
function TangentLine({ at }: { at: number[] }) {
  const along = unit([at[1]! - at[2]!, at[2]! - at[0]!, at[0]! - at[1]!]);
  return <Loop points={[add(at, times(-1.2, along)), add(at, times(1.2, along))]} colour="blue" open />;
}
