// Two measurements, of one run or of two, paired by task: what was gained and what was lost.

import { address, ask, changed, ofRun, valueOf } from './api.js';
import { chart, COLOURS, legend } from './chart.js';
import { card, h, number, percent, pick, put, signed } from './dom.js';

const first = (names, word) => names.find((name) => name.includes(`${word}sampled`))
  || names.find((name) => name.includes(word));

const KINDS = [['gained', 'gained'], ['lost', 'lost'], ['kept', 'always succeed'], ['never', 'never succeed'],
  ['same', 'unchanged']];

async function recordings(run) {
  const facets = await ofRun(run, '/facets');
  return facets.recording.map((one) => one.value).filter((name) => name.startsWith('evaluation/')).sort();
}

function verdict(found) {
  if (found.gain === null) return h('p', {}, 'No task was played in both.');
  const [low, high] = found.interval || [null, null];
  const range = low === null ? '' : `; 95 % by template: ${signed(100 * low)} to ${signed(100 * high)}`;
  return h('p', { class: 'big' },
    h('b', { class: found.gain > 0 ? 'up' : found.gain < 0 ? 'down' : '' },
      `${found.gain > 0 ? '+' : ''}${(100 * found.gain).toFixed(1)} points`),
    h('small', {}, ` over ${number(found.tasks)} common tasks${range}`));
}

export async function compareView({ run, words }) {
  const { runs } = await ask('runs'), names = runs.map((one) => one.name);
  const other = valueOf(words, 'b') || run;
  const [left, right] = await Promise.all([recordings(run), recordings(other)]);
  const a = valueOf(words, 'before') || first(left, other === run ? 'before-' : 'after-') || left[0];
  const like = (a || '').replace('before-', 'after-');
  const b = valueOf(words, 'after') || (right.includes(like) ? like : first(right, 'after-') || right[0]);
  const go = (name) => (value) => { location.hash = address(['run', run, 'compare'],
      changed(name === 'b' ? [] : words, name, value)); };
  const short = (name) => [name, name.replace('evaluation/', '')];
  const tools = h('div', { class: 'filters' }, pick(`Of ${run}`, left.map(short), a, go('before')),
    pick('With run', names.map((name) => [name, name]), other, go('b')),
    pick(`of ${other}`, right.map(short), b, go('after')));
  const body = h('div', { class: 'cards' });
  const node = h('div', {}, h('h1', { class: 'hidden' }, 'Comparison'), tools, body);
  if (other !== run) {
    const name = [['name', 'rollout/success_rate']],
      both = await Promise.all([ofRun(run, '/figures', name), ofRun(other, '/figures', name)]);
    const series = both.map((one, n) => ({ name: n ? other : run, xs: one.updates,
          ys: one.figures['rollout/success_rate'] }));
    body.append(card('Practice, both runs', { class: 'full' }, legend([[run, COLOURS[0]], [other, COLOURS[1]]]),
        chart({ series, share: true, smooth: 5, label: 'success of both runs' }),
      h('p', {}, h('a', { href: address(['run', run, 'figures'], [['with', other]]) }, 'Any figure of both'))));
  }
  if (!a || !b) {
    body.append(card('Tasks', {}, h('p', { class: 'quiet' }, 'There is no measurement of both yet.')));
    const refresh = async () => { // as soon as the recordings are read
      const now = await Promise.all([recordings(run), recordings(other)]);
      if (now[0].length !== left.length || now[1].length !== right.length) dispatchEvent(new Event('hashchange'));
    };
    return { node, refresh };
  }
  const found = await ask('compare', [['a', run], ['recording_a', a], ['b', other], ['recording_b', b]]);
  let kind = valueOf(words, 'kind') || (found.kinds.lost ? 'lost' : 'gained');
  const rows = h('tbody', {}), buttons = h('div', { class: 'choices', role: 'group', 'aria-label': 'Tasks that were' });
  const draw = () => {
    put(buttons, KINDS.map(([name, text]) => h('button',
          { type: 'button', 'aria-pressed': String(name === kind), onclick: () => { kind = name; draw(); } },
          `${text} ${found.kinds[name]}`)));
    put(rows, found.rows.filter((one) => one.kind === kind).slice(0, 500)
        .map((one) => h('tr', {}, h('td', {}, one.template), h('td', { class: 'long' }, one.goal),
      h('td', { class: 'n' }, h('a', { href: address(['run', run, 'episode', a, one.episode_a]) }, percent(one.a))),
      h('td', { class: 'n' }, h('a', { href: address(['run', other, 'episode', b, one.episode_b]) },
          percent(one.b))))));
  };
  draw();
  body.append(card('Paired by task', { class: 'full' }, verdict(found),
      found.only_a || found.only_b ? h('p', { class: 'quiet' },
        `${found.only_a} tasks are only in the first, ${found.only_b} only in the second.`) : null, buttons,
    h('div', { class: 'scroll' },
      h('table', {}, h('thead', {},
          h('tr', {}, [['Template'], ['Goal'], [short(a)[1], 'n'],
              [other === run ? short(b)[1] : `${other}: ${short(b)[1]}`, 'n']]
              .map(([t, kind]) => h('th', { scope: 'col', class: kind }, t)))), rows))));
  return { node };
}
