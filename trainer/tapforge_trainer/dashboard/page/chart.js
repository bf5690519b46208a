// Curves in SVG: several runs over each other, a readout under the pointer, gaps where nothing was measured.

import { h, number, percent, s } from './dom.js';

export const COLOURS = ['var(--c0)', 'var(--c1)', 'var(--c2)', 'var(--c3)', 'var(--c4)', 'var(--c5)'];
const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 24;

function ticks(low, high, count) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => power * m >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

/** Mean of the last `window` values up to each one, without those that are missing. */
export function trailing(values, window) {
  return values.map((value, place) => {
    if (value === null) return null;
    const known = values.slice(Math.max(0, place + 1 - window), place + 1).filter((one) => one !== null);
    return known.reduce((sum, one) => sum + one, 0) / known.length;
  });
}

/** At most about `most` points, the extremes of each stretch kept. */
function thinned(xs, ys, most) {
  if (xs.length <= most) return xs.map((x, n) => [x, ys[n]]);
  const found = [], size = Math.ceil((2 * xs.length) / most);
  for (let start = 0; start < xs.length; start += size) {
    let low = -1, high = -1;
    for (let n = start; n < Math.min(start + size, xs.length); n++) {
      if (ys[n] === null) continue;
      if (low < 0 || ys[n] < ys[low]) low = n;
      if (high < 0 || ys[n] > ys[high]) high = n;
    }
    if (low < 0) found.push([xs[start], null]);
    else for (const n of [...new Set([low, high])].sort((a, b) => a - b)) found.push([xs[n], ys[n]]);
  }
  return found;
}

function path(points, x, y) {
  let text = '', drawing = false;
  for (const [at, value] of points) {
    if (value === null) drawing = false;
    else {
      text += `${drawing ? 'L' : 'M'}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      drawing = true;
    }
  }
  return text;
}

/**
 * `series`: {name, xs, ys, colour?}. `points`: {x, y, low, high, name, colour?, beside?: pixels}. `lines`: {y, name}.
 * `share`: the scale is 0 to 100 %. `smooth`: updates of the trailing mean; 1 draws the values alone.
 */
export function chart({ series, points = [], lines = [], share = false, smooth = 1, height = 220, label }) {
  const box = h('div', { class: 'chart' });
  const readout = h('div', { class: 'readout', 'aria-hidden': 'true' });
  const draw = () => {
    const width = Math.max(260, box.clientWidth || 600);
    const values = [...series.flatMap((one) => one.ys.filter((y) => y !== null)),
      ...points.flatMap((p) => [p.low ?? p.y, p.high ?? p.y])];
    const xs = [...series.flatMap((one) => [one.xs[0], one.xs[one.xs.length - 1]]), ...points.map((p) => p.x)]
      .filter((x) => x !== undefined);
    if (!values.length) {
      box.replaceChildren(h('p', { class: 'quiet' }, 'Nothing measured yet.'));
      return;
    }
    let low = share ? 0 : Math.min(...values), high = share ? 1 : Math.max(...values);
    if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    else if (!share) [low, high] = [low >= 0 && low < 0.4 * high ? 0 : low - 0.04 * (high - low),
      high + 0.04 * (high - low)];
    const first = Math.min(...xs), last = Math.max(...xs, first + 1);
    const x = (at) => LEFT + ((at - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
    const words = (value) => (share ? percent(value) : number(value));
    const svg = s('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label });
    for (const at of ticks(low, high, 4)) {
      svg.append(s('line', { class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }),
        s('text', { class: 'tick', x: LEFT - 8, y: y(at) + 4, 'text-anchor': 'end' },
          share ? `${Math.round(100 * at)} %` : number(Number(at.toPrecision(6)))));
    }
    for (const at of ticks(first, last, Math.min(8, width / 90)).filter(Number.isInteger)) {
      svg.append(s('text', { class: 'tick', x: x(at), y: height - 6, 'text-anchor': 'middle' }, at));
    }
    for (const line of lines) {
      svg.append(s('line', { class: 'baseline', x1: LEFT, x2: width - RIGHT, y1: y(line.y), y2: y(line.y) }),
        s('text', { class: 'tick', x: width - RIGHT, y: y(line.y) - 4, 'text-anchor': 'end' },
          `${line.name} ${percent(line.y)}`));
    }
    const most = 2 * (width - LEFT - RIGHT);
    series.forEach((one, n) => {
      const stroke = one.colour || COLOURS[n % COLOURS.length];
      const means = smooth > 1 ? trailing(one.ys, smooth) : one.ys;
      if (smooth > 1) svg.append(s('path', { class: 'raw', d: path(thinned(one.xs, one.ys, most), x, y), stroke }));
      svg.append(s('path', { class: 'curve', d: path(thinned(one.xs, means, most), x, y), stroke }));
      if (one.xs.length === 1) svg.append(s('circle', { cx: x(one.xs[0]), cy: y(one.ys[0]), r: 3, fill: stroke }));
    });
    points.forEach((p) => {
      const colour = p.colour || 'var(--c1)',
        at = Math.max(LEFT + 5, Math.min(width - RIGHT - 5, x(p.x) + (p.beside || 0)));
      if (p.low !== undefined && p.low !== null) svg.append(s('line',
          { class: 'interval', x1: at, x2: at, y1: y(p.low), y2: y(p.high), stroke: colour }));
      svg.append(s('circle', { class: 'measured', cx: at, cy: y(p.y), r: 5, fill: colour },
          s('title', {}, `${p.name}: ${percent(p.y)}`)));
    });
    const rule = s('line', { class: 'rule', y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
    svg.append(rule);
    svg.addEventListener('pointermove', (event) => {
      const at = first + ((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * (last - first);
      const rows = series.map((one, n) => {
        let place = 0;
        for (let k = 1; k < one.xs.length; k++) if (Math.abs(one.xs[k] - at) < Math.abs(one.xs[place] - at)) place = k;
        return [one, one.xs[place], one.ys[place], one.colour || COLOURS[n % COLOURS.length]];
      }).filter(([, where]) => where !== undefined);
      if (!rows.length) return;
      const where = x(rows[0][1]);
      rule.setAttribute('x1', where);
      rule.setAttribute('x2', where);
      readout.replaceChildren(h('b', {}, `update ${rows[0][1]}`), ...rows.map(([one, , value, colour]) =>
        h('span', {}, h('i', { style: { background: colour } }), `${one.name} `,
          h('b', {}, value === null ? '–' : words(value)))));
      readout.style.setProperty('display', 'flex');
    });
    svg.addEventListener('pointerleave', () => {
      rule.setAttribute('x1', -9);
      rule.setAttribute('x2', -9);
      readout.style.setProperty('display', 'none');
    });
    box.replaceChildren(svg, readout);
  };
  new ResizeObserver(draw).observe(box);
  return box;
}

export function legend(names) {
  return h('p', { class: 'legend' },
    names.map(([name, colour]) => h('span', {}, h('i', { style: { background: colour } }), name)));
}
