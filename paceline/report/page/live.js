// The live page: `paceline report --serve` sends all data once, then what changes. page.js has drawn the rest.

function follow() {
  const connection = byId("connection");
  connection.hidden = false;
  connection.textContent = "Connecting …";
  const source = new EventSource("events");
  source.addEventListener("data", (event) => {
    start(JSON.parse(event.data));
    connection.textContent = "Live: follows the files of the run.";
  });
  source.addEventListener("change", (event) => change(JSON.parse(event.data)));
  source.addEventListener("error", () => { connection.textContent = "Not connected: paceline report --serve has ended, or is slow to answer. This page tries again."; });
}

const MOST_POINTS = 1000, MOST_STEPS = 120, MOST_LINES = 300;
let redraw = 0, lastDrawn = 0;

// Charts are drawn again at most once a second, and not while one is read.
function drawSoon() {
  if (redraw) return;
  redraw = setTimeout(() => {
    redraw = 0;
    lastDrawn = performance.now();
    if (document.querySelector("#charts svg:hover, #charts svg:focus, #any-chart svg:hover, #any-chart svg:focus")) { drawSoon(); return; }
    fillMetrics();
    showCurves();
  }, Math.max(0, lastDrawn + 1000 - performance.now()));
}

// Of many changes at once, the last is drawn.
const WAITING = new Set();
function soon(draw) {
  if (!WAITING.size) setTimeout(() => {
    const draws = [...WAITING];
    WAITING.clear();
    for (const each of draws) each();
  }, 100);
  WAITING.add(draw);
}

function addLine(run, line) {
  for (const [name, value] of Object.entries(line)) {
    if (name === "step") continue;
    const known = series(run, name);
    const own = known && !Array.isArray(run.curves.series[name]) ? known : { steps: [...(known?.steps ?? [])], values: [...(known?.values ?? [])] };
    run.curves.series[name] = own;
    if (own.steps.at(-1) >= line.step) continue;  // it was among the first data already
    own.steps.push(line.step);
    own.values.push(value);
    if (own.steps.length > MOST_POINTS) halve(own);
  }
  const steps = run.summary.find(([name]) => name === "steps");
  if (steps) steps[1] = steps[1].replace(/^\d+/, String(line.step));
}

// Of two neighbours the later step, with their mean.
function halve(line) {
  const [steps, values] = [[], []];
  for (let place = 0; place + 1 < line.steps.length; place += 2) {
    const pair = [line.values[place], line.values[place + 1]].filter((value) => value !== null);
    steps.push(line.steps[place + 1]);
    values.push(pair.length ? pair.reduce((sum, value) => sum + value, 0) / pair.length : null);
  }
  if (line.steps.length % 2) { steps.push(line.steps.at(-1)); values.push(line.values.at(-1)); }
  Object.assign(line, { steps, values });
}

function addStep(list, step) {
  const place = list.findIndex((other) => other.step === step.step);
  if (place >= 0) list.splice(place, 1);
  list.push(step);
  if (list.length > MOST_STEPS) list.shift();
}

function change(event) {
  const run = RUNS[event.run];
  const now = NOW[event.run];
  if (event.kind === "line") {
    addLine(run, event.line);
    drawSoon();
    soon(showSummary);
  } else if (event.kind === "gantt") {
    Object.assign(run.gantt.pools, event.pools);
    for (const bar of event.step.bars) if (!METHODS.includes(bar[1])) METHODS.push(bar[1]);
    addStep(run.gantt.steps, event.step);
    soon(ganttChooser.fillSteps);
  } else if (event.kind === "samples") {
    addStep(run.samples, { step: event.step, rows: event.rows });
    soon(samplesChooser.fillSteps);
  } else if (event.kind === "checkpoints") {
    run.checkpoints = event.value;
    soon(showCheckpoints);
  } else if (event.kind === "status") {
    run.status = event.value;
    const state = run.summary.find(([name]) => name === "state");
    if (state && event.value) state[1] = event.value.state === "silent" ? "no sign of life: killed, or its machine is gone" : event.value.state + (event.value.error ? `: ${event.value.error}` : "");
    soon(showSummary);
    soon(showNow);
  } else if (event.kind === "processes") {
    now.processes = event.value;
    soon(showProcesses);
  } else if (event.kind === "alarms") {
    run.alarms = [...run.alarms, ...event.lines.map((line) => JSON.parse(line))].slice(-MOST_LINES);
    soon(showAlarms);
  } else if (event.kind === "log") {
    now.log = [...now.log, ...event.lines].slice(-MOST_LINES);
    soon(showLog);
  }
}

let NOW = [];

function startNow() {
  NOW = RUNS.map(() => ({ processes: [], log: [] }));
  byId("now").hidden = false;
  byId("now-runs").replaceChildren(...RUNS.map((run, index) => element("div", { class: "sample" },
    element("strong", {}, LABELS[index]), " ", element("span", { class: "state" }, ""),
    element("div", { class: "controls" },
      button("stop after this step", "stop", index, "The run ends after the step that runs now, with a checkpoint."),
      button("checkpoint now", "checkpoint", index, "A checkpoint is saved after the step that runs now."),
      element("span", { class: "answer faint", role: "status" }, "")))));
  showNow();
  showProcesses();
  showLog();
}

function button(text, asked, index, title) {
  const made = element("button", { type: "button", title, "data-asked": asked }, text);
  made.addEventListener("click", async () => {
    const answer = made.parentElement.querySelector(".answer");
    if (asked === "stop" && made.dataset.sure !== "yes") {
      made.dataset.sure = "yes";
      made.textContent = "Press again to end the run after this step";
      setTimeout(() => { delete made.dataset.sure; made.textContent = text; }, 5000);
      return;
    }
    try {
      const response = await fetch(`${asked}/${index}`, { method: "POST" });
      answer.textContent = response.ok ? "Asked; the run does it after its step." : `Not possible: ${await response.text()}`;
    } catch (error) {
      answer.textContent = `Not possible: ${error.message}`;
    }
  });
  return made;
}

function showNow() {
  document.querySelectorAll("#now-runs .state").forEach((place, index) => {
    const status = RUNS[index].status;
    if (!status) { place.textContent = "unknown"; return; }
    const pools = Object.entries(status.running ?? {}).map(([pool, call]) => `${pool}: ${call}`).join(", ");
    const validation = status.validation ? `, validation: ${status.validation[0]} of ${status.validation[1]} prompts` : "";
    const queue = Object.entries(status.queue ?? {}).map(([state, count]) => `${count} ${state}`).join(", ");
    const facts = [`${status.state}, step ${status.step} of ${status.total_steps}${validation}`, pools, queue && `prompts: ${queue}`,
      { training: "the training waits for responses", rollout: "the rollout waits for the training" }[status.waits],
      status.deaths ? `died ${status.deaths} times before` : ""];
    place.textContent = facts.filter(Boolean).join(" · ");
  });
  document.querySelectorAll("#now-runs button").forEach((made) => {
    made.disabled = RUNS[[...document.querySelectorAll("#now-runs > div")].indexOf(made.closest(".sample"))].status?.state !== "running";
  });
}

function showProcesses() {
  const onGpus = NOW.some((now) => now.processes.some((process) => process[4] !== null));
  const rows = NOW.flatMap((now, index) => now.processes.map(([name, pid, cores, memory, gpu]) =>
    [named(index, name), pid, cores.toFixed(1), `${memory} MB`, ...(onGpus ? [gpu === null ? "–" : `${gpu} MB`] : [])]));
  byId("processes").replaceChildren(rows.length ? table(["process", "id", "cores", "memory", ...(onGpus ? ["GPU memory"] : [])], rows)
    : element("p", { class: "faint" }, "None of the run's processes is on this machine."));
}

function showLog() {
  const log = byId("log"), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.textContent = NOW.flatMap((now, index) => now.log.map((line) => named(index, line))).join("\n");
  if (atEnd) log.scrollTop = log.scrollHeight;
}

if (DATA.live) follow();
else start(DATA);
