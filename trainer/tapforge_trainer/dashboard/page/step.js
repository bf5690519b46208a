// A step: the screen as the model saw it, its prompt, the tokens of its answer, and what was said of it.

import { address, ofRun } from './api.js';
import { card, h, number, outcome, pick, put, seconds, signed } from './dom.js';
import { done, stepAddress } from './episode.js';
import { letter, screen } from './screen.js';

let zoom = 'fit', colouring = 'logprob', gesture = true;

const probability = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;

/** A colour of a token: the less probable or the less certain, the stronger; engine and learner that differ; its
 * policy's version; its step's advantage. */
function tint(mode, token, step, versions) {
  const shade = (colour, share) => `color-mix(in srgb, var(${colour}) ${Math.min(75, share)}%, transparent)`;
  if (mode === 'version') return versions.length > 1
    ? `hsl(${(versions.indexOf(token.version) * 137) % 360} 70% 50% / 0.28)` : 'transparent';
  if (mode === 'advantage') {
    const a = step.credit ? step.credit.advantage : 0;
    return shade(a > 0 ? '--good' : '--bad', Math.min(60, Math.abs(a) * 25));
  }
  if (mode === 'entropy') return shade('--c4', 40 * Math.sqrt(Math.max(0, token.entropy)));
  if (mode === 'gap') return shade(token.gap > 0 ? '--c0' : '--c2', 75 * Math.sqrt(Math.abs(token.gap)));
  return shade('--c3', 25 * Math.sqrt(Math.max(0, -(mode === 'learner' ? token.learner_logprob : token.logprob))));
}

function figures(token, n) {
  const said = [`token ${n}, id ${token.id}`,
    `log-probability ${number(token.logprob, 4)} (${probability(token.logprob)})`];
  if (token.gap !== undefined) said.push(
    `learner's log-probability ${number(token.learner_logprob, 4)} (${probability(token.learner_logprob)})`,
    `engine − learner ${number(token.gap, 3)}`, `entropy ${number(token.entropy, 3)}`);
  return [...said, `policy version ${token.version}`].join('\n');
}

/** What the learner computed of an answer, in a sentence. */
function learned({ tokens, learned: update }) {
  const mean = (of) => tokens.reduce((total, one) => total + of(one), 0) / tokens.length;
  const at = tokens.reduce((most, one, n) => (Math.abs(one.gap) > Math.abs(tokens[most].gap) ? n : most), 0);
  return `Update ${update} trained on it: the learner's log-probability was `
    + `${number(mean((one) => one.learner_logprob) * tokens.length, 4)} in all, the mean entropy `
    + `${number(mean((one) => one.entropy), 3)} nats; engine and learner differed by `
    + `${number(mean((one) => Math.abs(one.gap)), 3)} per token, most at token ${at} (${number(tokens[at].gap, 3)}).`;
}

function answer(step) {
  const { tokens } = step.answer, versions = [...new Set(tokens.map((one) => one.version))];
  const body = h('p', { class: 'tokens' }), sum = tokens.reduce((total, one) => total + one.logprob, 0);
  const modes = [['logprob', 'log-probability'],
    ...(step.answer.learned !== null ? [['learner', "learner's log-probability"], ['entropy', 'entropy'],
      ['gap', 'engine − learner']] : []),
    ['version', 'policy version'], ...(step.credit ? [['advantage', 'advantage']] : [])];
  const draw = (mode) => put(body, tokens.map((token, n) => h('span', {
    class: 'token', id: `token-${n}`, tabindex: 0, style: { background: tint(mode, token, step, versions) },
    title: figures(token, n),
  }, token.text ?? `⟨${token.id}⟩`)));
  const chosen = modes.some(([name]) => name === colouring) ? colouring : 'logprob';  // this answer may lack it
  draw(chosen);
  return card('Answer', {}, pick('Colour by', modes, chosen, (value) => { colouring = value; draw(value); }), body,
    h('p', { class: 'quiet' },
      `${tokens.length} tokens, log-probability ${number(sum, 4)} in all; ended by ${step.finish}. `,
      'Hover or focus a token for its figures.'),
    step.answer.learned !== null && tokens.length ? h('p', { class: 'quiet learned' }, learned(step.answer))
      : step.not_learned ? h('p', { class: 'quiet learned' }, step.not_learned) : null,
    step.no_tokenizer ? h('p', { class: 'quiet' }, step.no_tokenizer) : null,
    step.parse_error ? h('p', { class: 'alarm' }, `Not an action: ${step.parse_error}`) : null,
    h('h3', {}, 'Read as'), h('pre', {}, step.action ? JSON.stringify(step.action, null, 1) : 'no action'),
    h('details', {}, h('summary', {}, 'Its text'), h('pre', {}, step.text)));
}

function rewards(step) {
  const { credit } = step;
  return card('Rewards', {}, h('table', {}, h('tbody', {},
    h('tr', {}, h('th', { scope: 'row' }, 'environment'), h('td', { class: 'n' }, signed(step.reward)),
      h('td', { class: 'long' }, step.note)),
    step.verdicts.map((one) => h('tr', {}, h('th', { scope: 'row' }, one.stream),
        h('td', { class: 'n' }, one.value === null ? 'missing' : signed(one.value)),
        h('td', { class: 'long' }, one.words))),
    credit ? [h('tr', {}, h('th', { scope: 'row' }, 'reward in the update'),
        h('td', { class: 'n' }, signed(credit.reward)), h('td', {})),
      h('tr', {}, h('th', { scope: 'row' }, 'advantage'),
        h('td', { class: `n ${credit.advantage > 0 ? 'up' : credit.advantage < 0 ? 'down' : ''}` },
          signed(credit.advantage)),
        h('td', { class: 'long' },
          `episode ${signed(credit.episode_advantage)}, step ${signed(credit.step_advantage)}; `,
          `${credit.state_group_size} steps in its state`))]
        : null)),
  !credit && step.no_advantage ? h('p', { class: 'quiet' }, step.no_advantage) : null);
}

function prompt(run, recording, step) {
  const parts = step.prompt.map((part) => {
    if (part.frame) return screen(run, recording, { ...step, frame: part.frame, gesture: null, size: step.size },
      { height: 150 });
    return h('pre', {}, part.text ?? part.ids.join(' '));
  });
  return card('Prompt, as the model saw it', { class: 'prompt' },
    h('p', { class: 'quiet' },
      `${number(step.prompt_length)} tokens with those of ${step.frames.length} `,
      `screen${step.frames.length === 1 ? '' : 's'}`),
    parts);
}

export async function stepView({ run, parts: [recording, name, index] }) {
  const step = await ofRun(run, '/step', [['recording', recording], ['name', name], ['step', index]]);
  const at = Number(index), { episode } = step, large = h('div', { class: 'large' });
  const draw = () => {
    const fit = Math.max(320, innerHeight - 190);
    const size = zoom === 'fit' ? { height: step.size ? Math.min(fit, Math.max(step.size[1], 480)) : fit }
      : { width: step.size ? step.size[0] * Number(zoom) : 200 };
    put(large, screen(run, recording, step, { ...size, gesture }));
  };
  draw();
  const link = (to, text, label) => (to >= 0 && to < episode.steps
      ? h('a', { class: 'button', href: stepAddress(run, recording, name, to), 'aria-label': label }, text)
      : h('span', { class: 'button off' }, text));
  const back = address(['run', run, 'episode', recording, name]);
  const state = Object.entries(step.state).filter(([, value]) => value);
  const node = h('div', { class: 'stepview' },
    h('div', { class: 'title' }, link(at - 1, '←', 'previous step'),
      h('h1', {}, `Step ${at} of 0–${episode.steps - 1}`), link(at + 1, '→', 'next step'),
      h('a', { href: back }, episode.goal || name), outcome(episode.outcome),
      h('span', { class: 'quiet' }, episode.update ? `update ${episode.update}` : recording)),
    h('div', { class: 'columns' },
      h('div', { class: 'screenside' }, h('div', { class: 'tools' },
        pick('Size', [['fit', 'fit'], ['1', '1:1'], ['2', '2:1'], ['4', '4:1']], zoom,
          (value) => { zoom = value; draw(); }),
        h('label', { class: 'field check' },
          h('input', { type: 'checkbox', checked: gesture,
              onchange: (event) => { gesture = event.target.checked; draw(); } }), h('span', {}, 'gesture'))), large,
      h('p', { class: 'quiet' }, done(step.gesture),
        step.size ? ` on ${step.size[0]}x${step.size[1]}, the size that the model saw` : ''),
      step.app ? h('p', { class: 'quiet' }, `in ${step.app}`) : null),
      h('div', { class: 'cards one' }, answer(step), rewards(step), prompt(run, recording, step),
        card('State and versions', {}, h('p', {}, letter(step),
            ` ${step.alike > 1 ? `${step.alike} steps of the group saw this state` : 'seen once in its group'}`),
          h('dl', {}, state.map(([key, value]) => [h('dt', {}, key.replace(/_/g, ' ')),
                h('dd', {}, h('code', {}, value))]),
            h('dt', {}, 'policy versions'),
            h('dd', {}, [...new Set(step.answer.tokens.map((one) => one.version))].join(', ') || '–'),
            h('dt', {}, 'model took'), h('dd', {}, seconds(step.seconds_model)), h('dt', {}, 'phone took'),
            h('dd', {}, seconds(step.seconds_environment)))))));
  const key = (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1 }[event.key];
    if (to >= 0 && to < episode.steps) location.hash = stepAddress(run, recording, name, to);
    if (event.key === 'Escape') location.hash = back;
  };
  return { node, key };
}
