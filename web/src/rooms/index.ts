import type { Room } from "../room";
import { sphere } from "./sphere";

/** In the order in which they are walked through. */
export const ROOMS: Room[] = [sphere];
