import { apply, dot, eigh, mean, times, unit, type Matrix } from "../math/linear";
import { normalize } from "../math/norms";
import { given, room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Dot, Loop } from "../ui/marks";
import { Sliders } from "../ui/slider";
import { Axes, circle, Handle3, PlanePatch, Space } from "../ui/space";

type State = { gamma: number[]; norm: "layer" | "rms" };
type Numbers = { eigenvalues: number[]; predicted: number[]; cosine: number; along: number; semiaxes: number[] };

const { states } = given<{ states: Matrix }>("fingerprint");

const outputs = ({ gamma, norm: kind }: State): Matrix =>
  states.map((x) => normalize(kind, x, 0, 1).map((v, i) => v * gamma[i]!));

function covariance(rows: Matrix): Matrix {
  const middle = [0, 1, 2].map((i) => mean(rows.map((row) => row[i]!)));
  return [0, 1, 2].map((i) => [0, 1, 2].map((j) => mean(rows.map((row) => (row[i]! - middle[i]!) * (row[j]! - middle[j]!)))));
}

function numbers(state: State): Numbers {
  const seen = covariance(outputs(state));
  const found = eigh(seen);
  const predicted = unit(state.gamma.map((v) => 1 / v));
  // Semi-axes are √d times the singular values of diag(γ) P, which has the smallest one 0.
  const squares = state.gamma.map((v) => v * v);
  const flat = squares.map((_, i) => squares.map((_, j) => sandwich(squares, i, j)));
  const semiaxes =
    state.norm === "rms"
      ? [...state.gamma].sort((a, b) => b - a).map((v) => Math.sqrt(3) * v)
      : eigh(flat)
          .values.slice(0, 2)
          .map((v) => Math.sqrt(3 * v));
  return {
    eigenvalues: found.values,
    predicted,
    cosine: Math.abs(dot(found.vectors[2]!, predicted)),
    along: dot(predicted, apply(seen, predicted)),
    semiaxes,
  };
}

/** (P diag(s) P)_ij with P = I − 1 1ᵀ/3. */
const sandwich = (s: number[], i: number, j: number) => (i === j ? s[i]! : 0) - s[i]! / 3 - s[j]! / 3 + mean(s) / 3;

export const fingerprint = room<State, Numbers>({
  name: "fingerprint",
  title: "The fingerprint",
  text: (
    <>
      Normalized states sum to zero, so behind LayerNorm’s weight γ they lie in the plane at right angles to γ⁻¹: their covariance
      has one eigenvalue 0, whatever the text. The direction can be read off the states of a model that is only heard, and tells
      its γ up to a factor; RMSNorm leaves no such trace.
    </>
  ),
  source: "Shirodkar & Narayanan, arXiv 2606.19491; gaugekit.geometry.ellipsoid",
  numbers,
  rows: (n, { norm: kind }) => [
    { label: "eigenvalues of the covariance", value: n.eigenvalues, digits: 3 },
    { label: "γ⁻¹, normalized", value: n.predicted, digits: 3 },
    { label: "states’ variance along γ⁻¹", value: n.along, invariant: kind === "layer" },
    { label: "|cos|, smallest axis and γ⁻¹", value: n.cosine, invariant: kind === "layer" },
    { label: "semi-axes", value: n.semiaxes, digits: 3 },
  ],
  View: ({ state, numbers: n, set }) => {
    const ring = circle([1, 1, 1], Math.sqrt(3)).map((p) => p.map((v, i) => v * state.gamma[i]!));
    return (
      <>
        <Space label="Normalized states, the ellipse on which they lie, and the direction in which they do not vary" reach={3.6} turn={[-20, 22]}>
          <Axes reach={3.2} />
          {state.norm === "layer" && <PlanePatch axis={n.predicted} size={2.4} colour="blue" />}
          {state.norm === "layer" && <Loop points={ring} colour="blue" />}
          {outputs(state).map((y, i) => (
            <Dot key={i} at={y} colour="green" size={3.5} />
          ))}
          <Arrow from={times(-1, n.predicted)} to={times(2.6, n.predicted)} colour="red" label="γ⁻¹" />
          <Arrow to={state.gamma} colour="orange" label="γ" />
          <Handle3 label="Weight γ" at={state.gamma} move={(gamma) => set({ gamma })} />
        </Space>
        <div class="controls">
          <Choice label="Norm" value={state.norm} options={{ layer: "LayerNorm", rms: "RMSNorm" }} set={(kind) => set({ norm: kind })} />
          <Sliders label="γ" value={state.gamma} low={0.2} high={2} set={(gamma) => set({ gamma })} />
        </div>
      </>
    );
  },
});
