// What the address says is shown; a run that is going on is asked again every few seconds.

import { address, here } from './api.js';
import { h, put } from './dom.js';
import { compareView } from './compare.js';
import { episodeView } from './episode.js';
import { episodesView } from './episodes.js';
import { figuresView } from './figures.js';
import { groupView } from './group.js';
import { overviewView } from './overview.js';
import { runsView } from './runs.js';
import { stepView } from './step.js';

const EVERY = 3000;
const TABS = [['', 'Overview'], ['figures', 'Figures'], ['episodes', 'Episodes'], ['compare', 'Compare']];
const VIEWS = {
  '': overviewView, figures: figuresView, episodes: episodesView, compare: compareView,
  episode: episodeView, group: groupView, step: stepView,
};

const main = document.getElementById('main'), nav = document.getElementById('nav'),
  status = document.getElementById('status');
let shown = null, number = 0, lastList = '';

function tabs(run, kind) {
  if (!run) return put(nav);
  const inside = { episode: 'episodes', group: 'episodes', step: 'episodes' }[kind] || kind;
  put(nav, h('a', { class: 'run', href: address(['run', run]) }, run),
    TABS.map(([name, words]) => {
      const back = name === 'episodes' && inside === 'episodes' && kind !== 'episodes' && lastList;
      return h('a', { href: back || address(['run', run, ...(name ? [name] : [])]),
          'aria-current': name === inside ? 'page' : null }, words);
    }));
}

async function show() {
  const mine = ++number, { parts, words } = here();
  if (shown && shown.leave) shown.leave();
  shown = null;
  const run = parts[0] === 'run' ? parts[1] : '', kind = run ? parts[2] || '' : 'runs';
  if (kind === 'episodes') lastList = location.hash;
  tabs(run, kind);
  document.title = run ? `${run} – tapforge` : 'tapforge';
  main.setAttribute('aria-busy', 'true');
  const view = kind === 'runs' ? runsView : VIEWS[kind];
  try {
    if (!view) throw new Error(`this page has no ${kind}`);
    const next = await view({ run, parts: parts.slice(3), words });
    if (mine !== number) return next.leave && next.leave();
    shown = next;
    put(main, next.node);
    if (next.shown) next.shown();
    main.dataset.view = kind || 'overview';
    status.textContent = '';
    window.scrollTo(0, 0);
  } catch (error) {
    if (mine !== number) return;
    put(main, h('p', { class: 'error', role: 'alert' }, error.message));
    shown = { refresh: show }; // a run that has just begun, or is not read yet
  } finally {
    if (mine === number) main.removeAttribute('aria-busy');
  }
}

async function again() {
  const mine = number;
  if (shown && shown.refresh && !document.hidden) {
    try {
      await shown.refresh();
      if (mine === number) status.textContent = '';
    } catch (error) {
      status.textContent = error instanceof TypeError ? 'the server does not answer' : error.message;
    }
  }
  setTimeout(again, EVERY);
}

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches('input, select, textarea')) {
    if (event.key === 'Escape') event.target.blur();
    return;
  }
  if (event.key === '/') {
    const search = document.querySelector('input[type=search]');
    if (search) {
      event.preventDefault();
      search.focus();
    }
  } else if (shown && shown.key) shown.key(event);
});

document.getElementById('theme').addEventListener('click', () => {
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const now = document.documentElement.dataset.theme || (dark ? 'dark' : 'light');
  document.documentElement.dataset.theme = now === 'dark' ? 'light' : 'dark';
  localStorage.setItem('tapforge-theme', document.documentElement.dataset.theme);
});
const theme = localStorage.getItem('tapforge-theme');
if (theme) document.documentElement.dataset.theme = theme;

addEventListener('hashchange', show);
show().then(() => setTimeout(again, EVERY));
