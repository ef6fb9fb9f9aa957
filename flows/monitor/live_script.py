"""JavaScript of the page: asks the server for what is chosen, shows the header, the tabs and the open panel.

`posttrain.choose(values)` takes the values of the controls, in the order of `page.build_page`. The first question goes
out while the page loads, with what the address names.
"""

from __future__ import annotations

from flows.monitor.script import BLOCKS, CHART, TOOLS

__all__ = ["SCRIPT"]

_HEADER = r"""
let clock = null;
const duration = s => { if (s === null || s === undefined) return '\u2013'; s = Math.max(0, Math.round(s)); const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${String(m).padStart(2, '0')} min` : m ? `${m} min ${String(s % 60).padStart(2, '0')} s` : `${s} s`; };
const header = (e, head) => {
  if (!e.firstChild) { for (const [tag, cls] of [['span', 'pt-badge'], ['b', 'pt-name'], ['span', 'pt-now'], ['div', 'pt-bar pt-progress'], ['span', 'pt-time'], ['div', 'pt-why']]) e.append(html(tag, cls)); e.children[3].append(html('i')); }
  const [badge, name, now, bar, time, why] = e.children;
  badge.className = 'pt-badge ' + head.tone; set(badge, head.status); set(name, head.name); set(now, head.now);
  bar.style.display = head.fraction === null ? 'none' : ''; bar.firstChild.style.width = (100 * (head.fraction || 0)) + '%';
  const tell = () => { const since = head.live ? (Date.now() - head.received) / 1000 : 0;
    set(time, [head.elapsed === null ? '' : `${duration(head.elapsed + since)} elapsed`, head.left === null ? '' : `about ${duration(head.left - since)} left in this stage`,
      head.live && head.age !== null ? `last record ${duration(head.age + since)} ago` : ''].filter(Boolean).join(' \u00b7 ')); };
  set(why, head.why || ''); why.style.display = head.why ? '' : 'none';
  clearInterval(clock); tell();
  if (head.live) clock = setInterval(tell, 1000);
};
"""

_PAGE = r"""
const named = Object.fromEntries(new URLSearchParams(location.search));
const tabs = [...document.querySelectorAll('.pt-tabs button')], panels = [...document.querySelectorAll('.pt-panel')];
let tab = tabs.some(t => t.dataset.tab === named.tab) ? named.tab : 'overview';
let choice = {first: 1};  // as the server reads it: what the address names, then what the controls hold
for (const name of ['run', 'compare', 'stage', 'metrics', 'window', 'axis']) if (named[name]) choice[name] = named[name];
let offers = null, controls = false, seconds = 3, timer = null, asking = null;
let owed = true;  // an answer that has not come: asked for again even by a page that is paused
let patience = 20;  // seconds that it may take; longer after each that took longer, as of a busy machine
const versions = {};  // of what stands in each panel
const mark = () => {
  document.body.dataset.tab = tab;
  tabs.forEach(t => t.setAttribute('aria-selected', String(t.dataset.tab === tab)));
  panels.forEach(p => { p.hidden = p.dataset.tab !== tab; });
};
const show = next => {
  next.head.received = Date.now();
  header(document.querySelector('.pt-header'), next.head);
  history.replaceState(null, '', '?' + new URLSearchParams({...next.address, ...(named.__theme ? {__theme: named.__theme} : {}), tab: next.tab}));
  const panel = panels.find(p => p.dataset.tab === next.tab);
  if (next.blocks) {
    keyed(panel, next.blocks, b => { const e = kinds[b.kind].make(); e.classList.add('pt-block'); return e; }, (e, b) => kinds[b.kind].update(e, b));
    versions[next.tab] = next.version;
  }
  panel.dataset.ready = next.version;
  if (next.offers !== offers && controls) lists(next.offers);
};
const lists = now => { const button = document.querySelector('button#pt-lists, #pt-lists button'); if (button) { offers = now; button.click(); } };
// One question at a time; what a person asks for goes before the next look at what there is.
const ask = async () => {
  clearTimeout(timer);
  if (asking) asking.abort();
  const mine = asking = new AbortController(), begun = performance.now();
  owed = true;
  let late = false;
  const limit = setTimeout(() => { late = true; mine.abort(); }, 1000 * patience);
  const query = new URLSearchParams({...choice, tab, seen: versions[tab] || ''});
  try {
    const answer = await fetch('view?' + query, {signal: mine.signal});
    if (!answer.ok) throw new Error(String(answer.status));
    const next = await answer.json();
    if (asking !== mine) return;
    owed = false; patience = 20;
    document.body.classList.remove('pt-lost');
    const arrived = performance.now();
    show(next);
    document.dispatchEvent(new CustomEvent('posttrain-update', {detail: {begun, arrived, drawn: performance.now(), blocks: !!next.blocks}}));
  } catch (error) {
    if (asking !== mine) return;
    if (late) patience = Math.min(2 * patience, 160);
    else if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) console.error(error);
    document.body.classList.add('pt-lost');
  } finally { clearTimeout(limit); }
  asking = null;
  later();
};
const pause = () => seconds || (owed ? 3 : 0);
const later = () => { clearTimeout(timer); if (pause() > 0 && !document.hidden) timer = setTimeout(ask, 1000 * pause()); };
document.addEventListener('visibilitychange', () => { if (!document.hidden && !asking && pause() > 0) ask(); });
tabs.forEach(t => t.addEventListener('click', () => { tab = t.dataset.tab; mark(); ask(); }));
window.posttrain = {
  zoom, duration,
  every: value => { seconds = value; if (!asking) later(); },
  choose: ([run, compare, stage, window, axis, groups, metrics, source, outcome]) => {
    const next = {run: run || '', compare: (compare || []).join(), stage: stage || '', window: String(window || 10), axis: axis ? 'minutes' : 'step',
      groups: (groups || []).join(), metrics: (metrics || []).join(), source: source || '', outcome: outcome || 'all'};
    const before = JSON.stringify(choice);
    choice = next;
    if (!controls) { controls = true; offers = null; }
    if (before !== JSON.stringify(next)) ask();
  },
};
mark();
ask();
"""

SCRIPT = "<script>(() => {" + TOOLS + CHART + BLOCKS + _HEADER + _PAGE + "})();</script>"
