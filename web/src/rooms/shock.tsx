import { norm, singularValues, sum } from "../math/linear";
import { centred, jacobian, normalize } from "../math/norms";
import { room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Dot, Label, Loop, useProjection } from "../ui/marks";
import { Handle, Plane } from "../ui/plane";
import { Slider } from "../ui/slider";
import "./shock.css";

type State = { x: number[]; norm: "layer" | "rms"; eps: number };
type Numbers = { projected: number[]; output: number[]; length: number; sum: number; side: number; slope: number };

function numbers({ x, norm: kind, eps }: State): Numbers {
  const output = normalize(kind, x, eps, 1);
  return {
    projected: centred(x),
    output,
    length: norm(output),
    sum: sum(output),
    side: Math.sign(x[0]! - x[1]!),
    slope: singularValues(jacobian(kind, x, eps))[0]!,
  };
}

const REACH = 3.3;

function Halves() {
  const { project } = useProjection();
  const [low, high] = [[-REACH, -REACH], [REACH, REACH]];
  const [[x1, y1], [x2, y2]] = [project(low), project(high)];
  return (
    <g aria-hidden="true">
      <Loop points={[low, high, [REACH, -REACH]]} colour="blue" filled />
      <Loop points={[low, high, [-REACH, REACH]]} colour="purple" filled />
      <line class="shore" x1={x1} y1={y1} x2={x2} y2={y2} />
      <Label at={[-2.2, -2.3]} text="x₁ = x₂" />
    </g>
  );
}

/** All that can come out. */
function Outputs({ state }: { state: State }) {
  const { project, unit } = useProjection();
  const [x, y] = project([0, 0]);
  if (state.norm === "rms") return <circle class="curve stroke-green" cx={x} cy={y} r={Math.SQRT2 * unit} />;
  if (state.eps > 0) return <Loop points={[[1, -1], [-1, 1]]} colour="green" open />;
  return (
    <>
      <Dot at={[1, -1]} colour="blue" size={7} label="(1, −1)" />
      <Dot at={[-1, 1]} colour="purple" size={7} label="(−1, 1)" />
    </>
  );
}

export const shock = room<State, Numbers>({
  name: "shock",
  title: "The two-dimensional shock",
  text: (
    <>
      In two dimensions LayerNorm takes the whole plane to two points: all it can say is which of the two numbers is larger.
      Cross the line x₁ = x₂ and the output jumps; nowhere else does it move, unless eps opens the jump into a slope.
    </>
  ),
  source: "Ba, Kiros & Hinton 2016; gaugekit.geometry.normalization.layer_norm with d = 2",
  numbers,
  rows: (n, { norm: kind, eps }) => [
    { label: "projected, P x", value: n.projected, digits: 3 },
    { label: "output y", value: n.output, digits: 3 },
    { label: "larger", value: n.side > 0 ? "x₁" : n.side < 0 ? "x₂" : "neither" },
    { label: "|x₁ − x₂|", value: Math.abs(n.projected[0]! - n.projected[1]!) },
    { label: "length of y", value: n.length, invariant: eps === 0 && kind === "rms" && n.length > 0 },
    { label: "y₁ + y₂", value: n.sum, invariant: kind === "layer" },
    { label: "steepest slope of y", value: n.slope, invariant: eps === 0 && kind === "layer" },
  ],
  View: ({ state, numbers: n, set }) => (
    <>
      <Plane label="The plane, cut in two by the line on which both numbers are equal" reach={REACH}>
        {state.norm === "layer" && <Halves />}
        <Outputs state={state} />
        {state.norm === "layer" && <Arrow from={state.x} to={n.projected} colour="grey" dashed label="P x" />}
        <Arrow to={n.output} colour="green" {...(state.norm === "rms" || state.eps > 0 ? { label: "y" } : {})} />
        <Arrow to={state.x} colour="orange" label="x" />
        <Handle label="Input x" at={state.x} move={(x) => set({ x })} />
      </Plane>
      <div class="controls">
        <Choice label="Norm" value={state.norm} options={{ layer: "LayerNorm", rms: "RMSNorm" }} set={(kind) => set({ norm: kind })} />
        <Slider label="eps" value={state.eps} low={0} high={10} log set={(eps) => set({ eps })} />
      </div>
    </>
  ),
});
