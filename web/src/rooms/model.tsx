import type { ComponentChildren } from "preact";
import type { Session } from "../server";

export const MODEL = "model";

interface Props {
  session: Session | null;
  query: string;
  heading: ComponentChildren;
}

export function Model({ session, heading }: Props) {
  return (
    <article class="room">
      {heading}
      {session && !session.model && <p class="lead">No model was given.</p>}
    </article>
  );
}
