// The server at a glance and over the last minutes: figures, alarms, plots.

import { byId, element } from "./dom.js";
import { Figure } from "./figure.js";
import { RECENT, acceptanceLength, tokensPerSecond } from "./history.js";
import { fixed, percent, plural, whole } from "./numbers.js";
import { bars, lines } from "./plot.js";

const OVER_TIME = [
  {
    title: "Throughput",
    caption: "Tokens generated per second, over all answers.",
    names: ["tokens/s"],
    read: (history) => [history.flow(tokensPerSecond)],
    most: 10,
    digits: 1,
  },
  {
    title: "Acceptance length",
    caption: "Tokens per verified draft, the target's own included: 1 means that nothing is accepted.",
    names: ["tokens per draft"],
    read: (history) => [history.flow(acceptanceLength)],
    least: 1,
    most: 2,
    digits: 2,
  },
  {
    title: "Users",
    caption: "Answers that run, and answers that wait for a place.",
    names: ["running", "waiting"],
    read: (history) => [history.gauge((seen) => seen.load.running), history.gauge((seen) => seen.load.waiting)],
    most: 4,
    natural: true,
    digits: 0,
  },
  {
    title: "KV cache",
    caption: "KV blocks: held by answers, and free but cached for prompts that begin alike.",
    names: ["used", "cached"],
    read: (history) => [history.gauge((seen) => seen.kv_blocks.used), history.gauge((seen) => seen.kv_blocks.cached)],
    most: 10,
    natural: true,
    digits: 0,
  },
];

const BY_DEPTH = [
  {
    title: "Acceptance by depth",
    caption: "Share of verified drafts whose token at this depth was accepted.",
    most: 1,
    lately: (flow) => shares(flow.acceptedByDepth, flow.drafts),
    always: (counts) => shares(counts.accepted_by_depth, counts.drafts),
  },
  {
    title: "Depth chosen",
    caption: "How deep answers were to be drafted for, as a share of all choices; 0 is a plain step.",
    most: 1,
    first: 0,
    lately: (flow) => chosen(flow.rowsByDepth),
    always: (counts) => chosen(counts.rows_by_depth),
  },
];

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
    showTiles(latest, recent, history.recent(6));
    showAlarms(latest);
    for (const plot of this.overTime) showOverTime(plot, history);
    for (const plot of this.byDepth) showByDepth(plot, latest, recent);
  }
}

function showTiles(latest, recent, instant) {
  const { load, kv_blocks: blocks, counts } = latest;
  const since = counts.drafts ? 1 + counts.accepted_tokens / counts.drafts : null;
  const tiles = [
    ["Throughput", `${fixed(tokensPerSecond(instant))}`, "tokens/s now"],
    ["Acceptance length", fixed(acceptanceLength(recent), 2), `last ${RECENT} s; ${fixed(since, 2)} since the start`],
    ["Users", `${load.running}`, `running; ${load.waiting} waiting, at most ${load.capacity}`],
    ["KV cache", percent(blocks.used / Math.max(1, blocks.total)), `${whole(blocks.used)} of ${whole(blocks.total)} blocks used`],
    ["Tokens", whole(counts.tokens), `${fixed(counts.tokens / Math.max(1, counts.passes), 2)} for each pass of the target`],
  ];
  byId("tiles").replaceChildren(
    ...tiles.map(([name, value, more]) =>
      element("div", { class: "card" }, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "soft" }, more)),
    ),
  );
}

function showAlarms(latest) {
  const items = latest.alarms.map((alarm) =>
    element(
      "li",
      { class: alarm.raised ? "raised" : "quiet-alarm" },
      element("b", {}, alarm.raised ? "▲ raised" : "✓ quiet"),
      element("span", { class: alarm.raised ? null : "soft" }, `${alarm.name}: ${alarm.text}`),
    ),
  );
  const { failed_steps: failed, replaced_engines: replaced } = latest.counts;
  if (failed) {
    const words = `${plural(failed, "step")} failed, ${plural(replaced, "engine")} replaced since the start`;
    items.push(element("li", { class: "raised" }, element("b", {}, "▲ failures"), element("span", {}, words)));
  }
  byId("alarm-list").replaceChildren(...items);
  byId("notice-list").replaceChildren(
    ...latest.notices.map((notice) => {
      const ago = `${whole(latest.at_seconds - notice.at_seconds)} s ago`;
      return element("li", {}, element("b", { class: "soft" }, ago), element("span", {}, notice.text));
    }),
  );
}

function showOverTime({ figure, title, names, read, least, most, natural, digits }, history) {
  const series = read(history).map((points, i) => ({ name: names[i], points }));
  const now = series.map((one) => `${one.name} ${fixed(one.points.at(-1)?.y, digits)}`).join(", ");
  const chart = lines({
    series,
    x: [-history.span, 0],
    across: "seconds before now",
    least,
    most,
    natural,
    label: `${title} over the last ${history.span} seconds; now ${now}`,
  });
  const rows = series[0].points.map((point, i) => [
    fixed(point.x, 0),
    ...series.map((one) => fixed(one.points[i].y, digits)),
  ]);
  figure.show(chart, ["seconds before now", ...names], rows.reverse());
}

function showByDepth({ figure, title, most, first = 1, lately, always }, latest, recent) {
  const whole = always(latest.counts);
  const now = recent ? lately(recent) : [];
  const groups = Array.from({ length: Math.max(1, latest.served.max_depth + 1 - first) }, (_, i) => ({
    name: String(i + first),
    values: [now[i] ?? null, whole[i] ?? null],
  }));
  const told = groups.map((group) => `${group.name}: ${percent(group.values[0])}`).join(", ");
  const label = `${title} in the last ${RECENT} seconds: ${told}`;
  const rows = groups.map((group) => [group.name, ...group.values.map((value) => percent(value))]);
  const chart = bars({ groups, across: "draft depth", most, format: percent, label });
  figure.show(chart, ["depth", `last ${RECENT} s`, "since the start"], rows);
}

const shares = (counts, of) => (of > 0 ? counts.map((count) => count / of) : []);

function chosen(rowsByDepth) {
  const depths = Object.keys(rowsByDepth).map(Number);
  const counts = Array.from({ length: Math.max(-1, ...depths) + 1 }, (_, depth) => rowsByDepth[depth] ?? 0);
  return shares(counts, counts.reduce((sum, count) => sum + count, 0));
}
