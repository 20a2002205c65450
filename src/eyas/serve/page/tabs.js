// Tabs as the ARIA pattern has them: one is reached by Tab, arrows and Home and End move between them.

const MOVES = {
  ArrowRight: (at, count) => (at + 1) % count,
  ArrowLeft: (at, count) => (at - 1 + count) % count,
  Home: () => 0,
  End: (_, count) => count - 1,
};

/** Set up a tablist; `onShow` is told the id of the panel that is shown. The address keeps it after a #. */
export function setUpTabs(list, onShow) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

  const select = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      panelOf(tab).hidden = tab !== chosen;
    }
    history.replaceState(null, "", `#${panelOf(chosen).id}`);
    onShow(panelOf(chosen).id);
  };

  for (const tab of tabs) tab.addEventListener("click", () => select(tab));
  list.addEventListener("keydown", (event) => {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const next = tabs[move(tabs.indexOf(document.activeElement), tabs.length)];
    next.focus();
    select(next);
  });
  select(tabs.find((tab) => `#${panelOf(tab).id}` === location.hash) ?? tabs[0]);
}
