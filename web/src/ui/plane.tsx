import type { ComponentChildren } from "preact";
import { print } from "../format";
import { draggable } from "./drag";
import { Arrowheads, type Colour, Projected, type Projection, SIZE, useProjection } from "./marks";

interface Props {
  label: string; // what is drawn, for who does not see it
  reach: number; // x and y go from −reach to reach
  grid?: boolean;
  children: ComponentChildren;
}

/** A plane with axes, y upwards. */
export function Plane({ label, reach, grid = true, children }: Props) {
  const unit = SIZE / (2 * reach);
  const onPlane: Projection = { project: ([x, y]) => [SIZE / 2 + unit * x!, SIZE / 2 - unit * y!], unit };
  const ticks = Array.from({ length: 2 * Math.floor(reach) + 1 }, (_, i) => i - Math.floor(reach));
  return (
    <svg class="drawing" viewBox={`0 0 ${SIZE} ${SIZE}`} role="group" aria-label={label}>
      <Arrowheads />
      {grid &&
        ticks.map((t) => {
          const [x, y] = onPlane.project([t, t]);
          return (
            <g key={t} class={t ? "grid" : "axis"}>
              <line x1={x} x2={x} y1={0} y2={SIZE} />
              <line x1={0} x2={SIZE} y1={y} y2={y} />
            </g>
          );
        })}
      <Projected.Provider value={onPlane}>{children}</Projected.Provider>
    </svg>
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
  const { project, unit } = useProjection();
  const [x, y] = project(at);
  return (
    <circle
      class={`handle fill-${colour}`}
      cx={x}
      cy={y}
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
