import { useId } from "preact/hooks";

interface Props<T extends string> {
  label: string;
  value: T;
  options: Record<T, string>; // value → what is said
  set(value: T): void;
}

/** One of a few, as radio buttons in a row. */
export function Choice<T extends string>({ label, value, options, set }: Props<T>) {
  const id = useId();
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      {(Object.entries(options) as [T, string][]).map(([each, said]) => (
        <label key={each}>
          <input type="radio" name={id} value={each} checked={each === value} onChange={() => set(each)} />
          <span>{said}</span>
        </label>
      ))}
    </fieldset>
  );
}
