"use strict";
(() => {
  const story = JSON.parse(document.getElementById("story").textContent);
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;

  // An element with a class and children; texts of the model only ever become text nodes.
  function make(tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...children.filter((child) => child !== null));
    return element;
  }
  const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)} %`;
  const chance = (value) => (value > 0 && value < 0.01 ? "< 1 %" : value >= 0.995 && value < 1 ? "> 99 %" : percent(value));
  function time(seconds) {
    if (seconds === null) return "unknown";
    return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  }

  // What can be seen of a text: marks in the place of blanks, control characters by their pictures.
  function visible(text) {
    if (text === "") return "part of a character";
    const short = text.replace(/ {4,}/g, (blanks) => `\u2423\u00d7${blanks.length}`);
    return short.replace(/[\u0000-\u0020\u007f]/g, (char) => {
      const marks = { " ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\u007f": "\u2421" };
      return marks[char] || String.fromCharCode(0x2400 + char.charCodeAt(0));
    });
  }
  const spoken = (text) => {
    const names = { "": "part of a character", " ": "space", "\n": "line break", "\t": "tab" };
    return text in names ? names[text] : visible(text).replaceAll("\u2423", " ").replaceAll("\u21b5", " line break ").trim();
  };
  // The text of a token with a mark in front of its line breaks.
  function inked(text) {
    const parts = [];
    for (const part of text.split(/(\n)/)) {
      if (part === "\n") parts.push(make("span", "mark", "\u21b5"), "\n");
      else if (part) parts.push(part.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, visible));
    }
    return parts;
  }

  const single = story.drafters.length < 2;
  function label(who, drafter) {
    if (who === "accepted") return single ? "accepted draft" : `accepted draft of ${story.drafters[drafter]}`;
    return { corrected: "correction of a rejected draft", bonus: "bonus after a whole draft", plain: "without a draft" }[who];
  }
  const kind = (who, drafter) => (who === "accepted" ? (drafter ? "b" : "a") : who);
  const reasons = {
    batch_size: "a setting allows none for so many rows", does_not_pay: "drafting would not pay",
    length_limit: "a single token was left", max_model_len: "the text is too long for the drafter",
    nothing_found: "the method found nothing to draft",
  };

  let row, steps, tokens, columns, shown = null, origin = null;

  // ------------------------------------------------------------------ the card beside a token
  function figures(lines) {
    const table = make("table");
    for (const [name, value] of lines) table.append(make("tr", "", make("td", "", name), make("td", "", value)));
    return table;
  }
  function opinion(score) {
    const [prob, rank, margin, sampled] = score;
    const lines = [];
    if (prob !== null) lines.push(["probability", chance(prob)], ["rank", `${rank}`]);
    if (margin !== null) lines.push(["margin", `${margin > 0 ? "+" : ""}${margin.toFixed(2)} logits`]);
    if (sampled !== undefined && sampled !== null) lines.push(["drafted with", chance(sampled)]);
    return lines;
  }
  function showCard(element, title, note, lines) {
    const card = at("card");
    card.replaceChildren(make("strong", "", visible(title)), make("p", "", note), figures(lines));
    card.hidden = false;
    const box = element.getClientRects()[0] || element.getBoundingClientRect();
    const left = Math.min(Math.max(box.left, 8), innerWidth - card.offsetWidth - 8);
    const above = box.top - card.offsetHeight - 8;
    card.style.left = `${Math.max(left, 8)}px`;
    card.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  }
  const hideCard = () => { at("card").hidden = true; };

  // ------------------------------------------------------------------ the text
  function drawText() {
    tokens = [];
    const text = at("text");
    text.replaceChildren();
    text.removeAttribute("aria-activedescendant");
    steps.forEach((step, number) => {
      const group = make("span", "step");
      group.setAttribute("role", "presentation");
      for (const [piece, id, who, ...score] of step.tokens) {
        const element = make("span", `token ${kind(who, step.drafter)}`, ...inked(piece));
        if (piece === "") { element.classList.add("part"); element.append(make("span", "mark", "\u00b7")); }
        element.id = `token-${tokens.length}`;
        element.setAttribute("role", "option");
        element.setAttribute("aria-selected", "false");
        const place = step.cycle ? `cycle ${step.cycle}` : "prefill";
        const lines = [...opinion(score), ["token", `${id}`], ["written in", place]];
        element.setAttribute("aria-label", `${spoken(piece)}: ${label(who, step.drafter)}; ${lines.map((line) => line.join(" ")).join(", ")}`);
        tokens.push({ element, step: number, card: () => showCard(element, piece, label(who, step.drafter), lines) });
        group.append(element);
      }
      step.group = group;
      text.append(group);
    });
    at("prompt").querySelector("pre").textContent = row.prompt;
  }

  // A list of one tab stop: arrows move in it, Enter unfolds, Escape leaves.
  function listbox(box, items, leap) {
    let active = -1;
    function activate(index, scrolls = true) {
      const list = items();
      if (list[active]) { list[active].element.classList.remove("active"); list[active].element.setAttribute("aria-selected", "false"); }
      active = Math.min(Math.max(index, 0), list.length - 1);
      const item = list[active];
      if (!item) return;
      item.element.classList.add("active");
      item.element.setAttribute("aria-selected", "true");
      box.setAttribute("aria-activedescendant", item.element.id);
      if (scrolls) item.element.scrollIntoView({ block: "nearest", inline: "nearest" });
      item.card();
    }
    box.addEventListener("keydown", (event) => {
      const list = items();
      const moves = {
        ArrowRight: active + 1, ArrowLeft: active - 1, Home: 0, End: list.length - 1,
        ArrowDown: leap(active, 1), ArrowUp: leap(active, -1),
      };
      if (event.key in moves) activate(moves[event.key]);
      else if ((event.key === "Enter" || event.key === " ") && list[active]) unfold(list[active].step, box);
      else return;
      event.preventDefault();
    });
    box.addEventListener("focus", () => { if (box.matches(":focus-visible")) activate(Math.max(active, 0)); });
    box.addEventListener("blur", hideCard);
    const found = (event) => items().findIndex((item) => item.element === event.target.closest("[role=option]"));
    box.addEventListener("pointerover", (event) => { const index = found(event); if (index >= 0) items()[index].card(); });
    box.addEventListener("pointerleave", hideCard);
    box.addEventListener("click", (event) => {
      const index = found(event);
      if (index < 0) return;
      activate(index, false);
      unfold(items()[index].step, null);
    });
    return { forget: () => { active = -1; } };
  }
  // The first token of the step after, or before, the one that a token is of.
  function nextStep(index, way) {
    const wanted = (tokens[index] ? tokens[index].step : -1) + way;
    const found = tokens.findIndex((token) => token.step === Math.max(wanted, 0));
    return found < 0 ? tokens.length - 1 : found;
  }

  // ------------------------------------------------------------------ cycles
  function drawCycles() {
    columns = [];
    const box = at("cycles");
    box.replaceChildren();
    box.removeAttribute("aria-activedescendant");
    const timed = steps.filter((step) => step.cycle && story.cycles[step.cycle - 1]);
    const spent = timed.map((step) => story.cycles[step.cycle - 1].seconds[0] + story.cycles[step.cycle - 1].seconds[1]);
    // One slow cycle shall not flatten all others.
    const slow = [...spent].sort((one, other) => one - other)[Math.floor(0.98 * (spent.length - 1))] || 1;
    const most = Math.max(1, ...timed.map((step) => step.tokens.length));
    const unit = Math.max(2, Math.min(9, Math.floor(120 / most) - 1));
    for (const step of timed) {
      const won = make("div", "won"), used = make("div", "spent");
      won.style.height = `${most * (unit + 1) + 2}px`;
      for (const [, , who] of step.tokens) {
        const block = make("i", kind(who, step.drafter));
        block.style.height = `${unit}px`;
        won.append(block);
      }
      const [draft, verify] = story.cycles[step.cycle - 1].seconds;
      for (const [seconds, name] of [[draft, "draft"], [verify, "verify"]]) {
        const bar = make("i", name);
        bar.style.height = `${Math.min(56, (48 * seconds) / slow)}px`;
        if (seconds > 0) used.append(bar);
      }
      const element = make("div", "cycle", won, used);
      const number = steps.indexOf(step);
      element.id = `cycle-${step.cycle}`;
      element.setAttribute("role", "option");
      element.setAttribute("aria-selected", "false");
      const lines = [["draft", time(draft)], ["verification", time(verify)]];
      element.setAttribute("aria-label", `Cycle ${step.cycle}: ${account(step)}; draft ${time(draft)}, verification ${time(verify)}`);
      columns.push({ element, step: number, card: () => showCard(element, `cycle ${step.cycle}`.replace(" ", "\u00a0"), account(step), lines) });
      step.column = element;
      box.append(element);
    }
    const key = (name, text) => [make("i", `key ${name}`), text];
    at("cycles-scale").replaceChildren(
      `above: tokens; below: time, ${time(slow)} a full bar`, ...key("draft", "draft"), ...key("verify", "verification"));
  }
  function account(step) {
    if (!step.cycle) return "the prefill gave the first token";
    const own = step.tokens[step.accepted];
    const ending = { corrected: "; the target corrected the next", bonus: "; the target added one", plain: "" };
    if (!step.nodes.length) return `no draft: ${reasons[story.cycles[step.cycle - 1]?.why] || "this row had none"}`;
    const name = story.drafters[step.drafter];
    return `${name} drafted ${many(step.nodes.length, "token")}, ${step.accepted} accepted${own ? ending[own[2]] : ""}`;
  }

  // ------------------------------------------------------------------ acceptance by position
  function depthsOf(step) {
    const depths = [];
    for (const [, , parent] of step.nodes) depths.push(parent < 0 ? 1 : depths[parent] + 1);
    return depths;
  }
  function drawDepths() {
    const drafts = steps.filter((step) => step.nodes.length);
    const reach = drafts.map((step) => Math.max(...depthsOf(step)));
    const list = at("depths");
    list.replaceChildren();
    if (!drafts.length) list.append(make("p", "", "Nothing was drafted for this row."));
    for (let depth = 1; depth <= Math.min(Math.max(0, ...reach), 16); depth += 1) {
      const accepted = drafts.filter((step) => step.accepted >= depth).length;
      const share = accepted / drafts.length;
      const bar = make("i");
      bar.style.height = `${100 * share}%`;
      const value = make("span", "", make("span", "", `${Math.round(100 * share)}`));
      const item = make("li", "", value, make("div", "bar", bar), make("b", "", `${depth}`));
      item.title = `position ${depth}: ${accepted} of ${many(drafts.length, "draft")}, ${percent(share)}`;
      for (const part of item.children) part.setAttribute("aria-hidden", "true");
      item.append(make("span", "aloud", item.title));
      list.append(item);
    }
  }

  // ------------------------------------------------------------------ the draft of a cycle
  function unfold(number, from) {
    const step = steps[number];
    if (!step) return;
    for (const other of steps) { other.group.classList.remove("chosen"); other.column?.classList.remove("chosen"); }
    step.group.classList.add("chosen");
    step.column?.classList.add("chosen");
    if (step.column) at("cycles").scrollLeft = step.column.offsetLeft - at("cycles").offsetLeft - at("cycles").clientWidth / 2;
    hideCard();
    shown = number;
    if (from) origin = from;
    const seconds = story.cycles[step.cycle - 1]?.seconds;
    const times = seconds ? ` \u00b7 draft ${time(seconds[0])}, verification ${time(seconds[1])}` : "";
    const name = step.cycle ? `Cycle ${step.cycle} of ${story.cycles.length}` : "Prefill";
    at("drawer-title").replaceChildren(make("b", "", name), account(step) + times);
    at("tree").replaceChildren(drawTree(step, number));
    at("previous").disabled = number === 0;
    at("next").disabled = number === steps.length - 1;
    at("drawer").hidden = false;
    document.body.classList.add("unfolded");
    if (from) at("tree").querySelector(".node").focus();
  }
  function fold() {
    if (shown === null) return;
    const inside = at("drawer").contains(document.activeElement);
    at("drawer").hidden = true;
    document.body.classList.remove("unfolded");
    for (const step of steps) { step.group.classList.remove("chosen"); step.column?.classList.remove("chosen"); }
    shown = null;
    hideCard();
    if (inside) (origin || at("text")).focus();
  }
  function drawTree(step, number) {
    const taken = new Set(step.path);
    const last = step.path.length ? step.path[step.path.length - 1] : -1;
    const own = step.tokens[step.accepted];
    const children = new Map();
    step.nodes.forEach(([, , parent], index) => children.set(parent, [...(children.get(parent) || []), index]));

    function item(piece, className, note, score, name, isTaken) {
      const [prob] = score;
      const node = make("div", `node ${className}`, make("span", "", visible(piece)), make("small", "", prob === null ? name : `${name} ${chance(prob)}`.trim()));
      node.tabIndex = -1;
      const lines = opinion(score);
      const element = make("li", isTaken ? "taken" : "", node);
      element.setAttribute("role", "treeitem");
      node.setAttribute("aria-label", `${spoken(piece)}: ${note}${lines.length ? "; " : ""}${lines.map((line) => line.join(" ")).join(", ")}`);
      const card = () => showCard(node, piece, note, lines);
      node.addEventListener("focus", card);
      node.addEventListener("pointerenter", card);
      node.addEventListener("blur", hideCard);
      node.addEventListener("pointerleave", hideCard);
      return element;
    }
    function below(parent) {
      const list = make("ul");
      list.setAttribute("role", "group");
      if (own && parent === last) {
        const [piece, , who, ...score] = own;
        list.append(item(piece, who, label(who, step.drafter), score, "target", true));
      }
      // The taken path runs along the top.
      const drafted = [...(children.get(parent) || [])].sort((one, other) => taken.has(other) - taken.has(one));
      for (const index of drafted) {
        const [piece, , , ...score] = step.nodes[index];
        const isTaken = taken.has(index), isReached = parent === -1 ? true : taken.has(parent);
        const note = isTaken ? label("accepted", step.drafter) : isReached ? "rejected draft" : "draft that was not reached";
        const className = isTaken ? kind("accepted", step.drafter) : isReached ? "rejected" : "rejected unreached";
        const element = item(piece, className, note, score, isTaken ? "\u2713" : isReached ? "\u2717" : "", isTaken);
        const under = below(index);
        if (under.children.length) element.append(under);
        list.append(element);
      }
      return list;
    }
    const before = steps[number - 1]?.tokens;
    const anchor = before ? before[before.length - 1][0] : "\u2026";
    const start = item(anchor, "anchor", number ? "last token of the text before" : "end of the prompt", [null, null, null], "anchor", true);
    start.firstChild.tabIndex = 0;
    start.append(below(-1));
    const tree = make("ul", "", start);
    tree.setAttribute("role", "tree");
    tree.setAttribute("aria-label", "Draft of the cycle");
    return tree;
  }
  function moveInTree(event) {
    const node = event.target.closest(".node");
    if (!node) return;
    const place = node.parentElement;
    const nodes = [...at("tree").querySelectorAll(".node")];
    const moves = {
      ArrowRight: place.querySelector(":scope > ul > li > .node"), ArrowLeft: place.parentElement.closest("li")?.firstChild,
      ArrowDown: nodes[nodes.indexOf(node) + 1], ArrowUp: nodes[nodes.indexOf(node) - 1],
      Home: nodes[0], End: nodes[nodes.length - 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    if (!moves[event.key]) return;
    node.tabIndex = -1;
    moves[event.key].tabIndex = 0;
    moves[event.key].focus();
  }

  // ------------------------------------------------------------------ head, legend, table
  function drawHead() {
    const all = steps.flatMap((step) => step.tokens.map(([, , who]) => kind(who, step.drafter)));
    const cycles = steps.filter((step) => step.cycle);
    const drafts = cycles.filter((step) => step.nodes.length);
    const accepted = drafts.reduce((sum, step) => sum + step.accepted, 0);
    const reached = drafts.reduce((sum, step) => sum + Math.min(step.accepted + 1, Math.max(...depthsOf(step))), 0);
    const won = cycles.reduce((sum, step) => sum + step.tokens.length, 0);
    const batch = story.rows.length > 1 ? ` \u00b7 batch of ${story.rows.length}` : "";
    const rule = story.lossless ? "" : ` \u00b7 ${story.rule} acceptance, not the target\u2019s distribution`;
    at("headline").textContent = `${many(all.length, "token")} in ${many(cycles.length + 1, "forward")}`;
    at("subline").textContent = `${story.model} \u00b7 ${story.method}${batch}${rule}`;
    document.title = `${at("headline").textContent} \u00b7 ${story.method}`;
    const { seconds } = story;
    const entries = [
      ["tokens a cycle", cycles.length ? (won / cycles.length).toFixed(2) : "\u2013"],
      ["acceptance rate", reached ? percent(accepted / reached) : "\u2013"],
      ["drafting", time(seconds.draft)], ["verification", time(seconds.verify)],
      ["first token after", time(seconds.first)], ["in all", time(seconds.total)],
    ];
    at("figures").replaceChildren(...entries.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
    const kinds = [...story.drafters.map((_, index) => ["accepted", index]), ["corrected"], ["bonus"], ["plain"]];
    at("legend").replaceChildren(...kinds.map(([who, drafter]) => {
      const count = all.filter((one) => one === kind(who, drafter)).length;
      return make("li", "", make("span", `token ${kind(who, drafter)}`, "token"), `${label(who, drafter)} `, make("span", "count", `${count}`));
    }));
  }
  function drawTable() {
    const line = (tag, ...cells) => make("tr", "", ...cells.map((cell) => make(tag, "", cell)));
    const head = line("th", "cycle", "drafted", "accepted", "draft", "verification", "text");
    for (const cell of head.children) cell.scope = "col";
    const rows = steps.filter((step) => step.cycle).map((step) => {
      const [draft, verify] = story.cycles[step.cycle - 1]?.seconds || [null, null];
      const text = step.tokens.map(([piece]) => piece).join("");
      return line("td", `${step.cycle}`, `${step.nodes.length}`, `${step.accepted}`, time(draft), time(verify), visible(text).replaceAll("\u2423", " "));
    });
    at("table").querySelector("table").replaceChildren(make("thead", "", head), make("tbody", "", ...rows));
  }

  const lists = [
    listbox(at("text"), () => tokens, nextStep),
    listbox(at("cycles"), () => columns, (index, way) => index + way),
  ];
  function drawRow(index) {
    fold();
    hideCard();
    row = story.rows[index];
    steps = row.steps;
    lists.forEach((list) => list.forget());
    drawHead();
    drawText();
    drawCycles();
    drawDepths();
    drawTable();
  }

  // ------------------------------------------------------------------ theme, keys, start
  const preference = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(name) {
    root.dataset.theme = name;
    root.style.colorScheme = name;
    const other = name === "dark" ? "Light" : "Dark";
    at("theme").textContent = other;
    at("theme").title = `Switch to ${other.toLowerCase()} colours`;
  }
  setTheme(preference.matches ? "dark" : "light");
  preference.addEventListener("change", () => setTheme(preference.matches ? "dark" : "light"));
  at("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

  at("close").addEventListener("click", fold);
  function turn(way) {
    unfold(shown + way, null);
    steps[shown].group.firstChild.scrollIntoView({ block: "nearest" });
  }
  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  at("tree").addEventListener("keydown", moveInTree);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (!at("card").hidden && !at("drawer").contains(document.activeElement)) hideCard();
    else fold();
  });
  addEventListener("scroll", hideCard, { passive: true, capture: true });

  story.rows.forEach((_, index) => at("row").append(new Option(`${index + 1} of ${story.rows.length}`, `${index}`)));
  at("row-choice").hidden = story.rows.length < 2;
  at("row").addEventListener("change", () => drawRow(Number(at("row").value)));
  const notes = story.text ? story.notes : ["Tokens are shown by their numbers. Give to_html a tokenizer to see text.", ...story.notes];
  at("notes").append(...[...notes, `Probabilities, ranks and margins are the target\u2019s, before any logits processor. hf_specdec ${story.version}`].map((note) => make("p", "", note)));
  drawRow(0);
})();
