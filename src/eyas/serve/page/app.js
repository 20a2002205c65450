// Puts the page together: views, and the one look at the server that all of them share.

import { allowCompare, setUpCompare } from "./compare.js";
import { Dashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { History } from "./history.js";
import { onKey, setUpKey } from "./key.js";
import { plural } from "./numbers.js";
import { setUpPlayground } from "./playground.js";
import { adaptTo, setUpSettings } from "./settings.js";
import { setUpTabs } from "./tabs.js";
import { setUpTheme } from "./theme.js";
import { Watch } from "./watch.js";

const history = new History();
const dashboard = new Dashboard();
let shown = null; // the view
let known = ""; // what is served, as far as the page has adapted to it

function seen(status) {
  history.add(status);
  const served = JSON.stringify(status.served);
  if (served !== known) {
    known = served;
    adapt(status);
  }
  const words = { ok: status.load.running ? `${plural(status.load.running, "answer")} running` : "ready" };
  showState(status.alarms.some((alarm) => alarm.raised) ? "alarm" : status.state, words[status.state] ?? status.state);
  if (shown === "dashboard") dashboard.show(history);
}

function adapt({ served, version }) {
  const drafter = served.drafter ? `drafted by ${served.drafter}` : "no drafter";
  byId("served").textContent = `${served.model}, ${drafter}`;
  byId("foot").textContent = `eyas ${version}: up to ${served.max_model_len.toLocaleString("en")} tokens, ${served.max_num_seqs} answers at once.`;
  document.title = `${served.model} · eyas`;
  adaptTo(served);
  allowCompare(served.max_depth > 0);
}

function showState(state, words) {
  const pill = byId("state");
  pill.dataset.state = state;
  pill.textContent = state === "alarm" ? `alarm, ${words}` : words;
}

function show(view) {
  shown = view;
  byId("settings").hidden = view === "dashboard";
  document.body.dataset.view = view;
  if (view === "dashboard" && history.latest) dashboard.show(history);
}

setUpTheme(byId("theme"));
setUpKey();
setUpSettings();
setUpPlayground();
setUpCompare();
setUpTabs(document.querySelector('[role="tablist"]'), show);

const watch = new Watch(seen, (error) => showState("lost", error.name === "TypeError" ? "out of reach" : error.message));
onKey(() => watch.lookSoon());
watch.lookSoon();
