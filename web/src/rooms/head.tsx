import { print } from "../format";
import { forward, loss, moved, type Optimizer, products, ratio, stepped, type Task, type Weights } from "../math/head";
import { add, apply, product, times, turning, type Matrix } from "../math/linear";
import { given, room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Loop } from "../ui/marks";
import { MatrixTable } from "../ui/numbers";
import { Handle, Plane } from "../ui/plane";
import { Slider } from "../ui/slider";
import "./head.css";

type State = { theta: number; first: number; shear: number; second: number; mirror: "off" | "on"; lr: number };
type Numbers = {
  s: Matrix;
  q: Matrix;
  k: Matrix;
  v: Matrix;
  o: Matrix;
  g_qk: Matrix;
  g_vo: Matrix;
  attention: Matrix;
  output: Matrix;
  loss: number;
} & Record<`${Optimizer}_${"first" | "here" | "apart"}`, number>;

const GIVEN = given<Weights & Task>("head");
const START: Weights = { q: GIVEN.q, k: GIVEN.k, v: GIVEN.v, o: GIVEN.o };
const OPTIMIZERS: Record<Optimizer, string> = { sgd: "SGD", adam: "Adam", quotient: "QuotientSGD" };
const NAMES = Object.keys(OPTIMIZERS) as Optimizer[];

function element({ theta, first, shear, second, mirror }: State): Matrix {
  const sign = mirror === "on" ? -1 : 1;
  return product(turning(theta), [
    [first, sign * shear],
    [0, sign * second],
  ]);
}

function numbers(state: State): Numbers {
  const s = element(state);
  const here = moved(START, s);
  const [g_qk, g_vo] = products(here);
  const { attention, output } = forward(here, GIVEN.x);
  const found: Record<string, number> = {};
  for (const name of NAMES) {
    const behind = stepped(here, GIVEN, name, state.lr);
    const first = stepped(START, GIVEN, name, state.lr);
    found[`${name}_first`] = loss(first, GIVEN);
    found[`${name}_here`] = loss(behind, GIVEN);
    found[`${name}_apart`] = ratio(products(behind), products(first), products(first), products(START));
  }
  return { s, ...here, g_qk, g_vo, attention, output, loss: loss(here, GIVEN), ...found } as Numbers;
}

const REACH = 3.2;

export const head = room<State, Numbers>({
  name: "head",
  title: "Gauge of a head",
  text: (
    <>
      Write a head in another basis S of its two dimensions: all four matrices change, and neither the products G_QK and G_VO nor
      anything that is computed. But an optimizer steps in the matrices: from most other bases SGD and Adam go elsewhere, and only
      the quotient step does not see S.
    </>
  ),
  source: "François & Ravera, arXiv 2602.18948; gaugekit.symmetry.heads, gaugekit.optim.QuotientSGD",
  numbers,
  rows: (n) => [
    { label: "determinant of S", value: n.s[0]![0]! * n.s[1]![1]! - n.s[0]![1]! * n.s[1]![0]! },
    { label: "loss of the head", value: n.loss, invariant: true },
    { label: "SGD from S and from 1, apart", value: n.sgd_apart },
    { label: "Adam from S and from 1, apart", value: n.adam_apart },
    { label: "QuotientSGD, apart", value: n.quotient_apart, invariant: true },
  ],
  View: ({ state, numbers: n, set }) => {
    const back = turning(-state.theta);
    const sign = state.mirror === "on" ? -1 : 1;
    const column = (j: number) => n.s.map((row) => row[j]!);
    return (
      <div class="bench">
          <div class="stage">
          <Plane label="The basis S: where it takes the two unit vectors" reach={REACH}>
            <Loop points={[[0, 0], column(0), add(column(0), column(1)), column(1)]} colour="blue" filled />
            <Arrow to={column(0)} colour="orange" label="S e₁" />
            <Arrow to={column(1)} colour="purple" label="S e₂" />
            <Handle
              label="S e₁"
              at={column(0)}
              move={([x, y]) => set({ theta: (Math.atan2(y, x) * 180) / Math.PI, first: Math.hypot(x, y) })}
            />
            <Handle
              label="S e₂"
              at={column(1)}
              colour="purple"
              move={(to) => {
                const [shear, second] = times(sign, apply(back, to)) as [number, number];
                set({ shear, second });
              }}
            />
          </Plane>
        <div class="controls">
          <Slider label="learning rate" value={state.lr} low={0.01} high={0.5} set={(lr) => set({ lr })} />
          <Choice label="mirrored" value={state.mirror} options={{ off: "no", on: "yes" }} set={(mirror) => set({ mirror })} />
          <button type="button" onClick={() => set({ theta: 0, first: 1, shear: 0, second: 1, mirror: "off" })}>
            S = 1
          </button>
        </div>
          </div>
          <div class="stage">
          <div class="matrices">
            <MatrixTable label="W_Q" value={n.q} />
            <MatrixTable label="W_K" value={n.k} />
            <MatrixTable label="W_V" value={n.v} />
            <MatrixTable label="W_Oᵀ" value={n.o} />
            <MatrixTable label="G_QK" value={n.g_qk} invariant />
            <MatrixTable label="G_VO" value={n.g_vo} invariant />
            <MatrixTable label="attention" value={n.attention} invariant />
            <MatrixTable label="output" value={n.output} invariant />
          </div>
        <div class="scroll">
          <table class="optimizers">
            <caption>Loss behind one step at learning rate {print(state.lr, 2)}</caption>
            <thead>
              <tr>
                <th scope="col">optimizer</th>
                <th scope="col">from basis 1</th>
                <th scope="col">from basis S</th>
                <th scope="col">‖G − G′‖ / ‖step‖</th>
              </tr>
            </thead>
            <tbody>
              {NAMES.map((name) => (
                <tr key={name}>
                  <th scope="row">{OPTIMIZERS[name]}</th>
                  <td>{print(n[`${name}_first`])}</td>
                  <td data-number={`${OPTIMIZERS[name]} from S`}>{print(n[`${name}_here`])}</td>
                  <td>{print(n[`${name}_apart`], 3)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
          </div>
      </div>
    );
  },
});
