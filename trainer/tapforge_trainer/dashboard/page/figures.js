// Curves of any recorded figure, several runs over each other. What is shown is in the address.

import { address, ask, ofRun } from './api.js';
import { chart, COLOURS, legend } from './chart.js';
import { card, h, number, pick, put } from './dom.js';

const FIRST = ['rollout/success_rate', 'learner/entropy', 'learner/gradient_norm', 'learner/approx_kl',
  'batch/valid_action_ratio', 'time/rollout_wait'];
const SHARES = /success|share|rate$|ratio$|fraction|template\/.*\/(low|high)/;

export async function figuresView({ run, words }) {
  const [{ figures }, { runs }] = await Promise.all([ofRun(run, '/figures'), ask('runs')]);
  const meanings = new Map(figures.map((one) => [one.name, one]));
  let chosen = words.filter(([key]) => key === 'f').map(([, value]) => value);
  if (!chosen.length) chosen = FIRST.filter((name) => meanings.has(name));
  let others = words.filter(([key]) => key === 'with').map(([, value]) => value);
  let smooth = Number((words.find(([key]) => key === 'smooth') || [])[1]) || 5, search = '';
  const charts = h('div', { class: 'charts' }), list = h('ul', { class: 'figures' });

  const draw = async () => {
    const names = [run, ...others];
    const found = await Promise.all(names
        .map((one) => ofRun(one, '/figures', chosen.slice(0, 64).map((name) => ['name', name]))));
    put(charts, chosen.length ? null : h('p', { class: 'quiet' }, 'Choose figures on the left.'),
      names.length > 1 ? legend(names.map((name, n) => [name, COLOURS[n % COLOURS.length]])) : null,
      chosen.map((name) => card(null, {}, h('h2', {}, name),
          h('p', { class: 'quiet' }, (meanings.get(name) || {}).meaning || ''),
        chart({
          series: found.map((one, n) => ({ name: names[n], xs: one.updates, ys: one.figures[name] || [] }))
            .filter((one) => one.ys.length),
          share: SHARES.test(name) && !/learning_rate|hit_rate_|time\//.test(name), smooth, height: 190, label: name,
        }))));
  };
  const save = () => {
    const pairs = [...chosen.map((name) => ['f', name]), ...others.map((name) => ['with', name]),
      ...(smooth === 5 ? [] : [['smooth', smooth]])];
    history.replaceState(null, '', address(['run', run, 'figures'], pairs));
    return draw();
  };
  const toggle = (from, name, on) => (on ? [...from, name] : from.filter((one) => one !== name));
  const listed = () => put(list,
    figures.filter((one) => `${one.name} ${one.meaning}`.toLowerCase().includes(search.toLowerCase())).map((one) =>
    h('li', {}, h('label', { title: one.meaning }, h('input', {
      type: 'checkbox', checked: chosen.includes(one.name),
      onchange: (event) => { chosen = toggle(chosen, one.name, event.target.checked); save(); },
    }), h('span', {}, one.name), h('small', {}, number(one.last))))));
  listed();
  const rest = runs.map((one) => one.name).filter((name) => name !== run);
  const side = card(null, { class: 'side' }, h('h2', {}, 'Figures'),
    h('input', { type: 'search', placeholder: 'search names and meanings  /', 'aria-label': 'Search figures',
        oninput: (event) => { search = event.target.value; listed(); } }),
    pick('Mean of', [['1', '1 update'], ['5', '5 updates'], ['20', '20 updates']], String(smooth),
      (value) => { smooth = Number(value); save(); }),
    rest.length ? h('details', { open: others.length > 0 }, h('summary', {}, 'Other runs over it'),
      h('ul', { class: 'figures' }, rest.map((name) => h('li', {}, h('label', {}, h('input', {
      type: 'checkbox', checked: others.includes(name),
      onchange: (event) => { others = toggle(others, name, event.target.checked); save(); },
    }), h('span', {}, name)))))) : null, list);
  await draw();
  let updates = -1;
  const refresh = async () => {
    const { updates: now } = await ofRun(run, '/figures', [['name', 'rollout/success_rate']]);
    if (updates >= 0 && now.length !== updates) await draw();
    updates = now.length;
  };
  return { node: h('div', { class: 'beside' }, h('h1', { class: 'hidden' }, `Figures of ${run}`), side, charts),
    refresh };
}
