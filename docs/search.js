// Search: sixty scenes in the orders of v·t, of the vector and of phrases, by one of the page's models.
'use strict';
const search = (() => {
  const {D, make, phrasesOf, view, captionScores, vectorScores, load, pixelsOf, rgbOf} = c2lip;
  const at = id => document.getElementById(id), scenes = [...D.scenes, ...D.search.scenes];
  const SIDE = 96, FIRST = 10, seen = [[], []], now = {model: 1, asked: 0};
  const say = text => { at('found-status').textContent = text; };
  const pause = () => new Promise(done => setTimeout(done));

  async function encoded(m) { // what model m sees in every scene; when it is first asked
    for (const [i, scene] of scenes.entries()) {
      if (seen[m][i]) continue;
      seen[m][i] = view(m, rgbOf(pixelsOf(await load(`data:image/png;base64,${scene.seen}`), SIDE)));
      say(`${D.names[m]} reads scene ${i + 1} of ${scenes.length}`);
      await pause();
    }
    return seen[m];
  }

  const known = [...D.words.nouns, ...D.words.colours, ...D.words.others];
  function missing(scene, text) { // the phrases that name nothing in a scene; a text without one is its own
    const phrases = phrasesOf(text);
    return (phrases.length ? phrases : [text]).filter(phrase => {
      const words = phrase.toLowerCase().split(/\W+/).filter(word => known.includes(word));
      return !words.length || !scene.things.some(thing => words.every(word => thing.words.includes(word)));
    });
  }

  function hit(i, score, text) {
    const scene = scenes[i], lacks = missing(scene, text).map(p => `no ${p.replace(/^(an?|the|one|another) /i, '')}`);
    const image = make('img', {src: `data:image/png;base64,${scene.seen}`, alt: scene.caption});
    const words = make('span', {textContent: lacks.join(', ') || '✓'}), value = score.toFixed(3).replace('-', '−');
    return make('li', {className: lacks.length ? '' : 'right', title: scene.name}, image, make('b', {textContent: value}), words);
  }

  async function find(text) {
    text = text.split(/\s+/).filter(Boolean).join(' ');
    if (!text) return say('the search is empty; type a few words such as: a red mug and a blue fish');
    at('query').value = text;
    const m = now.model, asked = ++now.asked, images = await encoded(m);
    if (asked != now.asked) return; // something else is looked for by now
    const all = images.map(image => captionScores(m, text, image)), vector = vectorScores(m, text, images);
    const right = scenes.filter(scene => !missing(scene, text).length).length;
    const lists = {'by-vt': all.map(scores => scores[0]), 'by-vector': vector, 'by-phrases': all.map(scores => scores[1])};
    const counts = Object.entries(lists).map(([list, values]) => {
      const order = values.map((_, i) => i).sort((a, b) => values[b] - values[a]).slice(0, FIRST);
      at(list).replaceChildren(...order.map(i => hit(i, values[i], text)));
      at(list).parentNode.hidden = !values.length;
      return at(list).querySelectorAll('.right').length;
    });
    const one = vector.length ? `, the vector ${counts[1]}` : '';
    const found = `v·t has ${counts[0]} among its ten best${one}, the phrases ${counts[2]}`;
    say(`${D.names[m]}: ${right ? `of ${right} scenes that show it, ${found}` : 'no scene shows it'}`);
    at('found').dataset.asked = asked;
  }

  const chip = (text, act) => make('button', {type: 'button', className: 'chip', textContent: text, onclick: act});
  function start() {
    const models = D.names.map((name, m) => chip(name, () => { now.model = m; mark(); find(at('query').value); }));
    const mark = () => models.forEach((e, m) => e.setAttribute('aria-pressed', m == now.model));
    at('search-models').append(...models);
    at('search-examples').append(...D.search.texts.map(text => chip(text, () => find(text))));
    const read = () => find(at('query').value); // no form: JupyterLab's frame lets none be sent
    at('search-now').onclick = read;
    at('query').onkeydown = e => e.key == 'Enter' && !e.isComposing && read();
    mark();
  }
  return {start, scenes};
})();
search.start();
