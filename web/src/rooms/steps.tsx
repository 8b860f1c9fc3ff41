import { add, angle, dot, minus, norm, times, unit, type Vector } from "../math/linear";
import { given, room } from "../room";
import { Choice } from "../ui/choice";
import { Arrow, Dot, Loop } from "../ui/marks";
import { Slider } from "../ui/slider";
import { Axes, Handle3, Space, Sphere } from "../ui/space";

type Method = "ngpt" | "retract" | "exp";
type State = { f: number[]; alpha: number; count: number; method: Method };
type Numbers = {
  length: number;
  length_sphere: number;
  first_turn: number;
  last_turn: number;
  first_turn_sphere: number;
  last_turn_sphere: number;
  left: number;
  left_sphere: number;
  path: number[][];
  path_sphere: number[][];
};

const { start } = given<{ start: number[] }>("steps");

const direction = (x: Vector): Vector => (norm(x) ? unit(x) : x);

/** A layer that stays on the sphere. */
function onSphere(h: Vector, f: Vector, alpha: number, method: Method): Vector {
  const u = direction(h);
  if (!norm(f)) return u;
  if (method === "ngpt") return direction(add(u, times(alpha, minus(direction(f), u))));
  const v = times(alpha, f);
  const tangent = minus(v, times(dot(u, v), u));
  if (method === "retract") return direction(add(u, tangent));
  const size = norm(tangent);
  return size ? add(times(Math.cos(size), u), times(Math.sin(size) / size, tangent)) : u;
}

function along(update: (h: Vector) => Vector, count: number): Vector[] {
  const places = [start];
  for (let i = 0; i < count; i++) places.push(update(places[i]!));
  return places;
}

// A zero vector is at right angles to all others.
const turn = (x: Vector, y: Vector) => (norm(x) && norm(y) ? angle(x, y) : 90);

function numbers({ f, alpha, count, method }: State): Numbers {
  const layers = Math.floor(count + 0.5);
  const flat = along((h) => add(h, times(alpha, f)), layers);
  const round = along((h) => onSphere(h, f, alpha, method), layers);
  const turns = (path: Vector[]): [number, number] => [turn(path[0]!, path[1]!), turn(path.at(-2)!, path.at(-1)!)];
  const [first_turn, last_turn] = turns(flat);
  const [first_turn_sphere, last_turn_sphere] = turns(round);
  return {
    length: norm(flat.at(-1)!),
    length_sphere: norm(round.at(-1)!),
    first_turn,
    last_turn,
    first_turn_sphere,
    last_turn_sphere,
    left: turn(flat.at(-1)!, f),
    left_sphere: turn(round.at(-1)!, f),
    path: flat,
    path_sphere: round,
  };
}

export const steps = room<State, Numbers>({
  name: "steps",
  title: "On the sphere",
  text: (
    <>
      In space every layer adds its output to the stream, which grows, so that the same addition turns it less and less. On the
      sphere a layer is a step along it and back onto it; nGPT goes a share α of the way to where the layer points, and never
      grows.
    </>
  ),
  source: "Loshchilov et al. 2024 (nGPT); gaugekit.geometry.sphere",
  numbers,
  rows: (n) => [
    { label: "length, in space", value: n.length },
    { label: "length, on the sphere", value: n.length_sphere, invariant: true },
    { label: "first layer turns it by (°), in space", value: n.first_turn },
    { label: "last layer, in space", value: n.last_turn },
    { label: "first layer, on the sphere", value: n.first_turn_sphere },
    { label: "last layer, on the sphere", value: n.last_turn_sphere },
    { label: "left to f (°), in space", value: n.left },
    { label: "left, on the sphere", value: n.left_sphere },
  ],
  View: ({ state, numbers: n, set }) => {
    const reach = Math.max(2.4, 1.1 * n.length, 1.1 * norm(state.f));
    return (
      <>
        <Space label="The path of a state in space and on the unit sphere, layer by layer" reach={reach} turn={[20, 18]}>
          <Axes reach={0.9 * reach} />
          <Sphere radius={1} />
          <Loop points={n.path} colour="purple" open />
          <Loop points={n.path_sphere} colour="green" open />
          {n.path.slice(1).map((at, i) => (
            <Dot key={i} at={at} colour="purple" size={3.5} />
          ))}
          {n.path_sphere.slice(1).map((at, i) => (
            <Dot key={i} at={at} colour="green" size={3.5} />
          ))}
          <Arrow to={n.path.at(-1)!} colour="purple" label="in space" dashed />
          <Arrow to={n.path_sphere.at(-1)!} colour="green" label="on the sphere" />
          <Dot at={start} colour="blue" label="h" />
          <Arrow to={state.f} colour="orange" label="f" />
          <Handle3 label="What a layer puts out, f" at={state.f} move={(f) => set({ f })} />
        </Space>
        <div class="controls">
          <Choice
            label="Step on the sphere"
            value={state.method}
            options={{ ngpt: "nGPT", retract: "retraction", exp: "geodesic" }}
            set={(method) => set({ method })}
          />
          <Slider label="α" value={state.alpha} low={0} high={1.5} set={(alpha) => set({ alpha })} />
          <Slider label="layers" value={Math.round(state.count)} low={1} high={12} step={1} set={(count) => set({ count })} />
        </div>
      </>
    );
  },
});
