"use strict";
// A list of any length of which only the rows in view exist, and the unpacking of data from the page's own elements.
// Text is only ever set as text, never as HTML.
const evalWindow = (() => {
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

  return { element, unpacked, remembering, list };
})();
