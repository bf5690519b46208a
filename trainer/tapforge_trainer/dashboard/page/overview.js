// The first screen of a run: what happened, in one look.

import { address, ofRun } from './api.js';
import { chart, COLOURS, legend } from './chart.js';
import { ago, card, h, number, outcome, percent, put, s, seconds } from './dom.js';
import { pill } from './runs.js';

const PARTS = { sft: 'warm start', rl: 'reinforcement', total: 'in all' };
const words = (mode) => mode.replace(/_/g, ' ');

/** Success with its interval before and after, on one scale of 0 to 100 %; baselines are ticks. */
function scale(before, after, baselines) {
  const width = 340, height = 46, x = (rate) => 8 + rate * (width - 16);
  const point = (one, y, colour) => one && one.success !== null && [
    one.low !== null && s('line', { x1: x(one.low), x2: x(one.high), y1: y, y2: y, stroke: colour, 'stroke-width': 7,
        'stroke-opacity': 0.28, 'stroke-linecap': 'round' }),
    s('circle', { cx: x(one.success), cy: y, r: 5, fill: colour }),
  ];
  return s('svg', { class: 'scale', viewBox: `0 0 ${width} ${height}`, width, height, 'aria-hidden': 'true' },
    s('line', { class: 'axis', x1: x(0), x2: x(1), y1: 40, y2: 40 }),
    [0, 0.25, 0.5, 0.75, 1].map((rate) => s('line', { class: 'axis', x1: x(rate), x2: x(rate), y1: 37, y2: 43 })),
    baselines.map((one) => s('line', { class: 'baseline', x1: x(one.success), x2: x(one.success), y1: 4, y2: 40 },
        s('title', {}, `${one.policy} ${percent(one.success)}`))),
    point(before, 14, 'var(--soft)'), point(after, 28, 'var(--good)'));
}

function success(data) {
  const known = data.baselines.filter((one) => one.success !== null);
  const range = (one) => one && one.low !== null ? `${percent(one.low)} to ${percent(one.high)}` : '';
  const mode = (one) => h('div', { class: 'mode' },
    h('h3', {}, `Held-out tasks, ${words(one.mode)}`),
    h('p', { class: 'big' }, one.before ? percent(one.before.success) : '–', h('span', {}, ' → '),
      h('b', {}, one.after ? percent(one.after.success) : data.state === 'running' ? '…' : '–')),
    h('p', { class: 'quiet' }, one.before ? `95 %: ${range(one.before)}` : '',
      one.after ? ` → ${range(one.after)} · ${one.after.episodes} episodes` : ''),
    scale(one.before, one.after, known));
  return card('Success', { class: 'success' },
    data.success.length ? data.success.map(mode) : h('p', { class: 'quiet' }, 'No measurement yet.'),
    known.length ? h('p', { class: 'quiet' }, 'Baselines: ',
      known.map((one) => `${words(one.policy)} ${percent(one.success)} (${range(one)})`).join(', ')) : null);
}

function dumbbell(row) {
  const width = 120, x = (rate) => 6 + rate * (width - 12), { before, after } = row;
  const colour = before === null || after === null ? 'var(--soft)' : after >= before ? 'var(--good)' : 'var(--bad)';
  return s('svg', { viewBox: `0 0 ${width} 16`, width, height: 16, 'aria-hidden': 'true' },
    s('line', { class: 'axis', x1: x(0), x2: x(1), y1: 8, y2: 8 }),
    before !== null && after !== null && s('line',
      { x1: x(before), x2: x(after), y1: 8, y2: 8, stroke: colour, 'stroke-width': 3 }),
    before !== null && s('circle', { cx: x(before), cy: 8, r: 4, fill: 'var(--soft)' }),
    after !== null && s('circle', { cx: x(after), cy: 8, r: 5, fill: colour }));
}

function templates(data, run) {
  if (!data.templates.length) return null;
  const rows = data.templates.map((one) => ({ ...one, before: one.before ?? null, after: one.after ?? null }));
  rows.sort((a, b) => ((b.after ?? 0) - (b.before ?? 0)) - ((a.after ?? 0) - (a.before ?? 0)));
  const failures = (name) => address(['run', run, 'episodes'],
    [['template', name], ['outcome', 'failure'], ['sort', '-started']]);
  return card('Per template', { class: 'templates half' }, h('div', { class: 'scroll' }, h('table', {},
    h('thead', {}, h('tr', {}, [['Template'], ['Before', 'n'], ['Change'], ['After', 'n'], ['Practice now', 'n'],
          ['Episodes']].map(([t, kind]) => h('th', { scope: 'col', class: kind }, t)))),
    h('tbody', {}, rows.map((row) => h('tr', {},
      h('td', {}, h('a', { href: address(['run', run, 'episodes'], [['template', row.template]]) }, row.template)),
      h('td', { class: 'n' }, percent(row.before)), h('td', {}, dumbbell(row)),
      h('td', { class: 'n' }, h('b', {}, percent(row.after))),
      h('td', { class: 'n' }, row.practised ? percent(row.practised.success) : '–'),
      h('td', {}, h('a', { href: failures(row.template) }, 'failures'))))))));
}

function time(data) {
  const { parts, whole, phones_busy, steps_per_second, recent } = data.time;
  const sum = parts.reduce((total, one) => total + one.seconds, 0);
  let at = 0;
  const bars = parts.map((one, n) => {
    const x = at;
    at += sum ? (100 * one.seconds) / sum : 0;
    return s('rect', { x, y: 0, width: Math.max(0, at - x), height: 10, fill: COLOURS[n] },
      s('title', {}, `${one.words}: ${seconds(one.seconds)}`));
  });
  return card('Time', { class: 'time narrow' },
    parts.length ? [h('p', { class: 'quiet' }, `An update, mean of the last ${recent}`),
      s('svg', { class: 'bar', viewBox: '0 0 100 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, bars),
      h('ul', { class: 'keys' },
        parts.map((one, n) => h('li', {}, h('i', { style: { background: COLOURS[n] } }), one.words, ' ',
            h('b', {}, seconds(one.seconds)))))] : null,
    phones_busy !== null && phones_busy !== undefined ? h('p', {}, 'Phones are busy ', h('b', {}, percent(phones_busy)),
      ' of the time',
      steps_per_second ? `, ${number(steps_per_second)} steps per second` : '', '.') : null,
    Object.keys(whole).length ? h('p', { class: 'quiet' }, 'Whole run: ',
      Object.entries(whole).map(([name, value]) => `${PARTS[name] || name} ${seconds(value)}`).join(' · ')) : null);
}

function phones(data, run) {
  const found = data.phones;
  if (!found.count) return card('Phones', { class: 'narrow' },
    h('p', { class: 'quiet' }, data.state === 'running' ? 'No phones yet.' : 'The run wrote down no phones.'));
  const states = Object.entries(found.states).filter(([, count]) => count);
  return card('Phones', { class: 'narrow' },
    h('p', {}, h('b', {}, found.count), ' phones: ', states.map(([state, count]) => `${count} ${state}`).join(', '),
      found.quarantines ? `; ${found.quarantines} times into quarantine` : ''),
    found.troubled.length ? h('div', { class: 'scroll short' }, h('table', {},
      h('thead', {}, h('tr', {}, [['Phone'], ['State'], ['Clean', 'n'], ['Dirty', 'n'], ['Failures', 'n'],
            ['Last trouble']].map(([t, kind]) => h('th', { scope: 'col', class: kind }, t)))),
      h('tbody', {}, found.troubled
          .map((one) => h('tr', {},
            h('td', {}, h('a', { href: address(['run', run, 'episodes'], [['phone', one.name]]) }, one.name)),
        h('td', {}, one.state), h('td', { class: 'n' }, one.clean), h('td', { class: 'n' }, one.dirty),
        h('td', { class: 'n' }, one.failures), h('td', { class: 'long' }, one.why))))))
          : h('p', { class: 'quiet' }, 'No phone had a failure.'));
}

function alarms(data) {
  return card('Alarms and notes', {},
    data.alarms.length ? h('p', { class: 'alarm' }, 'Active: ', data.alarms.map((one) => one.name).join(', '))
      : h('p', { class: 'quiet' }, 'No alarm is active.'),
    data.notes.length ? h('ol', { class: 'notes', tabindex: 0 },
      [...data.notes].reverse().map((one) => h('li', {}, h('small', {}, `update ${one.update} · ${ago(one.at)} `),
          one.text))) : null);
}

function episodes(data, run) {
  const { outcomes, read, all, trouble } = data.episodes;
  const order = (name) => (name === 'rollout' ? '' : name);
  const rows = Object.entries(outcomes).sort(([a], [b]) => order(a).localeCompare(order(b)));
  const link = (recording, kind, count) => h('a',
    { href: address(['run', run, 'episodes'], [['recording', recording], ['outcome', kind]]) }, outcome(kind),
    ` ${number(count)}`);
  return card('Episodes', {},
    read < all ? h('p', { class: 'progress' }, h('progress', { max: all, value: read, 'aria-label': 'recording read' }),
      ` reading the recording, ${percent(read / all)}`) : null,
    trouble ? h('p', { class: 'alarm' }, trouble) : null,
    h('table', {}, h('tbody', {}, rows.map(([name, kinds]) => h('tr', {},
      h('td', {}, h('a', { href: address(['run', run, 'episodes'], [['recording', name]]) },
          name === 'rollout' ? 'practice' : words(name.replace('evaluation/', '')))),
      h('td', { class: 'kinds' }, Object.entries(kinds).map(([kind, count]) => [link(name, kind, count), ' '])))))));
}

async function curve(run, data) {
  const found = await ofRun(run, '/figures', [['name', 'rollout/success_rate']]);
  const modes = data.success.map((one, n) => [one, COLOURS[1 + n]]);
  const points = modes.flatMap(([one, colour]) => one.points.filter((p) => p.success !== null)
      .map((p) => ({ x: p.update, y: p.success, low: p.low, high: p.high, name: `${one.mode}, ${p.name}`, colour,
          beside: 9 * (modes.findIndex(([m]) => m === one) - (modes.length - 1) / 2) })));
  const lines = data.baselines.filter((one) => one.success !== null)
    .map((one) => ({ y: one.success, name: words(one.policy) }));
  return card('Success over updates', { class: 'wide' },
    legend([['practice, mean of 5 updates', COLOURS[0]],
        ...modes.map(([one, colour]) => [`held out, ${words(one.mode)} (95 %)`, colour])]),
    chart({ series: [{ name: 'practice', xs: found.updates, ys: found.figures['rollout/success_rate'] }], points, lines,
        share: true, smooth: 5, height: 320, label: 'Success over updates' }));
}

export async function overviewView({ run }) {
  const node = h('div', { class: 'overview' });
  let seen = '';
  const refresh = async () => {
    const data = await ofRun(run), key = JSON.stringify(data);
    if (key === seen) return;
    seen = key;
    const curves = await curve(run, data);
    put(node, h('div', { class: 'title' }, h('h1', {}, data.run), pill(data),
        data.alarms.length ? h('span', { class: 'pill bad' }, `alarm: ${data.alarms.map((one) => one.name).join(', ')}`)
          : null, data.phase ? h('span', { class: 'quiet' }, data.phase) : null,
      h('span', { class: 'quiet' }, data.last ? `last event ${ago(data.last)}` : 'no event yet')),
    h('div', { class: 'cards' }, success(data), curves, templates(data, run), time(data), phones(data, run),
      alarms(data), episodes(data, run),
      card('Facts', {}, h('dl', {}, Object.entries(data.facts)
            .map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])),
        h('p', { class: 'quiet' }, data.folder))));
  };
  await refresh();
  return { node, refresh };
}
