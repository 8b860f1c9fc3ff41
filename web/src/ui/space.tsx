import type { ComponentChildren } from "preact";
import { createContext } from "preact";
import { useContext, useMemo, useRef, useState } from "preact/hooks";
import { print } from "../format";
import { add, cross, dot, minus, norm, times, unit as unitVector, type Vector } from "../math/linear";
import { draggable } from "./drag";
import { Arrowheads, type Colour, Loop, Projected, type Projection, SIZE, useProjection } from "./marks";

interface Camera extends Projection {
  right: Vector;
  up: Vector;
  toward: Vector; // to the eye
}

const Seen = createContext<Camera>(null as unknown as Camera);

interface Props {
  label: string;
  reach: number; // what is at most so far from the middle is seen
  turn?: [number, number]; // first view: degrees around the vertical axis, and upwards
  children: ComponentChildren;
}

/** Space as it is seen from far away; dragging the background, or arrow keys on it, turn the view. */
export function Space({ label, reach, turn = [35, 25], children }: Props) {
  const [[yaw, pitch], look] = useState<[number, number]>(turn);
  const start = useRef<[number, number]>(turn);
  const camera = useMemo(() => cameraOf(yaw, pitch, SIZE / (2 * reach)), [yaw, pitch, reach]);
  const to = (a: number, b: number) => look([a, Math.max(-90, Math.min(90, b))]);
  return (
    <svg class="drawing space" viewBox={`0 0 ${SIZE} ${SIZE}`} role="group" aria-label={label}>
      <Arrowheads />
      <rect
        class="background"
        width={SIZE}
        height={SIZE}
        tabindex={0}
        role="slider"
        aria-label="The view: arrow keys turn it"
        aria-valuenow={Math.round(yaw)}
        aria-valuetext={`${Math.round(yaw)} degrees around, ${Math.round(pitch)} degrees up`}
        {...draggable({
          start: () => (start.current = [yaw, pitch]),
          to: (_x, _y, dx, dy) => to(start.current[0] - 0.5 * dx, start.current[1] + 0.5 * dy),
          by: (right, up) => to(yaw + 5 * right, pitch + 5 * up),
        })}
      />
      <Seen.Provider value={camera}>
        <Projected.Provider value={camera}>{children}</Projected.Provider>
      </Seen.Provider>
    </svg>
  );
}

/** The third axis points upwards at pitch 0. */
function cameraOf(yaw: number, pitch: number, unit: number): Camera {
  const [a, b] = [(yaw * Math.PI) / 180, (pitch * Math.PI) / 180];
  const toward = [Math.cos(b) * Math.cos(a), Math.cos(b) * Math.sin(a), Math.sin(b)];
  const right = [-Math.sin(a), Math.cos(a), 0];
  const up = cross(toward, right);
  const project = (x: Vector): [number, number] => [SIZE / 2 + unit * dot(x, right), SIZE / 2 - unit * dot(x, up)];
  return { right, up, toward, project, unit };
}

/** Circle of a radius around a point, at right angles to an axis. */
export function circle(axis: Vector, radius: number, middle: Vector = [0, 0, 0], count = 72): Vector[] {
  const [u, v] = basis(axis);
  return Array.from({ length: count }, (_, i) => {
    const t = (2 * Math.PI * i) / count;
    return add(middle, add(times(radius * Math.cos(t), u), times(radius * Math.sin(t), v)));
  });
}

/** Two unit vectors at right angles to an axis and to each other. */
export function basis(axis: Vector): [Vector, Vector] {
  const n = unitVector(axis);
  const least = n.reduce((best, v, i) => (Math.abs(v) < Math.abs(n[best]!) ? i : best), 0);
  const e = [0, 0, 0].map((_, i) => +(i === least));
  const u = unitVector(minus(e, times(dot(e, n), n)));
  return [u, cross(n, u)];
}

/** A sphere: its outline and three great circles. */
export function Sphere({ radius, colour = "grey" }: { radius: number; colour?: Colour }) {
  const { unit } = useProjection();
  return (
    <g class="sphere">
      <circle class={`outline stroke-${colour}`} cx={SIZE / 2} cy={SIZE / 2} r={unit * radius} />
      {[0, 1, 2].map((i) => (
        <Loop key={i} colour={colour} points={circle([0, 1, 2].map((j) => +(i === j)), radius)} />
      ))}
    </g>
  );
}

/** A square of a plane through a point (half its side `size`). */
export function PlanePatch({ axis, size, at = [0, 0, 0], colour }: { axis: Vector; size: number; at?: Vector; colour: Colour }) {
  const [u, v] = basis(axis);
  const corners = [[1, 1], [1, -1], [-1, -1], [-1, 1]].map(([a, b]) => add(at, add(times(a! * size, u), times(b! * size, v))));
  return <Loop points={corners} colour={colour} filled />;
}

/** The three axes. */
export function Axes({ reach }: { reach: number }) {
  const { project } = useProjection();
  return (
    <g class="axis">
      {[0, 1, 2].map((i) => {
        const e = [0, 1, 2].map((j) => (i === j ? reach : 0));
        const [x1, y1] = project(times(-1, e));
        const [x2, y2] = project(e);
        return (
          <g key={i}>
            <line x1={x1} y1={y1} x2={x2} y2={y2} />
            <text class="label fill-grey" x={x2 + 4} y={y2}>
              x{"₁₂₃"[i]}
            </text>
          </g>
        );
      })}
    </g>
  );
}

interface HandleProps {
  label: string;
  at: Vector;
  step?: number;
  colour?: Colour;
  move(to: Vector): void;
}

/** A point in space: a pointer drags it at right angles to the line of sight, arrow keys too, Page Up and Down along it. */
export function Handle3({ label, at, step = 0.05, colour = "orange", move }: HandleProps) {
  const { project, right, up, toward, unit } = useContext(Seen);
  const [x, y] = project(at);
  const from = useRef<Vector>(at);
  const by = draggable({
    start: () => (from.current = at),
    to: (_x, _y, dx, dy) => move(add(from.current, add(times(dx / unit, right), times(-dy / unit, up)))),
    by: (r, u) => move(add(at, add(times(step * r, right), times(step * u, up)))),
  });
  return (
    <circle
      class={`handle fill-${colour}`}
      cx={x}
      cy={y}
      r={9}
      tabindex={0}
      role="slider"
      aria-label={`${label}: arrow keys move it, Page Up and Page Down along the line of sight`}
      aria-valuenow={norm(at)}
      aria-valuetext={at.map((v) => print(v, 3)).join(", ")}
      {...by}
      onKeyDown={(event) => {
        const way = { PageUp: 1, PageDown: -1 }[event.key];
        if (!way) return by.onKeyDown(event);
        event.preventDefault();
        move(add(at, times(step * way, toward)));
      }}
    />
  );
}
