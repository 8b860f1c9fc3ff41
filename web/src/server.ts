// What the page asks the server; of an exported page the same addresses are files, and there is nobody to compute.
import { useEffect, useState } from "preact/hooks";
import type { Numbers, State } from "./room";
import { query } from "./state";

export interface ReportState {
  name: string; // inspect, probe, compare
  status: "ready" | "working" | "waiting" | "failed"; // one is worked on at a time
  message?: string; // why it failed, or how far the work is
  page?: string; // addresses, once it is ready
  json?: string;
}

export interface Session {
  version: string;
  live: boolean; // a server computes
  model: string | null; // its name
  reports: ReportState[];
}

export async function getJson<T>(address: string): Promise<T> {
  const answer = await fetch(address);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? answer.statusText);
  return body as T;
}

const pending = (report: ReportState) => report.status === "working" || report.status === "waiting";

/** A session whose server went away. */
const ended = (session: Session): Session => ({
  ...session,
  live: false,
  reports: session.reports.map((report) =>
    pending(report) ? { name: report.name, status: "failed", message: "the lab was ended before it was made" } : report,
  ),
});

/** The session, read again while reports are being made. Null until it is known. */
export function useSession(): Session | null {
  const [session, set] = useState<Session | null>(null);
  useEffect(() => {
    let timer = 0;
    const ask = () =>
      getJson<Session>("./session.json").then(
        (now) => {
          set(now);
          if (now.reports.some(pending)) timer = window.setTimeout(ask, 1000);
        },
        () => set((before) => (before ? ended(before) : { version: "", live: false, model: null, reports: [] })),
      );
    void ask();
    return () => clearTimeout(timer);
  }, []);
  return session;
}

export type Check =
  | { kind: "off" } // nobody to ask
  | { kind: "waiting" }
  | { kind: "done"; apart: number }
  | { kind: "failed"; message: string };

const IDLE = 200; // milliseconds without a change, after which Python is asked

/** Python's numbers of a state, once it rests, and how far the browser's are from them. */
export function useChecked(room: string, state: State, ours: Numbers, live: boolean): [Numbers, Check] {
  const said = query(room, state);
  const [found, set] = useState<{ room: string; said: string; numbers?: Numbers; failed?: string } | null>(null);
  useEffect(() => {
    if (!live) return;
    let stale = false;
    const timer = setTimeout(() => {
      getJson<{ numbers: Numbers }>(`./api/rooms/${room}?${said}`).then(
        ({ numbers }) => stale || set({ room, said, numbers }),
        (error: Error) => stale || set({ room, said, failed: error.message }),
      );
    }, IDLE);
    return () => {
      stale = true;
      clearTimeout(timer);
    };
  }, [room, said, live]);
  if (!live) return [ours, { kind: "off" }];
  if (found?.room !== room || found.said !== said) return [ours, { kind: "waiting" }];
  if (!found.numbers) return [ours, { kind: "failed", message: found.failed! }];
  return [found.numbers, { kind: "done", apart: apart(ours, found.numbers) }];
}

/** The largest difference of two sets of numbers, relative to 1 or to what is larger; ∞ where they do not match. */
export function apart(a: Numbers, b: Numbers): number {
  const keys = new Set([...Object.keys(a), ...Object.keys(b)]);
  return Math.max(0, ...[...keys].map((key) => difference(a[key], b[key])));
}

function difference(x: unknown, y: unknown): number {
  if (Array.isArray(x) && Array.isArray(y)) {
    return x.length === y.length ? Math.max(0, ...x.map((each, i) => difference(each, y[i]))) : Infinity;
  }
  if (typeof x !== "number" || typeof y !== "number") return Infinity;
  return x === y ? 0 : Math.abs(x - y) / Math.max(1, Math.abs(x), Math.abs(y));
}
