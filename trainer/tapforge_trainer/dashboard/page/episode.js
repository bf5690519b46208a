// An episode: its steps in a row, with what the model said and what it was worth.

import { address, exportUrl, ofRun } from './api.js';
import { ago, card, h, number, outcome, seconds, signed } from './dom.js';
import { letter, screen } from './screen.js';

export const stepAddress = (run, recording, name, index) => address(['run', run, 'step', recording, name, index]);

/** What was done, with what was typed or said. */
export function done(gesture) {
  if (!gesture) return 'no action';
  const label = gesture.label.slice(1).trim();
  return label && !gesture.words.includes(label) && !/^(done|give up)$/.test(label)
    ? `${gesture.words} ${gesture.label}` : gesture.words;
}

export function answerWords(step) {
  return step.parse_error ? h('p', { class: 'alarm', title: step.text }, `not an action: ${step.parse_error}`)
    : h('p', { class: 'action' }, done(step.gesture));
}

export function worth(step) {
  const { credit } = step;
  return h('p', { class: 'worth' }, letter(step),
    credit ? [h('span', { title: 'reward of the step, as the update used it' }, `r ${signed(credit.reward)}`),
      h('span', { class: credit.advantage > 0 ? 'up' : credit.advantage < 0 ? 'down' : '',
          title: `advantage: episode ${number(credit.episode_advantage)}, step ${number(credit.step_advantage)}` },
        `A ${signed(credit.advantage)}`)] : step.reward ? h('span', {}, `r ${signed(step.reward)}`) : null,
    step.verdicts.filter((one) => one.value !== 0 || one.words)
      .map((one) => h('span', { title: one.words }, `${one.stream} ${one.value === null ? '?' : signed(one.value)}`)));
}

function stepCard(run, recording, name, step) {
  return h('li', { class: 'step' },
    h('a', { href: stepAddress(run, recording, name, step.index) },
      h('h2', { class: 'name' }, `Step ${step.index}`, step.app ? h('small', {}, ` ${step.app}`) : ''),
      screen(run, recording, step, { height: 300 })),
    answerWords(step), worth(step), h('pre', { class: 'answer' }, step.text),
    step.note ? h('p', { class: 'quiet' }, step.note) : null,
    h('p', { class: 'quiet' },
      `${step.tokens} tokens · model ${seconds(step.seconds_model)} · phone ${seconds(step.seconds_environment)}`));
}

export function facts(found) {
  const rows = [
    ['task', `${found.task.suite} / ${found.task.template}`], ['group', found.group], ['update', found.update ?? '–'],
    ['outcome', found.verified && found.verified !== found.outcome
        ? `${found.outcome}; the verifier says ${found.verified}` : found.outcome],
    ['reason', found.reason.replace(/_/g, ' ')], ['score', number(found.score)], ['verifier', found.message || '–'],
    ['reward', number(found.reward)], ['advantage, mean', found.advantage === null ? '–' : signed(found.advantage)],
    ['policy versions', found.oldest === found.newest ? `${found.newest ?? '–'}`
        : `${found.oldest} to ${found.newest}`], ['staleness', found.staleness ?? '–'], ['phone', found.phone],
    ['attempt', found.attempt], ['seed', found.seed], ['started', ago(found.started)],
    ['took', seconds(found.ended - found.started)],
  ];
  return h('dl', { class: 'inline' }, rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

export async function episodeView({ run, parts: [recording, name] }) {
  const found = await ofRun(run, '/episode', [['recording', recording], ['name', name]]);
  const place = found.members.findIndex((one) => one.name === name);
  const member = (offset) => found.members[(place + offset + found.members.length) % found.members.length];
  const to = (one) => address(['run', run, 'episode', recording, one.name]);
  const group = address(['run', run, 'group', recording, found.group]);
  const last = found.last_frame ? { index: 'end', frame: found.last_frame,
    size: found.steps.length ? found.steps[found.steps.length - 1].size : null, gesture: null } : null;
  const node = h('div', { class: 'episode' },
    h('div', { class: 'title' }, h('h1', {}, found.task.goal || found.task.template), outcome(found.outcome),
      h('code', {}, name),
      h('a', { class: 'button', href: exportUrl(run, [['recording', recording], ['name', name]]), download: '' },
        'Export')),
    card(null, {}, facts(found)),
    found.members.length > 1 ? h('nav', { class: 'members', 'aria-label': 'Episodes of the group' },
      h('a', { class: 'button', href: group }, 'Group side by side'),
      found.members.map((one, n) => h('a', { href: to(one), class: `member ${one.outcome}`,
            'aria-current': n === place ? 'page' : null, title: `${one.name}: ${one.outcome}, ${one.steps} steps` },
          one.outcome === 'success' ? '✓' : one.outcome === 'failure' ? '✗' : '?', ` ${one.steps}`))) : null,
    h('ol', { class: 'steps', tabindex: 0, 'aria-label': 'Steps' },
      found.steps.map((step) => stepCard(run, recording, name, step)),
      last ? h('li', { class: 'step' }, h('h2', { class: 'name' }, 'Afterwards'),
        screen(run, recording, last, { height: 300 })) : null));
  const key = (event) => {
    if (event.key === 'g') location.hash = group;
    if (event.key === 'Enter' && found.steps.length
        && !event.target.closest('a, button')) location.hash = stepAddress(run, recording, name, 0);
    if (found.members.length > 1 && (event.key === 'n' || event.key === 'p')) location.hash = to(
        member(event.key === 'n' ? 1 : -1));
  };
  return { node, key };
}
