// One attention head, its gradient, and one step of each optimizer; gaugekit.lab.rooms.head says the same in torch.
import { inverse2, plus, product, scaled, softmax, sum, transpose, type Matrix } from "./linear";

export interface Weights {
  q: Matrix;
  k: Matrix;
  v: Matrix;
  o: Matrix; // in rows: (rank, width)
}

export interface Task {
  x: Matrix;
  target: Matrix;
}

export type Optimizer = "sgd" | "adam" | "quotient";

const RANK = 2;
const EPS = 1e-8; // Adam's

/** W_V → S W_V, W_O → W_O S⁻¹, and W_Q → S W_Q, W_K → S⁻ᵀ W_K. */
export function moved(w: Weights, s: Matrix): Weights {
  const dual = transpose(inverse2(s));
  return { q: product(s, w.q), k: product(dual, w.k), v: product(s, w.v), o: product(dual, w.o) };
}

export function forward(w: Weights, x: Matrix): { attention: Matrix; output: Matrix; mixed: Matrix } {
  const scores = scaled(1 / Math.sqrt(RANK), product(product(x, transpose(w.q)), transpose(product(x, transpose(w.k)))));
  const attention = scores.map((row, i) => [...softmax(row.slice(0, i + 1)), ...row.slice(i + 1).map(() => 0)]);
  const mixed = product(attention, product(x, transpose(w.v)));
  return { attention, mixed, output: product(mixed, w.o) };
}

const squares = (a: Matrix) => sum(a.flat().map((v) => v * v));
const difference = (a: Matrix, b: Matrix) => plus(a, scaled(-1, b));

export function loss(w: Weights, { x, target }: Task): number {
  return squares(difference(forward(w, x).output, target)) / (2 * x.length);
}

function gradient(w: Weights, { x, target }: Task): Weights {
  const { attention, mixed, output } = forward(w, x);
  const dOutput = scaled(1 / x.length, difference(output, target));
  const dMixed = product(dOutput, transpose(w.o));
  const dAttention = product(dMixed, transpose(product(x, transpose(w.v))));
  const dScores = attention.map((row, i) => {
    const inner = sum(row.map((a, j) => a * dAttention[i]![j]!));
    return row.map((a, j) => (a * (dAttention[i]![j]! - inner)) / Math.sqrt(RANK));
  });
  const queries = product(x, transpose(w.q));
  const keys = product(x, transpose(w.k));
  return {
    q: product(transpose(product(dScores, keys)), x),
    k: product(transpose(product(transpose(dScores), queries)), x),
    v: product(transpose(product(transpose(attention), dMixed)), x),
    o: product(transpose(mixed), dOutput),
  };
}

/** G_QK and G_VO. */
export const products = (w: Weights): [Matrix, Matrix] => [product(transpose(w.q), w.k), product(transpose(w.o), w.v)];

/** One step of QuotientSGD on a pair: A − lr σ (L + s² K⁻¹)⁻¹ ∂A and B − lr σ K⁻¹ ∂B, with σ² = tr(L K) / r. */
function quotient(a: Matrix, b: Matrix, da: Matrix, db: Matrix, lr: number): [Matrix, Matrix] {
  const inverseK = inverse2(product(a, transpose(a)));
  const L = product(b, transpose(b));
  const size = squares(product(transpose(b), a));
  const unit = Math.sqrt(size / RANK);
  const pushed = sum(product(transpose(db), product(inverseK, db)).map((row, i) => row[i]!)) / RANK;
  const floor = 2 ** -52 * size + (lr * unit) ** 2 * pushed;
  const inverseL = inverse2(plus(L, scaled(floor, inverseK)));
  return [
    difference(a, scaled(lr * unit, product(inverseL, da))),
    difference(b, scaled(lr * unit, product(inverseK, db))),
  ];
}

export function stepped(w: Weights, task: Task, optimizer: Optimizer, lr: number): Weights {
  const g = gradient(w, task);
  if (optimizer === "quotient") {
    const [q, k] = quotient(w.q, w.k, g.q, g.k, lr);
    const [v, o] = quotient(w.v, w.o, g.v, g.o, lr);
    return { q, k, v, o };
  }
  // Adam's first step has moments g and g².
  const step = (d: Matrix) => (optimizer === "sgd" ? d : d.map((row) => row.map((x) => x / (Math.abs(x) + EPS))));
  const of = (name: keyof Weights) => difference(w[name], scaled(lr, step(g[name])));
  return { q: of("q"), k: of("k"), v: of("v"), o: of("o") };
}

/** ‖G − G'‖ / ‖H − H'‖ over both products. */
export function ratio(g: [Matrix, Matrix], other: [Matrix, Matrix], h: [Matrix, Matrix], base: [Matrix, Matrix]): number {
  const apart = (x: [Matrix, Matrix], y: [Matrix, Matrix]) =>
    Math.sqrt(squares(difference(x[0], y[0])) + squares(difference(x[1], y[1])));
  return apart(g, other) / apart(h, base);
}
