// Questions to the server, and addresses of this page. Whatever can't be answered is an Error with the server's words.

export async function ask(path, words = []) {
  const query = new URLSearchParams(words).toString();
  const answer = await fetch(`/api/${path}${query ? `?${query}` : ''}`, { headers: { Accept: 'application/json' } });
  let found;
  try {
    found = await answer.json();
  } catch {
    throw new Error(`the server answered ${answer.status} without JSON`);
  }
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

export const ofRun = (run, path = '', words = []) => ask(`runs/${encodeURIComponent(run)}${path}`, words);

export function frameUrl(run, recording, name) {
  return `/api/runs/${encodeURIComponent(run)}/frame?${new URLSearchParams({ recording, name })}`;
}

/** A file of the episodes that these words find. */
export function exportUrl(run, words) {
  return `/api/runs/${encodeURIComponent(run)}/export?${new URLSearchParams(words)}`;
}

/** `parts` of the path, and `words` behind it as pairs. */
export function address(parts, words = []) {
  const query = new URLSearchParams(words).toString();
  return `#/${parts.map(encodeURIComponent).join('/')}${query ? `?${query}` : ''}`;
}

export function here() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  let parts;
  try {
    parts = path.split('/').filter(Boolean).map(decodeURIComponent);
  } catch {
    parts = [];
  }
  return { parts, words: [...new URLSearchParams(query)] };
}

export const valueOf = (words, name) => (words.find(([key]) => key === name) || [])[1];

/** With another value; '' takes the word out. */
export function changed(words, name, value) {
  const left = words.filter(([key]) => key !== name);
  return value === '' || value === null || value === undefined ? left : [...left, [name, value]];
}
