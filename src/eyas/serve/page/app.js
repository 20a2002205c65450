// Sets up the page: the views, and the polling of the server that they share.

import { setUpAnswersAs } from "./answers_as.js";
import { readHistory } from "./api.js";
import { setUpCodeDialog } from "./code_dialog.js";
import { allowCompare, setUpCompare } from "./compare.js";
import { Dashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { History } from "./history.js";
import { setUpKept } from "./kept.js";
import { onKey, setUpKey } from "./key.js";
import { setUpPlayground, showEnd } from "./playground.js";
import { onRun } from "./run.js";
import { adaptTo, setUpSettings } from "./settings.js";
import { showLost, showState } from "./state.js";
import { setUpTabs } from "./tabs.js";
import { setUpTheme } from "./theme.js";
import { Watch } from "./watch.js";

const history = new History();
const dashboard = new Dashboard();
let shown = null; // the view
let known = ""; // what is served, as far as the page has adapted to it

function seen(status) {
  const missed = history.misses(status);
  history.add(status);
  if (missed) catchUp();
  const served = JSON.stringify(status.served);
  if (served !== known) {
    known = served;
    adapt(status);
  }
  showState(status);
  showDashboard();
}

/** The server's history while this page was closed or hidden. Without it the plots begin now. */
async function catchUp() {
  const samples = await readHistory().catch(() => []);
  history.merge(samples);
  showDashboard();
}

function adapt({ served, version }) {
  const drafter = served.drafter ? `drafted by ${served.drafter}` : served.suffix ? "suffix drafts" : "no drafter";
  byId("served").textContent = `${served.model}, ${drafter}`;
  byId("foot").textContent = `eyas ${version}: up to ${served.max_model_len.toLocaleString("en")} tokens, ${served.max_num_seqs} answers at once.`;
  document.title = `${served.model} · eyas`;
  document.body.dataset.model = served.model;
  adaptTo(served);
  allowCompare(served);
}

function show(view) {
  shown = view;
  byId("settings").hidden = view === "dashboard";
  byId("kept").hidden = view !== "playground";
  document.body.dataset.view = view;
  showDashboard();
}

function showDashboard() {
  if (shown === "dashboard" && history.latest) dashboard.show(history);
}

const watch = new Watch(seen, showLost);
setUpTheme(byId("theme"));
setUpKey();
setUpSettings();
setUpAnswersAs(byId("answers-as"));
setUpPlayground();
setUpKept();
setUpCodeDialog();
setUpCompare();
byId("span").addEventListener("change", showDashboard);
setUpTabs(document.querySelector('[role="tablist"]'), show);
// On load the browser jumps to the address's #, which scrolls the header away and takes the focus.
window.addEventListener("load", () =>
  setTimeout(() => {
    window.scrollTo(0, 0);
    if (shown === "playground") showEnd();
  }),
);

onKey(() => watch.lookSoon());
// The badge must not be wrong for two seconds; the server needs a moment to accept or release a request.
onRun(() => setTimeout(() => watch.lookSoon(), 200));
watch.lookSoon();
