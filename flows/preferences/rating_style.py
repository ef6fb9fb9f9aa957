"""Style of the page: two columns on a desktop, one under the other on a phone; light and dark by the system."""

from __future__ import annotations

__all__ = ["STYLE"]

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
