"""The page itself: structure without data, filled by `rating_script`.

Style of the page: two columns on a desktop, one under the other on a phone; light and dark by the system.

Script of the page: asks for a question, draws it, sends what is chosen; no library, no other origin.
"""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>posttrain prefer</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="rating.css">
<script src="rating.js" defer></script>
</head>
<body>
<header>
  <strong>posttrain prefer</strong>
  <span id="progress" role="status"></span>
  <span class="gap"></span>
  <button id="show-agreement" type="button" aria-expanded="false" aria-controls="agreement">agreement</button>
  <button id="change" type="button" hidden></button>
</header>
<p id="problem" role="alert" hidden></p>
<form id="who" hidden>
  <label for="name">Your name</label>
  <input id="name" maxlength="40" autocomplete="nickname" required>
  <button type="submit" class="main">begin</button>
</form>
<section id="agreement" aria-label="agreement of the raters" hidden></section>
<main id="task" hidden>
  <h1 id="question" tabindex="-1"></h1>
  <details id="prompt-box" open><summary>Prompt</summary><div id="prompt"></div></details>
  <div id="answers"></div>
</main>
<p id="done" hidden>Nothing is left to rate. Thank you.</p>
<footer id="controls" hidden>
  <div id="reasons" role="radiogroup" aria-label="reason, if you like"></div>
  <label class="comment"><span>comment <kbd>c</kbd></span>
    <textarea id="comment" rows="1" maxlength="2000"
      title="optional; Esc goes back to the keys"></textarea>
  </label>
  <div id="choices"></div>
</footer>
</body>
</html>
"""


STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --main: #0b57d0; --on-main: #ffffff; --tool: #eef3fb; --warn: #9a3412; --warn-page: #fff4ed;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b2129; --ink: #e6e9ee; --soft: #9aa5b1; --line: #38414d;
    --main: #8ab4f8; --on-main: #10151b; --tool: #222c3a; --warn: #ffb38a; --warn-page: #33201a;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body {
  margin: 0; min-height: 100vh; display: flex; flex-direction: column; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}
header {
  display: flex; flex-wrap: wrap; gap: .5rem .75rem; align-items: center; padding: .5rem 1rem;
  border-bottom: 1px solid var(--line); background: var(--card);
}
#progress { color: var(--soft); font-variant-numeric: tabular-nums; }
.gap { flex: 1; }
main, #who, #agreement, #done { width: 100%; max-width: 1400px; margin: 0 auto; padding: 1rem; }
main { flex: 1; }
h1 { font-size: 1.15rem; margin: 0 0 .75rem; outline: none; }
#problem { margin: 0; padding: .5rem 1rem; background: var(--warn-page); color: var(--warn); }
details { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: .5rem .75rem; }
summary { color: var(--soft); cursor: pointer; }
#answers {
  display: grid; grid-template-columns: repeat(var(--columns, 2), minmax(0, 1fr)); gap: 1rem; margin-top: 1rem;
}
article {
  border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: .5rem .75rem; min-width: 0;
}
article h2 { font-size: .95rem; margin: 0 0 .25rem; color: var(--soft); font-weight: 600; }
.turn { white-space: pre-wrap; overflow-wrap: anywhere; margin: .35rem 0; }
.turn .role { display: block; color: var(--soft); font-size: .8rem; }
.turn.tool, .turn.system { background: var(--tool); border-radius: 6px; padding: .35rem .5rem; font-size: .92rem; }
.turn.call { border-left: 3px solid var(--main); padding-left: .5rem; font-family: ui-monospace, monospace; }
footer {
  position: sticky; bottom: 0; padding: .5rem 1rem calc(.5rem + env(safe-area-inset-bottom)); background: var(--card);
  border-top: 1px solid var(--line);
}
footer > * { max-width: 1400px; margin: 0 auto; }
#reasons { display: flex; flex-wrap: wrap; gap: .4rem; padding-bottom: .4rem; }
.comment { display: flex; gap: .5rem; align-items: center; padding-bottom: .5rem; color: var(--soft); }
textarea, input {
  flex: 1; font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  padding: .35rem .5rem; min-width: 0;
}
#choices { display: flex; flex-wrap: wrap; gap: .5rem; }
button {
  font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  padding: .35rem .75rem; cursor: pointer; min-height: 2.5rem;
}
#choices button { flex: 1 1 auto; }
#reasons button { min-height: 0; padding: .1rem .6rem; border-radius: 999px; font-size: .88rem; }
button.main, button[aria-checked="true"] { background: var(--main); color: var(--on-main); border-color: var(--main); }
button:focus-visible, textarea:focus-visible, input:focus-visible, summary:focus-visible {
  outline: 3px solid var(--main); outline-offset: 2px;
}
button:disabled { opacity: .55; cursor: default; }
kbd {
  font: .8em ui-monospace, monospace; border: 1px solid currentColor; border-radius: 4px; padding: 0 .3em; opacity: .75;
}
#who { display: flex; gap: .5rem; align-items: center; flex-wrap: wrap; }
table { border-collapse: collapse; width: 100%; max-width: 40rem; }
th, td {
  text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
}
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; max-width: 40rem; height: auto; margin-top: .75rem; }
svg text { fill: var(--soft); font-size: 11px; }
@media (max-width: 720px) {
  #answers { grid-template-columns: minmax(0, 1fr); gap: .6rem; }
  main { padding: .6rem; }
  kbd, header strong { display: none; }
  header button { min-height: 2rem; padding: .1rem .6rem; }
  header, footer { padding-left: .6rem; padding-right: .6rem; }
  #reasons { flex-wrap: nowrap; overflow-x: auto; }
  #reasons button { white-space: nowrap; }
  #choices button { padding: .35rem .3rem; flex: 1 1 28%; }
}
"""


SCRIPT = r"""
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
      throw new Error("the server does not answer; what you typed is kept. Start `posttrain prefer` again and retry.");
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
"""
