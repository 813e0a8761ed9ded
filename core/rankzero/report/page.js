"use strict";
// Draws the facts below the page. Whatever comes from a run becomes text (`textContent`), never markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const runs = data.runs || [];
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
  const duration = (run) => (run.started ? (run.ended || run.now) - run.started : NaN);
  const used = (run) => Object.entries(run.used).map(([name, value]) => (name.endsWith("hours") ? `${value} ${name}` : value)).join(", ");
  // The options of a run, with each argument of the training as one of them.
  const options = (run) => {
    const { params, ...rest } = run.config;
    const named = Object.entries(params || {}).map(([name, value]) => [name in rest ? `argument ${name}` : name, value]);
    return { ...Object.fromEntries(named), ...rest, ...run.labels };
  };
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

  // lines: [{x: [...], y: [...], color, other, name}]; draws again by the function that it returns.
  const chart = (parent, title, lines, format, axis, fromZero) => {
    const card = add(parent, "div", { class: "card chart" });
    const top = add(card, "div", { class: "top" });
    add(top, "h3", {}, title);
    const now = add(top, "span", { class: "now" });
    const svg = add(card, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    let logarithmic = false, place = null;
    const draw = () => {
      svg.replaceChildren();
      const shown = lines().map((line) => {
        const keep = line.y.map((value) => !logarithmic || value > 0);
        return { ...line, x: line.x.filter((_, i) => keep[i]), y: line.y.filter((_, i) => keep[i]) };
      }).filter((line) => line.x.length);
      if (!shown.length) {
        add(svg, "text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing above 0");
        place = null;
        return;
      }
      const least = (values) => values.reduce((a, b) => (b < a ? b : a)), most = (values) => values.reduce((a, b) => (b > a ? b : a));
      let x0 = least(shown.map((line) => least(line.x))), x1 = most(shown.map((line) => most(line.x)));
      let y0 = least(shown.map((line) => least(line.y))), y1 = most(shown.map((line) => most(line.y)));
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
        // A new attempt goes back to the step of its checkpoint: the curve begins anew there.
        const points = line.x.map((x, i) => `${i && x >= line.x[i - 1] ? "L" : "M"}${px(x).toFixed(1)} ${py(line.y[i]).toFixed(1)}`).join("");
        const attributes = { class: line.other ? "curve other" : "curve", d: points };
        if (!line.other) attributes.style = `stroke: ${line.color}`;
        if (line.x.length === 1) add(svg, "circle", { cx: px(line.x[0]), cy: py(line.y[0]), r: 3, style: `fill: ${line.color || "var(--faint)"}` });
        else add(svg, "path", attributes);
      }
      place = { shown, x0, x1, px, cross: add(svg, "line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }) };
      rest();
    };
    const rest = () => {
      const main = place && place.shown.filter((line) => !line.other);
      now.textContent = main && main.length ? main.map((line) => format(line.y[line.y.length - 1])).slice(0, 4).join(" · ") : "";
    };
    const near = (line, x) => line.x.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(line.x[best] - x) ? i : best), 0);
    svg.addEventListener("pointermove", (event) => {
      if (!place) return;
      const box = svg.getBoundingClientRect();
      const x = place.x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (place.x1 - place.x0);
      const main = place.shown.filter((line) => !line.other), others = place.shown.filter((line) => line.other);
      const lead = main[0] || others[0];
      const at = lead.x[near(lead, x)];
      place.cross.setAttribute("x1", place.px(at));
      place.cross.setAttribute("x2", place.px(at));
      place.cross.setAttribute("visibility", "visible");
      let text = main.slice(0, 4).map((line) => `${main.length > 1 ? `${line.name} ` : ""}${format(line.y[near(line, at)])}`).join(" · ");
      if (others.length) {
        const values = others.map((line) => line.y[near(line, at)]);
        text += ` · others ${format(Math.min(...values))} to ${format(Math.max(...values))}`;
      }
      now.textContent = `${axis(at)}: ${text}`;
    });
    svg.addEventListener("pointerleave", () => { if (place) { place.cross.setAttribute("visibility", "hidden"); rest(); } });
    draw();
    return (log) => { if (log !== undefined) logarithmic = log; draw(); };
  };

  // -- the parts of the page ---------------------------------------------------------------------
  const heading = (run) => {
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
    const facts = [["took", seconds(duration(run))], ["attempts", run.attempt + 1], ["checkpoints", run.checkpoints.length]];
    if (run.result) facts.push(["result", bytes(run.result.size || 0)]);
    for (const [name, value] of Object.entries(run.used)) facts.push([name, value]);
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

  const comparison = () => {
    add(page, "h1", {}, `${runs.length} runs side by side`);
    const made = section("Runs");
    const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.last)))].slice(0, 8);
    const told = new Map();
    const all = runs.map(options);
    for (const found of all) for (const name of Object.keys(found)) told.set(name, new Set(all.map((one) => text(one[name]))));
    const differs = [...told.keys()].filter((name) => told.get(name).size > 1 && !["run_id", "driver", "checkpoints"].includes(name)).slice(0, 12);
    const cell = (value) => (typeof value === "number" ? value : value === undefined ? "" : text(value));
    table(made, ["run", "state", "took", "used", ...differs, ...metrics], runs.map((run, index) => [
      run.id, run.state, seconds(duration(run)), used(run),
      ...differs.map((name) => cell(all[index][name])),
      ...metrics.map((name) => cell(run.last[name])),
    ]));
    for (const run of runs.filter((one) => one.error)) {
      const cause = add(made, "div", { class: "card cause" });
      add(cause, "h3", {}, `${run.id}: ${run.error.type || "error"}`);
      add(cause, "pre", {}, String(run.error.message || "").slice(0, 2000));
    }
  };

  const metrics = () => {
    const names = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.name)))];
    if (!names.length) return;
    const made = section("Metrics");
    const several = runs.length > 1;
    let byTime = false, log = false;
    const steps = runs[0].steps || "report";
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
    add(tools, "span", {}, `${several ? "rank 0 of each run" : "rank 0 bold, other ranks faint"}, by ${steps}`);
    if (several) {
      const legend = add(made, "p", { class: "legend" });
      runs.forEach((run, index) => {
        const item = add(legend, "span");
        add(item, "i", { style: `background: ${color(index)}` });
        item.append(run.id);
      });
    }
    const grid = add(made, "div", { class: "grid" });
    const redraw = names.map((name) => chart(grid, name, () => runs.flatMap((run, index) => {
      const curve = run.curves.find((one) => one.name === name);
      const ranks = curve ? curve.ranks.filter((one) => !several || one.rank === 0) : [];
      const from = run.started || run.created;
      return ranks.map((one) => ({
        x: byTime ? one.t.map((at) => at - from) : one.s, y: one.v, other: one.rank !== 0,
        color: color(several ? index : 0), name: several ? run.id.slice(0, 18) : `rank ${one.rank}`,
      }));
    }), number, (at) => (byTime ? seconds(at) : number(at))));
    const missing = runs.flatMap((run) => run.not_drawn);
    if (missing.length) add(made, "p", { class: "note" }, `Not drawn: ${missing.join(", ")}`);
  };

  const timeline = (run) => {
    if (!run.ranks.length) return;
    const made = section("Timeline");
    if (run.straggler) {
      const { rank, seconds: slow, usual } = run.straggler;
      add(made, "p", { class: "warn" }, `Rank ${rank} is the straggler: ${seconds(slow)} between two reports, the others ${seconds(usual)}.`);
    }
    const legend = add(made, "p", { class: "legend" });
    const phases = [["interpreter and torch", "--load"], ["waits for the others", "--meet"], ["training", "--train"], ["failed", "--bad"], ["checkpoint", "--good"], ["restart", "--warn"]];
    for (const [name, paint] of phases) {
      const item = add(legend, "span");
      add(item, "i", { style: `background: var(${paint})` });
      item.append(name);
    }
    const numbers = [...new Set(run.ranks.map((one) => one.rank))].sort((a, b) => a - b);
    const row = numbers.length > 200 ? 4 : numbers.length > 40 ? 10 : 18;
    const left = 116, wide = 1160, bottom = 24, head = 10, high = numbers.length * row + bottom + head;
    const first = Math.min(...run.ranks.map((one) => one.started || one.entered));
    const last = Math.max(first + 0.1, run.ended || run.now, ...run.ranks.map((one) => one.ended || 0));
    const px = (at) => left + ((Math.min(Math.max(at, first), last) - first) / (last - first)) * (wide - left - 8);
    const card = add(add(made, "div", { class: "card" }), "div", { class: "scroll" });
    const svg = add(card, "svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, role: "img", "aria-label": "timeline of all ranks", style: "min-width: 640px; width: 100%; height: auto" });
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
      if (row > 4 || index % 10 === 0) add(svg, "text", { x: 0, y: head + index * row + row - 6 }, `${rank} ${hosts.get(rank) || ""}`.slice(0, 17));
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

  const hosts = (run) => {
    if (!run.hosts.length) return;
    const made = section("Hosts");
    const grid = add(made, "div", { class: "grid" });
    for (const host of run.hosts) {
      const from = run.started || run.created;
      const lines = (...names) => () => names.filter((name) => host.columns[name]).map((name, index) => ({
        x: host.columns[name].t.map((at) => at - from), y: host.columns[name].v, color: color(index), name,
      }));
      const draw = (title, format, ...names) => { if (names.some((name) => host.columns[name])) chart(grid, `${host.host}: ${title}`, lines(...names), format, seconds, true); };
      draw(`busy cores of ${host.cores}`, number, "cpu");
      draw(`memory of ${bytes(host.memory_total || 0)}`, bytes, "memory");
      draw("network, received and sent a second", bytes, "received", "sent");
      const gpus = Object.keys(host.columns).filter((name) => name.startsWith("gpu "));
      draw("use of each GPU", number, ...gpus.filter((name) => name.endsWith("use")));
      draw(`memory of each GPU, of ${bytes(host.gpu_memory_total || 0)}`, bytes, ...gpus.filter((name) => name.endsWith("memory")));
    }
  };

  const kept = (run) => {
    if (!run.result && !run.checkpoints.length) return;
    const made = section("Result and checkpoints");
    const rows = run.checkpoints.map((one) => [one.id, bytes(one.size), Object.entries(one.metrics || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ")]);
    if (run.result) rows.push(["result", bytes(run.result.size || 0), [run.result.format, run.result.uri, run.result.digest].filter(Boolean).join(", ")]);
    table(made, ["", "size", ""], rows);
  };

  const config = (run) => {
    const made = section("Configuration");
    const facts = { ...options(run), identity: run.identity || undefined, torch: (run.ranks[0] || {}).torch };
    const rows = Object.entries(facts).filter(([, value]) => value !== undefined && value !== null);
    table(made, ["option", "value"], rows.map(([name, value]) => [name, text(value)]));
    add(made, "p", { class: "note" }, "Environment variables and Spark's configuration are in no file of a run, since they may hold secrets.");
  };

  const logs = (run) => {
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
          if (!word || line.toLowerCase().includes(word)) found.push([one.rank, line, one.times[index]]);
        });
      }
      // The sort keeps the order of lines of one time, and so that of each rank.
      found.sort((a, b) => a[2] - b[2]);
      const timed = times.getAttribute("aria-pressed") === "true";
      box.replaceChildren();
      for (const [rank, line, when] of found.slice(-MAX_LINES)) {
        if (timed && when !== null) add(box, "span", { class: "rank" }, `${new Date((run.created + when) * 1000).toLocaleTimeString()} `);
        add(box, "span", { class: "rank" }, `[${rank}] `);
        const at = word ? line.toLowerCase().indexOf(word) : -1;
        if (at < 0) box.append(line);
        else {
          box.append(line.slice(0, at));
          add(box, "mark", {}, line.slice(at, at + word.length));
          box.append(line.slice(at + word.length));
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

  const list = () => {
    add(page, "h1", {}, "Runs");
    add(page, "p", { class: "sub" }, data.store);
    const tools = add(page, "div", { class: "tools", style: "margin-top: 16px" });
    const search = add(tools, "input", { type: "search", placeholder: "search in ids, names and states", "aria-label": "search" });
    const compare = add(tools, "button", { type: "button", disabled: "" }, "compare");
    const body = add(page, "div");
    const chosen = new Set();
    const draw = () => {
      const word = search.value.toLowerCase();
      const found = data.list.filter((one) => [one.id, one.name, one.state].join(" ").toLowerCase().includes(word));
      body.replaceChildren();
      table(body, ["", "run", "state", "ranks", "submitted", "took", "used", "metrics"], found.map((one) => [
        "", one.id, one.state, one.world, moment(one.created), one.started ? seconds((one.ended || Date.now() / 1000) - one.started) : "", used(one),
        Object.entries(one.last).filter(([, value]) => typeof value === "number").slice(0, 4).map(([name, value]) => `${name} ${number(value)}`).join(", "),
      ]));
      [...body.querySelectorAll("tbody tr")].forEach((line, index) => {
        const { id, state } = found[index];
        const box = add(line.cells[0], "input", { type: "checkbox", "aria-label": `choose ${id}` });
        box.checked = chosen.has(id);
        box.addEventListener("change", () => {
          if (box.checked) chosen.add(id); else chosen.delete(id);
          compare.toggleAttribute("disabled", chosen.size < 2);
        });
        line.cells[1].textContent = "";
        add(line.cells[1], "a", { href: `runs/${encodeURIComponent(id)}` }, id);
        line.cells[2].textContent = "";
        add(line.cells[2], "span", { class: `badge ${/^[a-z]+$/.test(state) ? state : ""}` }, state);
      });
      if (!found.length) add(body, "p", { class: "note" }, "No run.");
      if (data.older) add(body, "p", { class: "note" }, `${data.older} older runs are not shown: rankzero runs lists them.`);
    };
    compare.addEventListener("click", () => { location.href = `compare?${[...chosen].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`; });
    search.addEventListener("input", draw);
    draw();
  };

  if (data.list) {
    list();
    return;
  }
  if (runs.length === 1) {
    const run = runs[0];
    heading(run);
    metrics();
    timeline(run);
    hosts(run);
    kept(run);
    logs(run);
    config(run);
  } else {
    comparison();
    metrics();
    for (const run of runs) {
      add(page, "h2", {}, run.id);
      timeline(run);
    }
  }
  // A saved file stays as it is.
  const lives = location.protocol.startsWith("http") && runs.some((run) => !run.ended);
  const made = Math.max(...runs.map((run) => run.now));
  add(page, "p", { class: "note" }, `Made by rankzero, ${moment(made)}${lives ? `; the page reloads every ${RELOAD} s until you use it` : ""}.`);
  if (lives) {
    // A reload would undo what a reader has typed, chosen, unfolded or scrolled. The page itself causes scroll events.
    let used = false;
    for (const kind of ["pointerdown", "click", "input", "keydown", "wheel", "touchmove"]) document.addEventListener(kind, () => { used = true; });
    setInterval(() => { if (!used && !document.hidden) location.reload(); }, RELOAD * 1000);
  }
})();
