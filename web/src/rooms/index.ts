import type { Room } from "../room";
import { fingerprint } from "./fingerprint";
import { forgotten } from "./forgotten";
import { frame } from "./frame";
import { head } from "./head";
import { keys } from "./keys";
import { ruler } from "./ruler";
import { shock } from "./shock";
import { sphere } from "./sphere";
import { steps } from "./steps";
import { tangent } from "./tangent";

/** In the order in which they are walked through. */
export const ROOMS: Room[] = [ruler, sphere, shock, forgotten, tangent, keys, fingerprint, steps, frame, head];
