import { print } from "../format";
import { useId } from "preact/hooks";

interface Props {
  label: string;
  value: number;
  low: number;
  high: number;
  step?: number;
  log?: boolean; // even steps of the logarithm; 0 is at the left end
  set(value: number): void;
}

const STEPS = 200;
const DECADES = 8; // that a logarithmic slider goes below its high end

/** A labelled range input that prints its value. */
export function Slider({ label, value, low, high, step, log, set }: Props) {
  const id = useId();
  const place = log ? (value <= low ? 0 : Math.max(1, Math.round(STEPS * (1 + Math.log10(value / high) / DECADES)))) : value;
  const read = (x: number) => (log ? (x === 0 ? low : high * 10 ** (DECADES * (x / STEPS - 1))) : x);
  return (
    <div class="slider">
      <label for={id}>{label}</label>
      <input
        id={id}
        type="range"
        min={log ? 0 : low}
        max={log ? STEPS : high}
        step={log ? 1 : (step ?? (high - low) / STEPS)}
        value={place}
        aria-valuetext={print(value, 3)}
        onInput={(event) => set(read(Number(event.currentTarget.value)))}
      />
      <output for={id}>{print(value, 3)}</output>
    </div>
  );
}

interface VectorProps {
  label: string; // each entry gets its number
  value: number[];
  low: number;
  high: number;
  set(value: number[]): void;
}

/** A slider for every entry. */
export function Sliders({ label, value, low, high, set }: VectorProps) {
  return (
    <>
      {value.map((entry, i) => (
        <Slider
          key={i}
          label={`${label}${"₁₂₃"[i]}`}
          value={entry}
          low={low}
          high={high}
          set={(now) => set(value.map((v, j) => (i === j ? now : v)))}
        />
      ))}
    </>
  );
}
