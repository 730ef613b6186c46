// The page without a kernel: tokenizer, towers, maps and panels. `c2lip` is what the tests call.
'use strict';
const c2lip = (() => {
  const D = JSON.parse(document.getElementById('data').textContent);
  const WIDTH = 64, PATCH = 16, SIDE = 96, GRID = 6, CONTEXT = 48, EOS = 1, SHOWN = 384;

  // ---- weights: safetensors files in base64

  function readWeights(text) {
    const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const length = Number(new DataView(bytes.buffer).getBigUint64(0, true));
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const weights = {};
    for (const [name, about] of Object.entries(head)) {
      if (name == '__metadata__') continue;
      const [begin, end] = about.data_offsets;
      weights[name] = new Float32Array(bytes.slice(8 + length + begin, 8 + length + end).buffer);
    }
    return weights;
  }

  // ---- layers; x holds n rows, one after the other

  function linear(x, n, w, bias) { // (n,in) → (n,out), w: (out,in)
    const ins = x.length / n, outs = w.length / ins, y = new Float32Array(n * outs);
    for (let i = 0; i < n; i++)
      for (let o = 0; o < outs; o++) {
        let sum = bias ? bias[o] : 0;
        for (let k = 0, a = i * ins, b = o * ins; k < ins; k++) sum += x[a + k] * w[b + k];
        y[i * outs + o] = sum;
      }
    return y;
  }

  function norm(x, n, w, bias, eps) {
    const d = x.length / n, y = new Float32Array(x.length);
    for (let i = 0; i < n; i++) {
      let mean = 0, square = 0;
      for (let k = 0; k < d; k++) mean += x[i * d + k];
      mean /= d;
      for (let k = 0; k < d; k++) square += (x[i * d + k] - mean) ** 2;
      const scale = 1 / Math.sqrt(square / d + eps);
      for (let k = 0; k < d; k++) y[i * d + k] = (x[i * d + k] - mean) * scale * w[k] + bias[k];
    }
    return y;
  }

  function erf(x) { // Abramowitz and Stegun 7.1.26, |error| < 1.5e-7
    const t = 1 / (1 + 0.3275911 * Math.abs(x));
    const sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    return Math.sign(x) * (1 - sum * Math.exp(-x * x));
  }

  const gelu = x => x.map(v => 0.5 * v * (1 + erf(v * Math.SQRT1_2)));
  const add = (x, y) => x.map((v, i) => v + y[i]);

  function softmax(values) {
    const top = Math.max(...values), e = values.map(v => Math.exp(v - top)), sum = e.reduce((a, b) => a + b, 0);
    return e.map(v => v / sum);
  }

  function attend(q, k, v, rows, columns, heads, causal) { // q: (rows,WIDTH), k and v: (columns,WIDTH)
    const d = WIDTH / heads, y = new Float32Array(rows * WIDTH);
    for (let h = 0; h < heads; h++)
      for (let i = 0; i < rows; i++) {
        const scores = [];
        for (let j = 0; j < (causal ? i + 1 : columns); j++) {
          let sum = 0;
          for (let c = h * d; c < (h + 1) * d; c++) sum += q[i * WIDTH + c] * k[j * WIDTH + c];
          scores.push(sum / Math.sqrt(d));
        }
        softmax(scores).forEach((a, j) => {
          for (let c = h * d; c < (h + 1) * d; c++) y[i * WIDTH + c] += a * v[j * WIDTH + c];
        });
      }
    return y;
  }

  function split(x, n, parts) { // (n,parts·WIDTH) → parts of (n,WIDTH)
    return [...Array(parts).keys()].map(p => {
      const y = new Float32Array(n * WIDTH);
      for (let i = 0; i < n; i++)
        for (let c = 0; c < WIDTH; c++) y[i * WIDTH + c] = x[(i * parts + p) * WIDTH + c];
      return y;
    });
  }

  function block(x, n, w, at, names, eps, causal) {
    const part = name => [w[`${at}.${name}.weight`], w[`${at}.${name}.bias`]];
    const [first, second, fc1, fc2] = names;
    const packed = w[`${at}.attn.in_proj_weight`] ? // of torch's own attention, else of timm's
      [w[`${at}.attn.in_proj_weight`], w[`${at}.attn.in_proj_bias`]] : part('attn.qkv');
    const out = part(w[`${at}.attn.out_proj.weight`] ? 'attn.out_proj' : 'attn.proj');
    const [q, k, v] = split(linear(norm(x, n, ...part(first), eps), n, ...packed), n, 3);
    x = add(x, linear(attend(q, k, v, n, n, 2, causal), n, ...out));
    return add(x, linear(gelu(linear(norm(x, n, ...part(second), eps), n, ...part(fc1))), n, ...part(fc2)));
  }

  function unit(x, n = 1) {
    const d = x.length / n, y = Float32Array.from(x);
    for (let i = 0; i < n; i++) {
      let sum = 0;
      for (let k = 0; k < d; k++) sum += x[i * d + k] ** 2;
      for (let k = 0; k < d; k++) y[i * d + k] /= Math.sqrt(sum);
    }
    return y;
  }

  const dot = (x, y, at = 0) => { let sum = 0; for (let k = 0; k < WIDTH; k++) sum += x[k] * y[at + k]; return sum; };

  // ---- the image tower: 96×96 RGB → pooled image and tokens, unit vectors

  function encodeImage(w, rgb) { // rgb: 96·96·3 bytes
    const n = GRID * GRID + 1, at = 'visual.trunk', patches = new Float32Array((n - 1) * 3 * PATCH * PATCH);
    for (let p = 0, i = 0; p < n - 1; p++)
      for (let c = 0; c < 3; c++)
        for (let y = 0; y < PATCH; y++)
          for (let x = 0; x < PATCH; x++, i++) {
            const row = Math.floor(p / GRID) * PATCH + y, column = p % GRID * PATCH + x;
            patches[i] = (rgb[(row * SIDE + column) * 3 + c] / 255 - 0.5) / 0.5;
          }
    const embedded = linear(patches, n - 1, w[`${at}.patch_embed.proj.weight`], w[`${at}.patch_embed.proj.bias`]);
    let x = new Float32Array(n * WIDTH);
    x.set(w[`${at}.cls_token`]);
    x.set(embedded, WIDTH);
    x = add(x, w[`${at}.pos_embed`]);
    for (let b = 0; b < 6; b++) x = block(x, n, w, `${at}.blocks.${b}`, ['norm1', 'norm2', 'mlp.fc1', 'mlp.fc2'], 1e-6);
    x = norm(x, n, w[`${at}.norm.weight`], w[`${at}.norm.bias`], 1e-6).slice(WIDTH);
    const part = name => [w[`${at}.attn_pool.${name}.weight`], w[`${at}.attn_pool.${name}.bias`]], M = n - 1;
    const [k, v] = split(linear(x, M, ...part('kv')), M, 2);
    const q = linear(w[`${at}.attn_pool.latent`], 1, ...part('q'));
    const read = (values, rows) => { // output projection and residual MLP of the pooling head
      const y = linear(values, rows, ...part('proj'));
      const inner = gelu(linear(norm(y, rows, ...part('norm'), 1e-6), rows, ...part('mlp.fc1')));
      return unit(add(y, linear(inner, rows, ...part('mlp.fc2'))), rows);
    };
    return {image: read(attend(q, k, v, 1, M, 2, false), 1), tokens: read(v, M)};
  }

  // ---- the text tower

  const rank = new Map(D.merges.map((pair, i) => [pair.join(' '), i]));
  const letters = (() => { // byte → the letter that stands for it in the vocabulary
    const found = {}; let extra = 256;
    for (let b = 0; b < 256; b++)
      found[b] = String.fromCodePoint(b > 32 && b < 127 || b > 160 && b < 173 || b > 173 ? b : extra++);
    return found;
  })();

  function clean(text) { // lower case, without punctuation, as the model's own tokenizer does it
    const area = document.createElement('textarea');
    for (let i = 0; i < 2; i++) { area.innerHTML = text.replace(/</g, '&lt;'); text = area.value; }
    text = text.normalize('NFC').replace(/[‘’“”]/g, '').replace(/_/g, ' ');
    return text.replace(/[!-\/:-@[-`{-~]/g, '').toLowerCase().split(/\s+/).filter(Boolean).join(' ');
  }

  function tokenize(text) { // ids up to the end token, cut to the context
    const ids = [], words = /'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
    const cleaned = clean(text);
    for (const word of cleaned ? ` ${cleaned}`.match(words) : []) {
      const parts = [...new TextEncoder().encode(word)].map(b => letters[b]);
      for (;;) {
        let best = Infinity, place = -1;
        for (let i = 0; i + 1 < parts.length; i++) {
          const r = rank.get(`${parts[i]} ${parts[i + 1]}`);
          if (r !== undefined && r < best) [best, place] = [r, i];
        }
        if (place < 0) break;
        parts.splice(place, 2, parts[place] + parts[place + 1]);
      }
      for (const part of parts) if (part in D.vocab) ids.push(D.vocab[part]);
    }
    return [...ids.slice(0, CONTEXT - 1), EOS];
  }

  function encodeText(w, text) {
    const ids = tokenize(text), n = ids.length;
    let x = new Float32Array(n * WIDTH);
    ids.forEach((id, i) => {
      for (let c = 0; c < WIDTH; c++)
        x[i * WIDTH + c] = w['text.token_embedding.weight'][id * WIDTH + c] + w['text.positional_embedding'][i * WIDTH + c];
    });
    for (let b = 0; b < 3; b++)
      x = block(x, n, w, `text.transformer.resblocks.${b}`, ['ln_1', 'ln_2', 'mlp.c_fc', 'mlp.c_proj'], 1e-5, true);
    const last = norm(x.slice((n - 1) * WIDTH), 1, w['text.ln_final.weight'], w['text.ln_final.bias'], 1e-5);
    const y = new Float32Array(WIDTH), p = w['text.text_projection'];
    for (let k = 0; k < WIDTH; k++) for (let o = 0; o < WIDTH; o++) y[o] += last[k] * p[k * WIDTH + o];
    return unit(y);
  }

  // ---- models, which are read when they are first asked

  const weights = [null, null], texts = [new Map(), new Map()];
  const model = m => weights[m] ||= readWeights(D.models[m]);
  const view = (m, rgb) => encodeImage(model(m), rgb);
  function embed(m, text) {
    if (!texts[m].has(text)) texts[m].set(text, encodeText(model(m), text));
    return texts[m].get(text);
  }

  function map(seen, concept) { // cosines of the patches, above their mean
    const cosines = [...Array(GRID * GRID).keys()].map(p => dot(concept, seen.tokens, p * WIDTH));
    const mean = cosines.reduce((a, b) => a + b, 0) / cosines.length;
    return cosines.map(v => v - mean);
  }

  function scores(seen, concept) { // v·c and v̂·c at β = 1
    const cosines = [...Array(GRID * GRID).keys()].map(p => dot(concept, seen.tokens, p * WIDTH));
    const reading = new Float32Array(WIDTH);
    softmax(cosines).forEach((a, p) => { for (let k = 0; k < WIDTH; k++) reading[k] += a * seen.tokens[p * WIDTH + k]; });
    return [dot(concept, seen.image), dot(concept, unit(reading))];
  }

  // ---- columns and their colours, as c2lip.attention.figures has them

  const decimals = spread => spread > 0 ? 1 - Math.floor(Math.log10(spread)) : 2;
  function roundedUp(high) {
    const step = 10 ** -decimals(high);
    return Math.max(Math.ceil(high / step - 1e-6), 1) * step;
  }
  const number = (x, digits = 3, sign = true) => ((sign && x >= 0 ? '+' : '') + x.toFixed(digits)).replace('-', '−');

  function columns(before, after) { // two maps → base, tuned, difference
    const change = after.map((v, i) => v - before[i]);
    const limit = roundedUp(Math.max(...change.map(Math.abs)));
    const found = [before, after].map((values, m) =>
      ({name: D.names[m], values, low: 0, high: roundedUp(Math.max(...values)), label: 'cosine above the mean'}));
    found.push({name: 'difference', values: change, low: -limit, high: limit, label: 'less  ·  cosine  ·  more', signed: true});
    return found;
  }

  function colour(column, share) {
    const palette = D.palettes[column.signed ? 'change' : 'amount'];
    return palette[Math.min(Math.max(Math.floor(share * palette.length), 0), palette.length - 1)];
  }

  function ticks(column) {
    const digits = Math.max(0, decimals(column.high - column.low));
    const ends = [column.low, column.high].map(x => Math.abs(x) > 1e-12 ? number(x, digits, !!column.signed) : '0');
    return column.signed ? [ends[0], '0', ends[1]] : ends;
  }

  function paint(pixels, column, opacity = 0.75) { // pixels: RGBA of the image → RGBA of the map over the grey image
    const side = Math.sqrt(pixels.length / 4), out = new Uint8ClampedArray(pixels.length);
    const spread = column.high > column.low ? column.high - column.low : 1;
    const colours = column.values.map(v => colour(column, (v - column.low) / spread));
    for (let i = 0, at = 0; i < side * side; i++, at += 4) {
      const grey = ((pixels[at] * 19595 + pixels[at + 1] * 38470 + pixels[at + 2] * 7471 + 0x8000) >> 16) / 255;
      const patch = Math.floor(Math.floor(i / side) * GRID / side) * GRID + Math.floor(i % side * GRID / side);
      for (let c = 0; c < 3; c++) {
        const painted = (1 - opacity + opacity * colours[patch][c] / 255) * (1 - (1 - grey) * (1 - opacity));
        out[at + c] = Math.floor(painted * 255 + 0.5);
      }
      out[at + 3] = 255;
    }
    return out;
  }

  function words(column, phrase) { // where a map is highest
    const place = column.values.indexOf(Math.max(...column.values));
    const down = ['top', 'middle', 'bottom'][Math.floor(Math.floor(place / GRID) / 2)];
    const across = ['left', 'centre', 'right'][Math.floor(place % GRID / 2)];
    return `map of “${phrase}”, ${column.name}: ${column.signed ? 'largest gain' : 'highest'} at the ${down} ${across}`;
  }

  // ---- words: phrases of a caption, and the same caption with two colours exchanged

  const noun = D.words.nouns.join('|'), attribute = [...D.words.colours, ...D.words.others].join('|');
  function phrasesOf(caption) {
    const pattern = new RegExp(`\\b(?:(?:an?|the|one|another)\\s+)(?:(?:${attribute})\\s+)*(?:${noun})\\b`, 'gi');
    return [...new Set((caption.match(pattern) || []).map(p => p.toLowerCase().split(/\s+/).join(' ')))];
  }
  function article(text) {
    return text.replace(/\b(an?)(\s+)(\w)/gi, (_, a, space, next) =>
      (/[aeiou]/i.test(next) ? (a[0] == 'A' ? 'An' : 'an') : a[0]) + space + next);
  }
  function swapped(text) { // null where there are no two colours
    const found = [...text.matchAll(new RegExp(`\\b(?:${D.words.colours.join('|')})\\b`, 'gi'))];
    const first = found[0], second = found.find(f => f[0].toLowerCase() != first[0].toLowerCase());
    if (!second) return null;
    const [a, b] = [first[0], second[0]].map(w => w.toLowerCase());
    return article(text.replace(new RegExp(`\\b(?:${a}|${b})\\b`, 'gi'), w => w.toLowerCase() == a ? b : a));
  }

  // ---- images

  function pixelsOf(image, side) {
    const canvas = document.createElement('canvas');
    canvas.width = canvas.height = side;
    const pen = canvas.getContext('2d', {willReadFrequently: true});
    pen.drawImage(image, 0, 0, side, side);
    return pen.getImageData(0, 0, side, side).data;
  }
  const rgbOf = pixels => Uint8Array.from({length: pixels.length / 4 * 3}, (_, i) => pixels[Math.floor(i / 3) * 4 + i % 3]);

  function resized(pixels, width, height) { // RGBA → 96×96 RGB, bicubic with antialiasing and squashed, as Pillow does it
    const cubic = x => (x = Math.abs(x)) < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
    const axis = size => [...Array(SIDE).keys()].map(i => {
      const scale = size / SIDE, wide = Math.max(scale, 1), centre = (i + 0.5) * scale;
      const first = Math.max(0, Math.floor(centre - 2 * wide + 0.5));
      const end = Math.min(size, Math.floor(centre + 2 * wide + 0.5)), shares = [];
      for (let k = first; k < end; k++) shares.push(cubic((k - centre + 0.5) / wide));
      const sum = shares.reduce((a, b) => a + b, 0);
      return [first, shares.map(s => s / sum)];
    });
    const rows = new Uint8ClampedArray(height * SIDE * 3), out = new Uint8ClampedArray(SIDE * SIDE * 3);
    axis(width).forEach(([first, shares], x) => {
      for (let y = 0; y < height; y++)
        for (let c = 0; c < 3; c++)
          rows[(y * SIDE + x) * 3 + c] = Math.floor(0.5 + shares.reduce((sum, s, k) => sum + s * pixels[(y * width + first + k) * 4 + c], 0));
    });
    axis(height).forEach(([first, shares], y) => {
      for (let x = 0; x < SIDE; x++)
        for (let c = 0; c < 3; c++)
          out[(y * SIDE + x) * 3 + c] = Math.floor(0.5 + shares.reduce((sum, s, k) => sum + s * rows[((first + k) * SIDE + x) * 3 + c], 0));
    });
    return out;
  }

  function load(source) {
    return new Promise((done, failed) => {
      const image = new Image();
      image.onload = () => done(image);
      image.onerror = () => failed(new Error('the image cannot be opened'));
      image.src = source;
    });
  }

  // ---- the page

  const at = id => document.getElementById(id);
  const make = (tag, about = {}, ...inside) => {
    const e = Object.assign(document.createElement(tag), about);
    e.append(...inside);
    return e;
  };
  const now = {scene: null, shown: null, seen: null, outlines: []};
  const phrases = () => at('phrase').value.split('|').map(p => p.split(/\s+/).filter(Boolean).join(' ')).filter(Boolean);

  function say(text, wrong = false) {
    at('status').textContent = text;
    at('status').className = wrong ? 'c2lip-wrong' : '';
  }

  async function choose(scene) {
    const [seen, shown, ...outlines] = await Promise.all(
      [scene.seen, scene.shown, ...scene.things.map(t => t.outline)].map(png => load(`data:image/png;base64,${png}`)));
    Object.assign(now, {scene, outlines, shown: pixelsOf(shown, SHOWN), seen: null});
    const rgb = rgbOf(pixelsOf(seen, SIDE));
    now.seen = [view(0, rgb), view(1, rgb)];
    for (const b of at('scenes').children) b.setAttribute('aria-pressed', b.title == scene.name);
    at('caption').value = scene.caption;
    at('phrase').value = scene.phrases[0];
    show();
  }

  async function own(file) {
    const address = URL.createObjectURL(file);
    try {
      const image = await load(address), canvas = document.createElement('canvas');
      const most = Math.min(1, 2048 / Math.max(image.naturalWidth, image.naturalHeight));
      canvas.width = Math.max(1, Math.round(image.naturalWidth * most));
      canvas.height = Math.max(1, Math.round(image.naturalHeight * most));
      const pen = canvas.getContext('2d', {willReadFrequently: true});
      pen.fillStyle = '#fff';
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(image, 0, 0, canvas.width, canvas.height);
      const rgb = resized(pen.getImageData(0, 0, canvas.width, canvas.height).data, canvas.width, canvas.height);
      Object.assign(now, {scene: {name: file.name, phrases: [], things: []}, outlines: [], shown: pixelsOf(canvas, SHOWN)});
      now.seen = [view(0, rgb), view(1, rgb)];
      for (const b of at('scenes').children) b.setAttribute('aria-pressed', false);
      at('caption').value = '';
      show();
    } catch (e) {
      say(`${file.name}: ${e.message}; choose a PNG or a JPEG`, true);
    } finally {
      URL.revokeObjectURL(address);
    }
  }

  function drawing(pixels, outlines) {
    const canvas = make('canvas', {width: SHOWN, height: SHOWN}), pen = canvas.getContext('2d');
    pen.putImageData(new ImageData(Uint8ClampedArray.from(pixels), SHOWN), 0, 0);
    for (const outline of outlines) pen.drawImage(outline, 0, 0);
    return canvas;
  }

  function figure(heading, alt, pixels, outlines, column, lines) {
    const canvas = drawing(pixels, outlines);
    canvas.setAttribute('role', 'img');
    canvas.setAttribute('aria-label', alt);
    const parts = [make('figcaption', {textContent: heading}), make('div', {className: 'c2lip-frame'}, canvas)];
    if (column) {
      const bar = make('canvas', {width: 65, height: 1, className: 'c2lip-bar'}), pen = bar.getContext('2d');
      bar.setAttribute('aria-hidden', true);
      for (let i = 0; i < 65; i++) {
        pen.fillStyle = `rgb(${colour(column, i / 64).map(c => Math.round(255 * 0.25 + 0.75 * c)).join(' ')})`;
        pen.fillRect(i, 0, 1, 1);
      }
      const marks = ticks(column), span = text => make('span', {textContent: text});
      parts.push(bar, make('div', {className: 'c2lip-ends'}, ...[marks[0], column.label, marks.at(-1)].map(span)));
      parts.push(make('div', {className: 'c2lip-lines'}, ...lines.map(span)));
    }
    return make('figure', {}, ...parts);
  }

  function section(phrase) {
    const said = new Set(phrase.toLowerCase().match(/\w+/g) || []);
    const known = [...D.words.nouns, ...D.words.colours, ...D.words.others].filter(w => said.has(w));
    const named = D.words.nouns.some(w => said.has(w));
    const outlines = now.outlines.filter((_, i) => named && known.every(w => now.scene.things[i].words.includes(w)));
    const concepts = [embed(0, phrase), embed(1, phrase)];
    const both = concepts.map((c, m) => scores(now.seen[m], c));
    both.push(both[1].map((s, i) => s - both[0][i]));
    const shown = columns(...concepts.map((c, m) => map(now.seen[m], c))).map((column, i) => {
      const [whole, parts] = both[i].map(s => number(s, 3, !!column.signed));
      return figure(column.name, words(column, phrase), paint(now.shown, column), outlines, column,
        [`fit v·c ${whole}`, `patches v̂·c ${parts}`]);
    });
    const first = figure('image', `image: ${at('caption').value || now.scene.name}`, now.shown, outlines);
    return make('section', {}, make('div', {className: 'c2lip-phrase', textContent: `“${phrase}”`}),
      make('div', {className: 'c2lip-panels'}, first, ...shown));
  }

  function captionScores() { // a table: the caption and its swap, by both models and both scores
    const caption = at('caption').value.trim(), other = caption && swapped(caption);
    at('scores').replaceChildren();
    if (!caption) return;
    const table = make('table', {}, make('caption', {textContent: 'Which sentence fits the image?'}));
    const head = ['', ...D.names.flatMap(name => [`${name}, v·t`, `${name}, v̂·c`])];
    table.append(make('thead', {}, make('tr', {}, ...head.map(text => make('th', {scope: 'col', textContent: text})))));
    const rows = [caption, ...(other ? [other] : [])].map(text => [text, ...[0, 1].flatMap(m => {
      const read = phrasesOf(text).map(p => scores(now.seen[m], embed(m, p))[1]);
      return [dot(embed(m, text), now.seen[m].image), read.length ? read.reduce((a, b) => a + b) / read.length : NaN];
    })]);
    const body = make('tbody');
    for (const row of rows) {
      const cells = row.slice(1).map((x, i) => {
        const best = rows.length == 2 && rows.every(r => r == row || r[i + 1] < x);
        return make('td', {textContent: isNaN(x) ? '' : number(x, 3, false), className: best ? 'better' : ''});
      });
      body.append(make('tr', {}, make('th', {scope: 'row', textContent: row[0]}), ...cells));
    }
    table.append(body);
    at('scores').append(table);
  }

  function show() {
    if (!now.seen) return;
    const begun = performance.now(), wanted = phrases(), found = phrasesOf(at('caption').value);
    at('chips').replaceChildren(...found.map(phrase => {
      const chip = make('button', {className: 'chip', textContent: phrase});
      chip.setAttribute('aria-pressed', wanted.includes(phrase));
      chip.onclick = () => { at('phrase').value = phrase; show(); [...at('chips').children].find(c => c.textContent == phrase)?.focus(); };
      return chip;
    }));
    captionScores();
    if (!wanted.length) return say('type a phrase, such as: a red mug', true);
    if (wanted.length > 4) return say(`at most four phrases at a time, got ${wanted.length}`, true);
    const long = wanted.find(phrase => tokenize(phrase).length == CONTEXT);
    if (long) return say(`the phrase is longer than the ${CONTEXT} tokens the model reads: ${long.slice(0, 40)}…`, true);
    at('maps').replaceChildren(...wanted.map(section));
    const drawn = now.scene.things.length ? '' : ' · both models have seen drawn scenes alone: they have no reason to know this image';
    say(`${now.scene.name}: ${wanted.map(p => `“${p}”`).join(', ')} · ${D.names.join(' → ')} · cosine above the mean${drawn}`);
    c2lip.took = performance.now() - begun;
  }

  function start() {
    D.names.forEach((name, m) => document.querySelectorAll(`.name${m}`).forEach(e => { e.textContent = name; }));
    for (const scene of D.scenes) {
      const image = make('img', {src: `data:image/png;base64,${scene.seen}`, alt: scene.caption});
      const button = make('button', {title: scene.name, onclick: () => choose(scene)}, image);
      button.setAttribute('aria-pressed', false);
      at('scenes').append(button);
    }
    at('caption').addEventListener('change', show);
    at('phrase').addEventListener('change', show);
    at('own').addEventListener('change', e => e.target.files[0] && own(e.target.files[0]));
    at('swap').addEventListener('click', () => {
      const other = phrases().map(p => {
        const mine = p.match(new RegExp(`\\b(?:${D.words.colours.join('|')})\\b`, 'i'));
        const rest = phrasesOf(at('caption').value).flatMap(q => q.match(new RegExp(`\\b(?:${D.words.colours.join('|')})\\b`, 'gi')) || []);
        const theirs = mine && [...rest, ...D.words.colours].find(c => c != mine[0].toLowerCase());
        return theirs && article(p.replace(mine[0], theirs));
      }).filter(Boolean);
      if (!other.length) return say('swap colours: there is no colour in the phrase', true);
      at('phrase').value = [...new Set([...phrases(), ...other])].slice(0, 4).join(' | ');
      show();
    });
    const theme = new URLSearchParams(location.search).get('theme');
    if (theme) document.documentElement.dataset.theme = theme;
    choose(D.scenes[0]).then(() => { c2lip.ready = performance.now(); });
  }

  return {D, start, tokenize, embed, view, map, scores, columns, paint, phrasesOf, swapped, resized, ready: 0, took: 0};
})();
c2lip.start();
