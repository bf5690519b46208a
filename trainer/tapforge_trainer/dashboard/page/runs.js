// All runs that are served.

import { address, ask } from './api.js';
import { ago, card, h, percent, put } from './dom.js';

export function pill(run) {
  const at = run.max_updates ? `${run.update} of ${run.max_updates}` : run.update;
  const words = run.state === 'running' ? `running · update ${at}` : `${run.state} · ${run.update} updates`;
  return h('span', { class: `pill ${run.state}` }, words);
}

function interval(one) {
  return one && one.low !== null ? h('small', {}, ` ${percent(one.low)} to ${percent(one.high)}`) : null;
}

function row(run) {
  const mode = run.success.find((one) => one.after) || run.success[0] || {};
  const { before, after } = mode;
  return h('tr', {},
    h('td', {}, h('a', { href: address(['run', run.name]) }, run.name)),
    h('td', {}, pill(run)),
    h('td', { class: 'n' }, before ? percent(before.success) : '–', interval(before)),
    h('td', { class: 'n' }, after ? h('b', {}, percent(after.success)) : '–', interval(after)),
    h('td', { class: 'n' }, percent(run.recent)),
    h('td', {}, run.facts.model || ''),
    h('td', { class: 'long' }, (run.facts.algorithm || '').split(',')[0]),
    h('td', {}, run.facts.seed || ''),
    h('td', {}, ago(run.last)));
}

export async function runsView() {
  const body = h('tbody', {});
  const refresh = async () => put(body, (await ask('runs')).runs.map(row));
  await refresh();
  const titles = [['Run'], ['State'], ['Before', 'n'], ['After', 'n'], ['Practice, last 5', 'n'], ['Model'],
    ['Algorithm'], ['Seed'], ['Last event']];
  const node = card('Runs', {}, h('div', { class: 'scroll' }, h('table', {},
    h('thead', {}, h('tr', {}, titles.map(([title, kind]) => h('th', { scope: 'col', class: kind }, title)))), body)));
  return { node: h('div', {}, h('h1', { class: 'hidden' }, 'Runs'), node), refresh };
}
