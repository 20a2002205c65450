// Small charts as SVG: a box of fixed coordinates that scales with the page. Values that are null leave a gap.

import { drawn } from "./dom.js";

const WIDTH = 460;
const HEIGHT = 220;
const LEFT = 46;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 34;
const NAME = 20; // what the name of a bar takes

/** Round numbers from below `low` to above `high`; natural ones where nothing is in between. */
export function ticks(low, high, { about = 4, natural = false } = {}) {
  const raw = Math.max((high - low) / about, natural ? 1 : 0);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * (natural ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((factor) => raw <= unit * factor * (1 + 1e-9));
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/** Lines over time. `series` have a name and points {x, y}; the second is dashed and has no ground. `marks` {x, name}
    are moments of which something is to be said; they are numbered. */
export function lines({ series, x, across, least = 0, most = 1, natural = false, format = plain, label, marks = [] }) {
  const values = series.flatMap((one) => one.points.map((point) => point.y)).filter((y) => y !== null);
  const up = upScale(least, Math.max(most, ...values), natural);
  const right = (value) => LEFT + ((value - x[0]) / (x[1] - x[0])) * (WIDTH - LEFT - RIGHT);
  const picture = frame(label, up, format, across);
  for (const tick of ticks(x[0], x[1], { about: 5 })) {
    if (tick >= x[0] && tick <= x[1]) picture.append(text("tick", right(tick), HEIGHT - BOTTOM + 15, "middle", plain(tick)));
  }
  picture.append(...marks.map((mark, i) => moment(mark, right(mark.x), i)));
  series.forEach((one, i) => {
    for (const run of runs(one.points)) {
      const path = run.map((point) => `${right(point.x).toFixed(1)},${up.at(point.y).toFixed(1)}`).join(" ");
      if (i === 0) {
        const [from, to, foot] = [right(run[0].x).toFixed(1), right(run.at(-1).x).toFixed(1), HEIGHT - BOTTOM];
        picture.append(drawn("polygon", { class: "area", points: `${from},${foot} ${path} ${to},${foot}` }));
      }
      picture.append(drawn("polyline", { class: `line c${i}`, points: path }));
      const last = run.at(-1);
      picture.append(drawn("circle", { class: `point c${i}`, cx: right(last.x), cy: up.at(last.y), r: run.length > 1 ? 2.6 : 2 }));
    }
  });
  return picture;
}

/** Bars in groups; the first of a group is filled, the second an outline. */
export function bars({ groups, across, most = null, format = plain, label }) {
  const values = groups.flatMap((group) => group.values).filter((value) => value !== null);
  const up = upScale(0, most ?? Math.max(1e-9, ...values), false);
  const picture = frame(label, up, format, across);
  const room = (WIDTH - LEFT - RIGHT) / Math.max(1, groups.length);
  const named = Math.ceil(NAME / room); // where bars are narrow, not each has its name below
  groups.forEach((group, place) => {
    const thick = Math.min(26, (room * 0.7) / group.values.length);
    const start = LEFT + (place + 0.5) * room - (thick * group.values.length) / 2;
    group.values.forEach((value, i) => {
      if (value === null) return;
      const [y, foot] = [up.at(value), up.at(0)];
      const bar = { class: `bar c${i}`, x: start + i * thick + 1, y, width: thick - 2, height: Math.max(0.5, foot - y), rx: 2 };
      picture.append(drawn("rect", bar, drawn("title", {}, `${group.name}: ${format(value)}`)));
    });
    if (place % named === 0) picture.append(text("tick", LEFT + (place + 0.5) * room, HEIGHT - BOTTOM + 15, "middle", group.name));
  });
  return picture;
}

/** A line from top to bottom with its number above; what it means is its title. */
function moment({ name }, x, i) {
  return drawn(
    "g",
    { class: "mark" },
    drawn("title", {}, name),
    drawn("line", { x1: x, y1: TOP, x2: x, y2: HEIGHT - BOTTOM }),
    text("mark-name", x, TOP - 3, "middle", String(i + 1)),
  );
}

export const plain = (value) => String(Number(value.toPrecision(4)));

function upScale(least, most, natural) {
  const marks = ticks(least, most > least ? most : least + 1, { natural });
  const [bottom, top] = [Math.min(least, marks[0]), Math.max(most, marks.at(-1))];
  const at = (value) => HEIGHT - BOTTOM - ((value - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM);
  return { marks, at };
}

function frame(label, up, format, across) {
  const picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const mark of up.marks) {
    const y = up.at(mark);
    picture.append(drawn("line", { class: "grid", x1: LEFT, y1: y, x2: WIDTH - RIGHT, y2: y }));
    picture.append(text("tick", LEFT - 7, y + 3.5, "end", format(mark)));
  }
  picture.append(text("name", LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 3, "middle", across));
  return picture;
}

const text = (kind, x, y, anchor, words) => drawn("text", { class: kind, x, y, "text-anchor": anchor }, words);

/** Stretches without a gap. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point.y === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}
