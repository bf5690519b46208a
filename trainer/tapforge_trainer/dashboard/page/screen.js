// A recorded screen with the gesture that was made on it, in pixels of the frame.

import { frameUrl } from './api.js';
import { h, s } from './dom.js';

function shapes(gesture, ring) {
  const at = (points) => points.map(([x, y]) => `${x},${y}`).join(' ');
  return gesture.shapes.map(({ kind, points, radius }) => {
    const [[cx, cy]] = points, width = ring / 3;
    const twice = (tag, props) => ['edge', 'ink']
      .map((layer) => s(tag, { ...props, class: `${layer} ${kind}`,
          'stroke-width': layer === 'edge' ? width * 2.4 : width }));
    if (kind === 'line') return twice('line', { x1: cx, y1: cy, x2: points[1][0], y2: points[1][1] });
    if (kind === 'head') return s('polygon', { class: 'head', points: at(points) });
    if (kind === 'dot') return s('circle', { class: 'dot', cx, cy, r: radius, 'stroke-width': width });
    return twice('circle', { cx, cy, r: radius, 'stroke-dasharray': kind === 'dashed' ? `${radius / 2} ${radius / 3}`
          : null });
  });
}

/** `height` or `width` in CSS pixels; without both the frame's own size. */
export function screen(run, recording, step, { height, width, gesture = true } = {}) {
  if (!step.frame) return h('div', { class: 'screen none' }, 'no screen');
  if (!step.size) return h('div', { class: 'screen none', style: { height: height ? `${height}px` : null } },
    'screen not recorded');
  const [wide, high] = step.size;
  const scale = height ? height / high : width ? width / wide : 1;
  const words = step.gesture ? step.gesture.words : 'no action';
  return h('div', { class: 'screen', style: { width: `${wide * scale}px`, height: `${high * scale}px` } },
    h('img', { src: frameUrl(run, recording, step.frame), alt: `screen of step ${step.index}: ${words}`,
        width: Math.round(wide * scale), height: Math.round(high * scale), loading: 'lazy',
        class: scale >= 1.5 ? 'pixels' : null }),
    gesture && step.gesture ? s('svg', { viewBox: `0 0 ${wide} ${high}`, 'aria-hidden': 'true' },
      shapes(step.gesture, Math.min(wide, high) / 50)) : null,
    gesture && step.gesture && step.gesture.label ? h('span', { class: 'said' }, step.gesture.label) : null);
}

const HUES = ['#3a5bd9', '#c2313d', '#12805c', '#9a5b00', '#7a3fb0', '#00728a', '#b0307a', '#556b00'];

/** The letter of a state that several steps of the group saw. */
export function letter(step) {
  const alone = 'no other step of the group saw this state';
  if (!step.letter) return h('span', { class: 'letter none', title: alone }, '·');
  const code = [...step.letter].reduce((sum, one) => sum * 26 + one.charCodeAt(0) - 65, 0);
  return h('span', { class: 'letter', style: { background: HUES[code % HUES.length] },
      title: `state ${step.letter}: ${step.alike} steps of the group` }, step.letter);
}
