// The dashboard: current figures, alarms, and plots of the last hour.

import { showAlarms } from "./alarms.js";
import { byId } from "./dom.js";
import { Figure } from "./figure.js";
import { RECENT } from "./history.js";
import { fixed, percent } from "./numbers.js";
import { bars, lines } from "./plot.js";
import { BY_DEPTH, OVER_TIME } from "./plots.js";
import { showTiles } from "./tiles.js";

const IN_SECONDS = 300; // the longest span that is told in seconds

export class Dashboard {
  constructor() {
    const figure = ({ title, caption, names }, key) => new Figure(title, caption, names, key);
    this.overTime = OVER_TIME.map((plot) => ({ ...plot, figure: figure(plot, "line") }));
    const names = [`last ${RECENT} s`, "since the start"];
    this.byDepth = BY_DEPTH.map((plot) => ({ ...plot, figure: figure({ ...plot, names }, "bar") }));
    byId("plots").append(...[...this.byDepth, ...this.overTime].map((plot) => plot.figure.node));
  }

  show(history) {
    const latest = history.latest;
    const recent = history.recent();
    showTiles(history);
    showAlarms(latest, recent);
    for (const plot of this.overTime) showOverTime(plot, history, Number(byId("span").value));
    for (const plot of this.byDepth) showByDepth(plot, latest, recent);
  }
}

function showOverTime({ figure, title, names, read, marks: moments, least, most, natural, digits }, history, span) {
  const [unit, size] = span > IN_SECONDS ? ["minutes", 60] : ["seconds", 1];
  const series = read(history, span).map((points, i) => ({
    name: names[i],
    points: points.map(({ x, y }) => ({ x: x / size, y })),
  }));
  const now = series.map((one) => `${one.name} ${fixed(one.points.at(-1)?.y, digits)}`).join(", ");
  const across = `${unit} before now`;
  const ago = (x) => fixed(x, size === 1 ? 0 : 1);
  const marks = (moments?.(history) ?? []).filter(({ x }) => x >= -span).map(({ x, name }) => ({ x: x / size, name }));
  const told = marks.map(({ x, name }) => `; at ${ago(x)}: ${name}`).join("");
  const label = `${title} over the last ${span / size} ${unit}; now ${now}${told}`;
  const chart = lines({ series, x: [-span / size, 0], across, least, most, natural, label, marks });
  const rows = series[0].points.map((point, i, all) => [
    ago(point.x),
    ...series.map((one) => fixed(one.points[i].y, digits)),
    ...(moments ? [marks.filter(({ x }) => x <= point.x && x > (all[i - 1]?.x ?? -Infinity)).map(({ name }) => name).join(", ")] : []),
  ]);
  const meanings = marks.map(({ x, name }) => `${name}, ${ago(-x)} ${unit} ago`);
  figure.show(chart, [across, ...names, ...(moments ? ["drafter"] : [])], rows.reverse(), meanings);
}

function showByDepth({ figure, title, most, first = 1, lately, always }, latest, recent) {
  const whole = always(latest.counts);
  const now = recent ? lately(recent) : [];
  // Suffix drafts may be deeper than the drafter's.
  const depths = Math.max(1, latest.served.max_depth + 1 - first, whole.length);
  const groups = Array.from({ length: depths }, (_, i) => ({
    name: String(i + first),
    values: [now[i] ?? null, whole[i] ?? null],
  }));
  const told = groups.map((group) => `${group.name}: ${percent(group.values[0])}`).join(", ");
  const label = `${title} in the last ${RECENT} seconds: ${told}`;
  const rows = groups.map((group) => [group.name, ...group.values.map((value) => percent(value))]);
  const chart = bars({ groups, across: "draft depth", most, format: percent, label });
  figure.show(chart, ["depth", `last ${RECENT} s`, "since the start"], rows);
}
