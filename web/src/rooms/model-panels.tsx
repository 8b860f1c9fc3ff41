// What stands beside the heads: the model, one of its layers, or one head.
import { count, figure, Listing, nameOf, NONE, percent, Spectrum, TITLES } from "./model-parts";
import type { Go } from "./model";
import type { Cell, Circuit, HeadSet, Inspect, Layer, LayerDistance, Measure, NormStates, NormWeight, Reports } from "./model-reports";

const OBSERVABLES: Record<string, string> = {
  logprobs: "log-probabilities",
  logits: "logits",
  hidden: "final hidden states",
  similarities: "inner products of final hidden states",
};

export function ModelPanel({ reports: { probe, compare }, inspect }: { reports: Reports; inspect: Inspect }) {
  const m = inspect.model;
  const { total, fraction, by_symmetry } = inspect.redundancy;
  const shared = m.kv_heads === m.heads ? "" : ` on ${m.kv_heads} key/value heads`;
  const facts: [string, string][] = [
    ["family", `${m.family} (${m.format})`],
    ["shape", `${m.layers} layers, d_model ${count(m.d_model)}, ${m.heads} heads${shared} of dimension ${m.head_dim}`],
    ["parameters", count(inspect.parameters)],
    ["observable", OBSERVABLES[inspect.observable] ?? inspect.observable],
    ["redundant", `${count(total)} dimensions, ${percent(fraction)}`],
  ];
  if (m.streams.length > 1) {
    facts.splice(2, 0, ["streams", m.streams.map((s) => `${s.name} ${s.layers} × ${count(s.d_model)}`).join(", ")]);
  }
  if (inspect.dead.total) facts.push(["dead", `${count(inspect.dead.total)} parameters`]);
  if (probe) facts.push(["text", `${nameOf(probe.text)}, ${count(probe.tokens)} tokens`]);
  if (compare) facts.push(["compared", `with ${nameOf(compare.second)}: ${compare.verdict}; ${compare.reason}`]);
  return (
    <>
      <dl class="facts">
        {facts.map(([what, value]) => (
          <div key={what}>
            <dt>{what}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {by_symmetry.length > 0 && (
        <Listing
          caption="Symmetries and their dimensions"
          rows={by_symmetry.map((each) => [
            <>
              {each.name}
              {each.exactness !== "exact" && ` (${each.exactness})`} <code>{each.group}</code>
            </>,
            count(each.dimension),
          ])}
        />
      )}
    </>
  );
}

interface LayerProps {
  reports: Reports;
  inspect: Inspect;
  set: HeadSet;
  layer: Layer;
  measure: Measure;
  go: Go;
}

export function LayerPanel({ reports: { probe, compare }, inspect, set, layer, measure, go }: LayerProps) {
  const names = [`layer ${layer.layer}`, `${set.stream} layer ${layer.layer}`];
  const redundant = inspect.redundancy.by_layer.find((each) => names.includes(each.layer));
  const norms = probe?.stream === set.stream ? probe.norms.filter((each) => each.layer === layer.layer) : [];
  const weights = inspect.norms.filter((each) => isOf(each, layer.layer, set.stream, inspect.model.streams.length > 1));
  return (
    <>
      {layer.cells.length > 0 && (
        <div class="links" role="navigation" aria-label={`Heads of layer ${layer.layer}`}>
          heads{" "}
          {layer.cells.map((cell) => (
            <a key={cell.head} href={go({ head: cell.head })} title={`${measure.title}: ${figure(measure.of(cell), 3)}`}>
              {cell.head}
            </a>
          ))}
        </div>
      )}
      {layer.share > 1 && (
        <p class="source">
          {layer.share} query heads at a time use one of {layer.cells.length / layer.share} key/value heads.
        </p>
      )}
      {norms.length > 0 ? <Norms norms={norms} weights={weights} /> : <Weights weights={weights} />}
      {layer.distance && compare && <Distances distance={layer.distance} second={compare.second} />}
      {redundant && (
        <Listing
          caption={`Redundant: ${count(redundant.dimension)} dimensions`}
          rows={Object.entries(redundant.by_symmetry)
            .sort((a, b) => b[1] - a[1])
            .map(([name, dimension]) => [name, count(dimension)])}
        />
      )}
    </>
  );
}

/** Whether a norm stands in a layer: the first number in its name is the layer's. */
function isOf({ where }: NormWeight, layer: number, stream: string, several: boolean): boolean {
  const parts = where.split(".");
  return parts[numberAt({ where })] === String(layer) && (!several || parts.includes(stream));
}

const numberAt = ({ where }: { where: string }): number => where.split(".").findIndex((part) => /^\d+$/.test(part));

function Norms({ norms, weights }: { norms: NormStates[]; weights: NormWeight[] }) {
  const weight = (norm: NormStates) => weights.find((each) => each.where === norm.where);
  const each = (of: (norm: NormStates) => string) => norms.map(of);
  const degrees = (value: number | null) => (value === null ? NONE : `${figure(value, 3)}°`);
  const kinds = [...new Set(each(({ kind }) => (kind === "rms" ? "RMSNorm" : "LayerNorm")))];
  return (
    <>
      <Listing
        caption={`Norms (${kinds.join(", ")}), on the text`}
        columns={each(({ place }) => place)}
        rows={[
          ["γ, mean", ...each((norm) => figure(weight(norm)?.mean, 3))],
          ["γ, spread", ...each((norm) => figure(weight(norm)?.std, 3))],
          ["radius / √d", ...each(({ radius }) => figure(radius.mean))],
          ["angle to 1, in", ...each(({ angle_before }) => degrees(angle_before.mean))],
          ["angle to 1, out", ...each(({ angle_after }) => degrees(angle_after.mean))],
          ["token rank, in", ...each(({ gram_before }) => figure(gram_before.effective_rank, 3))],
          ["token rank, out", ...each(({ gram_after }) => figure(gram_after.effective_rank, 3))],
          ["R² of a tanh", ...each(({ curve }) => figure(curve?.tanh, 3))],
          ["null / predicted", ...each(({ kernel }) => (kernel ? `${kernel.null} / ${kernel.predicted}` : NONE))],
        ]}
      />
      <p class="source">Random states stand at 90° ± {figure(norms[0]!.null_angle, 3)}° to 1. Token rank: effective rank of a window’s states.</p>
    </>
  );
}

/** What is known of norms without a text. */
function Weights({ weights }: { weights: NormWeight[] }) {
  if (!weights.length) return null;
  return (
    <Listing
      caption="Norms"
      columns={["mean γ", "spread", "zeros"]}
      rows={weights.map((each) => [
        each.where.split(".").slice(1 + numberAt(each)).join("."),
        figure(each.mean, 3),
        figure(each.std, 2),
        each.zeros,
      ])}
    />
  );
}

function Distances({ distance, second }: { distance: LayerDistance; second: string }) {
  const { spectra_qk, spectra_vo, qk, vo, mlp, cosine } = distance;
  const whole = qk !== null || vo !== null; // and not the spectra alone, which is all that a fingerprint has
  const removed: [string, ...string[]] = ["symmetries removed", figure(qk, 3), figure(vo, 3), figure(mlp, 3)];
  return (
    <>
      <Listing
        caption={`Distance from ${nameOf(second)}`}
        columns={["G_QK", "G_VO", ...(whole ? ["MLP"] : [])]}
        rows={[
          ["spectra", figure(spectra_qk, 3), figure(spectra_vo, 3), ...(whole ? [""] : [])],
          ...(whole ? [removed] : []),
        ]}
      />
      {cosine !== null && <p class="source">Median cosine of matched heads: {figure(cosine, 3)}.</p>}
    </>
  );
}

interface HeadProps {
  reports: Reports;
  layer: Layer;
  cell: Cell;
  go: Go;
}

export function HeadPanel({ reports: { compare }, layer, cell, go }: HeadProps) {
  const { share } = layer;
  const circuits = (["qk", "vo"] as Circuit[]).filter((which) => cell[which]);
  const each = (of: (row: NonNullable<Cell[Circuit]>) => string) => circuits.map((which) => of(cell[which]!));
  const first = cell.kv * share;
  const { states, distance } = layer;
  return (
    <>
      {share > 1 && (
        <p class="source">
          Query heads {first} to {first + share - 1} share key/value head {cell.kv}: spectra are of these heads side by side.
        </p>
      )}
      {circuits.map((which) => (
        <Spectrum key={which} which={which} cell={cell} layer={layer} />
      ))}
      <Listing
        caption="Singular values"
        columns={circuits.map((which) => TITLES[which])}
        rows={[
          ["effective rank", ...each((row) => figure(row.effective_rank))],
          ["stable rank", ...each((row) => figure(row.stable_rank))],
          ["rank", ...each((row) => `${row.rank} of ${row.spectrum.length}`)],
          ["tied", ...each(({ degenerate_blocks }) => ties(degenerate_blocks))],
          ["imbalance of factors", ...each((row) => figure(row.balance_relative, 3))],
        ]}
      />
      {states && (
        <Listing
          caption="On the text"
          rows={[
            ["entropy of attention", `${figure(states.entropy[cell.head], 3)} nats`],
            ["if it averaged", `${figure(states.uniform, 3)} nats`],
            ["unselectable keys", percent(states.unselectable[cell.kv])],
            ...(states.unselectable_unscaled
              ? [["… with one scale", percent(states.unselectable_unscaled[cell.kv])] as [string, string]]
              : []),
          ]}
        />
      )}
      {distance && compare && (
        <p class="source">
          <a href={go({ head: null })}>Layer {cell.layer}</a> is at {figure(distance.qk ?? distance.spectra_qk, 3)} (G_QK) and{" "}
          {figure(distance.vo ?? distance.spectra_vo, 3)} (G_VO) from {nameOf(compare.second)},{" "}
          {distance.qk === null ? "by spectra alone" : "medians over its heads"}.
        </p>
      )}
    </>
  );
}

/** Runs of singular values that are tied, counted from one. */
function ties(blocks: [number, number][]): string {
  return blocks.length ? blocks.map(([start, size]) => `${start + 1}–${start + size}`).join(", ") : "none";
}
