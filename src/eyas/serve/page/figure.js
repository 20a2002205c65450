// A chart with its title, what it means, a legend, and the same numbers as a table.

import { element } from "./dom.js";

const TOLD = 6; // marks whose meaning is told below a chart; all of them are in its table

export class Figure {
  constructor(title, caption, names, key) {
    this.chart = element("div", { class: "chart" });
    this.head = element("thead");
    this.rows = element("tbody");
    const legend = element("div", { class: "names" });
    if (names.length > 1) {
      names.forEach((name, i) => legend.append(element("span", {}, element("i", { class: `key ${key} c${i}` }), name)));
    }
    this.marks = element("ol", { class: "marks soft" });
    const table = element("table", {}, element("caption", { class: "hidden" }, title), this.head, this.rows);
    const frame = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, numbers` }, table);
    this.numbers = element("details", {}, element("summary", {}, "Numbers"), frame);
    this.node = element(
      "figure",
      { class: "card" },
      element("h3", {}, title),
      this.chart,
      legend,
      this.marks,
      element("figcaption", { class: "soft" }, caption),
      this.numbers,
    );
  }

  /** Show a chart, its numbers as rows of texts below columns, and what its marks mean: the latest ones, as numbered. */
  show(chart, columns, rows, marks = []) {
    this.chart.replaceChildren(chart);
    this.marks.replaceChildren(...marks.map((words, i) => element("li", { value: String(i + 1) }, words)).slice(-TOLD));
    if (!this.numbers.open && this.rows.childElementCount) return this.later(columns, rows);
    return this.fill(columns, rows);
  }

  /** A closed table is filled when it is opened. */
  later(columns, rows) {
    this.numbers.ontoggle = () => this.numbers.open && this.fill(columns, rows);
  }

  fill(columns, rows) {
    this.head.replaceChildren(element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
    this.rows.replaceChildren(
      ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))),
    );
  }
}
