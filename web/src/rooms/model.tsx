import type { ComponentChildren } from "preact";
import { useEffect, useId, useMemo, useState } from "preact/hooks";
import type { ReportState, Session } from "../server";
import { Choice } from "../ui/choice";
import { type Chosen, HeadMap } from "./model-map";
import { HeadPanel, LayerPanel, ModelPanel } from "./model-panels";
import { headSets, type HeadSet, type Measure, MEASURES, measureOf, type Reports, useReports } from "./model-reports";
import "./model.css";

export const MODEL = "model";

interface Props {
  session: Session | null;
  query: string;
  heading: ComponentChildren;
}

/** What is looked at: the state of the room, and its address. Names and numbers may be of another model's address. */
interface Place extends Chosen {
  stream: string;
  attention: string;
  measure: string;
}

export type Go = (change: Partial<Place>) => string; // the address of what is changed so

const REMEMBER = 150; // milliseconds; browsers refuse an address that changes at every frame

export function Model({ session, query, heading }: Props) {
  const [place, setPlace] = useState(() => parse(query));
  useEffect(() => {
    // An address that somebody typed, a link, or the way back.
    const read = () => {
      const [name, said = ""] = location.hash.slice(1).split("?");
      if (name === MODEL) setPlace(parse(said));
    };
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  const [reports, unread] = useReports(session);
  return (
    <article class="room room-model">
      <div class="words">
        {heading}
        <p class="lead">
          G_QK, by which a head scores keys, and G_VO, by which it writes, have singular values that no symmetry moves. Choose a
          layer or a head to see them, its work on a text, and its distance from another model.
        </p>
      </div>
      {session && (session.model ? <Opened {...{ session, reports, unread, place, setPlace }} /> : <Nothing />)}
    </article>
  );
}

function Nothing() {
  return (
    <div class="nothing">
      <p>No model was named. Start the lab with one, a directory, a GGUF file or a hub id of the local cache:</p>
      <pre>gaugekit lab MODEL</pre>
      <p>and let it read a text, and be compared with another model, or with its fingerprint:</p>
      <pre>gaugekit lab MODEL --text FILE --compare OTHER</pre>
    </div>
  );
}

interface OpenedProps {
  session: Session;
  reports: Reports;
  unread: Record<string, string>;
  place: Place;
  setPlace(place: Place): void;
}

function Opened({ session, reports, unread, place, setPlace }: OpenedProps) {
  const { inspect } = reports;
  const sets = useMemo(() => headSets(reports), [reports]);
  const set = sets.find((each) => each.stream === place.stream && each.attention === place.attention) ?? sets[0];
  const at = within(place, set);
  const measure = measureOf(place.measure);
  const shown: Place = { stream: set?.stream ?? "", attention: set?.attention ?? "", ...at, measure: measure.name };
  const go: Go = (change) => address({ ...shown, ...change }, sets[0]);
  const choose = (change: Partial<Place>) => setPlace({ ...shown, ...change });
  const here = go({});
  useEffect(() => {
    if (!set) return; // before the report is there nobody knows which layers there are
    const timer = setTimeout(() => {
      // A click may have led elsewhere already, though this room has not gone yet.
      if (location.hash.slice(1).split("?")[0] === MODEL && location.hash !== here) history.replaceState(null, "", here);
    }, REMEMBER);
    return () => clearTimeout(timer);
  }, [here, set === undefined]);

  const layer = set && at.layer !== null ? set.layers[at.layer] : undefined;
  const cell = layer && at.head !== null ? layer.cells[at.head] : undefined;
  return (
    <>
      <div class="stage">
        <div class="controls">
          {set && <Tint measure={measure} reports={reports} choose={choose} />}
          <States reports={session.reports} unread={unread} />
          {set && sets.length > 1 && <Streams sets={sets} set={set} choose={choose} />}
        </div>
        {set ? (
          <HeadMap set={set} measure={measure} at={at} choose={choose} />
        ) : (
          <p class="missing">
            {inspect ? "Only headers could be read, so there are no spectra of heads." : waitingFor(session, unread)}
          </p>
        )}
        <p class="source">
          Elhage et al. 2021 (circuits); Roy &amp; Vetterli 2007 (effective rank); gaugekit.verbs
        </p>
      </div>
      <aside class="beside" aria-label="What is chosen">
        <div class="crumbs" role="navigation" aria-label="From the model to the head">
          <Crumb to={go({ layer: null, head: null })} here={!layer} title={session.model!} />
          {layer && <Crumb to={go({ head: null })} here={!cell} title={`layer ${layer.layer}`} />}
          {cell && <Crumb to={here} here title={`head ${cell.head}`} />}
        </div>
        {!inspect ? null : set && layer && cell ? (
          <HeadPanel {...{ reports, layer, cell, go }} />
        ) : set && layer ? (
          <LayerPanel {...{ reports, inspect, set, layer, measure, go }} />
        ) : (
          <ModelPanel {...{ reports, inspect }} />
        )}
      </aside>
    </>
  );
}

function Crumb({ to, here, title }: { to: string; here: boolean; title: string }) {
  return here ? <h2 aria-current="true">{title}</h2> : <a href={to}>{title}</a>;
}

interface ChooseProps {
  choose(change: Partial<Place>): void;
}

function Streams({ sets, set, choose }: { sets: HeadSet[]; set: HeadSet } & ChooseProps) {
  const name = (each: HeadSet) => `${each.stream} ${each.attention}`;
  const options = Object.fromEntries(sets.map((each) => [name(each), `${each.stream}, ${each.attention}-attention`]));
  const pick = (value: string) => {
    const { stream, attention } = sets.find((each) => name(each) === value)!;
    choose({ stream, attention });
  };
  return <Choice label="Stream" value={name(set)} options={options} set={pick} />;
}

function Tint({ measure, reports, choose }: { measure: Measure; reports: Reports } & ChooseProps) {
  const id = useId();
  return (
    <div class="tint">
      <label for={id}>Tinted by</label>{" "}
      <select id={id} value={measure.name} onChange={(event) => choose({ measure: event.currentTarget.value })}>
        {MEASURES.map(([report, title, measures]) => (
          <optgroup key={report} label={title}>
            {measures.map((each) => (
              <option key={each.name} value={each.name} disabled={!reports[report] && each !== measure}>
                {each.title}
              </option>
            ))}
          </optgroup>
        ))}
      </select>
    </div>
  );
}

/** What is said in place of the heads while there are none to show. */
function waitingFor(session: Session, unread: Record<string, string>): string {
  const state = session.reports.find(({ name }) => name === "inspect");
  if (unread.inspect) return `The report of inspect cannot be read: ${unread.inspect}.`;
  if (state?.status === "failed") return `inspect failed: ${state.message}`;
  return "inspect is reading the model …";
}

function States({ reports, unread }: { reports: ReportState[]; unread: Record<string, string> }) {
  return (
    <ul class="reports" aria-label="Whole reports" aria-live="polite">
      {reports.map((each) => (
        <li key={each.name} class={unread[each.name] ? "failed" : each.status} data-report={each.name}>
          <State state={each} unread={unread[each.name]} />
        </li>
      ))}
    </ul>
  );
}

function State({ state: { name, status, message, page }, unread }: { state: ReportState; unread: string | undefined }) {
  if (unread) return <>{`${name} cannot be read: ${unread}`}</>;
  if (status === "waiting") return <>{`${name} waits for its turn`}</>;
  if (status === "working") return <>{`${name} is being made${message ? `: ${message}` : ""} …`}</>;
  if (status === "failed") return <>{`${name} failed: ${message}`}</>;
  return (
    <a href={page} target="_blank" rel="noopener" title={`The whole report of ${name}, in another tab`}>
      {name} <span aria-hidden="true">↗</span>
    </a>
  );
}

// --- addresses ------------------------------------------------------------------------------------------------------

function parse(query: string): Place {
  const said = new URLSearchParams(query);
  const number = (name: string) => {
    const word = said.get(name) ?? "";
    return /^\d{1,6}$/.test(word) ? Number(word) : null;
  };
  const word = (name: string) => said.get(name) ?? "";
  return { stream: word("stream"), attention: word("attention"), layer: number("layer"), head: number("head"), measure: word("measure") };
}

/** As much of what is chosen as there is. */
function within({ layer, head }: Chosen, set: HeadSet | undefined): Chosen {
  const row = layer === null ? undefined : set?.layers[layer];
  if (!row) return { layer: null, head: null };
  return { layer, head: head !== null && head < row.cells.length ? head : null };
}

/** Without what stands at its default. */
function address({ stream, attention, layer, head, measure }: Place, first: HeadSet | undefined): string {
  const parts = new URLSearchParams();
  if (first && (stream !== first.stream || attention !== first.attention)) {
    parts.set("stream", stream);
    parts.set("attention", attention);
  }
  if (layer !== null) parts.set("layer", `${layer}`);
  if (layer !== null && head !== null) parts.set("head", `${head}`);
  if (measure !== measureOf("").name) parts.set("measure", measure);
  const said = parts.toString();
  return `#${MODEL}${said && `?${said}`}`;
}
