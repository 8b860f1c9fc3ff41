// What the room of a model reads of its reports (gaugekit.verbs has the whole of them), and what tints its heads.
import { useEffect, useState } from "preact/hooks";
import { getJson, type Session } from "../server";

export type Figure = number | null; // JSON has no infinity: null is for it, and for what was not measured

export type Circuit = "qk" | "vo";

export interface CircuitRow {
  stream: string;
  layer: number;
  attention: string;
  kv_head: number;
  circuit: Circuit;
  rank: number;
  effective_rank: number;
  stable_rank: number;
  spectrum: number[];
  balance_relative: Figure;
  degenerate_blocks: [number, number][]; // first, size
}

export interface NormWeight {
  where: string;
  kind: string;
  mean: Figure;
  std: Figure;
  zeros: number;
}

export interface Inspect {
  model: {
    family: string;
    format: string;
    layers: number;
    d_model: number;
    heads: number;
    kv_heads: number;
    head_dim: number;
    vocabulary: number | null;
    tied: boolean;
    streams: { name: string; layers: number; d_model: number }[];
  };
  observable: string;
  parameters: number;
  redundancy: {
    total: number;
    fraction: number;
    by_symmetry: { name: string; group: string; dimension: number; exactness: string; where: string[] }[];
    by_layer: { layer: string; dimension: number; by_symmetry: Record<string, number> }[];
  };
  dead: { total: number };
  heads: CircuitRow[];
  norms: NormWeight[];
}

interface Spread {
  mean: Figure;
}

export interface NormStates {
  where: string;
  layer: number | null;
  place: string;
  kind: string;
  radius: Spread;
  angle_before: Spread;
  angle_after: Spread;
  null_angle: number;
  kernel: { predicted: number; null: number } | null;
  curve: { tanh: Figure } | null;
  gram_before: { effective_rank: Figure };
  gram_after: { effective_rank: Figure };
}

export interface HeadStates {
  layer: number;
  entropy: Figure[]; // of each query head
  uniform: Figure;
  unselectable: Figure[]; // of each key/value head
  unselectable_unscaled: Figure[] | null;
}

export interface Probe {
  stream: string;
  text: string;
  tokens: number;
  norms: NormStates[];
  heads: HeadStates[];
}

export interface LayerDistance {
  stream: string;
  layer: number;
  attention: string;
  spectra_qk: Figure;
  spectra_vo: Figure;
  qk: Figure;
  vo: Figure;
  mlp: Figure;
  rounding: Figure;
  cosine: Figure;
}

export interface Compare {
  second: string;
  verdict: string;
  reason: string;
  spectra: Figure;
  distance: Figure;
  layers: LayerDistance[];
}

export interface Reports {
  inspect?: Inspect;
  probe?: Probe;
  compare?: Compare;
}

/** The reports that are ready, each asked for once. What cannot be read is said by name. */
export function useReports(session: Session | null): [Reports, Record<string, string>] {
  const [found, set] = useState<Reports>({});
  const [unread, miss] = useState<Record<string, string>>({});
  const ready = (session?.reports ?? []).flatMap((each) => (each.json ? [[each.name, each.json] as const] : []));
  useEffect(() => {
    for (const [name, address] of ready) {
      if (name in found || name in unread) continue;
      getJson<never>(address).then(
        (report) => set((now) => ({ ...now, [name]: report })),
        (error: Error) => miss((now) => ({ ...now, [name]: error.message })),
      );
    }
  }, [ready.join()]);
  return [found, unread];
}

/** One query head: the circuits are those of the key/value head that it uses, alone or with others. */
export interface Cell {
  layer: number;
  head: number;
  kv: number;
  qk?: CircuitRow;
  vo?: CircuitRow;
  states?: HeadStates;
  distance?: LayerDistance;
}

export interface Layer {
  layer: number;
  cells: Cell[]; // none where a layer has no attention of this kind
  share: number; // query heads on each key/value head
  states?: HeadStates;
  distance?: LayerDistance;
}

/** The heads of one kind of attention of one stream. */
export interface HeadSet {
  stream: string;
  attention: string;
  layers: Layer[];
}

/** Every kind of attention of every stream, in the order of the report. */
export function headSets({ inspect, probe, compare }: Reports): HeadSet[] {
  if (!inspect) return [];
  const { heads, kv_heads, streams } = inspect.model;
  const names = [...new Set(inspect.heads.map((row) => `${row.stream} ${row.attention}`))];
  return names.map((name) => {
    const rows = inspect.heads.filter((row) => `${row.stream} ${row.attention}` === name);
    const { stream, attention } = rows[0]!;
    // What a text was read by: the self-attention of one stream.
    const probed = probe?.stream === stream && attention === "self" ? probe.heads : [];
    const distances = (compare?.layers ?? []).filter((row) => row.stream === stream && row.attention === attention);
    const count = streams.find((each) => each.name === stream)?.layers ?? 0;
    const layers = Array.from({ length: count }, (_, layer): Layer => {
      const here = rows.filter((row) => row.layer === layer);
      const kv = 1 + Math.max(-1, ...here.map((row) => row.kv_head));
      const states = probed.find((each) => each.layer === layer);
      const distance = distances.find((each) => each.layer === layer);
      const share = kv === 0 ? 1 : states ? states.entropy.length / kv : kv === kv_heads ? heads / kv_heads : 1;
      const known = { ...(states && { states }), ...(distance && { distance }) };
      const cells = Array.from({ length: kv * share }, (_, head): Cell => {
        const group = Math.floor(head / share);
        const circuits = here.filter((row) => row.kv_head === group).map((row) => [row.circuit, row]);
        return { layer, head, kv: group, ...Object.fromEntries(circuits), ...known };
      });
      return { layer, cells, share, ...known };
    });
    return { stream, attention, layers };
  });
}

export interface Measure {
  name: string; // in the URL
  title: string;
  of(cell: Cell): Figure | undefined;
}

const circuit = (which: Circuit, title: string): Measure[] => [
  { name: `${which}-effective`, title: `effective rank of ${title}`, of: (cell) => cell[which]?.effective_rank },
  { name: `${which}-stable`, title: `stable rank of ${title}`, of: (cell) => cell[which]?.stable_rank },
  { name: `${which}-largest`, title: `largest singular value of ${title}`, of: (cell) => cell[which]?.spectrum[0] },
  { name: `${which}-balance`, title: `imbalance of the factors of ${title}`, of: (cell) => cell[which]?.balance_relative },
];

/** All that a head can be tinted by, by the report that has it; those of a layer are the same for its heads. */
export const MEASURES: [keyof Reports, string, Measure[]][] = [
  ["inspect", "weights (inspect)", [...circuit("qk", "G_QK"), ...circuit("vo", "G_VO")]],
  [
    "probe",
    "on the text (probe)",
    [
      { name: "entropy", title: "entropy of attention, nats", of: ({ states, head }) => states?.entropy[head] },
      { name: "unselectable", title: "share of unselectable keys", of: ({ states, kv }) => states?.unselectable[kv] },
    ],
  ],
  [
    "compare",
    "distance of the layer (compare)",
    [
      { name: "spectra-vo", title: "distance of spectra of G_VO", of: ({ distance }) => distance?.spectra_vo },
      { name: "spectra-qk", title: "distance of spectra of G_QK", of: ({ distance }) => distance?.spectra_qk },
      { name: "distance-vo", title: "distance of G_VO", of: ({ distance }) => distance?.vo },
      { name: "distance-qk", title: "distance of G_QK", of: ({ distance }) => distance?.qk },
      { name: "distance-mlp", title: "distance of the MLP", of: ({ distance }) => distance?.mlp },
      { name: "cosine", title: "cosine of matched heads", of: ({ distance }) => distance?.cosine },
    ],
  ],
];

const EVERY = MEASURES.flatMap(([, , measures]) => measures);

export const measureOf = (name: string): Measure => EVERY.find((each) => each.name === name) ?? EVERY[0]!;
