// What is drawn at points, of a plane or of space: whoever draws says where they lie in the drawing.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Vector } from "../math/linear";

export const SIZE = 440; // units of a drawing, both ways

export interface Projection {
  project(x: Vector): [number, number];
  unit: number; // of the drawing, for a length of 1
}

export const Projected = createContext<Projection>({ project: ([x, y]) => [x!, y!], unit: 1 });
export const useProjection = () => useContext(Projected);

const COLOURS = ["blue", "orange", "green", "purple", "red", "grey"] as const;
export type Colour = (typeof COLOURS)[number];

/** Heads of arrows in all colours of the palette. */
export function Arrowheads() {
  return (
    <defs>
      {COLOURS.map((colour) => (
        <marker key={colour} id={`head-${colour}`} viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto-start-reverse">
          <path d="M0 0.5 L8 4 L0 7.5 z" class={`fill-${colour}`} />
        </marker>
      ))}
    </defs>
  );
}

interface ArrowProps {
  from?: Vector; // the origin, if it is left out
  to: Vector;
  colour: Colour;
  label?: string;
  dashed?: boolean;
}

export function Arrow({ from, to, colour, label, dashed }: ArrowProps) {
  const { project } = useProjection();
  const [x1, y1] = project(from ?? to.map(() => 0));
  const [x2, y2] = project(to);
  const long = Math.hypot(x2 - x1, y2 - y1) > 3;
  return (
    <g>
      <line
        class={`arrow stroke-${colour}${dashed ? " dashed" : ""}`}
        x1={x1}
        y1={y1}
        x2={x2}
        y2={y2}
        marker-end={long ? `url(#head-${colour})` : undefined}
      />
      {label && <Label at={to} text={label} colour={colour} />}
    </g>
  );
}

export function Label({ at, text, colour = "grey" }: { at: Vector; text: string; colour?: Colour }) {
  const [x, y] = useProjection().project(at);
  const left = x > 0.85 * SIZE;
  return (
    <text class={`label fill-${colour}`} x={x + (left ? -10 : 10)} y={y - 9} text-anchor={left ? "end" : "start"}>
      {text}
    </text>
  );
}

export function Dot({ at, colour, size = 5, label }: { at: Vector; colour: Colour; size?: number; label?: string }) {
  const [x, y] = useProjection().project(at);
  return (
    <g>
      <circle class={`fill-${colour}`} cx={x} cy={y} r={size} />
      {label && <Label at={at} text={label} colour={colour} />}
    </g>
  );
}

/** A closed curve through points, or an area, or an open curve. */
export function Loop({ points, colour, filled, open }: { points: Vector[]; colour: Colour; filled?: boolean; open?: boolean }) {
  const { project } = useProjection();
  const path = points.map((p, i) => `${i ? "L" : "M"}${project(p).map((v) => v.toFixed(1)).join(" ")}`).join("") + (open ? "" : "Z");
  return <path class={filled ? `area fill-${colour}` : `curve stroke-${colour}`} d={path} />;
}
