// Elements and words. What models wrote only ever becomes a text node here: nothing in this page parses HTML.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, props, kids) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === 'value') node.value = value;
    else node.setAttribute(name, value === true ? '' : String(value));
  }
  add(node, kids);
  return node;
}

export function add(node, kids) {
  for (const kid of kids.flat(Infinity)) {
    if (kid === null || kid === undefined || kid === false) continue;
    node.append(kid instanceof Node ? kid : document.createTextNode(String(kid)));
  }
}

export const h = (tag, props, ...kids) => fill(document.createElement(tag), props, kids);
export const s = (tag, props, ...kids) => fill(document.createElementNS(SVG, tag), props, kids);

export function put(node, ...kids) {
  node.replaceChildren();
  add(node, kids);
}

// --- words -----------------------------------------------------------------------------------------------------------

export function percent(rate) {
  if (rate === null || rate === undefined) return '–';
  let text = (100 * rate).toFixed(1);
  if (rate < 1 && text === '100.0') text = '99.9';
  if (rate > 0 && text === '0.0') text = '0.1';
  return `${text.replace(/\.0$/, '')} %`;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (Number.isInteger(value)) return value.toLocaleString('en');
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function ago(unix) {
  if (!unix) return '';
  const passed = Date.now() / 1000 - unix;
  if (passed < 90) return `${Math.max(0, Math.round(passed))} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  return new Date(1000 * unix).toLocaleString('en-GB',
    { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit' });
}

export const outcome = (name) => h('span', { class: `outcome ${name}` }, name);

export const card = (title, props, ...kids) =>
  h('section', { ...props, class: `card ${(props && props.class) || ''}` }, title ? h('h2', {}, title) : null, ...kids);

export function pick(label, options, value, changed, props = {}) {
  const select = h('select', { ...props, onchange: (event) => changed(event.target.value) },
    options.map(([key, words]) => h('option', { value: key, selected: key === value }, words)));
  return h('label', { class: 'field' }, h('span', {}, label), select);
}

export function entry(label, value, changed, props = {}) {
  const input = h('input', { type: 'text', size: 8, ...props, value: value || '',
      onchange: (e) => changed(e.target.value) });
  return h('label', { class: 'field' }, h('span', {}, label), input);
}
