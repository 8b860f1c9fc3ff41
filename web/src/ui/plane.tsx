import type { ComponentChildren } from "preact";
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { print } from "../format";
import { draggable } from "./drag";

export const SIZE = 440; // units of a drawing, both ways

interface Scale {
  x(value: number): number;
  y(value: number): number;
  reach: number;
}

const Scaled = createContext<Scale>({ x: (v) => v, y: (v) => v, reach: 1 });

interface Props {
  label: string; // what is drawn, for who does not see it
  reach: number; // x and y go from −reach to reach
  grid?: boolean;
  children: ComponentChildren;
}

/** A plane with axes, y upwards. */
export function Plane({ label, reach, grid = true, children }: Props) {
  const unit = SIZE / (2 * reach);
  const scale: Scale = { x: (v) => SIZE / 2 + unit * v, y: (v) => SIZE / 2 - unit * v, reach };
  const ticks = Array.from({ length: 2 * Math.floor(reach) + 1 }, (_, i) => i - Math.floor(reach));
  return (
    <svg class="drawing" viewBox={`0 0 ${SIZE} ${SIZE}`} role="group" aria-label={label}>
      <Arrowheads />
      {grid &&
        ticks.map((t) => (
          <g key={t} class={t ? "grid" : "axis"}>
            <line x1={scale.x(t)} x2={scale.x(t)} y1={0} y2={SIZE} />
            <line x1={0} x2={SIZE} y1={scale.y(t)} y2={scale.y(t)} />
          </g>
        ))}
      <Scaled.Provider value={scale}>{children}</Scaled.Provider>
    </svg>
  );
}

/** Heads of arrows in all colours of the palette: use as marker-end={head("blue")}. */
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

export const COLOURS = ["blue", "orange", "green", "purple", "red", "grey"] as const;
export type Colour = (typeof COLOURS)[number];
export const head = (colour: Colour) => `url(#head-${colour})`;

export const usePlane = () => useContext(Scaled);

export function Arrow({ from = [0, 0], to, colour, label, dashed }: { from?: number[]; to: number[]; colour: Colour; label?: string; dashed?: boolean }) {
  const { x, y } = usePlane();
  const long = Math.hypot(x(to[0]!) - x(from[0]!), y(to[1]!) - y(from[1]!)) > 3;
  return (
    <g>
      <line
        class={`arrow stroke-${colour}${dashed ? " dashed" : ""}`}
        x1={x(from[0]!)}
        y1={y(from[1]!)}
        x2={x(to[0]!)}
        y2={y(to[1]!)}
        marker-end={long ? head(colour) : undefined}
      />
      {label && <Label at={to} text={label} colour={colour} />}
    </g>
  );
}

export function Label({ at, text, colour = "grey" }: { at: number[]; text: string; colour?: Colour }) {
  const { x, y } = usePlane();
  const left = x(at[0]!) > 0.85 * SIZE;
  return (
    <text class={`label fill-${colour}`} x={x(at[0]!) + (left ? -10 : 10)} y={y(at[1]!) - 9} text-anchor={left ? "end" : "start"}>
      {text}
    </text>
  );
}

export function Dot({ at, colour, size = 5, label }: { at: number[]; colour: Colour; size?: number; label?: string }) {
  const { x, y } = usePlane();
  return (
    <g>
      <circle class={`fill-${colour}`} cx={x(at[0]!)} cy={y(at[1]!)} r={size} />
      {label && <Label at={at} text={label} colour={colour} />}
    </g>
  );
}

interface HandleProps {
  label: string;
  at: number[];
  step?: number; // of an arrow key
  colour?: Colour;
  move(to: [number, number]): void;
}

/** A point to be dragged, or moved by arrow keys. */
export function Handle({ label, at, step = 0.05, colour = "orange", move }: HandleProps) {
  const { x, y, reach } = usePlane();
  const unit = SIZE / (2 * reach);
  return (
    <circle
      class={`handle fill-${colour}`}
      cx={x(at[0]!)}
      cy={y(at[1]!)}
      r={9}
      tabindex={0}
      role="slider"
      aria-label={`${label}: arrow keys move it`}
      aria-valuenow={at[0]}
      aria-valuetext={`${print(at[0]!, 3)}, ${print(at[1]!, 3)}`}
      {...draggable({
        to: (px, py) => move([(px - SIZE / 2) / unit, (SIZE / 2 - py) / unit]),
        by: (right, up) => move([at[0]! + step * right, at[1]! + step * up]),
      })}
    />
  );
}
