"use strict";
// The browser of questions: filters, a list of any length of which only the rows in view exist, and one question's data,
// unpacked from the page's own elements. Text is only ever set as text, never as HTML.
(async () => {
  const ROW = 64, AROUND = 6;

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  async function unpacked(id) {
    const packed = atob(document.getElementById(id).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // Keeps the results of the last few calls: of pages and frames, never all at once.
  function remembering(count, load) {
    const kept = new Map();
    return (key) => {
      const found = kept.has(key) ? kept.get(key) : load(key);
      kept.delete(key);
      kept.set(key, found);
      if (kept.size > count) kept.delete(kept.keys().next().value);
      return found;
    };
  }

  // `drawRow(item)` makes the content of a row; `chosen(item)` is told which one is selected, null for none.
  function list(box, inner, drawRow, chosen) {
    let items = [], at = -1;
    const rows = new Map();

    function draw() {
      const first = Math.max(0, Math.floor(box.scrollTop / ROW) - AROUND);
      const end = Math.min(items.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + AROUND);
      for (const [index, row] of rows) {
        if (index < first || index >= end) {
          row.remove();
          rows.delete(index);
        }
      }
      for (let index = first; index < end; index++) {
        if (!rows.has(index)) {
          const row = element("div", "row");
          row.id = "row-" + index;
          row.setAttribute("role", "option");
          row.setAttribute("aria-setsize", items.length);
          row.setAttribute("aria-posinset", index + 1);
          row.style.top = index * ROW + "px";
          row.append(...drawRow(items[index]));
          row.addEventListener("click", () => select(index));
          rows.set(index, row);
          inner.append(row);
        }
        rows.get(index).setAttribute("aria-selected", index === at);
      }
      if (at >= 0) box.setAttribute("aria-activedescendant", "row-" + at);
      else box.removeAttribute("aria-activedescendant");
    }

    function select(index) {
      at = items.length ? Math.min(Math.max(index, 0), items.length - 1) : -1;
      if (at >= 0) {
        if (at * ROW < box.scrollTop) box.scrollTop = at * ROW;
        const below = (at + 1) * ROW - box.clientHeight;
        if (below > box.scrollTop) box.scrollTop = below;
      }
      draw();
      chosen(at < 0 ? null : items[at], at, items.length);
    }

    function show(newItems) {
      const kept = items[at];
      items = newItems;
      inner.style.height = items.length * ROW + "px";
      rows.forEach((row) => row.remove());
      rows.clear();
      select(Math.max(0, items.indexOf(kept)));
    }

    // More items behind those that are there: a search that goes on.
    function extend(more) {
      const none = items.length === 0;
      items = items.concat(more);
      inner.style.height = items.length * ROW + "px";
      rows.forEach((row) => row.setAttribute("aria-setsize", items.length));
      if (none) select(0); else draw();
    }

    box.addEventListener("scroll", () => requestAnimationFrame(draw));
    new ResizeObserver(draw).observe(box);
    return {
      show,
      extend,
      move: (by) => select(at + by),
      toEnd: (last) => select(last ? items.length - 1 : 0),
      page: () => Math.max(1, Math.floor(box.clientHeight / ROW) - 1),
    };
  }

  const by = (id) => document.getElementById(id);
  const browser = by("browser");
  if (!browser) return;
  browser.hidden = false;
  if (typeof DecompressionStream === "undefined") {
    browser.replaceChildren(element("p", "absent", "This browser is too old to unpack the questions; any of 2023 or later can."));
    return;
  }
  const { page: pageSize, sets, categories, others, columns } = await unpacked("index");
  const count = columns.id.length;
  const page = remembering(4, (number) => unpacked("page-" + number));
  const frameChunk = remembering(4, (number) => JSON.parse(by("frames-" + number).textContent));
  const OUTCOMES = ["wrong", "partly", "right", "none"];
  const state = { set: "", category: "", outcomes: new Set(), flags: 0, search: "" };
  const buttons = [...browser.querySelectorAll(".toggles button")];

  const percent = (share) => (100 * share).toFixed(Number.isInteger(100 * share) ? 0 : 1) + " %";
  const plain = (value) => String(Number(value.toPrecision(4)));

  // ---- which questions ----
  function inScope(index) {
    return (state.set === "" || columns.set[index] === state.set)
      && (state.category === "" || columns.category[index] === state.category);
  }

  function passes(index) {
    return inScope(index)
      && (state.outcomes.size === 0 || state.outcomes.has(columns.outcome[index]))
      && (columns.flags[index] & state.flags) === state.flags;
  }

  function candidates() {
    const found = [];
    for (let index = 0; index < count; index++) if (passes(index)) found.push(index);
    return found;
  }

  function writeCounts() {
    const outcomes = [0, 0, 0, 0], flags = {};
    for (let index = 0; index < count; index++) {
      if (!inScope(index)) continue;
      outcomes[columns.outcome[index]]++;
      for (let flag = 1; flag <= 32; flag *= 2) if (columns.flags[index] & flag) flags[flag] = (flags[flag] || 0) + 1;
    }
    for (const button of buttons) {
      const { outcome, flag } = button.dataset;
      const number = outcome === undefined ? flags[flag] || 0 : outcomes[outcome];
      button.querySelector("b").textContent = number.toLocaleString("en");
      button.classList.toggle("empty", number === 0);
    }
  }

  function textOf(index, detail) {
    const texts = [columns.id[index], detail.gold, ...detail.question, ...detail.options];
    for (const output of detail.outputs) {
      texts.push(...output.text, output.answer ?? "", output.note);
      if (output.judged) texts.push(output.judged.answer ?? "", output.judged.note, ...output.judged.reply);
    }
    for (const [name, value] of detail.details) texts.push(name, value);
    if (detail.fault) texts.push(...detail.fault);
    return texts.join("\n").toLowerCase();
  }

  let searching = 0;
  async function search(found) {
    const mine = ++searching, wanted = state.search.toLowerCase();
    const pages = new Map();
    for (const index of found) {
      const number = Math.floor(index / pageSize);
      if (!pages.has(number)) pages.set(number, []);
      pages.get(number).push(index);
    }
    questions.show([]);
    let total = 0, done = 0;
    for (const [number, indices] of pages) {
      const details = await unpacked("page-" + number);
      if (mine !== searching) return;
      const hits = indices.filter((index) => textOf(index, details[index % pageSize]).includes(wanted));
      total += hits.length;
      done++;
      if (hits.length) questions.extend(hits);
      say(total, done < pages.size ? `, searched ${Math.round(100 * done / pages.size)} %` : "");
    }
    if (!pages.size) say(0, "");
  }

  function say(number, more) {
    by("found").textContent = `${number.toLocaleString("en")} of ${count.toLocaleString("en")} questions${more}`;
  }

  function refresh() {
    searching++;
    writeCounts();
    for (const button of buttons) {
      const { outcome, flag } = button.dataset;
      const on = outcome === undefined ? (state.flags & flag) !== 0 : state.outcomes.has(Number(outcome));
      button.setAttribute("aria-pressed", on);
    }
    by("set").value = String(state.set);
    by("category").value = String(state.category);
    by("clear").disabled = state.set === "" && state.category === "" && !state.outcomes.size && !state.flags && !state.search;
    const found = candidates();
    if (state.search) {
      search(found);
    } else {
      questions.show(found);
      say(found.length, "");
    }
  }

  // ---- a row of the list ----
  function squares(marks) {
    const box = element("span", "dots");
    for (const mark of marks) {
      if (mark === "+") {
        box.append(element("small", "", "+"));
        continue;
      }
      const square = element("i", mark === "-" ? "none" : "");
      square.style.setProperty("--fill", (mark === "A" ? 100 : mark === "-" ? 0 : 10 * Number(mark)) + "%");
      box.append(square);
    }
    return box;
  }

  function drawRow(index) {
    const line = element("div", "line");
    line.append(squares(columns.marks[index]));
    if (columns.flags[index] & 8) line.append(element("span", "chip down", "bad media"));
    line.append(element("small", "", categories[columns.category[index]] || sets[columns.set[index]]));
    return [element("span", "edge " + OUTCOMES[columns.outcome[index]]), element("p", "", columns.text[index]), line];
  }

  // ---- one question ----
  function marked(pieces) {
    const box = element("pre");
    let inside = "";
    for (const piece of pieces) {
      if (typeof piece === "number") {
        box.append(element("span", "cut", `${piece.toLocaleString("en")} characters are left out here`));
        continue;
      }
      for (const part of piece.split(/(<\/?(?:think|answer)>)/)) {
        if (/^<\/?(?:think|answer)>$/.test(part)) {
          box.append(element("span", "tag", part));
          inside = part[1] === "/" ? "" : part.slice(1, -1);
        } else if (part) {
          box.append(element("span", inside, part));
        }
      }
    }
    return box;
  }

  function judgedOf(judged) {
    const box = element("details", "judged");
    const head = element("summary", "", judged.decided ? "judge: " : "judge did not decide: ");
    head.append(element("b", "", judged.decided ? judged.answer ?? "no answer" : judged.note));
    if (judged.decided) head.append(judged.score === null ? ", no value" : ", score " + plain(judged.score));
    box.append(head, marked(judged.reply));
    return box;
  }

  function outputOf(output, number) {
    const box = element("div", "response");
    const score = output.score;
    const sign = score === null || !output.counts ? "" : score >= 1 ? "up" : score <= 0 ? "down" : "";
    const chips = element("div", "chips");
    chips.append(element("span", "chip quiet", "#" + number));
    const read = element("span", "chip read", output.answer === null ? "no answer read" : "read ");
    if (output.answer === null) read.classList.add("down");
    else read.append(element("b", "", output.answer));
    chips.append(read, element("span", "chip " + sign, score === null ? "no value" : "score " + plain(score)));
    if (!output.counts) chips.append(element("span", "chip", "not counted"));
    if (output.cut_off) chips.append(element("span", "chip down", "truncated"));
    if (output.tokens !== null) chips.append(element("span", "chip quiet", output.tokens.toLocaleString("en") + " tok"));
    if (output.note) chips.append(element("span", "chip quiet note-text", output.note));
    box.append(chips, marked(output.text));
    if (output.judged) box.append(judgedOf(output.judged));
    return box;
  }

  function framesOf(strip) {
    if (!strip) return [];
    if (!strip.at) return [element("p", "absent", "Frames: " + strip.why + ".")];
    const [chunk, place] = strip.at;
    const frames = element("div", "frames");
    frames.tabIndex = 0;
    const image = element("img");
    image.src = "data:image/jpeg;base64," + frameChunk(chunk)[place];
    image.alt = "frames that the model saw, in order";
    frames.append(image);
    return [frames];
  }

  function questionOf(index, detail) {
    const box = element("div", "question");
    const question = marked(detail.question);
    question.className = "asked";
    const options = element("ul", "options");
    detail.options.forEach((option, place) => {
      options.append(element("li", detail.gold_at.includes(place) ? "gold" : "", option));
    });
    const facts = element("dl", "facts");
    const add = (name, value) => {
      const pair = element("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      facts.append(pair);
    };
    add("gold answer", detail.gold);
    if (columns.score[index] !== null) add("score", percent(columns.score[index]) + (detail.outputs.length > 1 ? ` over ${detail.outputs.length} outputs` : ""));
    others.forEach((name, number) => {
      const other = columns.others[index][number];
      add("score in " + name, other === null ? "–" : percent(other));
    });
    add("kind", detail.kind);
    if (detail.cluster && detail.cluster !== columns.id[index]) add("media", detail.cluster);
    detail.details.forEach(([name, value]) => add(name, value));
    box.append(question, options, facts);
    return box;
  }

  let shown = -1;
  async function showDetail(index, at, total) {
    shown = index;
    const detailBox = by("detail");
    if (index === null) {
      detailBox.replaceChildren(element("p", "empty", state.search ? "No question holds these words." : "No question meets these filters."));
      return;
    }
    const detail = (await page(Math.floor(index / pageSize)))[index % pageSize];
    if (shown !== index) return;  // another was selected meanwhile
    const head = element("div", "head");
    const where = element("span", "", [sets[columns.set[index]], categories[columns.category[index]]].filter(Boolean).join(" · "));
    head.append(where, element("code", "", columns.id[index]), element("small", "", `${(at + 1).toLocaleString("en")} of ${total.toLocaleString("en")}`));
    const parts = [head, ...framesOf(detail.strip), questionOf(index, detail)];
    if (detail.fault) parts.push(element("p", "absent", `This question could not be asked (${detail.fault[0]}): ${detail.fault[1]}`));
    const outputs = element("div", "outputs");
    outputs.append(...detail.outputs.map((output, number) => outputOf(output, number + 1)));
    if (detail.more_outputs) outputs.append(element("p", "absent", `${detail.more_outputs} more outputs are in the folder's answers file.`));
    parts.push(outputs);
    detailBox.replaceChildren(...parts);
    detailBox.scrollTop = 0;
  }

  // ---- events ----
  function fill(select, all, names, used) {
    select.append(new Option(all, ""));
    names.forEach((name, number) => { if (used.has(number)) select.append(new Option(name || "(no category)", number)); });
  }

  function fillCategories() {
    const used = new Set();
    for (let index = 0; index < count; index++) {
      if (state.set === "" || columns.set[index] === state.set) used.add(columns.category[index]);
    }
    by("category").replaceChildren();
    fill(by("category"), "All categories", categories, used);
    if (!used.has(state.category)) state.category = "";
  }

  const choice = (select) => (select.value === "" ? "" : Number(select.value));
  const questions = list(by("list"), by("rows"), drawRow, showDetail);

  by("set").addEventListener("change", () => { state.set = choice(by("set")); fillCategories(); refresh(); });
  by("category").addEventListener("change", () => { state.category = choice(by("category")); refresh(); });
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const { outcome, flag } = button.dataset;
      if (outcome === undefined) state.flags ^= Number(flag);
      else if (!state.outcomes.delete(Number(outcome))) state.outcomes.add(Number(outcome));
      refresh();
    });
  }
  let typing = 0;
  by("search").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => { state.search = by("search").value.trim(); refresh(); }, 200);
  });
  by("clear").addEventListener("click", () => {
    Object.assign(state, { set: "", category: "", outcomes: new Set(), flags: 0, search: "" });
    by("search").value = "";
    fillCategories();
    refresh();
  });
  document.querySelectorAll("a[data-set]").forEach((link) => link.addEventListener("click", () => {
    const set = sets.indexOf(link.dataset.set);
    state.set = set < 0 ? "" : set;
    fillCategories();
    const category = categories.indexOf(link.dataset.category);
    state.category = category < 0 ? "" : category;
    refresh();
  }));

  const STEPS = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inField = event.target.closest("input, select, textarea, summary, [contenteditable]");
    const inList = event.target === by("list");
    if (event.key === "Escape" && event.target === by("search")) {
      by("list").focus();
    } else if (inField) {
      return;
    } else if (event.key === "/") {
      by("search").focus();
      by("search").select();
    } else if (event.key === "j" || event.key === "k" || (inList && event.key in STEPS)) {
      questions.move(STEPS[event.key]);
    } else if (inList && (event.key === "Home" || event.key === "End")) {
      questions.toEnd(event.key === "End");
    } else if (inList && (event.key === "PageDown" || event.key === "PageUp")) {
      questions.move(questions.page() * (event.key === "PageDown" ? 1 : -1));
    } else {
      return;
    }
    event.preventDefault();
  });

  fill(by("set"), "All sets", sets, new Set(columns.set));
  fillCategories();
  refresh();
  browser.dataset.ready = "true";
})();
