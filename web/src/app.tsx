import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { NumberTable } from "./ui/numbers";
import { print } from "./format";
import { Model, MODEL } from "./rooms/model";
import { ROOMS } from "./rooms";
import { parameters, type Room, type State } from "./room";
import { type Check, useChecked, useSession } from "./server";
import { address, defaults, parse, settled, within } from "./state";

const TITLES: [string, string][] = [...ROOMS.map((room): [string, string] => [room.name, room.title]), [MODEL, "Your model"]];

function placeOf(hash: string): { name: string; query: string } {
  const [name = "", said = ""] = hash.replace(/^#/, "").split("?");
  return { name: TITLES.some(([each]) => each === name) ? name : TITLES[0]![0], query: said };
}

export function App() {
  const [hash, setHash] = useState(location.hash);
  const session = useSession();
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    const read = () => setHash(location.hash);
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  const { name, query } = placeOf(hash);
  const title = TITLES.find(([each]) => each === name)![1];
  const before = useRef(name);
  useEffect(() => {
    document.title = `${title} · gaugekit lab`;
    if (before.current !== name) heading.current?.focus();
    before.current = name;
  }, [name]);
  const room = ROOMS.find((each) => each.name === name);
  return (
    <>
      <a class="skip" href={location.hash || "#"} onClick={(event) => (event.preventDefault(), heading.current?.focus())}>
        To the room
      </a>
      <Header name={name} />
      <main>
        {room ? (
          <RoomPage key={name} room={room} query={query} live={session?.live ?? false} heading={heading} />
        ) : (
          <Model session={session} query={query} heading={<Heading text="Your model" heading={heading} />} />
        )}
      </main>
    </>
  );
}

function Heading({ text, heading }: { text: string; heading: { current: HTMLHeadingElement | null } }) {
  return (
    <h1 tabIndex={-1} ref={heading}>
      {text}
    </h1>
  );
}

function Header({ name }: { name: string }) {
  const index = TITLES.findIndex(([each]) => each === name);
  return (
    <header>
      <p class="brand">
        <img src="./icon.svg" alt="" width="24" height="24" /> gaugekit lab
      </p>
      <nav aria-label="Rooms">
        <ol>
          {TITLES.map(([each, title]) => (
            <li key={each}>
              <a href={`#${each}`} aria-current={each === name ? "page" : undefined}>
                {title}
              </a>
            </li>
          ))}
        </ol>
      </nav>
      <label class="rooms">
        <span>
          Room {index + 1} of {TITLES.length}
        </span>
        <select value={name} onChange={(event) => (location.hash = event.currentTarget.value)}>
          {TITLES.map(([each, title], i) => (
            <option key={each} value={each}>
              {i + 1}. {title}
            </option>
          ))}
        </select>
      </label>
      <Theme />
    </header>
  );
}

type Scheme = "system" | "light" | "dark";

function Theme() {
  const [scheme, set] = useState<Scheme>((localStorage.getItem("theme") as Scheme) ?? "system");
  useEffect(() => {
    document.documentElement.style.colorScheme = scheme === "system" ? "light dark" : scheme;
    if (scheme === "system") localStorage.removeItem("theme");
    else localStorage.setItem("theme", scheme);
  }, [scheme]);
  return (
    <label class="theme">
      <span class="hidden">Colours</span>
      <select value={scheme} onChange={(event) => set(event.currentTarget.value as Scheme)}>
        <option value="system">system colours</option>
        <option value="light">light</option>
        <option value="dark">dark</option>
      </select>
    </label>
  );
}

interface RoomProps {
  room: Room;
  query: string;
  live: boolean;
  heading: { current: HTMLHeadingElement | null };
}

const REMEMBER = 150; // milliseconds; browsers refuse an address that changes at every frame

function RoomPage({ room, query, live, heading }: RoomProps) {
  const [state, setState] = useState<State>(() => parse(room.name, query));
  const written = useRef(query);
  useEffect(() => {
    // An address that somebody typed, or the way back.
    if (written.current !== query) {
      written.current = query;
      setState(parse(room.name, query));
    }
  }, [query]);
  useEffect(() => {
    const timer = setTimeout(() => {
      // A click may have led elsewhere already, though this room has not gone yet.
      if (location.hash && placeOf(location.hash).name !== room.name) return;
      const next = address(room.name, state);
      written.current = next.split("?")[1] ?? "";
      if (next !== location.hash) history.replaceState(null, "", next);
    }, REMEMBER);
    return () => clearTimeout(timer);
  }, [state]);
  const set = useCallback((change: Partial<State>) => {
    const allowed = parameters(room.name);
    setState((now) => {
      const next = { ...now };
      for (const [key, value] of Object.entries(change)) next[key] = settled(within(allowed[key]!, value!));
      return next;
    });
  }, []);
  const ours = room.numbers(state);
  const [numbers, check] = useChecked(room.name, state, ours, live);
  return (
    <article class={`room room-${room.name}`}>
      <div class="words">
        <Heading text={room.title} heading={heading} />
        <p class="lead">{room.text}</p>
      </div>
      <div class="stage">
        <room.View state={state} numbers={ours} set={set} />
      </div>
      <aside class="beside" aria-label="Numbers">
        <NumberTable rows={room.rows(numbers, state)} />
        <Checked check={check} />
        <p class="actions">
          <button type="button" onClick={() => setState(defaults(room.name))}>
            Start again
          </button>
          <Share />
        </p>
        <p class="source">{room.source}</p>
      </aside>
    </article>
  );
}

function Checked({ check }: { check: Check }) {
  const said: ComponentChildren =
    check.kind === "off"
      ? "Computed in the browser; gaugekit lab checks it against Python."
      : check.kind === "waiting"
        ? "Computed in the browser …"
        : check.kind === "failed"
          ? `Python refuses: ${check.message}`
          : check.apart < AGREE
            ? "Python’s numbers; the browser’s agree."
            : `Python’s numbers; the browser’s differ by ${print(check.apart, 2)}.`;
  const apart = check.kind === "done" ? check.apart : undefined;
  return (
    <p class={`checked ${check.kind === "failed" || (apart ?? 0) >= AGREE ? "bad" : ""}`} data-check={check.kind} data-apart={apart}>
      {said}
    </p>
  );
}

const AGREE = 1e-9;

function Share() {
  const [said, say] = useState("Copy link to this view");
  return (
    <button
      type="button"
      onClick={() =>
        navigator.clipboard.writeText(location.href).then(
          () => say("Link copied"),
          () => say("The address bar has the link"),
        )
      }
    >
      <span aria-live="polite">{said}</span>
    </button>
  );
}

/** For tests: the browser's numbers of any state of any room. */
(window as unknown as { lab: unknown }).lab = {
  rooms: ROOMS.map((room) => room.name),
  numbers: (name: string, said: string) => ROOMS.find((room) => room.name === name)!.numbers(parse(name, said)),
};
