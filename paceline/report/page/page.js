"use strict";
// Everything of a run is put into the page as text (textContent), never as markup.

let DATA = JSON.parse(document.getElementById("data").textContent);
let RUNS = [], COMPARES = false;
// A run's name with what sets it apart; in the charts only where that is short.
let LABELS = [], CHART_NAMES = [];
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  ["Reward", ["critic/score/mean", "critic/rewards/mean"]],
  ["Loss", ["train/loss", "val/loss"]],
  ["Accuracy on pairs", ["train/accuracy", "val/accuracy"]],
  ["Margin between chosen and rejected", ["train/margin", "val/margin"]],
  ["Validation", /^val-core\//],
  ["Accuracy in training", /^reward\/.*acc/],
  ["KL divergence", ["actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"]],
  ["Entropy", ["actor/entropy", "train/entropy"]],
  ["Response length (tokens)", ["response_length/mean", "response_length/max", "response_length/min"]],
  ["Policy loss", ["actor/pg_loss"]],
  ["Value loss", ["critic/vf_loss"]],
  ["Explained variance of the critic", ["critic/vf_explained_var"]],
  ["Clipped share", ["actor/pg_clipfrac", "critic/vf_clipfrac"]],
  ["Gradient norm", ["actor/grad_norm", "critic/grad_norm", "train/grad_norm"]],
  ["Seconds per step", ["timing_s/step", "timing_s/gen", "timing_s/update_actor", "timing_s/update_critic", "timing_s/update_model"]],
  ["Speed of the run (tokens/s of all devices)", ["perf/tokens_per_second"]],
  ["Throughput (tokens/s per device)", ["perf/throughput"]],
  ["Busy share of all pools", ["perf/overlap"]],
  ["Staleness (updates)", ["training/staleness/mean", "training/staleness/max", "training/staleness/in_queue"]],
  ["Seconds without responses", ["timing_s/wait_for_responses"]],
];

function byId(id) { return document.getElementById(id); }

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes, children);
  return node;
}

function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  fill(node, attributes, children);
  return node;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : String(child)));
}

function color(index) { return `var(--c${index % 12})`; }

function number(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// A long name may break after a dot, a slash or an underscore.
function breakable(text) {
  const parts = String(text).split(/(?<=[._/])(?=\w)/);
  return element("span", {}, ...parts.flatMap((part, index) => index ? [element("wbr"), part] : [part]));
}

// On a narrow screen each row stands as a block, and a cell says itself which column it is of.
function table(head, rows) {
  const labelled = (cell, column) => {
    if (column && head?.[column]) cell.dataset.label = head[column];
    return cell;
  };
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, column) => labelled(
    cell instanceof HTMLTableCellElement ? cell
      : column ? element("td", {}, cell ?? "") : element("th", { scope: "row" }, breakable(cell ?? "")), column))));
  const top = head ? element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))) : null;
  return element("div", { class: "scroll", tabindex: "0" }, element("table", {}, top, element("tbody", {}, ...body)));
}

// ------------------------------------------------------------------------------------------------------- summary

function showSummary() {
  const title = RUNS.map((run) => run.name).join(" · ");
  byId("title").textContent = title;
  document.title = `${title} - paceline`;
  const names = [...new Set(RUNS.flatMap((run) => run.summary.map(([name]) => name)))];
  const rows = names.map((name) => [name, ...RUNS.map((run) => (run.summary.find(([other]) => other === name) ?? ["", "–"])[1])]);
  if (RUNS.some((run) => run.differs)) rows.unshift(["differs in", ...RUNS.map((run) => run.differs)]);
  byId("summary-table").replaceChildren(table(COMPARES ? ["", ...RUNS.map((run) => run.name)] : null, rows));
  byId("footer").textContent = `Written ${DATA.written} by paceline report. ${RUNS.map((run) => run.folder).join(", ")}`;
}

// -------------------------------------------------------------------------------------------------------- curves

function series(run, metric) {
  const found = run.curves.series[metric];
  if (!found) return null;
  return Array.isArray(found) ? { steps: run.curves.steps[found[0]], values: found[1] } : found;
}

function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

// A chart of lines: [{name, color, steps, values}].
function chart(title, lines, weight) {
  const [width, height, left, right, top, bottom] = [420, 210, 46, 8, 8, 22];
  const points = lines.flatMap((line) => line.steps.map((step, index) => [step, line.values[index]]));
  const finite = points.map((point) => point[1]).filter((value) => value !== null);
  const reading = element("div", { class: "reading" });
  const keys = element("ul", { class: "legend" }, ...lines.map((line) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${line.color}` }), line.name)));
  const caption = element("figcaption", {}, title);
  if (!finite.length) return element("figure", {}, caption, element("p", { class: "faint" }, "no finite values"));
  let [low, high] = [Math.min(...finite), Math.max(...finite)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const first = Math.min(...points.map((point) => point[0]));
  const last = Math.max(...points.map((point) => point[0]), first + 1);
  const x = (step) => left + (step - first) / (last - first) * (width - left - right);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  const label = `${title}. ` + lines.map((line) => {
    const known = line.values.filter((value) => value !== null);
    return known.length ? `${line.name}: from ${number(known[0])} to ${number(known.at(-1))}, `
      + `least ${number(Math.min(...known))}, most ${number(Math.max(...known))}` : `${line.name}: no finite values`;
  }).join("; ");
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": label });
  for (const tick of ticks(low, high, 4)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      drawn("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, Number(tick.toPrecision(6))));
  }
  for (const tick of ticks(first, last, 6).filter(Number.isInteger)) {
    svg.append(drawn("text", { x: x(tick), y: height - 5, "text-anchor": "middle" }, tick));
  }
  const draw = (line, values, kind) => {
    let path = "", pen = "M";
    line.steps.forEach((step, index) => {
      if (values[index] === null) { pen = "M"; return; }
      path += `${pen}${x(step).toFixed(1)} ${y(values[index]).toFixed(1)}`;
      pen = "L";
    });
    svg.append(drawn("path", { class: `curve ${kind}`, d: path, style: `stroke:${line.color}` }));
    if (line.steps.length <= 40 && kind !== "raw") {
      line.steps.forEach((step, index) => {
        if (values[index] !== null) svg.append(drawn("circle", { cx: x(step), cy: y(values[index]), r: 2.2, style: `fill:${line.color}` }));
      });
    }
  };
  const equal = COMPARES ? equalLines(lines) : [];
  for (const line of lines) {
    const over = equal.some((names) => names.indexOf(line.name) > 0);  // dashed, so that the one below is seen
    if (weight > 0) draw(line, line.values, "raw");
    draw(line, weight > 0 ? smoothed(line.values, weight) : line.values, over ? "over" : "");
  }

  const cursor = drawn("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  const steps = [...new Set(points.map((point) => point[0]))].sort((a, b) => a - b);
  let place = steps.length - 1;
  const read = (index) => {
    place = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[place];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    const values = lines.map((line) => {
      const at = line.steps.indexOf(step);
      return at < 0 ? null : `${lines.length > 1 ? `${line.name} ` : ""}${number(line.values[at])}`;
    });
    reading.textContent = `step ${step}: ${values.filter((value) => value !== null).join(", ")}`;
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); reading.textContent = ""; };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const step = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (last - first);
    read(steps.reduce((best, other, index) => Math.abs(other - step) < Math.abs(steps[best] - step) ? index : best, 0));
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("focus", () => read(place));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    read(Math.max(0, Math.min(steps.length - 1, place + move)));
  });
  const same = equal[0]?.length === lines.length ? "The same values in all runs."
    : `The same values: ${equal.map((names) => names.join(" and ")).join("; ")}.`;
  const note = equal.length ? element("p", { class: "reading equal" }, same) : null;
  return element("figure", { "data-chart": title }, caption, lines.length > 1 || COMPARES ? keys : null, svg, note, reading);
}

// The names of lines that lie over each other, a list for each such place.
function equalLines(lines) {
  const names = new Map();
  for (const line of lines) {
    const key = JSON.stringify([line.steps, line.values]);
    names.set(key, [...(names.get(key) ?? []), line.name]);
  }
  return [...names.values()].filter((same) => same.length > 1);
}

function allMetrics() { return [...new Set(RUNS.flatMap((run) => Object.keys(run.curves.series)))].sort(); }

// One run: the metrics of a chart are its lines. Several: each metric is a chart, and the runs are its lines.
function linesOf(metrics) {
  return metrics.flatMap((metric, index) => RUNS.map((run, place) => {
    const found = series(run, metric);
    return found && { name: COMPARES ? CHART_NAMES[place] : metric, color: color(COMPARES ? place : index), ...found };
  })).filter(Boolean);
}

function showCurves() {
  const weight = Number(byId("smoothing").value);
  byId("smoothing-value").textContent = String(weight);
  const known = allMetrics();
  const charts = [];
  for (const [title, wanted] of CHARTS) {
    const metrics = wanted instanceof RegExp ? known.filter((name) => wanted.test(name)) : wanted.filter((name) => known.includes(name));
    if (!metrics.length) continue;
    if (COMPARES) for (const metric of metrics) {
      charts.push(chart(wanted instanceof RegExp ? metric : `${title}: ${metric}`, linesOf([metric]), weight));
    } else {
      charts.push(chart(title, linesOf(metrics), weight));
    }
  }
  byId("charts").replaceChildren(...(charts.length ? charts : [element("p", { class: "faint" }, "No step has been logged yet.")]));
  const metric = byId("any-metric").value;
  byId("any-chart").replaceChildren(...(metric ? [chart(metric, linesOf([metric]), weight)] : []));
}

// --------------------------------------------------------------------------------------------------------- gantt

// The phases of a step first: their colors differ.
const PHASES = ["generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values", "update_critic", "update_actor",
  "compute_reward", "compute_rm_score", "compute_teacher_log_prob"];
let METHODS = PHASES;

function busySeconds(bars, start, end) {
  let [busy, until] = [0, start];
  for (const [from, to] of bars.map((bar) => [bar[2], bar[3]]).sort((a, b) => a[0] - b[0])) {
    busy += Math.max(0, Math.min(to, end) - Math.max(from, until));
    until = Math.max(until, Math.min(to, end));
  }
  return busy;
}

function showGantt(run, index) {
  const step = run.gantt.steps[index];
  if (!step) {
    byId("gantt").replaceChildren(element("p", { class: "faint" }, "This run has no timeline yet."));
    byId("pools").replaceChildren();
    return;
  }
  const pools = Object.keys(run.gantt.pools).filter((pool) => step.bars.some((bar) => bar[0] === pool));
  const [width, left, row, gap] = [1120, 200, 34, 10];
  const height = pools.length * (row + gap) + 30;
  const span = Math.max(step.end - step.start, 1e-6);
  const x = (time) => left + (Math.min(Math.max(time, step.start), step.end) - step.start) / span * (width - left - 10);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "data-step": step.step,
    "aria-label": `What each pool did in step ${step.step}, which took ${number(span)} seconds` });
  const rows = [];
  pools.forEach((pool, place) => {
    const top = place * (row + gap);
    const bars = step.bars.filter((bar) => bar[0] === pool);
    svg.append(drawn("text", { x: left - 8, y: top + row / 2 + 4, "text-anchor": "end" }, pool),
      drawn("rect", { class: "idle", x: left, y: top, width: width - left - 10, height: row, rx: 3 }));
    for (const [, method, start, end, of, validation, about] of bars) {
      const name = method + (validation ? " (validation)" : "") + (about ? `, ${about}` : "") + (of === step.step ? "" : `, of step ${of}`);
      const wide = Math.max(x(end) - x(start), 0.8);
      const bar = drawn("rect", { class: of === step.step ? "bar" : "bar other", x: x(start), y: top, width: wide, height: row, rx: 2,
        style: `fill:${color(METHODS.indexOf(method))}` },
        drawn("title", {}, `${name}: ${number(end - start)} s, from ${number(start - step.start)} s`));
      svg.append(bar);
      if (wide > method.length * 6.2 + 8 && of === step.step) svg.append(drawn("text", { class: "on-bar", x: x(start) + 5, y: top + row / 2 + 4 }, method));
    }
    const busy = busySeconds(bars, step.start, step.end);
    rows.push([pool, run.gantt.pools[pool].processes, run.gantt.pools[pool].roles.join(", "), `${number(busy)} s`,
      `${number(span - busy)} s`, `${Math.round((1 - busy / span) * 100)} %`]);
  });
  for (const tick of ticks(0, span, 8)) {
    svg.append(drawn("text", { x: x(step.start + tick), y: height - 8, "text-anchor": "middle" }, `${number(tick)} s`));
  }
  const used = METHODS.filter((method) => step.bars.some((bar) => bar[1] === method));
  const keys = element("ul", { class: "legend" }, ...used.map((method) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${color(METHODS.indexOf(method))};height:10px` }), method)),
    element("li", {}, element("span", { class: "swatch", style: "background:var(--idle);height:10px" }), "idle"));
  byId("gantt").replaceChildren(element("figure", {}, element("figcaption", {}, `Step ${step.step}: ${number(span)} s`), keys, element("div", { class: "scroll", tabindex: "0" }, svg),
    element("p", { class: "reading" }, "A pale bar belongs to the step before or after. All processes of a pool are drawn as one; timeline.json has each.")));
  byId("pools").replaceChildren(element("h3", {}, "Pools in this step"), table(["pool", "processes", "roles", "busy", "idle", "idle share"], rows));
}

// ------------------------------------------------------------------------------------------------------- samples

function showSamples(run, index) {
  const step = run.samples[index];
  if (!step) {
    byId("samples-list").replaceChildren(element("p", { class: "faint" }, "No samples: trainer.keep_samples keeps some of every step."));
    return;
  }
  byId("samples-list").replaceChildren(...step.rows.map((row) => {
    const facts = [row.kind, row.data_source, row.pred === undefined || row.pred === null ? null : `read as ${row.pred}`,
      row.ground_truth === undefined || row.ground_truth === null ? null : `ground truth ${row.ground_truth}`].filter(Boolean).join(" · ");
    const mood = typeof row.score !== "number" ? "" : row.score > 0 ? "good" : "bad";
    return element("article", { class: "sample" },
      element("div", {}, element("strong", { class: mood }, `score ${number(row.score)}`), " ", element("span", { class: "faint" }, facts)),
      element("div", { class: "label" }, "prompt"), element("pre", { tabindex: "0" }, row.prompt ?? ""),
      ...(row.turns ?? [{ by: "response", text: row.response ?? "" }]).flatMap(turnParts),
      row.tokens?.length ? showTokens(row.tokens) : null);
  }));
}

// What the model said is trained; what it read between is not, and looks so.
function turnParts(turn) {
  const words = { model: "model", read: "read, not trained" }[turn.by] ?? turn.by;
  const facts = [words, turn.tokens === undefined ? null : `${number(turn.tokens)} tokens`,
    turn.reward ? `reward ${number(turn.reward)}` : null].filter(Boolean).join(" · ");
  return [element("div", { class: "label" }, facts), element("pre", { tabindex: "0", class: turn.by === "read" ? "read" : "" }, turn.text ?? "")];
}

// Each token with its log-prob and advantage, by pointing at it or, with the keyboard, by the arrow keys.
function showTokens(tokens) {
  const reading = element("div", { class: "reading", "aria-live": "polite" });
  const largest = Math.max(...tokens.map((token) => Math.abs(token[2] ?? 0))) || 1;
  const parts = tokens.map(([text, logProb, advantage, mask], index) => {
    const strength = Math.round(Math.abs(advantage ?? 0) / largest * 45);
    const tone = mask && advantage ? `background:color-mix(in srgb, var(--${advantage > 0 ? "good" : "bad"}) ${strength}%, transparent)` : "";
    return element("span", { class: mask ? "token" : "token masked", "data-index": index, style: tone }, text);
  });
  const box = element("pre", { class: "tokens", tabindex: "0", "aria-label": "tokens of the response" }, ...parts);
  let place = -1;
  const read = (index) => {
    parts[place]?.classList.remove("chosen");
    place = Math.max(0, Math.min(parts.length - 1, index));
    const [text, logProb, advantage, mask] = tokens[place];
    parts[place].classList.add("chosen");
    reading.textContent = `token ${place} ${JSON.stringify(text)}: log-prob ${number(logProb)}, probability ${number(logProb === null ? null : Math.exp(logProb))}, `
      + `advantage ${number(advantage)}, ${mask ? "written by the policy" : "not written by the policy: mask 0"}`;
  };
  box.addEventListener("pointerover", (event) => { if (event.target.dataset?.index) read(Number(event.target.dataset.index)); });
  box.addEventListener("focus", () => { if (place < 0) read(0); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    read(place + move);
  });
  return element("div", {}, element("div", { class: "label" }, "tokens"), box, reading);
}

// A choice of run and step, with buttons for the neighbours.
function chooser(prefix, stepsOf, show) {
  const [runs, steps] = [byId(`${prefix}-run`), byId(`${prefix}-step`)];
  const [previous, next] = [byId(`${prefix}-previous`), byId(`${prefix}-next`)];
  const update = () => {
    previous.disabled = steps.selectedIndex <= 0;
    next.disabled = steps.selectedIndex >= steps.options.length - 1;
    show(RUNS[runs.selectedIndex], steps.selectedIndex);
  };
  // The newest step is followed; another one stays chosen.
  const fillSteps = () => {
    const known = stepsOf(RUNS[runs.selectedIndex]);
    const follows = steps.selectedIndex === steps.options.length - 1;
    const chosen = known.findIndex((step) => String(step.step) === steps.value);
    if (steps.options.length === known.length && steps.options[known.length - 1]?.value === String(known.at(-1)?.step)) return;
    steps.replaceChildren(...known.map((step) => element("option", { value: step.step }, step.step)));
    steps.selectedIndex = follows || chosen < 0 ? known.length - 1 : chosen;
    if (follows || chosen < 0) update();
    else previous.disabled = steps.selectedIndex <= 0, next.disabled = steps.selectedIndex >= known.length - 1;
  };
  const refill = () => {
    const chosen = Math.max(0, runs.selectedIndex);
    runs.replaceChildren(...RUNS.map((run, index) => element("option", { value: index }, LABELS[index])));
    runs.selectedIndex = Math.min(chosen, RUNS.length - 1);
    runs.closest("label").hidden = !COMPARES;
    steps.replaceChildren();
    fillSteps();
    update();
  };
  runs.addEventListener("change", () => { steps.replaceChildren(); fillSteps(); update(); });
  steps.addEventListener("change", update);
  previous.addEventListener("click", () => { steps.selectedIndex -= 1; update(); });
  next.addEventListener("click", () => { steps.selectedIndex += 1; update(); });
  return { refill, fillSteps };
}

// -------------------------------------------------------------------------------- config, checkpoints, environment

function showConfig() {
  const all = byId("config-all").checked;
  const wanted = byId("config-find").value.toLowerCase();
  const keys = [...new Set(RUNS.flatMap((run) => run.config.map((row) => row[0])))];
  const rows = keys.map((key) => [key, RUNS.map((run) => run.config.find((row) => row[0] === key))])
    .filter(([, found]) => all || (COMPARES ? new Set(found.map((row) => row?.[1])).size > 1 : found[0][3]))
    .filter(([key]) => !wanted || `${key} ${DATA.meanings[key] ?? ""}`.toLowerCase().includes(wanted))
    .map(([key, found]) => [element("th", { scope: "row", class: "mono" }, breakable(key)),
      ...found.map((row) => element("td", { class: "mono" }, row?.[1] ?? "–")),
      element("td", { class: "mono faint" }, found.find(Boolean)[2]), element("td", { class: "faint" }, DATA.meanings[key] ?? "")]);
  byId("config-table").replaceChildren(rows.length
    ? table(["key", ...RUNS.map((run) => COMPARES ? run.name : "value"), "default", "meaning"], rows)
    : element("p", { class: "faint" }, COMPARES ? "The runs have the same configuration." : "Nothing differs from the defaults."));
}

function showCheckpoints() {
  const rows = RUNS.flatMap((run) => run.checkpoints.map((point) => [COMPARES ? `${run.name} step ${point.step}` : `step ${point.step}`,
    point.parts.join(", "), `${(point.bytes / 1e6).toFixed(1)} MB`, point.complete ? "yes" : "no", element("td", { class: "mono" }, breakable(point.path))]));
  byId("checkpoints-table").replaceChildren(rows.length ? table(["", "holds", "size", "can be resumed", "folder"], rows)
    : element("p", { class: "faint" }, "None: the last step and every trainer.save_freq steps are saved, unless that is -1."));
}

function named(index, text) { return COMPARES ? `${RUNS[index].name}: ${text}` : text; }

function showAlarms() {
  const lines = RUNS.flatMap((run, index) => run.alarms.map((row) => named(index, `step ${row.step}: ${row.alarms.join("; ")}`)));
  byId("alarms-list").replaceChildren(...(lines.length ? lines.map((line) => element("li", { class: "bad" }, line))
    : [element("li", { class: "faint" }, "No step was far from its run.")]));
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, String(value)]];
  if (Array.isArray(value) && value.every((item) => typeof item !== "object")) return [[prefix, value.join(" ")]];
  return Object.entries(value).flatMap(([name, item]) => flat(item, prefix ? `${prefix}.${name}` : name));
}

function showEnvironment() {
  const found = RUNS.map((run) => new Map(run.environment ? flat(run.environment) : []));
  const names = [...new Set(found.flatMap((known) => [...known.keys()]))];
  const rows = names.map((name) => [name, ...found.map((known) => element("td", { class: "mono" }, known.get(name) ?? "–"))]);
  byId("environment-table").replaceChildren(rows.length ? table(COMPARES ? ["", ...RUNS.map((run) => run.name)] : null, rows)
    : element("p", { class: "faint" }, "This run has no environment.json."));
}

// --------------------------------------------------------------------------------------------------------- start

const ganttChooser = chooser("gantt", (run) => run.gantt.steps, showGantt);
const samplesChooser = chooser("samples", (run) => run.samples, showSamples);

function fillMetrics() {
  const metrics = byId("any-metric"), chosen = metrics.value, known = allMetrics();
  if (metrics.options.length === known.length) return;
  metrics.replaceChildren(...known.map((name) => element("option", {}, name)));
  if (known.includes(chosen)) metrics.value = chosen;
}

// All of the page, from data that are new or came again.
function start(data) {
  DATA = data;
  RUNS = data.runs;
  COMPARES = RUNS.length > 1;
  LABELS = RUNS.map((run) => run.differs ? `${run.name} (${run.differs})` : run.name);
  CHART_NAMES = LABELS.every((label) => label.length <= 40) ? LABELS : RUNS.map((run) => run.name);
  METHODS = [...new Set([...PHASES, ...RUNS.flatMap((run) => run.gantt.steps.flatMap((step) => step.bars.map((bar) => bar[1])))])];
  fillMetrics();
  if (COMPARES) byId("config-all-text").textContent = "all keys, not only those in which the runs differ";
  byId("legend").replaceChildren(...(COMPARES ? RUNS.map((run, index) =>
    element("li", {}, element("span", { class: "swatch", style: `background:${color(index)}` }), LABELS[index])) : []));
  showSummary();
  showCurves();
  ganttChooser.refill();
  samplesChooser.refill();
  showConfig();
  showCheckpoints();
  showEnvironment();
  showAlarms();
  if (data.live) startNow();
  document.documentElement.dataset.ready = "yes";
}

byId("smoothing").addEventListener("input", showCurves);
byId("any-metric").addEventListener("change", showCurves);
byId("config-all").addEventListener("change", showConfig);
byId("config-find").addEventListener("input", showConfig);
