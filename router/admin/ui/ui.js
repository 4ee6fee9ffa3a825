// Asks /ui/data every two seconds and shows it. Texts are set as text content: no model's name or reason becomes markup.
"use strict";

const EVERY_MS = 2000;
const ROWS = 100;
const HANDED_OVER = { seeded: "handed over, seeded", plain: "handed over", aggregated: "one instance" };

const $ = (id) => document.getElementById(id);

function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
}

function put(parent, ...children) {
  parent.replaceChildren(...children);
  return parent;
}

function add(parent, ...children) {
  parent.append(...children);
  return parent;
}

const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const percent = (value) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(value >= 0.995 && value < 1 ? 1 : 0)} %`);

function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

function bar(share) {
  const outer = make("span", null, share >= 0.9 ? "bar full" : "bar");
  const inner = make("span");
  inner.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  outer.setAttribute("aria-hidden", "true");
  return add(outer, inner);
}

// --- the verdict, and the way of a request ---------------------------------------------------------------------------

function verdict(data) {
  const said = data.bottleneck;
  $("verdict").className = `verdict ${said.where}`;
  if ($("sentence").textContent !== said.sentence) $("sentence").textContent = said.sentence;
  put($("because"), ...said.because.map((line) => make("li", line)));
  $("now-s").textContent = data.window_s.now;
}

function step(title, held, big, unit, rows, small) {
  const item = make("li", null, [held ? "held" : "", small ? "small" : ""].join(" ").trim());
  const head = make("h3", title);
  if (held) add(head, make("span", "bottleneck", "tag"));
  const figure = make("div", `${big} `, "big");
  add(figure, make("small", unit));
  const list = make("dl");
  for (const [name, value, share] of rows) {
    add(list, make("dt", name), make("dd", value));
    if (share !== undefined && share !== null) add(list, bar(share));
  }
  return add(item, head, figure, list);
}

function poolStep(name, title, data) {
  const pool = data.pools[name];
  const where = data.bottleneck.where;
  const held = where === name || (where === "both" && (name === "both" || data.pools.both.instances === 0));
  const share = pool.limit ? pool.places / pool.limit : null;
  const rows = [
    ["running", number(pool.running, 1)],
    ["in the queue for it", number(pool.in_line, 1)],
    ["places taken", pool.limit === null ? number(pool.places, 1) : `${number(pool.places, 1)} of ${pool.limit}`, share],
    ["KV memory", percent(pool.kv_usage), pool.kv_usage],
    ["instances ready", `${pool.ready} of ${pool.instances}`],
    name === "prefill"
      ? ["prompt tokens", `${number(pool.prompt_tokens_s)} /s`]
      : ["tokens made", `${number(pool.generation_tokens_s)} /s`],
  ];
  return step(title, held, number(pool.waiting + (name === "both" ? pool.pulling : 0), 1), "waiting in engines", rows, false);
}

function flow(data) {
  const pools = data.pools;
  const steps = [step("Queue", data.bottleneck.where === "router", number(data.line), "waiting in routers", [["answered", `${number(data.rate, 1)} /s`], ["mean, 5 min", number(data.windows.five_minutes.line, 1)]], true)];
  const split = pools.prefill.instances + pools.decode.instances > 0;
  if (split) {
    const over = data.pairs.reduce((sum, pair) => sum + pair.handed_over, 0);
    const failed = data.pairs.reduce((sum, pair) => sum + pair.failed, 0);
    steps.push(poolStep("prefill", "Prefill", data));
    steps.push(step("Hand-over", data.bottleneck.where === "handoff", number(pools.decode.pulling, 1), "being pulled", [["so far", number(over)], ["failed", number(failed)]], true));
    steps.push(poolStep("decode", "Decode", data));
  }
  if (pools.both.instances) steps.push(poolStep("both", split ? "Both legs" : "Prefill and decode", data));
  put($("flow"), ...steps);
}

// --- figures ---------------------------------------------------------------------------------------------------------

function tile(title, value, small) {
  return add(make("div", null, "tile"), make("h3", title), make("p", value), ...small.map((line) => make("div", line, "dim")));
}

const PARTS = { queue_p: "queue at prefill", handoff_queue_d: "hand-over and queue at decode", queue: "queue", credit: "queue in the router", source: "another instance's answer", prefill_leg: "prefill", whole_leg: "engine", decode_leg: "decode", step_d: "decode's step", residual: "network and HTTP" };

function parts(told) {
  const largest = Object.entries(told).slice(0, 3).filter(([, value]) => value >= 0.5);
  return largest.map(([name, value]) => `${PARTS[name] || name} ${ms(value)}`).join(", ") || "–";
}

function times(title, kind, data) {
  const now = data.windows.now.times_ms[kind];
  const five = data.windows.five_minutes.times_ms[kind];
  const spread = (each) => `p90 ${ms(each[1])} · p99 ${ms(each[2])}`;
  const lines = [`now: ${spread(now)}`, `5 min: median ${ms(five[0])} · ${spread(five)}`];
  return tile(title, `${ms(now[0])} median`, kind === "ttft" ? [...lines, `mean, by part: ${parts(data.windows.now.ttft_parts_ms)}`] : lines);
}

function figures(data) {
  const now = data.windows.now;
  const bad = now.ended - now.served;
  put(
    $("tiles"),
    tile("Requests answered", `${number(data.rate, 1)} /s`, [`now: ${now.served} served${bad ? `, ${bad} not` : ""} in ${data.window_s.now} s`, `5 min: ${number(data.windows.five_minutes.served)} served, ${number(data.windows.five_minutes.ended - data.windows.five_minutes.served)} not`]),
    times("TTFT: time to first token", "ttft", data),
    times("TT2T: first to second token", "tt2t", data),
    times("TPOT: per token after it", "tpot", data),
  );
}

// --- charts ----------------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 92, LEFT = 46, TOP = 8, BOTTOM = 16;

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function curve(values, top) {
  const wide = (WIDTH - LEFT) / (values.length - 1);
  let path = "", down = false;
  values.forEach((value, at) => {
    if (value === null) { down = false; return; }
    const y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    path += `${down ? "L" : "M"}${(LEFT + at * wide).toFixed(1)} ${y.toFixed(1)}`;
    down = true;
  });
  return path;
}

function chart(title, series, say) {
  const values = series.flatMap((each) => each.values).filter((value) => value !== null);
  const top = Math.max(1e-9, ...values) || 1;
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const last = series.map((each) => `${each.name} ${say(each.values[each.values.length - 1])}`).join(", ");
  add(svg, draw("title", {}, `${title}, last five minutes; now ${last}; highest ${say(top)}`));
  for (const y of [TOP, HEIGHT - BOTTOM]) add(svg, draw("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y, class: "grid" }));
  add(svg, draw("text", { x: LEFT - 4, y: TOP + 4, "text-anchor": "end" }, say(top)));
  add(svg, draw("text", { x: LEFT - 4, y: HEIGHT - BOTTOM + 3, "text-anchor": "end" }, "0"));
  add(svg, draw("text", { x: LEFT, y: HEIGHT - 3 }, "5 min ago"), draw("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  for (const each of series) add(svg, draw("path", { d: curve(each.values, top), class: each.look }));
  const key = make("p", null, "key");
  for (const each of series) add(key, make("span", `${each.mark} ${each.name}`, each.look));
  return add(make("div", null, "chart"), make("h3", title), svg, key);
}

function charts(data) {
  const slots = data.history.slots;
  const waiting = (name) => slots.map((slot) => slot.waiting[name]);
  const seconds = data.history.slot_s;
  const waits = [{ name: "for prefill", values: waiting("prefill"), look: "s-prefill", mark: "—" }, { name: "for decode", values: waiting("decode"), look: "s-decode", mark: "- -" }];
  if (data.pools.both.instances) waits.push({ name: "for both", values: waiting("both"), look: "s-hand", mark: "··" });
  else waits.push({ name: "for hand-over", values: waiting("handoff"), look: "s-hand", mark: "··" });
  put(
    $("charts"),
    chart("Requests waiting", waits, (value) => number(value, 1)),
    chart("Mean times", [
      { name: "TTFT", values: slots.map((slot) => slot.ttft_ms), look: "s-prefill", mark: "—" },
      { name: "TT2T", values: slots.map((slot) => slot.tt2t_ms), look: "s-decode", mark: "- -" },
    ], ms),
    chart("Requests that ended, per second", [{ name: "ended", values: slots.map((slot) => slot.ended / seconds), look: "s-prefill", mark: "—" }], (value) => number(value, 1)),
  );
}

// --- tables ----------------------------------------------------------------------------------------------------------

function table(id, columns, rows, empty) {
  const head = make("tr");
  for (const [name, right] of columns) {
    const cell = make("th", name, right ? "n" : "");
    cell.scope = "col";
    add(head, cell);
  }
  const body = make("tbody");
  for (const cells of rows) {
    const row = make("tr");
    cells.forEach((cell, at) => {
      const node = cell instanceof Node ? cell : make("td", cell);
      if (columns[at][1]) node.classList.add("n");
      add(row, node);
    });
    add(body, row);
  }
  if (!rows.length) {
    const cell = make("td", empty, "dim");
    cell.colSpan = columns.length;
    add(body, add(make("tr"), cell));
  }
  put($(id), add(make("thead"), head), body);
}

const STATES = { up: ["ready", "good"], quarantined: ["quarantined", "bad"], down: ["down", "bad"], failed: ["failed", "bad"], gone: ["gone", "bad"] };

function kv(share) {
  return add(make("td", percent(share)), bar(share));
}

// Of a large fleet, the instances to look at: those that are not ready, then those with the most waiting requests.
function shown(all) {
  if (all.length <= ROWS) return all;
  const trouble = (each) => (each.state === "up" ? 0 : 1e9) + each.waiting;
  return [...all].sort((a, b) => trouble(b) - trouble(a)).slice(0, ROWS);
}

// Prompt tokens that were handed over to an instance and that it computed itself: there should be none.
function again(each) {
  if (each.recomputed_tokens === null) return make("td", "", "dim");
  return make("td", number(each.recomputed_tokens), each.recomputed_lately ? "bad" : each.recomputed_tokens ? "warn" : "dim");
}

function instances(data) {
  const more = data.instances.length - ROWS;
  const unproven = Object.entries(data.unproven).map(([name, because]) => `${name} (${because})`);
  put($("scaling"), data.scaling ? `Sized by the controller at ${data.scaling.controller}: ${data.scaling.says}` : "");
  put($("unproven"), unproven.length ? `Ignored in the registry: ${unproven.join("; ")}` : "");
  $("instances-more").textContent = more > 0 ? `${more} others are not shown: they are ready, or have less waiting.` : "";
  table(
    "instances",
    [["instance"], ["role"], ["state"], ["running", true], ["waiting", true], ["legs of credits", true], ["KV memory", true], ["prompt tokens/s", true], ["tokens made/s", true], ["computed again", true], ["speed"], ["model"]],
    shown(data.instances).map((each) => {
      const [state, look] = STATES[each.state] || [each.state, "warn"];
      const kept = each.tenants?.length ? ` · only for ${each.tenants.join(", ")}` : "";
      return [
        each.id, each.role, make("td", each.detail ? `${state}: ${each.detail}` : state, look),
        number(each.running), number(each.waiting),
        each.credits === null ? number(each.legs) : `${each.legs} of ${each.credits}`,
        kv(each.kv_usage), number(each.prompt_tokens_s), number(each.generation_tokens_s), again(each), speed(each), make("td", each.models.join(", ") + kept, "dim"),
      ];
    }),
    "No instance is known.",
  );
}

// By kind of prediction: the number of instances where it was told, is learned or assumed; 1 if it is for all requests.
function basis(data) {
  $("basis-part").hidden = !data.basis.length;
  const count = (value, look) => make("td", value ? number(value) : "", look);
  table(
    "basis",
    [["predicted"], ["told", true], ["learned", true], ["assumed", true], ["what is assumed, or how much was measured"]],
    data.basis.map((each) => [
      each.title, count(each.told, "good"), count(each.learned, "good"), count(each.assumed, "warn"),
      make("td", each.assumes || (each.seen ? `learned from ${number(each.seen)}` : ""), "dim"),
    ]),
    "",
  );
}

const ORIGINS = { told: "good", learned: "good", assumed: "warn" };

// The source of an instance's speed: "learned, 31 prompts, 5.4 ×".
function speed(each) {
  const told = each.basis?.prompts || each.basis?.steps;
  if (!told) return make("td", "", "dim");
  const things = each.basis.prompts ? "prompts" : "answers";
  const measured = told.seen ? `, ${number(told.seen)} ${things}, ${number(told.factor, 2)} ×` : "";
  return make("td", told.from + measured, ORIGINS[told.from]);
}

function pairs(data) {
  const whole = data.served_whole.map((name) => name || "without a class");
  $("pairs-part").hidden = !data.pairs.length && !whole.length;
  put($("served-whole"), whole.length ? `Served whole for now, since handing over loses: ${whole.join(", ")}` : "");
  table(
    "pairs",
    [["prefill"], ["decode"], ["handed over", true], ["failed", true], ["last failure"]],
    data.pairs.slice(0, 24).map((each) => [each.prefill, each.decode, number(each.handed_over), make("td", number(each.failed), each.failed ? "bad" : ""), each.apart ? make("td", `nothing is handed over for now: ${each.last_failure || "not met, or pulls have failed"}`, "bad") : make("td", each.unseeded ? `handed over, but not seeded: ${each.unseeded}` : each.last_failure, "dim")]),
    "",
  );
}

function classes(data) {
  $("classes-part").hidden = !data.classes.length;
  const cell = (window, target) => {
    const share = window.attainment;
    const look = share === null ? "dim" : target && share < target ? "bad" : "good";
    return make("td", share === null ? "no request" : `${percent(share)} of ${window.counted}`, look);
  };
  const late = (window) => [window.late_ttft ? `${window.late_ttft} first token late` : "", window.late_tpot ? `${window.late_tpot} tokens slow` : "", window.shed ? `${window.shed} refused` : ""].filter(Boolean).join(", ") || "nothing";
  table(
    "classes",
    [["class"], ["promises"], ["target", true], [`met, last ${data.window_s.now} s`, true], ["met, 5 min", true], ["missed by, 5 min"]],
    data.classes.map((each) => {
      const { attainment, ...targets } = each.targets;
      const said = Object.entries(targets).map(([name, value]) => `${name.replace("_ms", "").toUpperCase()} ${ms(value)}`).join(", ");
      return [each.name, said, percent(attainment), cell(each.now, attainment), cell(each.five_minutes, attainment), late(each.five_minutes)];
    }),
    "",
  );
}

function requests(data) {
  const many = data.routers.length > 1;
  table(
    "requests",
    [["request"], ["ago", true], ["state"], ["way"], ["prefill → decode"], ["TTFT", true], ["TT2T", true], ["total", true], ["because"], ...(many ? [["router"]] : [])],
    data.requests.map((each) => {
      const link = make("a", each.id);
      link.href = `/explain/${encodeURIComponent(each.id)}`;
      const choice = each.choice;
      const way = choice.decode ? (choice.prefill ? `${choice.prefill} → ${choice.decode}` : choice.decode) : choice.prefill || (choice.wait ? "in the queue" : "–");
      const look = each.state === "served" ? "good" : each.state === "open" ? "" : "bad";
      const cells = [add(make("td", null, "id"), link), ms(each.ago_s * 1000), make("td", each.state, look), make("td", each.state === "open" && each.ttft_ms === null ? "under way" : HANDED_OVER[each.way] || each.way, "nowrap"), make("td", way, "nowrap"), ms(each.ttft_ms), ms(each.tt2t_ms), ms(each.total_ms), make("td", choice.because || "", "dim")];
      return many ? [...cells, make("td", each.router, "dim")] : cells;
    }),
    "No request has come yet.",
  );
}

function routers(data) {
  $("routers-part").hidden = data.routers.length < 2;
  table(
    "routers",
    [["router"], ["state"], ["in the queue", true], ["late to its work", true]],
    data.routers.map((each) => [each.router, make("td", each.detail ? `${each.state}: ${each.detail}` : each.state, each.state === "silent" ? "bad" : "good"), number(each.line), each.late_s === undefined ? "–" : ms(each.late_s * 1000)]),
    "",
  );
}

// --- asking ----------------------------------------------------------------------------------------------------------

function show(data) {
  const count = data.routers.filter((each) => each.state !== "silent").length;
  $("whose").textContent = count > 1 ? `${data.router}, and ${count - 1} other router${count > 2 ? "s" : ""}` : data.router;
  document.title = { prefill: "Prefill is the bottleneck", decode: "Decode is the bottleneck", handoff: "The hand-over is the bottleneck", router: "The routers are the bottleneck", both: "Both pools are short" }[data.bottleneck.where] || "Baton";
  for (const part of [verdict, flow, figures, charts, classes, instances, basis, pairs, requests, routers]) part(data);
}

function status(text, look) {
  $("age").className = look;
  $("age").textContent = text;
}

let timer = 0;

async function ask() {
  clearTimeout(timer);
  try {
    const answer = await fetch("/ui/data", { cache: "no-store" });
    if (answer.status === 401) {
      status("This router asks for a key. Open the page on its own machine, or through ssh -L 8001:127.0.0.1:8001 HOST.", "bad");
      return;
    }
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
    status(`as of ${new Date().toLocaleTimeString()}, every ${EVERY_MS / 1000} s`, "");
  } catch (error) {
    status(`The router does not answer (${error.message}); what is shown is old.`, "bad");
  } finally {
    if (!document.hidden) timer = setTimeout(ask, EVERY_MS);
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
ask();
