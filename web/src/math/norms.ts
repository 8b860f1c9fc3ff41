// The norms as the browser computes them while a hand drags; gaugekit.geometry.normalization says what they are.
import { type Matrix, mean, minus, sum, type Vector } from "./linear";

export type Norm = "layer" | "rms" | "dyt" | "derf" | "none";

export const NORMS: Record<Norm, string> = {
  layer: "LayerNorm",
  rms: "RMSNorm",
  dyt: "DyT",
  derf: "Derf",
  none: "none",
};

/** Without its mean; of equal entries exactly zero, for which the mean must not be rounded past them. */
export const centred = (x: Vector): Vector => {
  const m = Math.min(Math.max(...x), Math.max(Math.min(...x), sum(x.map((v) => v / x.length))));
  const y = x.map((v) => v - m);
  const rest = mean(y);
  return y.map((v) => v - rest);
};

export const rms = (x: Vector, eps = 0): number => Math.sqrt(mean(x.map((v) => v * v)) + eps);

/** Without affine part. DyT and Derf at α = `alpha`, Derf's shift 0; zero stays zero at eps = 0. */
export function normalize(kind: Norm, x: Vector, eps: number, alpha: number): Vector {
  if (kind === "dyt") return x.map((v) => Math.tanh(alpha * v));
  if (kind === "derf") return x.map((v) => erf(alpha * v));
  if (kind === "none") return [...x];
  const y = kind === "layer" ? centred(x) : x;
  const size = rms(y, eps);
  return size ? y.map((v) => v / size) : minus(y, y);
}

/** ∂y/∂x of LayerNorm or RMSNorm without affine part; zero where the norm is of nothing. */
export function jacobian(kind: "layer" | "rms", x: Vector, eps: number): Matrix {
  const y = kind === "layer" ? centred(x) : x;
  const size = rms(y, eps);
  const d = x.length;
  if (!size) return x.map(() => x.map(() => 0));
  const n = y.map((v) => v / size);
  return n.map((a, i) => n.map((b, j) => (+(i === j) - (kind === "layer" ? 1 / d : 0) - (a * b) / d) / size));
}

/** The error function to double precision: its power series near zero, and the continued fraction of erfc far away. */
function erf(x: number): number {
  const a = Math.abs(x);
  if (a < 2.5) {
    let term = a;
    let total = a;
    for (let n = 1; n < 100 && Math.abs(term) > 1e-18 * Math.abs(total); n++) {
      term *= (2 * a * a) / (2 * n + 1);
      total += term;
    }
    return (Math.sign(x) * 2 * Math.exp(-a * a) * total) / Math.sqrt(Math.PI);
  }
  if (a > 6) return Math.sign(x);
  let f = 0;
  for (let n = 60; n > 0; n--) f = n / 2 / (a + f);
  return Math.sign(x) * (1 - Math.exp(-a * a) / Math.sqrt(Math.PI) / (a + f));
}
