import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { print } from "../format";
import { getJson, type ReportState, type Session } from "../server";
import "./model.css";

export const MODEL = "model";

// What is read of the reports; gaugekit.verbs has the whole of them.
interface Head {
  stream: string;
  layer: number;
  attention: string;
  kv_head: number;
  circuit: "qk" | "vo";
  rank: number;
  effective_rank: number;
  stable_rank: number;
  spectrum: number[];
  balance_relative: number;
}

interface Inspect {
  model: { family: string; format: string; layers: number; d_model: number; heads: number; kv_heads: number; head_dim: number };
  observable: string;
  parameters: number;
  redundancy: { total: number; fraction: number; by_symmetry: { name: string; group: string; dimension: number; where: string[] }[] };
  heads: Head[];
}

interface Spread {
  mean: number;
}

interface Probe {
  text: string;
  tokens: number;
  norms: { layer: number | null; place: string; kind: string; angle_before: Spread; angle_after: Spread; radius: Spread }[];
  heads: { layer: number; entropy: number[]; uniform: number; unselectable: number[] }[];
}

interface Compare {
  second: string;
  verdict: string;
  layers: {
    stream: string;
    layer: number;
    attention: string;
    spectra_qk: number;
    spectra_vo: number;
    qk: number | null;
    vo: number | null;
    mlp: number | null;
  }[];
}

interface Reports {
  inspect?: Inspect;
  probe?: Probe;
  compare?: Compare;
}

interface Props {
  session: Session | null;
  query: string;
  heading: ComponentChildren;
}

export function Model({ session, query, heading }: Props) {
  const reports = useReports(session);
  return (
    <article class="model">
      <div>
        {heading}
        <p class="lead">
          What <code>gaugekit inspect</code>, <code>probe</code> and <code>compare</code> find in the model that was named: its
          symmetries, and the invariants of every head. Choose a head to see its spectra, which no change of basis alters.
        </p>
      </div>
      {session && !session.model && <Nothing />}
      {session?.model && (
        <>
          <Facts name={session.model} inspect={reports.inspect} />
          <States reports={session.reports} />
          {reports.inspect && <Heads reports={reports} inspect={reports.inspect} query={query} />}
          {reports.inspect && <Symmetries inspect={reports.inspect} />}
        </>
      )}
    </article>
  );
}

/** The reports that are ready, each asked for once. */
function useReports(session: Session | null): Reports {
  const [found, set] = useState<Reports>({});
  const ready = (session?.reports ?? []).filter((each) => each.json).map((each) => each.name);
  useEffect(() => {
    for (const name of ready) {
      if (name in found) continue;
      getJson<never>(`./reports/${name}.json`).then(
        (report) => set((now) => ({ ...now, [name]: report })),
        () => undefined, // the list of reports says what became of it
      );
    }
  }, [ready.join()]);
  return found;
}

function Nothing() {
  return (
    <p>
      No model was named. Start the lab with one: <code>gaugekit lab MODEL</code>, and add <code>--text FILE</code> to probe its
      states on a text, or <code>--compare OTHER</code> to see how far another one is.
    </p>
  );
}

function Facts({ name, inspect }: { name: string; inspect: Inspect | undefined }) {
  const m = inspect?.model;
  return (
    <dl class="facts">
      <dt>model</dt>
      <dd>{name}</dd>
      {inspect && m && (
        <>
          <dt>family</dt>
          <dd>
            {m.family} ({m.format}): {m.layers} layers, d_model {m.d_model}, {m.heads} heads on {m.kv_heads} key/value heads of
            dimension {m.head_dim}
          </dd>
          <dt>parameters</dt>
          <dd>
            {inspect.parameters.toLocaleString("en")}, of which {inspect.redundancy.total.toLocaleString("en")} are redundant (
            {print(100 * inspect.redundancy.fraction, 3)} %, observable {inspect.observable})
          </dd>
        </>
      )}
    </dl>
  );
}

function States({ reports }: { reports: ReportState[] }) {
  return (
    <ul class="reports" aria-live="polite">
      {reports.map((each) => (
        <li key={each.name} class={each.status}>
          {each.status === "ready" ? (
            <a href={each.page} target="_blank" rel="noopener">
              the whole report of {each.name}
            </a>
          ) : each.status === "working" ? (
            `${each.name} is being made …`
          ) : (
            `${each.name} failed: ${each.message}`
          )}
        </li>
      ))}
    </ul>
  );
}

type Measure = "effective_qk" | "effective_vo" | "stable_qk" | "stable_vo" | "entropy" | "unselectable";

const MEASURES: Record<Measure, string> = {
  effective_qk: "effective rank of G_QK",
  effective_vo: "effective rank of G_VO",
  stable_qk: "stable rank of G_QK",
  stable_vo: "stable rank of G_VO",
  entropy: "entropy of attention (nats)",
  unselectable: "share of unselectable keys",
};

const mean = (x: number[]) => x.reduce((a, b) => a + b, 0) / x.length;

interface Row {
  stream: string;
  layer: number;
  attention: string;
  heads: { qk: Head | undefined; vo: Head | undefined; entropy: number[]; unselectable: number | undefined }[];
}

/** The attentions of a model, each with its key/value heads. */
function rowsOf({ heads, model }: Inspect, probe: Probe | undefined): Row[] {
  const rows: Row[] = [];
  for (const head of heads) {
    let row = rows.find((r) => r.stream === head.stream && r.layer === head.layer && r.attention === head.attention);
    if (!row) rows.push((row = { stream: head.stream, layer: head.layer, attention: head.attention, heads: [] }));
    const cell = (row.heads[head.kv_head] ??= { qk: undefined, vo: undefined, entropy: [], unselectable: undefined });
    cell[head.circuit] = head;
  }
  // Probe watches self-attention of the stream that reads text, the last one.
  const last = rows.at(-1)?.stream;
  const share = model.heads / model.kv_heads;
  for (const row of rows) {
    const states = row.stream === last && row.attention === "self" ? probe?.heads.find((each) => each.layer === row.layer) : undefined;
    row.heads.forEach((cell, i) => {
      cell.entropy = states?.entropy.slice(i * share, (i + 1) * share) ?? [];
      cell.unselectable = states?.unselectable[i];
    });
  }
  return rows;
}

function value(cell: Row["heads"][number], measure: Measure): number | undefined {
  if (measure === "effective_qk") return cell.qk?.effective_rank;
  if (measure === "effective_vo") return cell.vo?.effective_rank;
  if (measure === "stable_qk") return cell.qk?.stable_rank;
  if (measure === "stable_vo") return cell.vo?.stable_rank;
  if (measure === "entropy") return cell.entropy.length ? mean(cell.entropy) : undefined;
  return cell.unselectable;
}

function Heads({ reports, inspect, query }: { reports: Reports; inspect: Inspect; query: string }) {
  const rows = rowsOf(inspect, reports.probe);
  const said = new URLSearchParams(query);
  const within = (name: string, most: number) => Math.min(Math.max(0, Math.floor(Number(said.get(name)) || 0)), Math.max(0, most));
  const at = within("row", rows.length - 1);
  const row = rows[at];
  const head = within("head", (row?.heads.length ?? 1) - 1);
  const asked = said.get("measure") as Measure;
  const measure: Measure = asked in MEASURES ? asked : "effective_qk";
  if (!row) return <p>Only headers could be read: there are no spectra.</p>;

  const go = (change: { row?: number; head?: number; measure?: Measure }) => {
    const next = { row: at, head, measure, ...change };
    history.replaceState(null, "", `#${MODEL}?row=${next.row}&head=${next.head}&measure=${next.measure}`);
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  const values = rows.flatMap((r) => r.heads.map((cell) => value(cell, measure))).filter((v) => v !== undefined);
  const top = Math.max(1e-12, ...values);
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const i = Math.min(Math.max(0, at + step[0]!), rows.length - 1);
    const j = Math.min(Math.max(0, head + step[1]!), rows[i]!.heads.length - 1);
    go({ row: i, head: j });
    requestAnimationFrame(() => document.querySelector<HTMLElement>(".heads [aria-selected=true]")?.focus());
  };
  const several = new Set(rows.map((r) => `${r.stream} ${r.attention}`)).size > 1;
  const widest = Math.max(...rows.map((r) => r.heads.length));
  return (
    <div class="halves">
      <section aria-label="Heads">
        <p class="controls">
          <label>
            Shown:{" "}
            <select value={measure} onChange={(event) => go({ measure: event.currentTarget.value as Measure })}>
              {(Object.entries(MEASURES) as [Measure, string][]).map(([each, title]) => (
                <option key={each} value={each} disabled={(each === "entropy" || each === "unselectable") && !reports.probe}>
                  {title}
                </option>
              ))}
            </select>
          </label>
        </p>
        <div class="heads">
          <table role="grid" aria-label={`Key/value heads by layer: ${MEASURES[measure]}`}>
            <thead>
              <tr>
                <th scope="col">layer</th>
                {Array.from({ length: widest }, (_, j) => (
                  <th key={j} scope="col">
                    head {j}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((r, i) => (
                <tr key={`${r.stream} ${r.layer} ${r.attention}`}>
                  <th scope="row">{several ? `${r.stream} ${r.layer}, ${r.attention}` : r.layer}</th>
                  {r.heads.map((cell, j) => {
                    const v = value(cell, measure);
                    const chosen = i === at && j === head;
                    return (
                      <td key={j} role="presentation">
                        <button
                          type="button"
                          role="gridcell"
                          tabIndex={chosen ? 0 : -1}
                          aria-selected={chosen}
                          aria-label={`layer ${r.layer}, head ${j}: ${v === undefined ? "not known" : print(v, 3)}`}
                          style={{ "--tint": `${Math.round((65 * (v ?? 0)) / top)}%` }}
                          onClick={() => go({ row: i, head: j })}
                          onKeyDown={onKeyDown}
                        >
                          {v === undefined ? "–" : print(v, 3)}
                        </button>
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </section>
      <Chosen row={row} head={head} inspect={inspect} reports={reports} />
    </div>
  );
}

function Chosen({ row, head, inspect, reports }: { row: Row; head: number; inspect: Inspect; reports: Reports }) {
  const cell = row.heads[head]!;
  const share = inspect.model.heads / inspect.model.kv_heads;
  const circuits = [cell.qk, cell.vo].filter((each) => each !== undefined);
  const norms = reports.probe?.norms.filter((each) => each.layer === row.layer) ?? [];
  const distance = reports.compare?.layers.find(
    (each) => each.stream === row.stream && each.layer === row.layer && each.attention === row.attention,
  );
  return (
    <section class="panel" aria-live="polite">
      <h2>
        Layer {row.layer}, head {head}
      </h2>
      {share > 1 && (
        <p class="source">
          Key/value head {head}, shared by query heads {head * share} to {(head + 1) * share - 1}.
        </p>
      )}
      <Spectra qk={cell.qk?.spectrum} vo={cell.vo?.spectrum} />
      <table class="listing">
        <thead>
          <tr>
            <th scope="col">invariants</th>
            {circuits.map((each) => (
              <th key={each.circuit} scope="col">
                {each.circuit === "qk" ? "G_QK" : "G_VO"}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {(["rank", "effective_rank", "stable_rank"] as const).map((name) => (
            <tr key={name}>
              <th scope="row">{name.replace("_", " ")}</th>
              {circuits.map((each) => (
                <td key={each.circuit}>{name === "rank" ? each.rank : print(each[name], 3)}</td>
              ))}
            </tr>
          ))}
          <tr>
            <th scope="row">imbalance of the factors (not invariant)</th>
            {circuits.map((each) => (
              <td key={each.circuit}>{print(each.balance_relative, 3)}</td>
            ))}
          </tr>
        </tbody>
      </table>
      {cell.entropy.length > 0 && (
        <>
          <h3>On the text</h3>
          <p class="source">
            Entropy of attention, by query head: {cell.entropy.map((v) => print(v, 3)).join(", ")} nats (uniform would be{" "}
            {print(reports.probe!.heads.find((each) => each.layer === row.layer)!.uniform, 3)}).
            {cell.unselectable !== undefined && ` Keys that no query can select: ${print(100 * cell.unselectable, 3)} %.`}
          </p>
        </>
      )}
      {norms.length > 0 && (
        <table class="listing">
          <thead>
            <tr>
              <th scope="col">norms of the layer</th>
              <th scope="col">angle to 1 before</th>
              <th scope="col">behind</th>
            </tr>
          </thead>
          <tbody>
            {norms.map((each) => (
              <tr key={each.place}>
                <th scope="row">
                  {each.place} ({each.kind})
                </th>
                <td>{print(each.angle_before.mean, 4)}°</td>
                <td>{print(each.angle_after.mean, 4)}°</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {distance && (
        <>
          <h3>From {reports.compare!.second.split("/").at(-1)}</h3>
          <p class="source">
            {reports.compare!.verdict}; this layer’s spectra differ by {print(distance.spectra_qk, 3)} (G_QK) and{" "}
            {print(distance.spectra_vo, 3)} (G_VO)
            {distance.qk !== null && `, its products by ${print(distance.qk, 3)} and ${print(distance.vo ?? NaN, 3)}`}
            {distance.mlp !== null && `, its MLP by ${print(distance.mlp, 3)}`}.
          </p>
        </>
      )}
    </section>
  );
}

const WIDTH = 320;
const HEIGHT = 130;

/** Singular values of both circuits, each relative to its largest, on a logarithmic scale of as many decades as needed. */
function Spectra({ qk, vo }: { qk: number[] | undefined; vo: number[] | undefined }) {
  const below = [qk, vo].flatMap((each) => (each ?? []).map((s) => -Math.log10(s / (each![0] || 1)))).filter(isFinite);
  const decades = Math.min(6, Math.max(1, Math.ceil(Math.max(0, ...below))));
  const path = (spectrum: number[]) =>
    spectrum
      .map((s, i) => {
        const x = 30 + ((WIDTH - 40) * i) / Math.max(1, spectrum.length - 1);
        const y = 8 + ((HEIGHT - 30) * Math.min(decades, -Math.log10(s / (spectrum[0] || 1)))) / decades;
        return `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      })
      .join("");
  return (
    <svg class="spectrum" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label="Singular values of G_QK and G_VO, falling, relative to the largest">
      <g class="axis">
        <line x1={30} x2={WIDTH - 10} y1={HEIGHT - 22} y2={HEIGHT - 22} />
        <line x1={30} x2={30} y1={8} y2={HEIGHT - 22} />
      </g>
      <text x={4} y={14}>
        1
      </text>
      <text x={2} y={HEIGHT - 20}>
        10⁻{"⁰¹²³⁴⁵⁶"[decades]}
      </text>
      {qk && <path class="curve stroke-blue" d={path(qk)} />}
      {vo && <path class="curve stroke-orange" d={path(vo)} stroke-dasharray="6 3" />}
      <text x={34} y={HEIGHT - 6} style={{ fill: "var(--blue)" }}>
        — G_QK
      </text>
      <text x={110} y={HEIGHT - 6} style={{ fill: "var(--orange)" }}>
        - - G_VO
      </text>
      <text x={WIDTH - 10} y={HEIGHT - 6} text-anchor="end">
        {(qk ?? vo ?? []).length} singular values
      </text>
    </svg>
  );
}

function Symmetries({ inspect }: { inspect: Inspect }) {
  return (
    <section>
      <h2>Symmetries</h2>
      <div class="scroll">
        <table class="listing">
          <thead>
            <tr>
              <th scope="col">symmetry</th>
              <th scope="col">group</th>
              <th scope="col">dimension</th>
              <th scope="col">places</th>
            </tr>
          </thead>
          <tbody>
            {inspect.redundancy.by_symmetry.map((each) => (
              <tr key={each.name}>
                <th scope="row">{each.name}</th>
                <td>
                  <code>{each.group}</code>
                </td>
                <td>{each.dimension.toLocaleString("en")}</td>
                <td>{each.where.length}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
