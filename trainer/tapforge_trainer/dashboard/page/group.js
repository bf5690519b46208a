// The episodes of a group side by side: same states have the same letter, and where they part is marked.

import { address, ofRun } from './api.js';
import { h, outcome, signed } from './dom.js';
import { answerWords, stepAddress, worth } from './episode.js';
import { screen } from './screen.js';

/** Index of the step from which on an episode does something else than the first one. */
function parting(first, other) {
  const same = (a, b) => a && b && JSON.stringify(a.action) === JSON.stringify(b.action) && a.frame === b.frame;
  for (let n = 0; n < Math.max(first.steps.length, other.steps.length);
    n++) if (!same(first.steps[n], other.steps[n])) return n;
  return -1;
}

export async function groupView({ run, parts: [recording, name] }) {
  const found = await ofRun(run, '/group', [['recording', recording], ['name', name]]);
  const [first] = found.episodes, wins = found.episodes.filter((one) => one.outcome === 'success').length;
  const rows = found.episodes.map((one, n) => {
    const parts = n ? parting(first, one) : -1;
    return h('section', { class: 'lane', 'aria-label': one.id },
      h('div', { class: 'lane-title' }, h('a', { href: address(['run', run, 'episode', recording, one.id]) }, one.id),
        outcome(one.outcome),
        h('span', { class: 'quiet' }, one.reason.replace(/_/g, ' ')),
        one.advantage !== null ? h('span', { class: one.advantage > 0 ? 'up' : 'down' }, `A ${signed(one.advantage)}`)
          : null, one.message ? h('span', { class: 'quiet' }, one.message) : null),
      h('ol', { class: 'steps small', tabindex: 0, 'aria-label': `Steps of ${one.id}` },
        one.steps.map((step, k) => h('li', { class: `step${k === parts ? ' parts' : ''}` },
        k === parts ? h('p', { class: 'parting' }, 'parts from the first') : null,
        h('a', { href: stepAddress(run, recording, one.id, step.index),
            'aria-label': `step ${step.index} of ${one.id}` }, screen(run, recording, step, { height: 190 })),
        answerWords(step), worth(step)))));
  });
  return {
    node: h('div', { class: 'group' }, h('div', { class: 'title' }, h('h1', {}, found.task.goal || found.task.template),
        h('span', { class: 'quiet' }, `group ${name}: ${wins} of ${found.episodes.length} succeeded`)),
      h('p', { class: 'quiet' }, 'A letter names a state that several steps of the group saw; · was seen once.'),
      rows),
  };
}
