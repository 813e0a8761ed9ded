"use strict";
// Draws the facts below the page. Whatever comes from a run becomes text (`textContent`), never markup.
(() => {
  const run = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const SVG = "http://www.w3.org/2000/svg";
  const COLORS = 8;
  const MAX_LINES = 2000;
  const RELOAD = 15;

  // -- small things ----------------------------------------------------------------------------
  const add = (parent, tag, attributes = {}, text) => {
    const svg = parent.namespaceURI === SVG || tag === "svg";
    const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  };
  const number = (value) => {
    if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
    if (Number.isSafeInteger(value)) return String(value);
    if (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) return String(+value.toPrecision(5));
    return value.toExponential(2);
  };
  const bytes = (value) => {
    let power = 0;
    for (; value >= 1024 && power < 4; power++) value /= 1024;
    return `${power ? value.toPrecision(3) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  };
  const seconds = (value) => {
    if (!(value >= 0)) return "";
    if (value < 120) return `${+value.toPrecision(3)} s`;
    if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
    return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  };
  const moment = (unix) => (unix ? new Date(unix * 1000).toLocaleString() : "");
  const color = (index) => `var(--c${index % COLORS})`;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const section = (title) => {
    const made = add(page, "section");
    add(made, "h2", {}, title);
    return made;
  };
  const table = (parent, heads, rows) => {
    const made = add(add(parent, "div", { class: "scroll" }), "table");
    const top = add(add(made, "thead"), "tr");
    const wide = (index) => rows.length > 0 && rows.every((row) => row[index] === "" || typeof row[index] === "number");
    heads.forEach((head, index) => add(top, "th", wide(index) ? { class: "number" } : {}, head));
    const body = add(made, "tbody");
    for (const row of rows) {
      const line = add(body, "tr");
      row.forEach((cell, index) => add(line, "td", wide(index) ? { class: "number" } : {}, number(cell)));
    }
  };

  // -- a chart of lines --------------------------------------------------------------------------
  const WIDTH = 400, HEIGHT = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
  const ticks = (low, high, count) => {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
    const found = [];
    const first = Math.ceil(low / step) * step;
    // From 2 ** 53 on, adding a step may change nothing: only the count ends the loop.
    for (let i = 0; i <= count && first + i * step <= high + step * 1e-9; i++) found.push(+(first + i * step).toPrecision(12));
    return found;
  };
  const logTicks = (low, high) => {
    const found = [];
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    const every = Math.max(1, Math.ceil((last - first) / 4));
    for (let power = first; power <= last; power += every) {
      const at = 10 ** power;
      if (at >= low * 0.999 && at <= high * 1.001) found.push(at);
    }
    return found.length ? found : [low, high];
  };

  // lines: [{x: [...], y: [...], color, other, name}], a y of null is a gap; draws again by the function that it returns.
  const chart = (parent, title, lines, format, when, axis, fromZero) => {
    const card = add(parent, "div", { class: "card chart" });
    const top = add(card, "div", { class: "top" });
    add(top, "h3", {}, title);
    const now = add(top, "span", { class: "now" });
    const svg = add(card, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    const tip = add(card, "div", { class: "tip", hidden: "" });
    let logarithmic = false, place = null;
    const draw = () => {
      svg.replaceChildren();
      tip.hidden = true;
      const drawn = (value) => value !== null && (!logarithmic || value > 0);
      const shown = lines();
      const xs = shown.flatMap((line) => line.x), ys = shown.flatMap((line) => line.y.filter(drawn));
      if (!ys.length) {
        add(svg, "text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, logarithmic ? "nothing above 0" : "no finite value");
        place = null;
        return;
      }
      const least = (values) => values.reduce((a, b) => (b < a ? b : a)), most = (values) => values.reduce((a, b) => (b > a ? b : a));
      let x0 = least(xs), x1 = most(xs), y0 = least(ys), y1 = most(ys);
      if (fromZero && !logarithmic) y0 = Math.min(0, y0);
      if (x0 === x1) x1 = x0 + Math.max(1, Math.abs(x0) * 1e-9);
      if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
      if (logarithmic && y0 <= 0) y0 = y1 / 10;
      const scale = logarithmic ? Math.log10 : (value) => value;
      const px = (value) => LEFT + ((value - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
      const py = (value) => HEIGHT - BOTTOM - ((scale(value) - scale(y0)) / (scale(y1) - scale(y0))) * (HEIGHT - TOP - BOTTOM);
      for (const at of logarithmic ? logTicks(y0, y1) : ticks(y0, y1, 4)) {
        add(svg, "line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: py(at), y2: py(at) });
        add(svg, "text", { x: LEFT - 6, y: py(at) + 4, "text-anchor": "end" }, format(at));
      }
      for (const at of ticks(x0, x1, 5)) {
        if (px(at) < WIDTH - 24) add(svg, "text", { x: px(at), y: HEIGHT - 5, "text-anchor": "middle" }, axis(at));
      }
      for (const line of [...shown].sort((a, b) => (b.other ? 1 : 0) - (a.other ? 1 : 0))) {
        // A gap lifts the pen. So does a new attempt, which goes back to the step of its checkpoint.
        const joins = (i) => i > 0 && drawn(line.y[i - 1]) && line.x[i] >= line.x[i - 1];
        const points = line.x.map((x, i) => (drawn(line.y[i]) ? `${joins(i) ? "L" : "M"}${px(x).toFixed(1)} ${py(line.y[i]).toFixed(1)}${joins(i) ? "" : "h0"}` : "")).join("");
        add(svg, "path", { class: line.other ? "curve other" : "curve", d: points, ...(line.other ? {} : { style: `stroke: ${line.color}` }) });
      }
      place = { shown, x0, x1, px, py, cross: add(svg, "line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }), dots: [] };
      const main = shown.filter((line) => !line.other);
      now.textContent = main.map((line) => format(line.y[line.y.length - 1] ?? "nan")).slice(0, 4).join(" · ");
    };
    const near = (line, x) => line.x.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(line.x[best] - x) ? i : best), 0);
    const leave = () => {
      tip.hidden = true;
      if (place) place.cross.setAttribute("visibility", "hidden");
      if (place) place.dots.splice(0).forEach((dot) => dot.remove());
    };
    svg.addEventListener("pointermove", (event) => {
      leave();
      if (!place) return;
      const box = svg.getBoundingClientRect(), left = event.clientX - box.left;
      const x = place.x0 + ((left / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (place.x1 - place.x0);
      const main = place.shown.filter((line) => !line.other), others = place.shown.filter((line) => line.other);
      const lead = main[0] || others[0], at = lead.x[near(lead, x)];
      for (const [name, value] of [["x1", place.px(at)], ["x2", place.px(at)], ["visibility", "visible"]]) place.cross.setAttribute(name, value);
      const text = [when(at)];
      for (const line of main.slice(0, 8)) {
        const value = line.y[near(line, at)];
        text.push(`${main.length > 1 || others.length ? `${line.name}: ` : ""}${value === null ? "not finite" : format(value)}`);
        if (value !== null && !(logarithmic && value <= 0)) place.dots.push(add(svg, "circle", { cx: place.px(at), cy: place.py(value), r: 3.5, style: `fill: ${line.color}` }));
      }
      const values = others.map((line) => [line.y[near(line, at)], line.name]).filter(([value]) => value !== null).sort((a, b) => a[0] - b[0]);
      if (values.length === 1) text.push(`${values[0][1]}: ${format(values[0][0])}`);
      if (values.length > 1) text.push(`lowest ${format(values[0][0])} (${values[0][1]})`, `highest ${format(values[values.length - 1][0])} (${values[values.length - 1][1]})`);
      tip.textContent = text.join("\n");
      tip.hidden = false;
      tip.style.left = "0";
      tip.style.left = `${Math.min(Math.max(0, place.px(at) / WIDTH * box.width + 24), card.clientWidth - tip.offsetWidth - 6)}px`;
    });
    svg.addEventListener("pointerleave", leave);
    draw();
    return (log) => { logarithmic = log; draw(); };
  };

  // -- the parts of the page ---------------------------------------------------------------------
  const heading = () => {
    const head = add(page, "div", { class: "head" });
    add(head, "h1", {}, run.id);
    add(head, "span", { class: `badge ${/^[a-z]+$/.test(run.state) ? run.state : ""}` }, run.shown);
    add(page, "p", { class: "sub" }, `${run.name} on ${run.world} ranks · submitted ${moment(run.created)} · ${run.directory}`);
    if (run.engine_url && /^https?:/.test(run.engine_url)) {
      add(add(page, "p", { class: "sub" }), "a", { href: run.engine_url, rel: "noreferrer" }, "Spark UI");
    }
    if (!run.ended && run.progress) {
      const { done, total, unit, seconds_left: left } = run.progress;
      const card = add(page, "div", { class: "card", style: "margin-top: 14px" });
      if (total > 0) add(card, "progress", { max: total, value: done, "aria-label": "progress" });
      add(card, "div", {}, `${number(done)}${total ? ` of ${number(total)}` : ""} ${unit}${left === null ? "" : `, ${seconds(left)} left`}`);
    }
    if (run.error) {
      const cause = add(page, "div", { class: "card cause" });
      add(cause, "h3", {}, `First cause: ${run.error.type || "error"}`);
      add(cause, "pre", {}, run.error.message || "");
    }
    const facts = [["took", run.started ? seconds((run.ended || run.now) - run.started) : ""], ["attempts", run.attempt + 1], ["checkpoints", run.checkpoints.length]];
    if (run.result) facts.push(["result", bytes(run.result.size || 0)]);
    facts.push(["used", run.used]);
    for (const [name, value] of Object.entries(run.throughput)) facts.push([name.replaceAll("_", " "), number(value)]);
    for (const [name, value] of Object.entries(run.last).slice(0, 8)) facts.push([name, number(value)]);
    const tiles = add(page, "div", { class: "tiles" });
    for (const [name, value] of facts) {
      if (value === "") continue;
      const tile = add(tiles, "div", { class: "card tile" });
      add(tile, "div", { class: "what" }, name);
      add(tile, "div", { class: "value" }, value);
    }
  };

  const metrics = () => {
    if (!run.curves.length) return;
    const made = section("Metrics");
    let byTime = false, log = false;
    const tools = add(made, "div", { class: "tools" });
    const toggle = (text, act) => {
      const button = add(tools, "button", { type: "button", "aria-pressed": "false" }, text);
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        act(on);
        redraw.forEach((draw) => draw(log));
      });
    };
    toggle("by time", (on) => { byTime = on; });
    toggle("log scale", (on) => { log = on; });
    add(tools, "span", {}, `rank 0 bold, other ranks faint, by ${run.steps || "report"}`);
    const grid = add(made, "div", { class: "grid" });
    const from = run.started || run.created;
    const redraw = run.curves.map((curve) => chart(grid, curve.name, () => curve.ranks.map((one) => ({
      x: byTime ? one.t.map((at) => at - from) : one.s, y: one.v, other: one.rank !== 0, color: color(0), name: `rank ${one.rank}`,
    })), number, (at) => (byTime ? seconds(at) : `${run.steps || "report"} ${number(at)}`), (at) => (byTime ? seconds(at) : number(at))));
  };

  const timeline = () => {
    if (!run.ranks.length) return;
    const made = section("Timeline");
    const legend = add(made, "p", { class: "legend" });
    const phases = [["interpreter and torch", "--load"], ["waits for the others", "--meet"], ["training", "--train"], ["failed", "--bad"], ["checkpoint", "--good"], ["restart", "--warn"]];
    for (const [name, paint] of phases) {
      const item = add(legend, "span");
      add(item, "i", { style: `background: var(${paint})` });
      item.append(name);
    }
    const numbers = [...new Set(run.ranks.map((one) => one.rank))].sort((a, b) => a - b);
    const row = numbers.length > 200 ? 4 : numbers.length > 40 ? 12 : 18;
    const left = 116, wide = 1160, bottom = 24, head = 10, high = numbers.length * row + bottom + head;
    const first = Math.min(...run.ranks.map((one) => one.started || one.entered));
    const last = Math.max(first + 0.1, run.ended || run.now, ...run.ranks.map((one) => one.ended || 0));
    const px = (at) => left + ((Math.min(Math.max(at, first), last) - first) / (last - first)) * (wide - left - 8);
    const card = add(add(made, "div", { class: "card" }), "div", { class: "scroll" });
    const svg = add(card, "svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, role: "img", "aria-label": "timeline of all ranks", style: "min-width: 860px; width: 100%; height: auto" });
    for (const at of ticks(0, last - first, 8)) {
      add(svg, "line", { class: "rule", x1: px(first + at), x2: px(first + at), y1: 0, y2: high - bottom });
      add(svg, "text", { x: px(first + at), y: high - 6, "text-anchor": "middle" }, seconds(at));
    }
    const bar = (from, to, y, paint, text) => {
      if (!(to > from)) return;
      const rect = add(svg, "rect", { x: px(from), y, width: Math.max(1, px(to) - px(from)), height: Math.max(2, row - 3), rx: row > 8 ? 2 : 0, style: `fill: var(${paint})` });
      add(rect, "title", {}, text);
    };
    const hosts = new Map(run.ranks.map((one) => [one.rank, one.host]));
    numbers.forEach((rank, index) => {
      if (row > 4 || index % 10 === 0) add(svg, "text", { x: 0, y: head + index * row + row * 2 / 3 }, `${rank} ${hosts.get(rank) || ""}`.slice(0, 17));
    });
    for (const one of run.ranks) {
      const y = head + numbers.indexOf(one.rank) * row;
      const failed = one.outcome === "failed";
      const end = one.ended || (run.ranks.some((other) => other.attempt > one.attempt) ? one.reported || one.entered : last);
      const told = `rank ${one.rank}, attempt ${one.attempt}, ${one.host || "?"}`;
      bar(one.started, one.imported, y, "--load", `${told}: loaded torch in ${seconds(one.imported - one.started)}`);
      bar(one.imported, one.entered, y, "--meet", `${told}: waited for the others ${seconds(one.entered - one.imported)}`);
      bar(one.entered, end, y, "--train", `${told}: ${one.reports} reports in ${seconds(end - one.entered)}`);
      if (failed) {
        const mark = add(svg, "rect", { x: px(one.ended) - 4, y, width: 6, height: Math.max(2, row - 3), style: "fill: var(--bad)" });
        add(mark, "title", {}, `${told} failed: ${one.what || ""}`);
      }
    }
    for (const mark of run.marks) {
      const paint = { checkpoint: "--good", restart: "--warn" }[mark.type];
      if (!paint || mark.time < first) continue;
      const line = add(svg, "line", { x1: px(mark.time), x2: px(mark.time), y1: 0, y2: high - bottom, style: `stroke: var(${paint}); stroke-width: 2` });
      add(line, "title", {}, mark.text);
    }
    const told = run.marks.filter((mark) => !["state", "checkpoint"].includes(mark.type));
    if (told.length) table(made, ["after", "", "rank", "what"], told.map((mark) => [seconds(mark.time - run.created), mark.type, mark.rank === null || mark.rank === undefined ? "" : `rank ${mark.rank}`, mark.text]));
  };

  const hosts = () => {
    if (!run.hosts.length) return;
    const made = section("Hosts");
    const grid = add(made, "div", { class: "grid" });
    for (const host of run.hosts) {
      const from = run.started || run.created;
      const lines = (...names) => () => names.filter((name) => host.columns[name]).map((name, index) => ({
        x: host.columns[name].t.map((at) => at - from), y: host.columns[name].v, color: color(index), name,
      }));
      const draw = (title, format, ...names) => { if (names.some((name) => host.columns[name])) chart(grid, `${host.host}: ${title}`, lines(...names), format, seconds, seconds, true); };
      draw(`busy cores of ${host.cores}`, number, "cpu");
      draw(`memory of ${bytes(host.memory_total || 0)}`, bytes, "memory");
      const gpus = Object.keys(host.columns).filter((name) => name.startsWith("gpu "));
      draw("use of each GPU", number, ...gpus.filter((name) => name.endsWith("use")));
      draw(`memory of each GPU, of ${bytes(host.gpu_memory_total || 0)}`, bytes, ...gpus.filter((name) => name.endsWith("memory")));
    }
  };

  const kept = () => {
    if (!run.result && !run.checkpoints.length) return;
    const made = section("Result and checkpoints");
    const rows = run.checkpoints.map((one) => [one.id, bytes(one.size), Object.entries(one.metrics || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ")]);
    if (run.result) rows.push(["result", bytes(run.result.size || 0), [run.result.format, run.result.uri, run.result.digest].filter(Boolean).join(", ")]);
    table(made, ["", "size", ""], rows);
  };

  const config = () => {
    const made = section("Configuration");
    const { params, ...rest } = run.config;
    const named = Object.entries(params || {}).map(([name, value]) => [name in rest ? `argument ${name}` : name, value]);
    const facts = { ...Object.fromEntries(named), ...rest, ...run.labels, identity: run.identity || undefined, torch: (run.ranks[0] || {}).torch };
    const rows = Object.entries(facts).filter(([, value]) => value !== undefined && value !== null);
    table(made, ["option", "value"], rows.map(([name, value]) => [name, text(value)]));
    add(made, "p", { class: "note" }, "Environment variables and Spark's configuration are in no file of a run, since they may hold secrets.");
  };

  // Yields the class and text of each part of a line: colors and bold of a terminal are shown, other sequences left out.
  const ESCAPE = /\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)/g;
  function* colored(line) {
    let from = 0, ink = "", bold = "";
    for (const found of [...line.matchAll(ESCAPE), { 0: "", index: line.length }]) {
      if (found.index > from) yield [`${ink} ${bold}`.trim(), line.slice(from, found.index)];
      from = found.index + found[0].length;
      const codes = found[0].endsWith("m") ? found[0].slice(2, -1).split(";").map(Number) : [];
      for (let i = 0; i < codes.length; i++) {
        const code = codes[i];
        if (code === 38 || code === 48) i += codes[i + 1] === 5 ? 2 : 4;
        else if (code === 0) ink = bold = "";
        else if (code === 1) bold = "bold";
        else if (code === 22) bold = "";
        else if (code === 39) ink = "";
        else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) ink = `ansi${code % 10}`;
      }
    }
  }

  const logs = () => {
    if (!run.logs.length) return;
    const made = section("Logs");
    const tools = add(made, "div", { class: "tools" });
    const choice = add(tools, "select", { "aria-label": "rank" });
    add(choice, "option", { value: "" }, "all ranks");
    for (const one of run.logs) add(choice, "option", { value: one.rank }, `rank ${one.rank}`);
    if (run.error && run.logs.some((one) => one.rank === run.error.rank)) choice.value = run.error.rank;
    const search = add(tools, "input", { type: "search", placeholder: "search in the lines", "aria-label": "search" });
    const times = add(tools, "button", { type: "button", "aria-pressed": "false" }, "times");
    const count = add(tools, "span");
    const box = add(add(made, "div", { class: "card" }), "pre", { class: "log" });
    const draw = () => {
      const word = search.value.toLowerCase();
      const found = [];
      let cut = false;
      for (const one of run.logs) {
        if (choice.value !== "" && one.rank !== Number(choice.value)) continue;
        cut = cut || one.cut;
        one.lines.forEach((line, index) => {
          if (!word || line.replace(ESCAPE, "").toLowerCase().includes(word)) found.push([one.rank, line, one.times[index]]);
        });
      }
      // The sort keeps the order of lines of one time, and so that of each rank.
      found.sort((a, b) => a[2] - b[2]);
      const timed = times.getAttribute("aria-pressed") === "true";
      box.replaceChildren();
      for (const [rank, line, when] of found.slice(-MAX_LINES)) {
        if (timed && when !== null) add(box, "span", { class: "rank" }, `${new Date((run.created + when) * 1000).toLocaleTimeString()} `);
        add(box, "span", { class: "rank" }, `[${rank}] `);
        for (const [style, part] of colored(line)) {
          const target = style ? add(box, "span", { class: style }) : box;
          const at = word ? part.toLowerCase().indexOf(word) : -1;
          target.append(at < 0 ? part : part.slice(0, at));
          if (at < 0) continue;
          add(target, "mark", {}, part.slice(at, at + word.length));
          target.append(part.slice(at + word.length));
        }
        box.append("\n");
      }
      const shown = Math.min(found.length, MAX_LINES);
      count.textContent = `${found.length} lines${shown < found.length ? `, the last ${shown} shown` : ""}${cut ? "; earlier ones are in the run's directory only" : ""}`;
    };
    choice.addEventListener("change", draw);
    times.addEventListener("click", () => {
      times.setAttribute("aria-pressed", String(times.getAttribute("aria-pressed") !== "true"));
      draw();
    });
    search.addEventListener("input", draw);
    draw();
    box.scrollTop = box.scrollHeight;
  };

  heading();
  metrics();
  timeline();
  hosts();
  kept();
  logs();
  config();
  // A saved file stays unchanged.
  const lives = location.protocol.startsWith("http") && !run.ended;
  add(page, "p", { class: "note" }, `Made by rankzero, ${moment(run.now)}${lives ? `; the page reloads every ${RELOAD} s until you use it` : ""}.`);
  if (lives) {
    // A reload would undo what a reader has typed, chosen, unfolded or scrolled. The page itself causes scroll events.
    let used = false;
    for (const kind of ["pointerdown", "click", "input", "keydown", "wheel", "touchmove"]) document.addEventListener(kind, () => { used = true; });
    setInterval(() => { if (!used && !document.hidden) location.reload(); }, RELOAD * 1000);
  }
})();
