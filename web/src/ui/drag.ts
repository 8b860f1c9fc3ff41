// Dragging with a pointer or with arrow keys, in the coordinates of what is drawn.
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";

interface Handlers {
  onPointerDown(event: TargetedPointerEvent<SVGElement>): void;
  onKeyDown(event: TargetedKeyboardEvent<SVGElement>): void;
}

/** From the page to the coordinates of the drawing in which an element lies. */
function placeIn(svg: SVGSVGElement, event: PointerEvent): [number, number] {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM()!.inverse());
  return [point.x, point.y];
}

/** From the press of a pointer on an element until its release: where it goes, on and off the element. */
export function follow(element: HTMLElement | SVGElement, down: PointerEvent, move: (now: PointerEvent) => void): void {
  element.setPointerCapture(down.pointerId);
  const end = () => {
    element.removeEventListener("pointermove", move as EventListener);
    element.removeEventListener("pointerup", end);
    element.removeEventListener("pointercancel", end);
  };
  element.addEventListener("pointermove", move as EventListener);
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", end);
}

interface Moves {
  start?(): void;
  /** To a place in the drawing (units of its viewBox, y downwards), and how far from where the drag began. */
  to(x: number, y: number, dx: number, dy: number): void;
  /** By keys: steps to the right and up; with Shift ten at a time. */
  by?(right: number, up: number): void;
}

/** Properties that make an SVG element draggable. */
export function draggable(moves: Moves): Handlers {
  return {
    onPointerDown(event) {
      if (event.button !== 0) return;
      event.preventDefault();
      event.stopPropagation();
      const element = event.currentTarget;
      const svg = element instanceof SVGSVGElement ? element : element.ownerSVGElement!;
      element.focus({ preventScroll: true });
      const [x0, y0] = placeIn(svg, event);
      moves.start?.();
      follow(element, event, (now) => {
        const [x, y] = placeIn(svg, now);
        moves.to(x, y, x - x0, y - y0);
      });
    },
    onKeyDown(event) {
      const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!step || !moves.by) return;
      event.preventDefault();
      event.stopPropagation();
      const many = event.shiftKey ? 10 : 1;
      moves.by(many * step[0]!, many * step[1]!);
    },
  };
}
