(() => {
const SVG = 'http://www.w3.org/2000/svg';
const html = (tag, cls, text) => { const e = document.createElement(tag); if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text; return e; };
const svg = (tag, attributes, text) => { const e = document.createElementNS(SVG, tag);
  for (const k in attributes) e.setAttribute(k, attributes[k]); if (text !== undefined) e.textContent = text; return e; };
const set = (e, text) => { if (e.textContent !== text) e.textContent = text; };
// Children of `parent` in the order of `items`; each keeps its element as long as its id stays.
const keyed = (parent, items, make, update) => {
  const old = new Map([...parent.children].map(e => [e.dataset.key, e]));
  items.forEach((item, i) => {
    let e = old.get(item.id);
    if (!e) { e = make(item); e.dataset.key = item.id; }
    old.delete(item.id);
    if (parent.children[i] !== e) parent.insertBefore(e, parent.children[i] || null);
    update(e, item);
  });
  old.forEach(e => e.remove());
};
const number = v => {
  if (v === null || v === undefined || !isFinite(v)) return '\u2013';
  const a = Math.abs(v);
  if (v === 0) return '0';
  if (a >= 1e6 || a < 1e-4) return v.toExponential(2);
  if (a >= 1000) return Math.round(v).toLocaleString('en-US');
  return String(parseFloat(v.toPrecision(4)));
};
const value = (spec, v) => spec.percent && v !== null && isFinite(v) ? parseFloat((100 * v).toPrecision(3)) + ' %' : number(v);
const short = v => { const a = Math.abs(v);
  if (a >= 1e9) return parseFloat((v / 1e9).toPrecision(4)) + 'G';
  if (a >= 1e6) return parseFloat((v / 1e6).toPrecision(4)) + 'M';
  if (a >= 1e4) return parseFloat((v / 1e3).toPrecision(4)) + 'k';
  if (a && a < 1e-3) return v.toExponential(1);
  return String(parseFloat(v.toPrecision(6))); };
const ticks = (lo, hi, n, whole) => {
  const raw = Math.max((hi - lo) / Math.max(1, n), whole ? 1 : 0), base = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map(k => k * base).find(s => s >= raw * 0.999);
  const found = [];
  for (let v = Math.ceil(lo / step - 1e-9) * step; v <= hi + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
};

const zoom = {}, hidden = {};   // per chart id: [x from, x to]; names of lines that are switched off
const L = 52, R = 12, B = 34, H = 226;
let T = 8;                      // room above the plot: more where marks have names
const drawn = new WeakMap();    // chart element -> what it shows
const makeChart = () => {
  const e = html('div', 'pt-chart');
  e.append(html('div', 'pt-title'), html('div', 'pt-legend'), html('div', 'pt-plot'));
  const plot = e.lastChild, tip = html('div', 'pt-tip');
  plot.append(svg('svg', {}), tip);
  let from = null;
  const at = event => { const d = drawn.get(e), box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left - L) / (box.width - L - R);
    return d.x0 + Math.min(1, Math.max(0, share)) * (d.x1 - d.x0); };
  plot.addEventListener('pointerdown', event => { if (drawn.get(e)) { from = at(event); plot.setPointerCapture(event.pointerId); event.preventDefault(); } });
  plot.addEventListener('pointermove', event => { if (drawn.get(e)) hover(e, tip, at(event), from); });
  plot.addEventListener('pointerup', event => {
    if (from === null) return;
    const d = drawn.get(e), to = at(event), a = Math.min(from, to), b = Math.max(from, to);
    from = null;
    if (b - a > (d.x1 - d.x0) * 0.02) zoom[d.spec.id] = [a, b];
    drawChart(e, d.spec);
  });
  plot.addEventListener('pointerleave', () => { tip.style.display = 'none'; const g = plot.querySelector('.pt-hover'); if (g) g.replaceChildren(); });
  plot.addEventListener('dblclick', () => { const d = drawn.get(e); if (d) { delete zoom[d.spec.id]; drawChart(e, d.spec); } });
  new ResizeObserver(() => { const d = drawn.get(e); if (d && Math.abs(d.width - plot.clientWidth) > 1) drawChart(e, d.spec); }).observe(plot);
  return e;
};
const shown = (spec, line) => !(hidden[spec.id] || new Set()).has(line.name);
const drawChart = (e, spec, wide) => {
  const [title, legend, plot] = e.children, root = plot.firstChild;
  if (!title.firstChild) title.append(html('b'), html('span'), html('a', 'pt-reset', 'reset zoom'));
  set(title.children[0], spec.label || spec.title); title.children[0].title = spec.hint || spec.title; title.children[0].dataset.metric = spec.title; set(title.children[1], spec.unit || '');
  title.children[2].style.display = zoom[spec.id] ? '' : 'none';
  title.children[2].onclick = () => { delete zoom[spec.id]; drawChart(e, spec); };
  legend.classList.toggle('one', spec.lines.length > 1 && spec.lines.every(l => !l.quiet) && !!spec.compares);
  keyed(legend, spec.lines.filter(l => !l.quiet).map(l => ({...l, id: l.name})), () => { const i = html('span', 'pt-key'); i.append(html('i'), html('span'), html('b')); return i; }, (i, l) => {
    i.firstChild.style.cssText = `border-top:3px ${l.dash ? 'dashed' : 'solid'} var(--c${l.colour})`;
    set(i.children[1], l.name); set(i.children[2], spec.names ? '' : value(spec, l.last));
    i.classList.toggle('off', !shown(spec, l));
    i.title = 'click to hide or show';
    i.onclick = () => { const s = hidden[spec.id] = hidden[spec.id] || new Set(); s.has(l.name) ? s.delete(l.name) : s.add(l.name); drawChart(e, spec); };
  });
  const width = wide || plot.clientWidth || 420, lines = spec.lines.filter(l => shown(spec, l) && l.x.length);
  let x0 = Infinity, x1 = -Infinity;
  for (const l of lines) { x0 = Math.min(x0, l.x[0]); x1 = Math.max(x1, l.x[l.x.length - 1]); }
  if (!isFinite(x0)) { x0 = 0; x1 = 1; }
  if (zoom[spec.id]) [x0, x1] = zoom[spec.id];
  if (x1 <= x0) { x0 -= 0.5; x1 = x0 + 1; }
  const placed = placeMarks((spec.marks || []).filter(m => m.x >= x0 && m.x <= x1), x => L + (x - x0) / (x1 - x0) * (width - L - R), width - R);
  T = placed.rows ? 6 + 14 * placed.rows : 8;
  let y0 = Infinity, y1 = -Infinity;
  const span = ys => (x, i) => { if (x >= x0 && x <= x1) { y0 = Math.min(y0, ys[i]); y1 = Math.max(y1, ys[i]); } };
  for (const l of lines) for (const ys of [l.y, l.low, l.high]) if (ys) l.x.forEach(span(ys));
  for (const l of lines) if (l.avg) l.ax.forEach(span(l.avg));
  if (spec.range) { y0 = Math.min(spec.range[0], isFinite(y0) ? y0 : spec.range[0]); y1 = isFinite(y1) && y1 > spec.range[1] ? y1 + (y1 - y0) * 0.06 : spec.range[1]; }
  if (!isFinite(y0)) { y0 = 0; y1 = 1; }
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y0))) { const pad = Math.abs(y0) * 0.1 || 0.5; y0 -= pad; y1 += pad; }
  else if (!spec.range) { const pad = (y1 - y0) * 0.06; if (!(y0 >= 0 && y0 - pad < 0)) y0 -= pad; else y0 = Math.min(y0, 0); y1 += pad; }
  const X = x => L + (x - x0) / (x1 - x0) * (width - L - R), Y = y => T + (1 - (y - y0) / (y1 - y0)) * (H - T - B);
  root.setAttribute('width', width); root.setAttribute('height', H);
  const parts = [], clip = 'pt-clip-' + spec.id.replace(/\W/g, '-');
  const defs = svg('defs', {}), path = svg('clipPath', {id: clip});
  path.append(svg('rect', {x: L, y: T - 2, width: Math.max(1, width - L - R), height: H - T - B + 4})); defs.append(path); parts.push(defs);
  const ys = spec.names ? spec.names.map((_, i) => i) : ticks(y0, y1, 5);
  for (const v of ys) if (v >= y0 - 1e-9 && v <= y1 + 1e-9) {
    parts.push(svg('line', {x1: L, x2: width - R, y1: Y(v), y2: Y(v), class: 'pt-grid'}));
    parts.push(svg('text', {x: L - 6, y: Y(v) + 4, 'text-anchor': 'end'}, spec.names ? clipped(spec.names[v], 8) : spec.percent ? short(v * 100) + ' %' : short(v)));
  }
  for (const v of ticks(x0, x1, Math.max(2, width / 75), !spec.x.startsWith('minutes'))) parts.push(svg('text', {x: X(v), y: H - B + 15, 'text-anchor': 'middle'}, short(v)));
  parts.push(svg('text', {x: (L + width - R) / 2, y: H - 4, 'text-anchor': 'middle', class: 'pt-axis'}, spec.x));
  const body = svg('g', {'clip-path': `url(#${clip})`});
  const step = l => spec.step ? l.x.flatMap((x, i) => i ? [`${X(x)},${Y(l.y[i - 1])}`, `${X(x)},${Y(l.y[i])}`] : [`${X(x)},${Y(l.y[i])}`]) : l.x.map((x, i) => `${X(x)},${Y(l.y[i])}`);
  for (const m of placed.marks) {
    const line = svg('line', {x1: m.at, x2: m.at, y1: m.row === null ? T : 8 + 14 * m.row, y2: H - B, class: 'pt-mark ' + m.kind});
    line.append(svg('title', {}, m.label));
    parts.push(line);
  }
  for (const m of placed.marks) if (m.row !== null) parts.push(svg('text', {x: m.start, y: 12 + 14 * m.row, class: 'pt-mark-label'}, m.label));
  for (const l of lines) if (l.low) {  // from the least to the largest seed
    const edge = ys => l.x.map((x, i) => `${X(x)},${Y(ys[i])}`);
    body.append(svg('polygon', {points: [...edge(l.low), ...edge(l.high).reverse()].join(' '), fill: `var(--c${l.colour})`, class: 'pt-band'}));
  }
  for (const l of lines) {
    const common = {fill: 'none', stroke: `var(--c${l.colour})`, 'stroke-linejoin': 'round'};
    if (l.x.length === 1) body.append(svg('circle', {cx: X(l.x[0]), cy: Y(l.y[0]), r: 3, fill: `var(--c${l.colour})`}));
    body.append(svg('polyline', {...common, points: step(l).join(' '), 'stroke-width': l.avg ? 1 : 1.8, opacity: l.avg ? 0.4 : 1, ...(l.dash ? {'stroke-dasharray': '5 4'} : {})}));
    if (l.avg) body.append(svg('polyline', {...common, points: l.ax.map((x, i) => `${X(x)},${Y(l.avg[i])}`).join(' '), 'stroke-width': 2.1, ...(l.dash ? {'stroke-dasharray': '6 4'} : {})}));
  }
  parts.push(body, svg('g', {class: 'pt-hover'}));
  root.replaceChildren(...parts);
  drawn.set(e, {spec, x0, x1, y0, y1, width, X, Y, T, lines});
};
// Marks with their labels in rows, so that none hides another. Marks closer than 5 px share one line and one label; where
// all rows are full, the label before counts the others.
const placeMarks = (marks, X, right) => {
  const joined = [];
  for (const m of [...marks].sort((a, b) => a.x - b.x)) {
    const last = joined[joined.length - 1];
    if (last && X(m.x) - last.at < 5) { last.labels.push(m.label); last.kind = last.kind || m.kind || ''; }
    else joined.push({at: X(m.x), labels: [m.label], kind: m.kind || ''});
  }
  const free = Array(right < 600 ? 4 : 3).fill(-Infinity), width = text => text.length * 6.2 + 12;
  let rows = 0, before = null;
  for (const m of joined) {
    m.label = m.labels.length > 2 ? `${m.labels[0]} … ${m.labels[m.labels.length - 1]} (${m.labels.length})` : m.labels.join(', ');
    m.start = Math.max(L, Math.min(m.at - 3, right - width(m.label)));
    const row = free.findIndex(end => m.start >= end);
    m.row = row < 0 ? null : row;
    if (row >= 0) { free[row] = m.start + width(m.label); rows = Math.max(rows, row + 1); before = m; before.more = 0; }
    else if (before) before.more += m.labels.length;
  }
  for (const m of joined) if (m.more) m.label += ` +${m.more}`;
  return {marks: joined, rows};
};
const clipped = (text, n) => text.length > n ? text.slice(0, n - 1) + '…' : text;
const hover = (e, tip, x, from) => {
  const d = drawn.get(e), layer = e.querySelector('.pt-hover'), rows = [], T = d.T;
  layer.replaceChildren();
  if (from !== null) layer.append(svg('rect', {x: Math.min(d.X(from), d.X(x)), width: Math.abs(d.X(x) - d.X(from)), y: T, height: H - T - B, class: 'pt-drag'}));
  let at = null;
  for (const l of d.lines) {
    const xs = l.avg ? l.ax : l.x, ys = l.avg || l.y;
    let lo = 0, hi = xs.length - 1;
    while (hi - lo > 1) { const m = (lo + hi) >> 1; xs[m] < x ? lo = m : hi = m; }
    const i = Math.abs(xs[lo] - x) < Math.abs(xs[hi] - x) || d.spec.step && xs[hi] > x ? lo : hi;
    if (at === null) at = xs[i];
    layer.append(svg('circle', {cx: d.X(xs[i]), cy: d.Y(ys[i]), r: 3.2, fill: `var(--c${l.colour})`}));
    const range = l.low ? ` (${value(d.spec, l.low[i])} to ${value(d.spec, l.high[i])})` : '';
    rows.push([l, d.spec.names ? d.spec.names[ys[i]] : value(d.spec, ys[i]) + range]);
  }
  if (!rows.length) { tip.style.display = 'none'; return; }
  layer.append(svg('line', {x1: d.X(at), x2: d.X(at), y1: T, y2: H - B, class: 'pt-cross'}));
  tip.replaceChildren(html('div', 'pt-faint', `${d.spec.x} ${short(at)}`), ...rows.slice(0, 14).map(([l, v]) => {
    const row = html('div'), dot = html('i'); dot.style.background = `var(--c${l.colour})`; row.append(dot, html('span', '', l.name), html('b', '', v)); return row; }));
  tip.style.display = 'block';
  const right = d.X(at) > d.width / 2;
  tip.style.left = right ? '' : (d.X(at) + 12) + 'px'; tip.style.right = right ? (d.width - d.X(at) + 12) + 'px' : '';
};

const cell = value => {
  const v = (value !== null && typeof value === 'object') ? value : {t: value};
  const td = html('td', v.c || '');
  if (v.bar !== undefined) { const bar = html('div', 'pt-bar'), fill = html('i'); fill.style.width = (100 * v.bar) + '%'; bar.append(fill); td.append(bar); }
  if (v.badge) td.append(html('span', 'pt-badge ' + v.badge, v.t)); else td.append(document.createTextNode(v.t === null || v.t === undefined ? '\u2013' : v.t));
  if (v.title) td.title = v.title;
  return td;
};
// Notes of a run. What is being written stays: newer notes of another tab are shown below it, and saving again replaces them.
let token = '';  // of this start of the server; saving needs it
const drafts = {};  // run -> what is written and not saved
const makeNotes = () => {
  const e = html('details', 'pt-notes'), form = html('form'), foot = html('div', 'pt-foot'), save = html('button', '', 'Save');
  e.revision = -1; e.save = save;
  e.head = html('summary'); e.tags = html('input'); e.text = html('textarea'); e.say = html('span', 'pt-faint'); e.theirs = html('pre');
  e.say.setAttribute('role', 'status'); e.theirs.hidden = true;
  e.tags.setAttribute('aria-label', 'Tags'); e.tags.placeholder = 'tags, separated by commas';
  e.text.setAttribute('aria-label', 'Note'); e.text.placeholder = 'a note about this run'; e.text.rows = 4;
  e.tags.oninput = e.text.oninput = () => editNotes(e);
  form.onsubmit = event => { event.preventDefault(); saveNotes(e); };
  foot.append(save, e.say); form.append(e.tags, e.text, e.theirs, foot); e.append(e.head, form);
  return e;
};
const fillNotes = (e, notes) => {
  delete drafts[e.run];
  e.revision = notes.revision; e.tags.value = notes.tags.join(', '); e.text.value = notes.note; e.theirs.hidden = true;
  e.head.replaceChildren(document.createTextNode('Notes'), ...notes.tags.map(tag => html('span', 'pt-badge info', tag)), html('span', 'pt-faint', notes.note.split('\n')[0]));
  set(e.say, notes.time ? 'saved ' + new Date(1000 * notes.time).toLocaleString('en-GB') : '');
};
const editNotes = e => { drafts[e.run] = {tags: e.tags.value, text: e.text.value, revision: e.revision}; set(e.say, 'not saved'); };
const conflict = (e, notes) => {
  e.revision = notes.revision; editNotes(e);
  e.theirs.textContent = [notes.tags.map(tag => '#' + tag).join(' '), notes.note].filter(Boolean).join('\n') || '(empty)'; e.theirs.hidden = false;
  set(e.say, 'Another tab has saved the text above. Save again to replace it with yours.');
};
const saveNotes = async e => {
  const run = e.run, typed = e.tags.value, tags = typed.split(',').map(tag => tag.trim()).filter(Boolean), note = e.text.value;
  e.save.disabled = true;  // a second request would have the old revision
  set(e.say, 'saving');
  try {
    const answer = await fetch('notes?' + new URLSearchParams({run}), {method: 'POST', headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + token}, body: JSON.stringify({note, tags, revision: Math.max(0, e.revision)})});
    const values = await answer.json();
    if (answer.status === 409) conflict(e, values);
    else if (!answer.ok) { set(e.say, values.error); if (answer.status === 403) ask(); }  // with the next view comes the new token
    else if (e.text.value === note && e.tags.value === typed) fillNotes(e, values);
    else { e.revision = values.revision; editNotes(e); }  // written on meanwhile
  } catch (error) { set(e.say, 'not saved: the server of this page does not answer'); }
  finally { e.save.disabled = false; }
};
const heading = (e, block) => { set(e.querySelector('.pt-h'), block.title || ''); set(e.querySelector('.pt-note'), block.note || ''); };
const kinds = {
  tiles: {make: () => html('div', 'pt-tiles'), update: (e, block) => keyed(e, block.items.map(i => ({...i, id: i.label})),
    () => { const t = html('div', 'pt-tile'); t.append(html('span'), html('b'), html('small')); return t; },
    (t, i) => { set(t.children[0], i.label); set(t.children[1], i.value); set(t.children[2], i.sub || ''); t.title = i.title || ''; })},
  charts: {make: () => { const e = html('section'); e.append(html('h3', 'pt-h'), html('p', 'pt-note'), html('div', 'pt-charts')); return e; },
    update: (e, block) => { heading(e, block); e.lastChild.classList.toggle('even', block.charts.length === 4); 
      const changed = [];  // widths are read together: reading one after drawing another lays the page out anew
      keyed(e.lastChild, block.charts, makeChart, (chart, spec) => { if (!spec.same) changed.push([chart, spec]); });
      const widths = changed.map(([chart]) => chart.lastChild.clientWidth);
      changed.forEach(([chart, spec], i) => drawChart(chart, spec, widths[i])); }},
  table: {make: () => { const e = html('section'), s = html('div', 'pt-scroll'); s.append(html('table')); e.append(html('h3', 'pt-h'), html('p', 'pt-note'), s); return e; },
    update: (e, block) => {
      heading(e, block);
      const text = JSON.stringify([block.columns, block.rows]);
      if (e.shows === text) return;
      e.shows = text;
      const head = html('tr');
      block.columns.forEach(c => head.append(html('th', c.c || '', c.t)));
      e.lastChild.classList.toggle('narrow', !block.columns.some(c => c.c === 'text'));
      const table = e.querySelector('table'), thead = html('thead'), tbody = html('tbody');
      thead.append(head);
      for (const row of block.rows) { const tr = html('tr'); row.forEach((v, i) => { const td = cell(v); if (block.columns[i].c) td.classList.add(block.columns[i].c); tr.append(td); }); tbody.append(tr); }
      table.replaceChildren(thead, tbody);
    }},
  bars: {make: () => { const e = html('section'); e.append(html('h3', 'pt-h'), html('p', 'pt-note'), html('div', 'pt-bars')); return e; },
    update: (e, block) => { heading(e, block); keyed(e.lastChild, block.items,
      () => { const r = html('div', 'pt-share'), bar = html('div', 'pt-sharebar'); bar.append(html('i')); r.append(html('span'), bar, html('b')); return r; },
      (r, i) => { set(r.children[0], i.label); r.children[0].title = i.label; const fill = r.children[1].firstChild;
        fill.style.width = (100 * i.share) + '%'; fill.style.background = `var(--c${i.colour})`; set(r.children[2], i.text); }); }},
  note: {make: () => html('div', 'pt-message'), update: (e, block) => { e.className = 'pt-block pt-message ' + (block.tone || ''); const text = JSON.stringify(block.lines); if (e.shows === text) return; e.shows = text;
    e.replaceChildren(...block.lines.map((l, i) => html(l.startsWith('$ ') ? 'pre' : i ? 'p' : 'h3', '', l.replace(/^\$ /, '')))); }},
  notes: {make: makeNotes, update: (e, block) => {
    if (block.revision <= e.revision || e.save.disabled) return;  // the answer to a save says what is stored
    if (e.run === undefined) {
      e.run = block.run;
      const draft = drafts[e.run];
      if (draft) { e.revision = draft.revision; e.tags.value = draft.tags; e.text.value = draft.text; e.open = true; editNotes(e); }
    }
    if (!drafts[e.run]) fillNotes(e, block);
    else if (block.revision > e.revision) conflict(e, block);
  }},
  links: {make: () => html('div', 'pt-links'), update: (e, block) => keyed(e, block.items.map(i => ({...i, id: i.href})), () => html('a'), (a, i) => {
    a.href = i.href; a.setAttribute('download', ''); if (!a.firstChild) a.append(html('b'), html('span')); set(a.children[0], i.label); set(a.children[1], i.sub); })},
  episodes: {make: () => { const e = html('div', 'pt-episodes'); e.append(html('div', 'pt-list'), html('div', 'pt-episode')); return e; }, update: (e, block) => {
    const [list, detail] = e.children;
    if (e.source !== block.source) { e.source = block.source; e.chosen = null; }
    if (!e.chosen && block.rows.length) e.chosen = block.rows[0];
    keyed(list, block.rows, () => { const r = html('button', 'pt-row'); r.append(html('span', 'pt-badge'), html('b'), html('small')); return r; }, (r, row) => {
      r.children[0].className = 'pt-badge ' + (row.success == null ? 'none' : row.success ? 'good' : 'bad');
      set(r.children[0], row.success == null ? '\u2013' : row.success ? 'right' : 'wrong'); r.children[0].title = row.success == null ? 'success is unknown' : '';
      set(r.children[1], row.prompt); set(r.children[2], row.sub);
      r.classList.toggle('chosen', !!e.chosen && e.chosen.id === row.id);
      r.onclick = () => { e.chosen = row; [...list.children].forEach(c => c.classList.toggle('chosen', c === r)); episode(detail, row); };
    });
    if (e.chosen) episode(detail, e.chosen); else { detail.shows = ''; detail.replaceChildren(); }
  }},
};
const episode = (e, row) => {
  if (e.shows === row.id) return;
  e.shows = row.id;
  const top = html('div', 'pt-question'), words = html('div');
  words.append(html('h3', '', row.prompt), html('p', 'pt-faint', row.sub));
  const facts = html('dl');
  for (const [name, value] of row.facts) facts.append(html('dt', '', name), html('dd', '', value));
  words.append(facts);
  if (row.image) { const image = html('img'); image.alt = 'the image that the question is about'; image.hidden = true; image.onload = () => { image.hidden = false; }; image.onerror = () => image.remove(); image.src = row.image; top.append(image); }
  top.append(words);
  const turns = html('ol', 'pt-turns');
  for (const turn of row.turns) {
    const item = html('li');
    item.append(html('pre', 'pt-action', turn.action || '(nothing)'));
    if (turn.call) item.append(html('small', 'pt-faint', turn.call));
    if (turn.observation !== null) item.append(html('pre', 'pt-observation' + (turn.error ? ' error' : ''), turn.observation));
    turns.append(item);
  }
  e.replaceChildren(top, turns);
};

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

const named = Object.fromEntries(new URLSearchParams(location.search));
const tabs = [...document.querySelectorAll('.pt-tabs button')], panels = [...document.querySelectorAll('.pt-panel')];
let tab = tabs.some(t => t.dataset.tab === named.tab) ? named.tab : 'overview';
let choice = {first: 1};  // as the server reads it: what the address names, then what the controls hold
for (const name of ['run', 'compare', 'stage', 'metrics', 'search', 'window', 'axis']) if (named[name]) choice[name] = named[name];
const searchBox = document.querySelector('#pt-search');
searchBox.value = named.search || '';
let typing = null;
searchBox.oninput = () => { choice = {...choice, search: searchBox.value}; clearTimeout(typing); typing = setTimeout(ask, 150); };
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
  next.head.received = Date.now(); token = next.token;
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
      groups: (groups || []).join(), metrics: (metrics || []).join(), source: source || '', outcome: outcome || 'all', search: searchBox.value};
    const before = JSON.stringify(choice);
    choice = next;
    if (!controls) { controls = true; offers = null; }
    if (before !== JSON.stringify(next)) ask();
  },
};
mark();
ask();
})();
