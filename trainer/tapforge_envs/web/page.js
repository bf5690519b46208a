// Runs before every script of a page. Promises:
// 1. Time stands still but for __tapforge.advance(ms): Date, performance.now, timers and animation frames follow the
//    same clock. A timer that is due at once runs by itself, as in any page.
// 2. What no clock of the page's scripts governs (CSS animations, the blinking caret) does not move.
// 3. The list of a <select> is drawn inside the page, so that a screenshot shows it. Date and time fields, whose popups
//    a screenshot does not show, have no button for them: they are typed into.
// 4. A form is never submitted to a server, and no window and no menu of the browser's own opens.
// 5. What a script draws at random before the episode is seeded is the same every time.
(() => {
  "use strict";
  if (window.__tapforge) return;
  const RealDate = Date;
  const nativeTimeout = window.setTimeout.bind(window);
  const nativeFrame = window.requestAnimationFrame.bind(window);
  const START = RealDate.UTC(2020, 5, 15, 12);
  const FRAME = 16;
  const MOST_CALLS = 20000;
  let now = START, last = 0, depth = 0, drains = false;
  const timers = new Map();

  window.Date = new Proxy(RealDate, {
    construct: (target, args, self) => Reflect.construct(target, args.length ? args : [now], self),
    apply: () => new RealDate(now).toString(),
    get: (target, name) => (name === "now" ? () => now : Reflect.get(target, name)),
  });
  RealDate.prototype.constructor = window.Date;
  performance.now = () => now - START;

  const run = (callback, args) => {
    depth += 1;
    try {
      if (typeof callback === "function") callback.apply(window, args);
      else (0, eval)(String(callback));
    } catch (error) {
      console.error(error);
    } finally {
      depth -= 1;
    }
  };
  const soonest = (until) => {
    let found = null;
    for (const [id, timer] of timers)
      if (timer.at <= until && (found === null || timer.at < timers.get(found).at)) found = id;
    return found;
  };
  const fire = (id) => {
    const timer = timers.get(id);
    now = Math.max(now, timer.at);
    if (timer.every === null) timers.delete(id);
    else timer.at = now + timer.every;
    run(timer.callback, timer.frame ? [performance.now()] : timer.args);
  };
  const drain = () => {
    drains = false;
    for (let calls = 0, id; calls < MOST_CALLS && (id = soonest(now)) !== null; calls++) fire(id);
  };
  const add = (callback, ms, args, repeats, frame) => {
    const wait = Number(ms) > 0 ? Number(ms) : 0;
    // What a timer starts at once is due a millisecond later: a chain of such timers ends with the clock's step.
    const at = frame ? START + (Math.floor((now - START) / FRAME) + 1) * FRAME : now + (depth && wait < 1 ? 1 : wait);
    timers.set(++last, { at, callback, args, every: repeats ? Math.max(wait, 4) : null, frame });
    if (at <= now && !drains) {
      drains = true;
      nativeTimeout(drain, 0);
    }
    return last;
  };
  const remove = (id) => void timers.delete(Number(id));
  window.setTimeout = (callback, ms, ...args) => add(callback, ms, args, false, false);
  window.setInterval = (callback, ms, ...args) => add(callback, ms, args, true, false);
  window.requestAnimationFrame = (callback) => add(callback, 0, [], false, true);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = remove;
  window.open = () => null;
  window.print = () => undefined;

  let noise = 1;
  Math.random = () => {
    noise = (noise * 48271) % 2147483647;
    return noise / 2147483647;
  };

  const style = document.createElement("style");
  style.textContent = `
    *, *::before, *::after {
      transition: none !important; animation: none !important; caret-color: transparent !important;
      scroll-behavior: auto !important;
    }
    html { overflow: hidden !important; }
    #reward-display, #click-canvas, #sync-task-cover, #attention-canvas { display: none !important; }
    select:not([multiple]):not([size]), select:not([multiple]):not([size])::picker(select) { appearance: base-select; }
    select:not([multiple]):not([size]) { min-height: 0; padding: 1px 3px; gap: 2px; font-size: 10px; }
    ::picker(select) { max-height: 120px; overflow-y: auto; font-size: 10px; }
    input::-webkit-calendar-picker-indicator { display: none; }
    select option { min-height: 0; padding: 1px 3px; }
  `;
  const install = () => (document.head || document.documentElement).appendChild(style);
  document.addEventListener("DOMContentLoaded", install, { once: true });
  window.addEventListener("submit", (event) => event.preventDefault(), true);
  // Menus and drags of the browser's own are not part of a page, are in no screenshot, and hold up everything else.
  for (const name of ["contextmenu", "dragstart"]) {
    window.addEventListener(name, (event) => event.preventDefault(), true);
  }
  window.addEventListener("mousedown", (event) => event.button === 1 && event.preventDefault(), true);

  const settled = async () => {
    // A frame runs what the browser itself keeps for frames: scroll and resize events.
    await Promise.race([new Promise(nativeFrame), new Promise((done) => nativeTimeout(done, 200))]);
    await new Promise((done) => nativeTimeout(done, 0));
  };
  // Pictures that a script has put in since the page was loaded, of elements and of styles.
  const drawn = new Set();
  const pictures = async () => {
    const wanted = new Set([...document.images].map((image) => image.currentSrc || image.src));
    for (const element of document.body.querySelectorAll("*")) {
      const style = getComputedStyle(element);
      for (const said of [style.backgroundImage, style.content, style.listStyleImage])
        for (const [, url] of said.matchAll(/url\("([^"]+)"\)/g)) wanted.add(url);
    }
    const missing = [...wanted].filter((url) => url && !drawn.has(url));
    if (!missing.length) return;
    const decoded = missing.map((url) => {
      drawn.add(url);
      const image = new Image();
      image.src = url;
      return image.decode().catch(() => undefined);
    });
    await Promise.race([Promise.all(decoded), new Promise((done) => nativeTimeout(done, 2000))]);
    await settled();
  };
  const advance = async (ms) => {
    const until = now + ms;
    for (let calls = 0, id; calls < MOST_CALLS && (id = soonest(until)) !== null; calls++) {
      fire(id);
      await null;
    }
    now = Math.max(now, until);
  };

  // --- what is seen ---

  const MOST_NODES = 3000, MOST_TEXT = 2000;
  const HIDDEN = new Set(["reward-display", "click-canvas", "sync-task-cover", "attention-canvas"]);
  const SKIPPED = new Set(["SCRIPT", "STYLE", "LINK", "META", "TEMPLATE"]);
  const described = (element, left) => {
    const box = element.getBoundingClientRect();
    const name = element.tagName.toLowerCase();
    const node = { tag: name };
    if (element.id) node.id = element.id;
    const classes = element.getAttribute("class");
    if (classes) node.class = classes;
    const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join(" ").trim();
    if (text) node.text = text.replace(/\s+/g, " ").slice(0, MOST_TEXT);
    if (name === "input" || name === "textarea" || name === "select") {
      node.type = element.type;
      if (element.type === "checkbox" || element.type === "radio") node.checked = element.checked;
      else node.value = String(element.value).slice(0, MOST_TEXT);
      node.editable = !element.readOnly && !element.disabled;
      if (element.placeholder) node.placeholder = element.placeholder;
    }
    if (name === "option") node.selected = element.selected;
    if (element.namespaceURI && element.namespaceURI.endsWith("svg"))
      for (const of of ["fill", "stroke", "r", "transform"]) {
        if (element.hasAttribute(of)) node[of] = element.getAttribute(of);
      }
    if (element.style && element.style.backgroundColor) node.background = element.style.backgroundColor;
    if (element === document.activeElement && element !== document.body) node.focused = true;
    if (element.scrollTop) node.scrolled = Math.round(element.scrollTop);
    node.left = Math.round(box.left); node.top = Math.round(box.top);
    node.width = Math.round(box.width); node.height = Math.round(box.height);
    const children = [];
    for (const child of element.children) {
      if (left.nodes <= 0) break;
      if (SKIPPED.has(child.tagName) || HIDDEN.has(child.id)) continue;
      const shape = child.getBoundingClientRect();
      const seen = shape.width > 0 || shape.height > 0 || child.children.length > 0;
      if (!seen || getComputedStyle(child).display === "none") continue;
      if (getComputedStyle(child).visibility === "hidden") continue;
      left.nodes -= 1;
      children.push(described(child, left));
    }
    if (children.length) node.children = children;
    return node;
  };
  const utterance = () => {
    const said = core.getUtterance();
    return typeof said === "string" ? said : String((said && said.utterance) || JSON.stringify(said));
  };
  const observe = async (ms) => {
    await settled();
    await advance(ms);
    await pictures();
    return {
      done: WOB_DONE_GLOBAL === true,
      raw: Number(WOB_RAW_REWARD_GLOBAL),
      reason: WOB_REWARD_REASON === null || WOB_REWARD_REASON === undefined ? "" : String(WOB_REWARD_REASON),
      tree: described(document.body, { nodes: MOST_NODES }),
    };
  };
  const begin = async (seed, mode, ms) => {
    const there = typeof core !== "undefined" && typeof core.startEpisodeReal === "function";
    if (!there) throw new Error("no page of MiniWoB");
    await document.fonts.ready;
    await advance(0);
    if (mode) core.setDataMode(mode);
    core.EPISODE_MAX_TIME = 1e12;  // an episode ends by what is done, or by the agent's number of steps
    Math.seedrandom(seed);
    core.startEpisodeReal();
    return { ...(await observe(ms)), goal: utterance() };
  };
  const selection = () => {
    const at = document.activeElement;
    if (at && typeof at.selectionStart === "number") return at.value.slice(at.selectionStart, at.selectionEnd);
    return String(window.getSelection());
  };
  Object.defineProperty(window, "__tapforge", { value: Object.freeze({ advance, observe, begin, selection }) });
})();
