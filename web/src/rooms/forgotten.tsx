import { add, dot, mean, minus, norm, times, unit } from "../math/linear";
import { centred, normalize } from "../math/norms";
import { given, room } from "../room";
import { Arrow, Dot, Label, Loop } from "../ui/marks";
import { Slider } from "../ui/slider";
import { Axes, circle, Handle3, Space } from "../ui/space";

type State = { scale: number; shift: number };
type Numbers = { moved: number[]; output: number[]; unsigned: number[]; mean: number; length: number; away: number };

const { start } = given<{ start: number[] }>("forgotten");
const ONES = [1, 1, 1];
const FLAT = centred(start);

function numbers({ scale, shift }: State): Numbers {
  const moved = scale ? start.map((v) => scale * v + shift) : ONES.map(() => shift);
  const output = normalize("layer", moved, 0, 1);
  return {
    moved,
    output,
    unsigned: times(Math.sign(scale), output),
    mean: mean(moved),
    length: norm(centred(moved)),
    away: norm(minus(output, normalize("layer", start, 0, 1))),
  };
}

const REACH = 3.6;

export const forgotten = room<State, Numbers>({
  name: "forgotten",
  title: "What is forgotten",
  text: (
    <>
      All vectors a x + b 1 with a &gt; 0, a half-plane, come out of LayerNorm as one: its mean and its length are forgotten.
      With a &lt; 0 the output is turned round, and on the line along 1, between the two halves, there is nothing to say.
    </>
  ),
  source: "Ba, Kiros & Hinton 2016; gaugekit.geometry.normalization.fibre",
  numbers,
  rows: (n, { scale }) => [
    { label: "a x + b 1", value: n.moved, digits: 3 },
    { label: "its mean (forgotten)", value: n.mean },
    { label: "length of P (forgotten)", value: n.length },
    { label: "output y", value: n.output, digits: 3 },
    { label: "y times the sign of a", value: n.unsigned, digits: 3, invariant: scale !== 0 },
    { label: "y from where it was", value: n.away },
  ],
  View: ({ state, numbers: n, set }) => {
    // The nearest point of the plane of x and 1 to where the hand is.
    const drag = (to: number[]) => {
      const scale = dot(to, FLAT) / dot(FLAT, FLAT);
      set({ scale, shift: mean(to) - scale * mean(start) });
    };
    const u = unit(ONES);
    return (
      <>
        <Space label="The half-plane of all vectors that LayerNorm takes to one point" reach={REACH} turn={[-70, 22]}>
          <Axes reach={3} />
          <Loop points={circle(ONES, Math.sqrt(3))} colour="grey" />
          <Half sign={1} />
          <Half sign={-1} />
          <Arrow from={times(-3.2, u)} to={times(3.2, u)} colour="grey" label="1" dashed />
          <Dot at={start} colour="grey" label="x" />
          <Arrow to={n.output} colour="green" label="y" />
          <Dot at={times(-1, n.output)} colour="purple" size={3} />
          <Arrow to={n.moved} colour="orange" label="a x + b 1" />
          <Handle3 label="The point a x + b 1" at={n.moved} move={drag} />
        </Space>
        <div class="controls">
          <Slider label="scale a" value={state.scale} low={-2} high={2} set={(scale) => set({ scale })} />
          <Slider label="shift b" value={state.shift} low={-1.5} high={1.5} set={(shift) => set({ shift })} />
        </div>
      </>
    );
  },
});

function Half({ sign }: { sign: 1 | -1 }) {
  const [along, up] = [unit(FLAT), unit(ONES)];
  const reach = 3;
  const corners = [
    times(-reach, up),
    times(reach, up),
    add(times(reach, up), times(sign * reach, along)),
    add(times(-reach, up), times(sign * reach, along)),
  ];
  return (
    <g>
      <Loop points={corners} colour={sign > 0 ? "blue" : "purple"} filled />
      <Label at={add(times(-2.6, up), times(sign * 1.2, along))} text={sign > 0 ? "a > 0" : "a < 0"} colour={sign > 0 ? "blue" : "purple"} />
    </g>
  );
}
