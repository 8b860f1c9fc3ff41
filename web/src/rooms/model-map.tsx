// All heads of one kind of attention: a row is a layer, a cell a head. One of them is chosen, by pointer or by keys.
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { follow } from "../ui/drag";
import { figure } from "./model-parts";
import type { HeadSet, Layer, Measure } from "./model-reports";

/** Nothing, a layer, or a head of it. */
export interface Chosen {
  layer: number | null;
  head: number | null;
}

interface Props {
  set: HeadSet;
  measure: Measure;
  at: Chosen;
  choose(at: Chosen): void;
}

const LABELS = 12; // heads and groups of heads that can be told apart in a line
const PRINTED = 16; // layers of which there is room for numbers
const LABELLED = 36; // layers of which each can have its number beside it

export function HeadMap({ set, measure, at, choose }: Props) {
  const grid = useRef<HTMLDivElement>(null);
  const widest = Math.max(...set.layers.map(({ cells }) => cells.length));
  const scale = useMemo(() => scaleOf(set, measure), [set, measure]);
  const stop: Chosen = at.layer === null ? { layer: 0, head: set.layers[0]!.cells.length ? 0 : null } : at;

  useEffect(() => {
    // Keys lead the focus along.
    if (!grid.current!.contains(document.activeElement)) return;
    grid.current!.querySelector<HTMLElement>(`[data-at="${placeOf(stop)}"]`)?.focus({ preventScroll: true });
  }, [at.layer, at.head]);

  const onKeyDown = (event: TargetedKeyboardEvent<HTMLDivElement>) => {
    const next = stepped(event, set.layers, at, stop);
    if (!next) return;
    event.preventDefault();
    choose(next);
  };
  const onPointerDown = (event: TargetedPointerEvent<HTMLDivElement>) => {
    const pressed = under(event);
    if (event.button !== 0 || !pressed) return;
    event.preventDefault();
    event.currentTarget.querySelector<HTMLElement>("[tabindex='0']")?.focus({ preventScroll: true });
    choose(pressed);
    follow(event.currentTarget, event, (now) => {
      const found = under(now);
      if (found) choose(found);
    });
  };

  const fullest = set.layers.find(({ cells }) => cells.length === widest)!;
  const printed = widest <= LABELS && set.layers.length <= PRINTED;
  const every = Math.ceil(set.layers.length / LABELLED);
  return (
    <figure class="map">
      <div
        ref={grid}
        class={printed ? "map-grid map-printed" : "map-grid"}
        role="grid"
        aria-label={`Heads by layer, tinted by ${measure.title}: arrow keys choose one, the column on the left a whole layer`}
        style={{ "--rows": set.layers.length, "--widest": widest }}
        onKeyDown={onKeyDown}
        onPointerDown={onPointerDown}
      >
        <Columns fullest={fullest} />
        {set.layers.map((row) => {
          const chosen = row.layer === at.layer;
          const tab = row.layer === stop.layer && stop.head === null;
          return (
            <div key={row.layer} role="row" class={chosen ? "map-row chosen" : "map-row"}>
              <div
                role="rowheader"
                class="map-layer"
                tabindex={tab ? 0 : -1}
                data-at={row.layer}
                aria-label={`layer ${row.layer}`}
                aria-selected={chosen && at.head === null}
              >
                {row.layer % every === 0 ? row.layer : ""}
              </div>
              <div class="map-cells" role="presentation">
                {row.cells.map((cell) => {
                  const value = measure.of(cell) ?? null;
                  return (
                    <div
                      key={cell.head}
                      role="gridcell"
                      class={`map-cell${cell.head % row.share === 0 ? " first" : ""}${value === null ? " unknown" : ""}`}
                      tabindex={row.layer === stop.layer && cell.head === stop.head ? 0 : -1}
                      data-at={`${row.layer},${cell.head}`}
                      aria-label={`layer ${row.layer}, head ${cell.head}: ${value === null ? "not measured" : figure(value, 3)}`}
                      aria-selected={chosen && cell.head === at.head}
                      style={{ "--tint": `${tint(value, scale)}%` }}
                    >
                      {printed && value !== null && <span>{figure(value, 3)}</span>}
                    </div>
                  );
                })}
              </div>
            </div>
          );
        })}
      </div>
      <figcaption class="map-legend">
        {!scale ? (
          `${measure.title}: not measured`
        ) : scale.low === scale.high ? (
          `${measure.title}: ${figure(scale.low, 3)} everywhere`
        ) : (
          <>
            {scale.below && "≤ "}
            {figure(scale.low, 3)} <span class="map-scale" /> {scale.above && "≥ "}
            {figure(scale.high, 3)} <span>{measure.title}</span>
          </>
        )}
      </figcaption>
    </figure>
  );
}

/** The numbers of heads, and of the key/value heads that some of them share. */
function Columns({ fullest: { cells, share } }: { fullest: Layer }) {
  const groups = cells.length / share;
  const every = Math.ceil(cells.length / LABELS);
  return (
    <>
      {share > 1 && groups <= LABELS && (
        <div class="map-row map-groups" aria-hidden="true">
          <div class="map-layer">kv head</div>
          <div class="map-cells">
            {Array.from({ length: groups }, (_, group) => (
              <div key={group} class="map-column first" style={{ flexGrow: share }}>
                {group}
              </div>
            ))}
          </div>
        </div>
      )}
      <div class="map-row map-heads" role="row">
        <div role="columnheader" class="map-layer">
          layer
        </div>
        <div class="map-cells" role="presentation">
          {cells.map(({ head }) => (
            <div
              key={head}
              role="columnheader"
              aria-label={`head ${head}`}
              class={head % share === 0 ? "map-column first" : "map-column"}
            >
              {head % every === 0 ? head : ""}
            </div>
          ))}
        </div>
      </div>
    </>
  );
}

const placeOf = ({ layer, head }: Chosen) => (head === null ? `${layer}` : `${layer},${head}`);

/** What lies under the pointer. */
function under(event: PointerEvent): Chosen | null {
  const element = document.elementFromPoint(event.clientX, event.clientY)?.closest<HTMLElement>(".map [data-at]");
  if (!element) return null;
  const [layer, head] = element.dataset.at!.split(",").map(Number);
  return { layer: layer!, head: head ?? null };
}

/** Where a key leads. Left of the first head stands the whole layer; what nothing was chosen before begins at the stop. */
function stepped(event: KeyboardEvent, layers: Layer[], at: Chosen, stop: Chosen): Chosen | null {
  const { key, ctrlKey } = event;
  if (event.altKey || event.metaKey) return null;
  if (key === "Escape") return at.layer === null ? null : { layer: at.head === null ? null : at.layer, head: null };
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
  const ends = key === "Home" || key === "End";
  if (!step && !ends && key !== "Enter" && key !== " ") return null;
  if (at.layer === null) return stop;
  if (!step && !ends) return at;
  const many = event.shiftKey ? 10 : 1;
  const bounded = (x: number, least: number, most: number) => Math.min(Math.max(least, x), most);
  const last = layers.length - 1;
  const layer = step ? bounded(at.layer + many * step[0]!, 0, last) : !ctrlKey ? at.layer : key === "Home" ? 0 : last;
  const heads = layers[layer]!.cells.length;
  const column = step ? (at.head ?? -1) + many * step[1]! : key === "Home" ? 0 : heads - 1;
  const head = bounded(column, -1, heads - 1);
  return { layer, head: head < 0 ? null : head };
}

interface Scale {
  low: number;
  high: number;
  below: boolean; // there are values beyond the ends
  above: boolean;
}

const FAR = 2; // times the middle half of all values: what lies farther off would leave no tints for the others

/** The ends of the scale of tints; null where nothing was measured. */
function scaleOf(set: HeadSet, measure: Measure): Scale | null {
  const values = set.layers
    .flatMap(({ cells }) => cells.map((cell) => measure.of(cell) ?? null))
    .filter((value) => value !== null)
    .sort((a, b) => a - b);
  if (!values.length) return null;
  const at = (share: number) => values[Math.round(share * (values.length - 1))]!;
  const [least, first, third, most] = [at(0), at(0.25), at(0.75), at(1)];
  // Where more than half are one value, the ends are all there is to go by.
  const far = third > first ? FAR * (third - first) : Infinity;
  const low = Math.max(least, first - far);
  const high = Math.min(most, third + far);
  return { low, high, below: least < low, above: most > high };
}

const FAINTEST = 5; // per cent, so that a cell is seen at all

function tint(value: number | null, scale: Scale | null): number {
  if (value === null || !scale) return 0;
  const { low, high } = scale;
  const share = high > low ? Math.min(Math.max(0, (value - low) / (high - low)), 1) : 0.5;
  return Math.round(FAINTEST + (100 - FAINTEST) * share);
}
