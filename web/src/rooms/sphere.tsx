import { Choice } from "../ui/choice";
import { Arrow, Dot, Loop } from "../ui/marks";
import { Slider, Sliders } from "../ui/slider";
import { Axes, circle, Handle3, PlanePatch, Space, Sphere } from "../ui/space";
import { angle, mean, norm } from "../math/linear";
import { centred, type Norm, normalize, NORMS } from "../math/norms";
import { room } from "../room";

type State = {
  x: number[];
  norm: Norm;
  eps: number;
  alpha: number;
  affine: "off" | "on";
  gamma: number[];
};

type Numbers = {
  projected: number[];
  output: number[];
  length_in: number;
  length_projected: number;
  length_out: number;
  mean_out: number;
  turned: number; // angle between input and output, degrees
};

function numbers({ x, norm: kind, eps, alpha, affine, gamma }: State): Numbers {
  const plain = normalize(kind, x, eps, alpha);
  const output = affine === "on" ? plain.map((v, i) => v * gamma[i]!) : plain;
  const projected = centred(x);
  return {
    projected,
    output,
    length_in: norm(x),
    length_projected: norm(projected),
    length_out: norm(output),
    mean_out: mean(output),
    turned: angle(x, output),
  };
}

const ONES = [1, 1, 1];
const REACH = 3.4;

export const sphere = room<State, Numbers>({
  name: "sphere",
  title: "Plane and sphere",
  text: (
    <>
      LayerNorm drops a vector onto the plane of mean zero and then pulls it to the circle of radius √d in it; RMSNorm only
      pulls it to the sphere, so that what comes out points where it pointed. DyT and Derf do neither: they squash each
      coordinate on its own.
    </>
  ),
  source: "Zhang & Sennrich 2019 (RMSNorm); Gupta et al. 2024; Zhu et al. 2025 (DyT); gaugekit.geometry.normalization",
  numbers,
  rows: (n, { norm: kind, affine, eps }) => [
    { label: "length of x", value: n.length_in },
    { label: "without its mean, P x", value: n.projected, digits: 3 },
    { label: "length of P x", value: n.length_projected },
    { label: "output y", value: n.output, digits: 3 },
    { label: "length of y", value: n.length_out, invariant: (kind === "layer" || kind === "rms") && affine === "off" && eps === 0 },
    { label: "mean of y", value: n.mean_out, invariant: kind === "layer" && affine === "off" },
    { label: "angle from x to y (°)", value: n.turned, invariant: kind === "rms" && affine === "off" },
  ],
  View: ({ state, numbers: n, set }) => {
    const ellipse = (points: number[][]) =>
      state.affine === "on" ? points.map((p) => p.map((v, i) => v * state.gamma[i]!)) : points;
    const ring = circle(ONES, Math.sqrt(3));
    return (
      <>
        <Space label="A vector in space, the plane of mean zero and the sphere of radius √3" reach={REACH} turn={[-28, 16]}>
          <Axes reach={3} />
          {state.norm === "layer" && <PlanePatch axis={ONES} size={2.1} colour="blue" />}
          {(state.norm === "layer" || state.norm === "rms") && <Sphere radius={Math.sqrt(3)} />}
          {state.norm === "layer" && <Loop points={ring} colour="blue" />}
          {state.norm === "layer" && state.affine === "on" && <Loop points={ellipse(ring)} colour="purple" />}
          {state.norm === "rms" &&
            state.affine === "on" &&
            [0, 1, 2].map((i) => (
              <Loop key={i} colour="purple" points={ellipse(circle([0, 1, 2].map((j) => +(i === j)), Math.sqrt(3)))} />
            ))}
          {state.norm === "layer" && <Arrow from={state.x} to={n.projected} colour="blue" dashed />}
          {state.norm === "layer" && <Dot at={n.projected} colour="blue" label="P x" />}
          <Arrow to={n.output} colour="green" label="y" />
          <Arrow to={state.x} colour="orange" label="x" />
          <Handle3 label="Input x" at={state.x} move={(x) => set({ x })} />
        </Space>
        <div class="controls">
          <Choice label="Norm" value={state.norm} options={NORMS} set={(kind) => set({ norm: kind })} />
          {(state.norm === "layer" || state.norm === "rms") && (
            <Slider label="eps" value={state.eps} low={0} high={10} log set={(eps) => set({ eps })} />
          )}
          {(state.norm === "dyt" || state.norm === "derf") && (
            <Slider label="α" value={state.alpha} low={0.1} high={3} set={(alpha) => set({ alpha })} />
          )}
          <Choice label="Affine part γ" value={state.affine} options={{ off: "1", on: "γ" }} set={(affine) => set({ affine })} />
          {state.affine === "on" && <Sliders label="γ" value={state.gamma} low={0.2} high={2} set={(gamma) => set({ gamma })} />}
        </div>
      </>
    );
  },
});
