// A scene of one's own: drawn as c2lip.lab.world.drawn draws it, arranged by mouse, touch or keyboard.
'use strict';
c2lip.scene = (() => {
  const {D, make} = c2lip, W = D.world, SHOWN = 384, SEEN = 96, MOST = 4;
  const at = id => document.getElementById(id);

  // ---- an object's masks

  function trace(pen, kind, points, {radius = 0, start = 0, end = 360, width = 0}, unit) { // a shape of Pillow's ImageDraw
    const p = points.flat().map(v => v * unit), turn = degrees => degrees * Math.PI / 180;
    pen.beginPath();
    if (kind == 'polygon' || kind == 'line') {
      for (let i = 0; i < p.length; i += 2) pen.lineTo(p[i], p[i + 1]);
    } else if (kind == 'circle') {
      pen.arc(p[0], p[1], radius * unit, 0, 2 * Math.PI);
    } else if (kind.endsWith('rectangle')) {
      pen.roundRect(p[0], p[1], p[2] - p[0], p[3] - p[1], radius * unit);
    } else { // ellipse, pieslice, arc: an arc's width lies inside
      const x = (p[0] + p[2]) / 2, y = (p[1] + p[3]) / 2, inner = width * unit / 2;
      if (kind == 'pieslice') pen.moveTo(x, y);
      pen.ellipse(x, y, x - p[0] - inner, y - p[1] - inner, 0, turn(start), turn(end));
    }
    if (kind == 'line' || kind == 'arc') {
      pen.lineWidth = width * unit;
      pen.stroke();
    } else {
      pen.fill();
    }
  }

  function painted(shapes, side, unit) { // coverage in 0…1 of side·side points
    const canvas = make('canvas', {width: side, height: side}), pen = canvas.getContext('2d', {willReadFrequently: true});
    pen.translate(0.25, 0.25); // Pillow's points are the middles of its pixels
    for (const shape of shapes) {
      const [kind] = Object.keys(shape);
      pen.globalCompositeOperation = shape.fill === 0 ? 'destination-out' : 'source-over';
      trace(pen, kind, shape[kind], shape, unit);
    }
    const pixels = pen.getImageData(0, 0, side, side).data;
    return Float32Array.from({length: side * side}, (_, i) => pixels[4 * i + 3] / 255);
  }

  function enlarged(mask, side, reach) { // the largest value within `reach` points each way
    const out = Float32Array.from(mask), n = reach + 1;
    for (const step of [1, side])
      for (const way of [1, -1])
        for (let line = 0; line < side; line++) {
          const first = line * (step == 1 ? side : 1);
          for (let covered = 1; covered < n;) {
            const shift = Math.min(covered, n - covered);
            for (let k = 0; k + shift < side; k++) {
              const i = first + (way > 0 ? k : side - 1 - k) * step;
              out[i] = Math.max(out[i], out[i + way * shift * step]);
            }
            covered += shift;
          }
        }
    return out;
  }

  function reduced(mask, side, times) { // the mean of times·times points
    const out = new Float32Array(side * side);
    mask.forEach((v, i) => { out[Math.floor(i / side / times ** 2) * side + Math.floor(i % (side * times) / times)] += v / times ** 2; });
    return out;
  }

  const sprites = new Map();
  function sprite(noun, pattern, side) { // role → coverage (side·side)
    const key = [noun, pattern, side].join();
    if (!sprites.has(key)) {
      const times = side < 64 ? 4 : 2, fine = side * times, unit = fine - times / 8, masks = {};
      for (const [role, shapes] of Object.entries(W.objects[noun])) masks[role] = painted(shapes, fine, unit);
      const whole = masks.body.map((v, i) => Math.max(v, masks.light[i], masks.dark[i]));
      masks.motif = painted(W.patterns[pattern], fine, fine / 6);
      masks.outline = enlarged(whole, fine, Math.round(fine * 0.032));
      for (const role in masks) masks[role] = reduced(masks[role], side, times);
      masks.motif = masks.motif.map((v, i) => v * masks.body[i]);
      sprites.set(key, masks);
    }
    return sprites.get(key);
  }

  // ---- a scene

  const clip = (x, low, high) => Math.min(Math.max(x, low), high);
  function square(thing, size) { // its pixels: top, left, side
    const side = Math.max(8, Math.round(thing.side * size));
    const [top, left] = [thing.y, thing.x].map(centre => clip(Math.round(centre * size - side / 2), 0, size - side));
    return [top, left, side];
  }

  function draw({things, ground}, size) { // RGBA
    const [sky, floor, border] = ground, out = new Float32Array(size * size * 4).fill(255);
    for (let y = 0; y < size; y++) {
      const row = y / (size - 1), mix = clip((row - border) * size / 3 + 0.5, 0, 1), light = 1.02 - 0.06 * row;
      for (let x = 0; x < size; x++)
        for (let c = 0; c < 3; c++) out[(y * size + x) * 4 + c] = (sky[c] * (1 - mix) + floor[c] * mix) * light;
    }
    for (const thing of things) {
      const [top, left, side] = square(thing, size), masks = sprite(thing.noun, thing.pattern, side);
      const colour = W.colours[thing.colour].map(c => c * thing.shade), drop = Math.max(1, Math.floor(side / 14));
      const motif = thing.colour == 'white' ? [70, 70, 84] : [247, 247, 247];
      const paints = {outline: colour.map(c => c * 0.32), body: colour, motif, light: [244, 248, 252], dark: [44, 40, 48]};
      for (let i = 0; i < side * side; i++) {
        const y = Math.floor(i / side), first = ((top + y) * size + left + i % side) * 4;
        const shadow = y < drop ? 1 : 1 - 0.16 * masks.outline[i - drop * side];
        for (let c = 0; c < 3; c++) {
          let v = out[first + c] * shadow;
          for (const role in paints) v += masks[role][i] * (paints[role][c] - v);
          out[first + c] = v;
        }
      }
    }
    return Uint8ClampedArray.from(out);
  }

  function contour(thing) { // a canvas with its outline: dark with a white rim
    const [top, left, side] = square(thing, SHOWN), inner = new Float32Array(SHOWN * SHOWN);
    sprite(thing.noun, thing.pattern, side).outline.forEach((v, i) => {
      inner[(top + Math.floor(i / side)) * SHOWN + left + i % side] = v > 0.5;
    });
    const middle = enlarged(inner, SHOWN, 2), outer = enlarged(middle, SHOWN, 3), pixels = new Uint8ClampedArray(SHOWN * SHOWN * 4);
    for (let i = 0; i < inner.length; i++)
      if (outer[i] && !inner[i]) pixels.set(middle[i] ? [29, 29, 31, 255] : [255, 255, 255, 255], 4 * i);
    const canvas = make('canvas', {width: SHOWN, height: SHOWN});
    canvas.getContext('2d').putImageData(new ImageData(pixels, SHOWN), 0, 0);
    return canvas;
  }

  // ---- its words

  function named({noun, colour, pattern}) {
    const words = [pattern == 'plain' ? '' : pattern, colour, noun].filter(Boolean).join(' ');
    return `${/^[aeiou]/.test(words) ? 'an' : 'a'} ${words}`;
  }
  const listed = names => names.length < 2 ? names.join() : `${names.slice(0, -1).join(', ')} and ${names.at(-1)}`;

  // ---- what a reader does

  let scene = null, chosen = 0, waiting = 0;
  const thing = () => scene.things[chosen];

  function ask(moving = false) { // both models, when the drawing has been shown
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const names = scene.things.map(named), rgb = c2lip.rgbOf(draw(scene, SEEN));
      const things = scene.things.map(t => ({...t, words: [t.noun, t.colour, t.pattern, t.size].filter(Boolean)}));
      const own = {...scene, name: 'your scene', caption: listed(names), truth: names, things};
      c2lip.arranged(own, draw(scene, SHOWN), rgb, moving ? [] : scene.things.map(contour), moving);
    });
  }

  function moved(i, x, y) { // to a place where it is whole
    const t = scene.things[i], half = t.side / 2;
    Object.assign(t, {x: clip(x, half, 1 - half), y: clip(y, half, 1 - half)});
    handles();
    stage(draw(scene, SHOWN));
  }

  function change(changes, focus) { // of the thing that is chosen
    Object.assign(thing(), changes, changes.size === undefined ? {} : {side: W.sizes[changes.size]});
    moved(chosen, thing().x, thing().y);
    tools();
    ask();
    focus?.focus();
  }

  function add() { // a noun and a colour that the scene lacks, where there is most room
    const free = (all, name) => all.find(v => !scene.things.some(t => t[name] == v)) || all[0];
    const places = [0.22, 0.5, 0.78].flatMap(y => [0.22, 0.5, 0.78].map(x => ({x, y})));
    const room = p => Math.min(1, ...scene.things.map(t => Math.hypot(p.x - t.x, p.y - t.y)));
    const place = places.reduce((best, p) => room(p) > room(best) ? p : best);
    scene.things.push({noun: free(D.words.nouns, 'noun'), colour: free(D.words.colours, 'colour'), pattern: 'plain', size: '',
      side: W.sizes[''], shade: 1, ...place});
    select(scene.things.length - 1);
    change({});
  }

  function remove(i) {
    if (scene.things.length < 2) return;
    scene.things.splice(i, 1);
    select(Math.min(chosen, scene.things.length - 1));
    change({});
    at('handles').children[chosen].focus();
  }

  function exchange() { // the colours of the chosen thing and of the first of another colour, of its own kind if there is one
    const a = thing(), others = scene.things.filter(t => t.colour != a.colour);
    const b = others.find(t => t.noun == a.noun) || others[0];
    if (!b) return;
    const colour = b.colour;
    b.colour = a.colour;
    change({colour});
  }

  function select(i) {
    chosen = i;
    handles();
    tools();
  }

  // ---- what a reader sees

  function stage(pixels) {
    at('stage').getContext('2d').putImageData(new ImageData(Uint8ClampedArray.from(pixels), SHOWN), 0, 0);
  }

  function handle(i) { // a button over a thing: dragged, or moved by the arrow keys
    const button = make('button', {onfocus: () => select(i)});
    button.onpointerdown = e => {
      const from = scene.things[i], dx = from.x - e.clientX / at('stage').clientWidth, dy = from.y - e.clientY / at('stage').clientWidth;
      let far = false;
      button.setPointerCapture(e.pointerId);
      select(i);
      button.onpointermove = e => {
        far = true;
        moved(i, dx + e.clientX / at('stage').clientWidth, dy + e.clientY / at('stage').clientWidth);
        ask(true);
      };
      button.onpointerup = button.onpointercancel = () => {
        button.onpointermove = button.onpointerup = button.onpointercancel = null;
        if (far) ask();
      };
    };
    button.onkeydown = e => {
      const step = e.shiftKey ? 1 / 96 : 1 / 24, t = scene.things[i];
      const way = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]}[e.key];
      if (e.key == 'Delete' || e.key == 'Backspace') remove(i);
      else if (way) {
        moved(i, t.x + way[0], t.y + way[1]);
        ask();
      } else return;
      e.preventDefault();
    };
    return button;
  }

  function handles() {
    const list = at('handles'), things = scene ? scene.things : [];
    while (list.children.length > things.length) list.lastChild.remove();
    while (list.children.length < things.length) list.append(handle(list.children.length));
    things.forEach((t, i) => {
      const [top, left, side] = square(t, SHOWN).map(v => `${100 * v / SHOWN}%`), button = list.children[i];
      Object.assign(button.style, {top, left, width: side, height: side});
      button.setAttribute('aria-label', `${named(t)}, ${Math.round(100 * t.x)} % from the left, ${Math.round(100 * t.y)} % from the top`);
      button.setAttribute('aria-pressed', i == chosen);
    });
  }

  function tools() {
    at('tools').hidden = !scene;
    if (!scene) return;
    const t = thing();
    at('chosen').textContent = named(t);
    for (const b of at('colours').children) b.setAttribute('aria-pressed', b.value == t.colour);
    for (const name of ['noun', 'pattern', 'size']) at(name).value = t[name];
    at('add').disabled = scene.things.length >= MOST;
    at('remove').disabled = scene.things.length < 2;
    at('exchange').disabled = scene.things.every(other => other.colour == t.colour);
  }

  function opened(other, pixels) { // a scene of the page's, or an image, which has no things
    scene = other.things.length ? structuredClone({things: other.things, ground: other.ground}) : null;
    at('stage').setAttribute('aria-label', `the scene: ${other.caption || other.name}`);
    stage(pixels);
    select(0);
  }

  for (const [name, rgb] of Object.entries(W.colours)) {
    const button = make('button', {className: 'swatch', value: name, title: name, onclick: () => change({colour: name})});
    button.style.background = `rgb(${rgb})`;
    button.setAttribute('aria-label', name);
    at('colours').append(button);
  }
  const options = {noun: D.words.nouns, pattern: Object.keys(W.patterns), size: ['small', '', 'large']};
  for (const [name, values] of Object.entries(options)) {
    at(name).append(...values.map(value => make('option', {value, textContent: value || 'middle'})));
    at(name).onchange = () => change({[name]: at(name).value});
  }
  at('add').onclick = add;
  at('remove').onclick = () => remove(chosen);
  at('exchange').onclick = exchange;
  return {opened, draw};
})();
c2lip.start();
