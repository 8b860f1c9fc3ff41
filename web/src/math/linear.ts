// Vectors and small matrices (lists of rows).
export type Vector = number[];
export type Matrix = number[][];

export const sum = (x: Vector) => x.reduce((a, b) => a + b, 0);
export const mean = (x: Vector) => sum(x) / x.length;
export const dot = (x: Vector, y: Vector) => x.reduce((s, v, i) => s + v * y[i]!, 0);
export const norm = (x: Vector) => Math.hypot(...x);
export const add = (x: Vector, y: Vector) => x.map((v, i) => v + y[i]!);
export const minus = (x: Vector, y: Vector) => x.map((v, i) => v - y[i]!);
export const times = (c: number, x: Vector) => x.map((v) => c * v);
export const unit = (x: Vector) => times(1 / norm(x), x);
export const cross = (x: Vector, y: Vector) => [
  x[1]! * y[2]! - x[2]! * y[1]!,
  x[2]! * y[0]! - x[0]! * y[2]!,
  x[0]! * y[1]! - x[1]! * y[0]!,
];
/** In degrees; 0 where one of the two is zero. Exact near 0 and 180 too (Kahan). */
export function angle(x: Vector, y: Vector): number {
  const a = norm(x);
  const b = norm(y);
  if (!a || !b) return 0;
  const u = times(1 / a, x);
  const v = times(1 / b, y);
  return (2 * Math.atan2(norm(minus(u, v)), norm(add(u, v))) * 180) / Math.PI;
}

export const transpose = (a: Matrix): Matrix => a[0]!.map((_, j) => a.map((row) => row[j]!));
export const apply = (a: Matrix, x: Vector): Vector => a.map((row) => dot(row, x));
export const product = (a: Matrix, b: Matrix): Matrix => {
  const columns = transpose(b);
  return a.map((row) => columns.map((column) => dot(row, column)));
};
export const plus = (a: Matrix, b: Matrix): Matrix => a.map((row, i) => add(row, b[i]!));
export const scaled = (c: number, a: Matrix): Matrix => a.map((row) => times(c, row));
const identity = (n: number): Matrix => Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => +(i === j)));
/** The turn of the plane, anticlockwise. */
export function turning(degrees: number): Matrix {
  const t = (degrees * Math.PI) / 180;
  return [
    [Math.cos(t), -Math.sin(t)],
    [Math.sin(t), Math.cos(t)],
  ];
}
export const inverse2 = ([[a, b], [c, d]]: Matrix): Matrix => {
  const det = a! * d! - b! * c!;
  return [
    [d! / det, -b! / det],
    [-c! / det, a! / det],
  ];
};
export const softmax = (x: Vector): Vector => {
  const top = Math.max(...x);
  const e = x.map((v) => Math.exp(v - top));
  return times(1 / sum(e), e);
};

/** Eigenvalues, falling, and eigenvectors (rows) of a symmetric matrix, by Jacobi's rotations. */
export function eigh(a: Matrix): { values: Vector; vectors: Matrix } {
  const n = a.length;
  const m = a.map((row) => [...row]);
  const v = identity(n);
  for (let sweep = 0; sweep < 50; sweep++) {
    let off = 0;
    for (let p = 0; p < n; p++) for (let q = p + 1; q < n; q++) off += m[p]![q]! ** 2;
    if (off < 1e-300) break;
    for (let p = 0; p < n; p++) {
      for (let q = p + 1; q < n; q++) {
        if (Math.abs(m[p]![q]!) < 1e-300) continue;
        const theta = (m[q]![q]! - m[p]![p]!) / (2 * m[p]![q]!);
        const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1));
        const c = 1 / Math.sqrt(t * t + 1);
        const s = t * c;
        for (let k = 0; k < n; k++) {
          const x = m[k]![p]!;
          const y = m[k]![q]!;
          m[k]![p] = c * x - s * y;
          m[k]![q] = s * x + c * y;
        }
        for (let k = 0; k < n; k++) {
          const x = m[p]![k]!;
          const y = m[q]![k]!;
          m[p]![k] = c * x - s * y;
          m[q]![k] = s * x + c * y;
          const vx = v[p]![k]!;
          const vy = v[q]![k]!;
          v[p]![k] = c * vx - s * vy;
          v[q]![k] = s * vx + c * vy;
        }
      }
    }
  }
  const order = Array.from({ length: n }, (_, i) => i).sort((i, j) => m[j]![j]! - m[i]![i]!);
  return { values: order.map((i) => m[i]![i]!), vectors: order.map((i) => v[i]!) };
}

/** Singular values, falling. */
export const singularValues = (a: Matrix): Vector =>
  eigh(product(transpose(a), a)).values.map((x) => Math.sqrt(Math.max(0, x)));
