import { printed, short } from "../format";
import type { Row } from "../room";

/** The numbers of a room. Those that nothing changes are marked. */
export function NumberTable({ rows }: { rows: Row[] }) {
  return (
    <table class="numbers">
      <caption class="hidden">Numbers of what is drawn</caption>
      <tbody>
        {rows.map((row) => (
          <tr key={row.label} class={row.invariant ? "invariant" : undefined}>
            <th scope="row">
              {row.label}
              {row.invariant && <span class="tag">does not change</span>}
            </th>
            <td data-number={row.label} data-invariant={row.invariant ? "" : undefined}>
              {printed(row.value, row.digits)}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

interface MatrixProps {
  label: string;
  value: number[][];
  invariant?: boolean;
  rowNames?: string[];
  columnNames?: string[];
}

/** A small matrix, its entries tinted by sign and size. `invariant`: dragging leaves it as it is. */
export function MatrixTable({ label, value, invariant, rowNames, columnNames }: MatrixProps) {
  const top = Math.max(1e-12, ...value.flat().map(Math.abs));
  const tint = (x: number) => ({ "--tint": `${Math.round((60 * Math.abs(x)) / top)}%` });
  return (
    <table class={invariant ? "matrix invariant" : "matrix"}>
      <caption>
        {label}
        {invariant && <span class="tag">stays</span>}
      </caption>
      {columnNames && (
        <thead>
          <tr>
            {rowNames && <td />}
            {columnNames.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
      )}
      <tbody>
        {value.map((row, i) => (
          <tr key={i}>
            {rowNames && <th scope="row">{rowNames[i]}</th>}
            {row.map((x, j) => (
              <td
                key={j}
                class={x < 0 ? "negative" : "positive"}
                style={tint(x)}
                data-number={`${label} ${i},${j}`}
                data-invariant={invariant ? "" : undefined}
              >
                {short(x)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
