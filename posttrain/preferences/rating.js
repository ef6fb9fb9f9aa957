
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const make = (kind, text, className) => {
    const element = document.createElement(kind);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const kept = {
    read: (name) => { try { return localStorage.getItem("posttrain " + name) || ""; } catch { return ""; } },
    write: (name, value) => { try { localStorage.setItem("posttrain " + name, value); } catch { /* private mode */ } },
  };
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("token")) kept.write("token", given.get("token"));
  const token = given.get("token") || kept.read("token");
  let rater = given.get("rater") || kept.read("rater");
  if (location.hash) history.replaceState(null, "", location.pathname);
  let page = null, current = null, rated = 0, reason = "", shownAt = 0, away = 0, hiddenAt = 0, busy = false;

  const CHOICES = {
    pairs: [["left", "A", "1"], ["tie", "tie", "0"], ["right", "B", "2"], ["both_bad", "both bad", "b"]],
    scores: [[1, "1", "1"], [2, "2", "2"], [3, "3", "3"], [4, "4", "4"], [5, "5", "5"]],
    thumbs: [[1, "\u{1F44D} good", "1"], [0, "\u{1F44E} bad", "2"]],
  };

  async function ask(path, body) {
    let answer;
    try {
      answer = await fetch("api/" + path, {
        method: body ? "POST" : "GET",
        headers: { authorization: "Bearer " + token, "content-type": "application/json" },
        body: body ? JSON.stringify(body) : undefined,
      });
    } catch {
      throw new Error("the server does not answer; what you typed is kept. Start `posttrain label` again and retry.");
    }
    const found = await answer.json().catch(() => ({ error: "the server's answer cannot be read" }));
    if (!answer.ok) throw new Error(found.error || "error " + answer.status);
    return found;
  }

  function problem(text) {
    at("problem").textContent = text || "";
    at("problem").hidden = !text;
  }

  async function during(work) {
    if (busy) return;
    busy = true;
    setEnabled(false);
    try {
      await work();
      problem("");
    } catch (error) {
      problem(error.message);
    } finally {
      busy = false;
      setEnabled(true);
    }
  }

  function setEnabled(enabled) {
    for (const button of document.querySelectorAll("#choices button")) button.disabled = !enabled;
    if (enabled && at("undo")) at("undo").disabled = rated === 0;
  }

  function drawTurns(place, messages, plain) {
    place.replaceChildren();
    for (const message of messages) {
      const isCall = message.role === "assistant" && /^\s*[{<\[]/.test(message.content) && messages.length > 1;
      const turn = make("div", undefined, "turn " + message.role + (isCall ? " call" : ""));
      if (!(plain && messages.length === 1)) turn.append(make("span", message.role, "role"));
      if (message.reasoning_content) turn.append(make("div", message.reasoning_content, "turn system"));
      turn.append(make("div", message.content || ""));
      for (const call of message.tool_calls || []) {
        turn.append(make("div", call.function.name + " " + JSON.stringify(call.function.arguments), "turn call"));
      }
      place.append(turn);
    }
  }

  function draw(found) {
    rated = found.rated;
    current = found.question;
    const others = found.raters > 1 ? ", " + found.total + " ratings by " + found.raters + " people" : "";
    const left = found.items + " to rate" + others;
    at("progress").textContent = "you: " + rated + " · " + left;
    at("task").hidden = at("controls").hidden = !current;
    at("done").hidden = Boolean(current);
    if (!current) { at("controls").hidden = rated === 0; at("reasons").hidden = true; setEnabled(true); return; }
    at("reasons").hidden = false;
    at("question").textContent = page.question + (current.asked > 1 ? " (once more)" : "");
    drawTurns(at("prompt"), current.prompt, true);
    const names = current.answers.length > 1 ? ["A", "B"] : ["answer"];
    at("answers").style.setProperty("--columns", String(names.length));
    at("answers").replaceChildren(...current.answers.map((messages, place) => {
      const card = make("article");
      card.setAttribute("aria-label", names[place]);
      card.append(make("h2", names[place]));
      const turns = make("div");
      drawTurns(turns, messages, true);
      card.append(turns);
      return card;
    }));
    choose("");
    at("comment").value = kept.read("draft " + current.item);
    shownAt = performance.now();
    away = hiddenAt = 0;
    window.scrollTo(0, 0);
    at("question").focus({ preventScroll: true });
  }

  function choose(text) {
    reason = text;
    for (const button of at("reasons").children) {
      button.setAttribute("aria-checked", String(button.textContent === text));
    }
  }

  function send(choice) {
    if (!current) return;
    return during(async () => {
      const body = {
        rater, item: current.item, count: rated, reason, comment: at("comment").value.trim(),
        seconds: Math.max(0, (performance.now() - shownAt - away) / 1000),
      };
      if (typeof choice === "number") body.score = choice; else body.choice = choice;
      const item = current.item;
      const found = await ask("rate", body);
      kept.write("draft " + item, "");
      draw(found);
      if (found.outdated) throw new Error("that question was answered already (in another tab?); here is the open one");
    });
  }

  const undo = () => during(async () => {
    const found = await ask("undo", { rater });
    draw(found);
    if (found.undone) { at("comment").value = found.undone.comment; choose(found.undone.reason); }
  });

  function drawControls() {
    const buttons = CHOICES[page.ask].map(([choice, text, key]) => button(text, key, () => send(choice)));
    buttons.push(button("skip", "s", () => send("skip")));
    const back = button("undo", "u", undo);
    back.id = "undo";
    at("choices").replaceChildren(...buttons, back);
    at("reasons").replaceChildren(...page.reasons.map((text) => {
      const chip = make("button", text);
      chip.type = "button";
      chip.setAttribute("role", "radio");
      chip.setAttribute("aria-checked", "false");
      chip.addEventListener("click", () => choose(reason === text ? "" : text));
      return chip;
    }));
  }

  function button(text, key, action) {
    const element = make("button", text + " ");
    element.type = "button";
    element.dataset.key = key;
    element.append(make("kbd", key));
    element.addEventListener("click", action);
    return element;
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && event.target === at("comment")) {
      at("comment").blur();
      at("question").focus();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.target.getAttribute("role") === "radio" && event.key.startsWith("Arrow")) {  // within the reasons
      event.preventDefault();
      const chips = [...at("reasons").children], step = /Left|Up/.test(event.key) ? -1 : 1;
      const next = chips[(chips.indexOf(event.target) + step + chips.length) % chips.length];
      next.focus();
      choose(next.textContent);
      return;
    }
    if (at("controls").hidden || event.repeat) return;
    if (event.key === "c") { event.preventDefault(); at("comment").focus(); return; }
    if (event.key === "r") {
      const all = ["", ...page.reasons];
      choose(all[(all.indexOf(reason) + 1) % all.length]);
      return;
    }
    const key = { t: "0", "=": "0", ArrowLeft: "1", ArrowRight: "2" }[event.key] || event.key;
    if (page.ask !== "pairs" && key !== event.key) return;
    const found = document.querySelector('#choices button[data-key="' + CSS.escape(key) + '"]');
    if (found && !found.disabled) { event.preventDefault(); found.click(); }
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) hiddenAt = performance.now();
    else if (hiddenAt) { away += performance.now() - hiddenAt; hiddenAt = 0; }
  });
  at("comment").addEventListener("input", () => {
    if (current) kept.write("draft " + current.item, at("comment").value);
  });

  // ---- agreement ----------------------------------------------------------------------------------------------------

  const number = (value, digits = 2) => (value === null || value === undefined ? "-" : value.toFixed(digits));

  async function showAgreement() {
    const place = at("agreement");
    place.hidden = !place.hidden;
    at("show-agreement").setAttribute("aria-expanded", String(!place.hidden));
    if (place.hidden) return;
    const found = await ask("agreement");
    const interval = found.low === null ? "" : " [" + number(found.low) + ", " + number(found.high) + "]";
    const title = make("h1", "Krippendorff's alpha: " + number(found.alpha) + interval);
    const about = make("p", found.units + " items rated by two people or more. 1: they agree; 0: as by chance.");
    const table = make("table");
    const head = make("tr");
    for (const text of ["rater", "alpha with the others", "items", "same answer again"]) head.append(make("th", text));
    table.append(head);
    for (const one of found.raters) {
      const row = make("tr");
      const same = one.repeats ? Math.round(100 * one.consistency) + "% of " + one.repeats : "-";
      for (const text of [one.rater, number(one.alpha), one.units, same]) row.append(make("td", String(text)));
      table.append(row);
    }
    place.replaceChildren(title, about, table);
    if (found.over_time.length > 1) place.append(curve(found.over_time.map((window) => window[1])));
  }

  function curve(values) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const part = (kind, attributes, text) => {
      const element = document.createElementNS(space, kind);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      if (text !== undefined) element.textContent = text;
      svg.append(element);
    };
    svg.setAttribute("viewBox", "0 0 400 130");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "alpha over time: " + values.map((value) => number(value)).join(", "));
    const x = (place) => 40 + 350 * (values.length > 1 ? place / (values.length - 1) : 0);
    const lowest = Math.min(0, ...values.map((value) => Math.floor(2 * (value || 0)) / 2));
    const y = (value) => 100 - 85 * (value - lowest) / (1 - lowest);
    for (let level = lowest; level <= 1; level += 0.5) {
      part("line", { x1: 40, x2: 390, y1: y(level), y2: y(level), stroke: "var(--line)" });
      part("text", { x: 8, y: y(level) + 4 }, level.toFixed(1));
    }
    part("text", { x: 40, y: 122 }, "earlier");
    part("text", { x: 362, y: 122 }, "later");
    const points = values.map((value, place) => (value === null ? null : [x(place), y(value)])).filter(Boolean);
    part("polyline", { points: points.map((p) => p.join(",")).join(" "), fill: "none", stroke: "var(--main)",
      "stroke-width": 2 });
    for (const [cx, cy] of points) part("circle", { cx, cy, r: 3, fill: "var(--main)" });
    return svg;
  }

  // ---- start --------------------------------------------------------------------------------------------------------

  at("show-agreement").addEventListener("click", () => during(showAgreement));
  at("change").addEventListener("click", () => { rater = ""; begin(); });
  at("who").addEventListener("submit", (event) => {
    event.preventDefault();
    rater = at("name").value.trim();
    if (rater) { kept.write("rater", rater); begin(); }
  });

  function begin() {
    at("change").hidden = !rater;
    at("change").textContent = rater ? "you are " + rater : "";
    at("who").hidden = Boolean(rater);
    if (!rater) {
      at("task").hidden = at("controls").hidden = at("done").hidden = true;
      at("name").focus();
      return;
    }
    during(async () => {
      page = page || await ask("page");
      drawControls();
      draw(await ask("question", { rater }));
    });
  }
  begin();
})();
