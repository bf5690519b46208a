// All episodes: filters, text search and order are in the address; rows are fetched as they come into view.

import { address, changed, exportUrl, ofRun, valueOf } from './api.js';
import { ago, entry, h, number, outcome, pick, put, seconds, signed } from './dom.js';

const ROW = 34, PAGE = 100, KEPT = 30;
const COLUMNS = [
  ['update', 'Update', 'n'], ['template', 'Template', ''], ['goal', 'Goal', 'long'], ['outcome', 'Outcome', ''],
  ['reason', 'Reason', ''],
  ['steps', 'Steps', 'n'], ['reward', 'Reward', 'n'], ['advantage', 'Advantage', 'n'], ['staleness', 'Stale', 'n'],
  ['parse_errors', 'Unread', 'n'],
  ['phone', 'Phone', ''], ['seconds', 'Time', 'n'], ['started', 'Started', 'n'],
];

export function episodeAddress(run, row) {
  return address(['run', run, 'episode', row.recording, row.name]);
}

function cells(row) {
  const reward = row.reward ?? row.score;
  return [
    row.update ?? (row.recording === 'rollout' ? '–' : row.recording.replace('evaluation/', '')), row.template,
    row.goal, outcome(row.outcome), row.reason.replace(/_/g, ' '),
    row.steps, number(reward), row.advantage === null ? '–' : signed(row.advantage), row.staleness ?? '–',
    row.parse_errors || '',
    row.phone, seconds(row.seconds), ago(row.started),
  ];
}

function filters(run, words, facets, apply) {
  const get = (name) => valueOf(words, name) || '';
  const set = (name) => (value) => apply(changed(words, name, value.trim()));
  const choice = (name, label, shown = (value) => value) => pick(label,
    [['', 'any'], ...facets[name].map((one) => [one.value, `${shown(one.value)} (${number(one.count)})`])], get(name),
    set(name));
  const range = (name, label, hint) => entry(label, get(name), set(name),
    { placeholder: hint, title: 'a number, or a range: 2..5, 2.. or ..5' });
  const search = h('input', { type: 'search', value: get('q'), placeholder: 'words in goals, answers and verdicts  /',
      onchange: (event) => set('q')(event.target.value) });
  const task = ['task', 'group', 'version', 'attempt', 'tokens', 'score'].filter((name) => get(name));
  return h('form', { class: 'filters', onsubmit: (event) => event.preventDefault(), 'aria-label': 'Filters' },
    h('label', { class: 'field search' }, h('span', {}, 'Search'), search),
    choice('recording', 'Played for', (value) => (value === 'rollout' ? 'practice' : value.replace('evaluation/', ''))),
    choice('template', 'Template'), choice('outcome', 'Outcome'),
    choice('reason', 'Reason', (value) => value.replace(/_/g, ' ')), choice('phone', 'Phone'),
    range('update', 'Update', '10..20'), range('steps', 'Steps', '2..5'), range('advantage', 'Advantage', '..-0.5'),
    range('reward', 'Reward', '1..'),
    range('staleness', 'Staleness', '1..'), range('parse_errors', 'Unread answers', '1..'),
    range('seconds', 'Seconds', '30..'),
    facets.streams.map((name) => range(`stream.${name}`, `Reward: ${name}`, '0.5..')),
    task.map((name) => entry(name, get(name), set(name))),
    words.length ? h('a', { class: 'button', href: address(['run', run, 'episodes']) }, 'Clear') : null,
    h('a', { class: 'button', href: exportUrl(run, words), download: '', title: 'the first 30 of these as one file' },
      'Export'));
}

export async function episodesView({ run, words }) {
  const facets = await ofRun(run, '/facets');
  const apply = (next) => { location.hash = address(['run', run, 'episodes'], next); };
  const sort = valueOf(words, 'sort') || '-started';
  const pages = new Map();
  let total = 0, changes = -1, at = 0, frame = 0;
  const count = h('p', { class: 'count', role: 'status' }), trouble = h('p', { class: 'alarm' });
  const rows = h('div', { class: 'rows', role: 'presentation' }),
    room = h('div', { class: 'room', role: 'presentation' }, rows);
  const title = ([name, text, kind]) => {
    const falling = sort === `-${name}`, sorted = falling || sort === name;
    return h('span', { role: 'columnheader', class: kind,
        'aria-sort': sorted ? (falling ? 'descending' : 'ascending') : 'none' },
      h('a', { href: address(['run', run, 'episodes'], changed(words, 'sort', sorted && falling ? name : `-${name}`)) },
        text, sorted ? (falling ? ' ▾' : ' ▴') : ''));
  };
  const body = h('div', { class: 'body', tabindex: 0, 'aria-label': 'Episodes', role: 'rowgroup' }, room);
  const table = h('div', { class: 'episodes', role: 'table', 'aria-label': 'Episodes' },
    h('div', { class: 'row head', role: 'row' }, COLUMNS.map(title)), body);

  const fetchPage = async (page) => {
    const found = await ofRun(run, '/episodes',
      [...changed(changed(words, 'offset', ''), 'limit', ''), ['sort', sort], ['offset', page * PAGE], ['limit', PAGE]]
        .filter(([key], n, all) => key !== 'sort' || n === all.findIndex(([one]) => one === 'sort')));
    if (found.changes !== changes) pages.clear();
    ({ total, changes } = found);
    pages.set(page, found.episodes);
    while (pages.size > KEPT) pages.delete(pages.keys().next().value);
    put(count, `${number(total)} episode${total === 1 ? '' : 's'}`,
      found.read < found.all ? ` so far: ${Math.round((100 * found.read) / found.all)} % of the recording is read`
        : '');
    put(trouble, found.trouble);
    room.style.setProperty('height', `${total * ROW}px`);
    table.setAttribute('aria-rowcount', total);
  };
  const known = new Map();
  const rowNode = (n, row) => {
    const key = `${n} ${JSON.stringify(row)}`;
    if (!known.has(key)) {
      if (known.size > 2000) known.clear();
      // A link is not a row: it is all that its row's one cell holds.
      const link = h('a', { class: 'row', href: episodeAddress(run, row) },
        cells(row).map((cell, k) => h('span', { class: COLUMNS[k][2] }, cell)));
      const cell = h('div', { role: 'cell', 'aria-colspan': COLUMNS.length }, link);
      known.set(key, h('div', { role: 'row', 'aria-rowindex': n + 1 }, cell));
    }
    return known.get(key);
  };
  const draw = async () => {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 5),
      last = Math.min(total, first + Math.ceil((body.clientHeight || 700) / ROW) + 10);
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE);
      page++) if (!pages.has(page)) await fetchPage(page);
    at = Math.min(at, Math.max(0, total - 1));
    rows.style.setProperty('transform', `translateY(${first * ROW}px)`);
    const nodes = [];
    for (let n = first; n < Math.min(total, last); n++) {
      const row = (pages.get(Math.floor(n / PAGE)) || [])[n % PAGE];
      if (row) nodes.push(rowNode(n, row));
    }
    for (const node of nodes) node.querySelector('a').classList.toggle('at', node.ariaRowIndex === String(at + 1));
    // A row that stays the same element can be clicked while a run goes on.
    if (!nodes.length) put(rows, h('p', { class: 'quiet empty' }, 'No episode is like that.'));
    else if (nodes.length !== rows.children.length || nodes.some((node, n) => rows.children[n] !== node)) put(rows,
      nodes);
  };
  body.addEventListener('scroll', () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => draw().catch((error) => put(trouble, error.message)));
  });
  const key = (event) => {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (step) {
      event.preventDefault();
      at = Math.max(0, Math.min(total - 1, at + step));
      if (at * ROW < body.scrollTop) body.scrollTop = at * ROW;
      if ((at + 1) * ROW > body.scrollTop + body.clientHeight) body.scrollTop = (at + 1) * ROW - body.clientHeight;
      draw();
    } else if (event.key === 'Enter' && !event.target.closest('a, button')) {
      const row = (pages.get(Math.floor(at / PAGE)) || [])[at % PAGE];
      if (row) location.hash = episodeAddress(run, row);
    }
  };
  await fetchPage(0);
  await draw();
  const refresh = async () => {
    const { changes: now } = await ofRun(run, '/episodes', [['limit', 1]]);
    if (now !== changes) {
      if (!facets.recording.length) dispatchEvent(new Event('hashchange')); // filters had nothing to choose from
      pages.clear();
      await fetchPage(Math.floor(body.scrollTop / ROW / PAGE));
      await draw();
    }
  };
  const node = h('div', { class: 'list' }, h('h1', { class: 'hidden' }, `Episodes of ${run}`),
    filters(run, words, facets, apply), count, trouble, table);
  return { node, refresh, key, shown: draw };
}
