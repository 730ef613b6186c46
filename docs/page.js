// The page without a kernel: tokenizer, towers, maps and panels. `c2lip` is what the tests call.
'use strict';
const c2lip = (() => {
  const D = JSON.parse(document.getElementById('data').textContent);
  const WIDTH = 64, PATCH = 16, SIDE = 96, GRID = 6, CONTEXT = 48, EOS = 1, SHOWN = 384;
  const BLOCKS = 6, HEADS = 2;

  // ---- weights: safetensors files in base64

  function readWeights(text) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    const length = Number(new DataView(bytes.buffer).getBigUint64(0, true));
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
    const weights = {};
    for (const [name, about] of Object.entries(head)) {
      if (name == '__metadata__') continue;
      const [begin, end] = about.data_offsets;
      const kept = bytes.slice(8 + length + begin, 8 + length + end).buffer;
      weights[name] = about.dtype == 'F16' ? Float32Array.from(new Uint16Array(kept), half) : new Float32Array(kept);
    }
    return weights;
  }

  function half(bits) { // a finite float16
    const size = bits & 1023, power = bits >> 10 & 31;
    return (bits >> 15 ? -1 : 1) * (power ? 2 ** (power - 15) * (1 + size / 1024) : 2 ** -24 * size);
  }

  // ---- layers; x holds n rows, one after the other

  function linear(x, n, w, bias) { // (n,in) → (n,out), w: (out,in); out is a multiple of 4
    const ins = x.length / n, outs = w.length / ins, y = new Float32Array(n * outs);
    for (let i = 0; i < n; i += 2) { // two rows and four outputs at a time: every number is read less often
      const j = Math.min(i + 1, n - 1);
      for (let o = 0; o < outs; o += 4) {
        let p0 = 0, p1 = 0, p2 = 0, p3 = 0, q0 = 0, q1 = 0, q2 = 0, q3 = 0;
        for (let k = 0, a = i * ins, b = j * ins, c = o * ins, d = c + ins, e = d + ins, f = e + ins; k < ins; k++) {
          const p = x[a + k], q = x[b + k], w0 = w[c + k], w1 = w[d + k], w2 = w[e + k], w3 = w[f + k];
          p0 += p * w0; p1 += p * w1; p2 += p * w2; p3 += p * w3;
          q0 += q * w0; q1 += q * w1; q2 += q * w2; q3 += q * w3;
        }
        [p0, p1, p2, p3].forEach((v, m) => { y[i * outs + o + m] = v + bias[o + m]; });
        [q0, q1, q2, q3].forEach((v, m) => { y[j * outs + o + m] = v + bias[o + m]; });
      }
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

  function attend(q, k, v, rows, columns, heads, causal, kept = []) { // q: (rows,WIDTH), k and v: (columns,WIDTH)
    const d = WIDTH / heads, y = new Float32Array(rows * WIDTH); // `kept` gets what each head attends to
    for (let h = 0; h < heads; h++)
      for (let i = 0; i < rows; i++) {
        const scores = [];
        for (let j = 0; j < (causal ? i + 1 : columns); j++) {
          let sum = 0;
          for (let c = h * d; c < (h + 1) * d; c++) sum += q[i * WIDTH + c] * k[j * WIDTH + c];
          scores.push(sum / Math.sqrt(d));
        }
        const shares = softmax(scores);
        kept.push(shares);
        shares.forEach((a, j) => {
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

  // ---- the image tower: 96×96 RGB → pooled image and tokens, unit vectors; heads: what the pooling attends to

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
    const names = ['norm1', 'norm2', 'mlp.fc1', 'mlp.fc2'];
    for (let b = 0; b < BLOCKS; b++) x = block(x, n, w, `${at}.blocks.${b}`, names, 1e-6);
    const last = norm(x, n, w[`${at}.norm.weight`], w[`${at}.norm.bias`], 1e-6).slice(WIDTH);
    const part = name => [w[`${at}.attn_pool.${name}.weight`], w[`${at}.attn_pool.${name}.bias`]], M = n - 1;
    const [k, v] = split(linear(last, M, ...part('kv')), M, 2);
    const q = linear(w[`${at}.attn_pool.latent`], 1, ...part('q'));
    const read = (values, rows) => { // output projection and residual MLP of the pooling head
      const y = linear(values, rows, ...part('proj'));
      const inner = gelu(linear(norm(y, rows, ...part('norm'), 1e-6), rows, ...part('mlp.fc1')));
      return unit(add(y, linear(inner, rows, ...part('mlp.fc2'))), rows);
    };
    const heads = [], image = read(attend(q, k, v, 1, M, HEADS, false, heads), 1);
    return {image, tokens: read(v, M), heads};
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

  const weights = [null, null], heads = [null, null], texts = [new Map(), new Map()];
  const model = m => weights[m] ||= readWeights(D.models[m]);
  const view = (m, rgb) => encodeImage(model(m), rgb);
  function embed(m, text) {
    if (!texts[m].has(text)) texts[m].set(text, encodeText(model(m), text));
    return texts[m].get(text);
  }

  const share = how => ['softmax', 'head'].includes(how.kind);

  function map(seen, concept, how = D.selection) { // (GRID·GRID) of one kind, as c2lip.lab.attention.maps has them
    if (how.kind == 'head')
      return seen.heads[0].map((v, p) => seen.heads.reduce((sum, h) => sum + h[p], 0) / HEADS);
    const cosines = [...Array(GRID * GRID).keys()].map(p => dot(concept, seen.tokens, p * WIDTH));
    if (how.kind == 'softmax') return softmax(cosines.map(v => how.scale * v));
    const mean = how.kind == 'centred' ? cosines.reduce((a, b) => a + b, 0) / cosines.length : 0;
    return cosines.map(v => v - mean);
  }

  function scores(seen, concept) { // v·t of a phrase as a text, and its best patch
    const cosines = [...Array(GRID * GRID).keys()].map(p => dot(concept, seen.tokens, p * WIDTH));
    return [dot(concept, seen.image), Math.max(...cosines)];
  }

  function captionScores(m, text, seen) { // v·t and the score of phrases, by the weights of model m, as c2lip.score has them
    const found = phrasesOf(text), phrases = found.length ? found : [text], [cosine, weight] = D.weights[m];
    const whole = dot(embed(m, text), seen.image), best = phrases.map(phrase => scores(seen, embed(m, phrase))[1]);
    return [whole, cosine * whole + weight * best.reduce((a, b) => a + b) / phrases.length];
  }

  function vectorScores(m, text, images) { // of the scenes to search, by the vector head of model m; empty where it has none
    if (!D.heads[m]) return [];
    const w = heads[m] ||= readWeights(D.heads[m]), [share] = w.share, found = phrasesOf(text);
    const layer = (x, k) => linear(x, 1, w[`phrase_layers.${k}.weight`], w[`phrase_layers.${k}.bias`]);
    const mapped = c => unit(layer(gelu(layer(c.map(v => v * Math.sqrt(WIDTH)), 0)), 2));
    const asked = unit((found.length ? found : [text]).map(phrase => mapped(embed(m, phrase))).reduce(add));
    const fits = i => asked.reduce((sum, v, k) => sum + v * w.scenes[i * asked.length + k], 0);
    return images.map((seen, i) => (1 - share) * dot(embed(m, text), seen.image) + share * fits(i));
  }

  // ---- columns and their colours, as c2lip.lab.attention.maps and figures have them

  const decimals = spread => spread > 0 ? 1 - Math.floor(Math.log10(spread)) : 2;
  function rounded(low, high) { // outwards, to two digits; never empty
    const step = 10 ** -decimals(high - low), first = Math.floor(low / step + 1e-6);
    return [first * step, Math.max(Math.ceil(high / step - 1e-6), first + 1) * step];
  }
  const number = (x, digits = 3, sign = true) => ((sign && x >= 0 ? '+' : '') + x.toFixed(digits)).replace('-', '−');

  function columns(before, after, how = D.selection) { // maps of all phrases by both models → base, tuned, difference
    const both = [before, after].map(maps => maps.map(values => values.map(v => share(how) ? 100 * v : v)));
    const change = both[1].map((values, i) => values.map((v, p) => v - both[0][i][p]));
    const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
    const lowest = how.kind == 'centred' ? () => 0 : share(how) ? mean : values => Math.min(...values);
    const found = both.map((maps, m) => {
      const ranged = how.same_scale ? both.flat() : maps;
      const least = Math.min(...(how.same_scale ? both : [maps]).map(own => lowest(own.flat())));
      const [low, high] = rounded(least, Math.max(...ranged.flat(), share(how) ? 10 * least : least)); // what is not there stays pale
      return {name: D.names[m], maps, low, high, label: D.labels[how.kind]};
    });
    const limit = rounded(0, Math.max(...change.flat().map(Math.abs)))[1], label = `less  ·  ${share(how) ? '% points' : 'cosine'}  ·  more`;
    return [...found, {name: 'difference', maps: change, low: -limit, high: limit, label, signed: true}];
  }

  const palette = column => D.palettes[column.signed ? 'change' : 'amount'];
  const place = (colours, share) => Math.min(Math.max(Math.floor(share * colours.length), 0), colours.length - 1);

  function ticks(column) {
    const digits = Math.max(0, decimals(column.high - column.low));
    const ends = [column.low, column.high].map(x => Math.abs(x) > 1e-12 ? number(x, digits, !!column.signed) : '0');
    return column.signed ? [ends[0], '0', ends[1]] : ends;
  }

  function sampled(values, side) { // at the centres of side·side points: cubic between the patches, as torch has it
    const A = -0.75, near = x => ((A + 2) * x - (A + 3)) * x * x + 1, far = x => ((A * x - 5 * A) * x + 8 * A) * x - 4 * A;
    const taps = [...Array(side).keys()].map(i => {
      const x = (i + 0.5) / side * GRID - 0.5, first = Math.floor(x), t = x - first;
      const places = [-1, 0, 1, 2].map(k => Math.min(Math.max(first + k, 0), GRID - 1));
      return [places, [far(1 + t), near(t), near(1 - t), far(2 - t)]];
    });
    const low = Math.min(...values), high = Math.max(...values), out = new Float32Array(side * side);
    const rows = [...Array(GRID).keys()].map(y => taps.map(([places, by]) => by.reduce((sum, w, k) => sum + w * values[y * GRID + places[k]], 0)));
    taps.forEach(([[a, b, c, d], [u, v, w, z]], y) => {
      for (let x = 0; x < side; x++)
        out[y * side + x] = Math.min(Math.max(u * rows[a][x] + v * rows[b][x] + w * rows[c][x] + z * rows[d][x], low), high);
    });
    return out;
  }

  function paint(pixels, column, values, how = D.selection) { // pixels: RGBA of the image → RGBA of the map over the grey image
    const side = Math.sqrt(pixels.length / 4), out = new Uint8ClampedArray(pixels.length), opacity = how.opacity;
    const spread = column.high > column.low ? column.high - column.low : 1;
    const smooth = how.smooth && sampled(values, side), colours = palette(column);
    const pale = Float64Array.from(colours.flat(), c => 255 * (1 - opacity) + opacity * c);
    for (let i = 0, at = 0; i < side * side; i++, at += 4) {
      const grey = ((pixels[at] * 19595 + pixels[at + 1] * 38470 + pixels[at + 2] * 7471 + 0x8000) >> 16) / 255;
      const patch = Math.floor(Math.floor(i / side) * GRID / side) * GRID + Math.floor(i % side * GRID / side);
      const rgb = 3 * place(colours, ((smooth ? smooth[i] : values[patch]) - column.low) / spread);
      const light = 1 - (1 - grey) * (1 - opacity);
      for (let c = 0; c < 3; c++) out[at + c] = Math.floor(pale[rgb + c] * light + 0.5);
      out[at + 3] = 255;
    }
    return out;
  }

  function words(column, values, phrase) { // where a map is highest
    const place = values.indexOf(Math.max(...values));
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

  // ---- questions, rivals and doubts, as c2lip.lab.attention.questions has them; a short list of words stands for its tagger

  const known = new Set([...D.words.nouns, ...D.words.colours, ...D.words.others]);
  const small = new Set((`a an the one another some this that these those my your its his her their and or not no is are be ` +
    `with without of in on at to by from for near above below over under behind beside inside outside between next`).split(' '));
  const wordsOf = text => [...text.matchAll(/\w+/g)].map(m => ({text: m[0], lower: m[0].toLowerCase(), start: m.index, end: m.index + m[0].length}));
  const unique = list => [...new Set(list)];

  function parts(phrase) { // its attribute and its noun, or null
    const all = wordsOf(phrase), article = ['a', 'an', 'the', 'one', 'another'];
    const end = all.findIndex(w => small.has(w.lower) && !article.includes(w.lower));
    const own = all.slice(0, end < 0 ? all.length : end).filter(w => !small.has(w.lower));
    const isColour = w => D.words.colours.includes(w.lower) || D.words.more_colours.includes(w.lower);
    const others = own.filter(w => !isColour(w)), nouns = others.filter(w => !D.words.others.includes(w.lower));
    const noun = nouns.at(-1) || null;
    return {attribute: own.find(isColour) || others.find(w => w != noun) || null, noun};
  }
  const exchange = (phrase, part, word, end = part.end) => article(phrase.slice(0, part.start) + word + phrase.slice(end));

  function exchanged(part, phrase, others) {
    const own = parts(phrase)[part];
    for (const theirs of others.map(other => parts(other)[part]))
      if (own && theirs && theirs.lower != own.lower) return exchange(phrase, own, theirs.text);
    return null;
  }
  const QUESTIONS = {
    'swap colours': (phrase, others) => exchanged('attribute', phrase, others),
    'swap nouns': (phrase, others) => exchanged('noun', phrase, others),
    'without attribute': phrase => {
      const own = parts(phrase).attribute, rest = own && /^\s+(\w+)/.exec(phrase.slice(own.end));
      return rest ? exchange(phrase, own, rest[1], own.end + rest[0].length) : null;
    },
  };
  function ask(question, phrases, caption) { // phrases, and what the question makes of them; a text where it changes nothing
    const made = phrases.map(phrase => [phrase, QUESTIONS[question](phrase, [...phrases, ...caption])])
      .filter(([, other]) => other && !phrases.includes(other));
    if (!made.length) return `${question} makes nothing new of ${phrases.join(' | ') || 'no phrase'}`;
    const both = unique([...phrases, ...made.map(([, other]) => other)]);
    return (both.length > 4 ? unique(made.flat()) : both).slice(0, 4);
  }

  function rivals(phrase, truth) { // kind → what the phrase might be mistaken for
    const bare = p => p.toLowerCase().split(/\s+/).filter(w => !['a', 'an', 'the'].includes(w)).join(' ');
    const {attribute, noun} = parts(phrase), facts = truth.map(bare), found = {};
    const kinds = {colours: [noun && attribute, D.words.colours, D.words.more_colours], nouns: [noun, D.words.nouns, D.words.more_nouns]};
    for (const [kind, [part, first, second]] of Object.entries(kinds)) {
      if (!part) continue;
      const words = first.includes(part.lower) ? first : second;
      const kept = words.filter(w => w != part.lower).map(w => exchange(phrase, part, w))
        .filter(p => !facts.includes(bare(phrase)) || !facts.includes(bare(p)));
      if (kept.length && (kind == 'nouns' || words.includes(part.lower))) found[kind] = kept;
    }
    return found;
  }
  function ranks(m, seen, phrase, truth) { // [kind, rank, number of those ranked] of each kind; a tie counts against it
    const fit = dot(embed(m, phrase), seen.image);
    return Object.entries(rivals(phrase, truth)).map(([kind, others]) =>
      [kind, 1 + others.filter(other => dot(embed(m, other), seen.image) >= fit).length, 1 + others.length]);
  }
  function doubts(drawn, ranked) { // ranked: phrase → its ranks; what stands behind the name of the model
    const found = drawn ? [] : ['never saw such an image, only scenes of one world'];
    const strangeOf = phrase => wordsOf(phrase).filter(w => !small.has(w.lower) && !known.has(w.lower)).map(w => w.text);
    const strange = new Set(ranked.flatMap(([phrase]) => strangeOf(phrase)));
    if (strange.size) found.push(`never read “${[...strange].join('”, “')}”`);
    for (const [phrase, own] of ranked)
      if (!strangeOf(phrase).length && own.length && own.every(([, rank, count]) => 2 * rank > count + 1))
        found.push(`most rivals fit better than “${phrase}”`);
    return found;
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
  const now = {scene: null, shown: null, seen: null, outlines: [], phrases: [], how: {...D.selection}};
  const typed = () => at('phrase').value.split('|').map(p => p.split(/\s+/).filter(Boolean).join(' ')).filter(Boolean);

  function say(text, wrong = false) {
    at('status').textContent = wrong ? `${text} (unchanged: ${now.scene.name})` : text;
    at('status').className = wrong ? 'c2lip-wrong' : '';
    at('maps').classList.remove('stale');
  }

  function captioned(caption, typed = []) { // the phrases on show stay where the caption has them all, or they were typed
    const found = phrasesOf(caption), kept = now.phrases.filter(p => found.includes(p) || typed.includes(p));
    at('caption').value = caption;
    show(kept.length && kept.length == now.phrases.length ? kept : found.slice(0, 1));
  }

  async function choose(scene) {
    const [seen, shown, ...outlines] = await Promise.all(
      [scene.seen, scene.shown, ...scene.things.map(t => t.outline)].map(png => load(`data:image/png;base64,${png}`)));
    Object.assign(now, {scene, outlines, shown: pixelsOf(shown, SHOWN), seen: null});
    const rgb = rgbOf(pixelsOf(seen, SIDE));
    now.seen = [view(0, rgb), view(1, rgb)];
    for (const b of at('scenes').children) b.setAttribute('aria-pressed', b.title == scene.name);
    c2lip.scene.opened(scene, now.shown);
    captioned(scene.caption);
  }

  function arranged(scene, shown, rgb, outlines, moving) { // of the reader's own; while a thing moves the captions alone are asked
    const before = phrasesOf(at('caption').value);
    Object.assign(now, {scene, shown, outlines, seen: [view(0, rgb), view(1, rgb)]});
    for (const b of at('scenes').children) b.setAttribute('aria-pressed', false);
    if (moving) compareCaptions();
    else captioned(scene.caption, now.phrases.filter(p => !before.includes(p)));
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
      Object.assign(now, {scene: {name: file.name, caption: '', things: []}, outlines: [], shown: pixelsOf(canvas, SHOWN)});
      now.seen = [view(0, rgb), view(1, rgb)];
      for (const b of at('scenes').children) b.setAttribute('aria-pressed', false);
      c2lip.scene.opened(now.scene, now.shown);
      captioned('');
    } catch (e) {
      say(`${file.name} cannot be shown: ${e.message}; choose a PNG or a JPEG`, true);
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
        pen.fillStyle = `rgb(${palette(column)[place(palette(column), i / 64)].map(c => Math.round(255 + now.how.opacity * (c - 255))).join(' ')})`;
        pen.fillRect(i, 0, 1, 1);
      }
      const marks = ticks(column), span = text => make('span', {textContent: text});
      parts.push(bar, make('div', {className: 'c2lip-ends'}, ...[marks[0], column.label, marks.at(-1)].map(span)));
      parts.push(make('div', {className: 'c2lip-lines'}, ...lines.map(span)));
    }
    return make('figure', {}, ...parts);
  }

  function outlinesOf(phrase) { // of the things that the phrase is true of
    const said = new Set(wordsOf(phrase).map(w => w.lower)), named = D.words.nouns.some(w => said.has(w));
    return now.outlines.filter((_, i) => named && [...known].every(w => !said.has(w) || now.scene.things[i].words.includes(w)));
  }

  function section(phrase, shown, i, ranked) { // shown: columns, whose map i is that of the phrase; ranked: of each model, its ranks
    const outlines = outlinesOf(phrase);
    const concepts = [embed(0, phrase), embed(1, phrase)];
    const both = concepts.map((c, m) => scores(now.seen[m], c));
    both.push(both[1].map((s, i) => s - both[0][i]));
    const maps = shown.map((column, m) => {
      const [whole, best] = both[m].map(s => number(s, 3, !!column.signed)), values = column.maps[i];
      const lines = (ranked[m] || []).map(([kind, rank, count]) => `rank ${rank} of ${count} ${kind}`);
      return figure(column.name, words(column, values, phrase), paint(now.shown, column, values, now.how), outlines, column,
        [`v·t ${whole}`, `best patch ${best}`, ...lines]);
    });
    const first = figure('image', `image: ${at('caption').value || now.scene.name}`, now.shown, outlines);
    return make('section', {}, make('div', {className: 'c2lip-phrase', textContent: `“${phrase}”`}),
      make('div', {className: 'c2lip-panels'}, first, ...maps));
  }

  function compareCaptions() { // the caption and its swap, by both models and both scores; the swap is false of the page's scenes
    const caption = at('caption').value.trim(), other = caption && swapped(caption), texts = [caption, other].filter(Boolean);
    const rows = texts.map(text => [0, 1].flatMap(m => captionScores(m, text, now.seen[m])));
    const known = caption == now.scene.caption, first = other ? rows[0].map((x, i) => x > rows[1][i]) : [];
    at('verdict').replaceChildren(...(other ? D.names.map((name, m) => verdict(name, first.slice(2 * m, 2 * m + 2), known)) : caption ?
      ['A caption with two colours can be compared with the one in which they are exchanged.'] : []));
    const cell = (tag, text, about = {}) => {
      const e = make(tag, {textContent: text});
      for (const [name, value] of Object.entries(about)) e.setAttribute(name, value);
      return e;
    };
    const named = D.names.map(name => cell('th', name, {scope: 'colgroup', colspan: 2}));
    const kinds = D.names.flatMap(() => ['v·t', 'phrases']).map(text => cell('th', text, {scope: 'col'}));
    const bodies = texts.map((text, row) => {
      const kind = !known ? '' : row ? 'false' : 'true', title = cell('th', text, {scope: 'rowgroup', colspan: 4, 'data-kind': kind});
      const cells = rows[row].map((x, i) => cell('td', number(x, 3, false), {
        class: other && first[i] == !row ? `better ${kind}` : ''}));
      return make('tbody', {}, make('tr', {}, title), make('tr', {}, ...cells));
    });
    const about = make('caption', {textContent: 'v·t: cosine of image and caption. Phrases: v·t and the best patch of each phrase, as the model weighs them.'});
    at('scores').replaceChildren(...(texts.length ? [make('table', {}, about,
      make('thead', {}, make('tr', {}, ...named), make('tr', {}, ...kinds)), ...bodies)] : []));
  }

  function verdict(name, first, known) { // which caption a model's two scores prefer, in words
    const by = ['by no score', 'by v·t alone', 'by its phrases alone', 'by both scores'][first[0] + 2 * first[1]];
    const marks = make('span', {className: 'marks', textContent: known ? first.map(x => x ? '✓' : '✗').join(' ') : ''});
    marks.setAttribute('aria-hidden', true);
    return make('div', {className: known && first.every(Boolean) ? 'all' : ''}, make('b', {textContent: name}), marks,
      make('p', {textContent: `prefers the ${known ? 'true' : 'first'} caption ${by}`}));
  }

  function chips(phrases) { // a phrase of the caption alone, or beside those on show; the same ones while the caption stays
    const found = phrasesOf(at('caption').value);
    if ([...at('chips').children].map(pair => pair.firstChild.textContent).join('|') != found.join('|'))
      at('chips').replaceChildren(...found.map(phrase => make('span', {},
        make('button', {className: 'chip', textContent: phrase, onclick: () => show([phrase])}),
        make('button', {className: 'chip', onclick: () =>
          show(now.phrases.includes(phrase) ? now.phrases.filter(p => p != phrase) : [...now.phrases, phrase])}))));
    [...at('chips').children].forEach((pair, i) => {
      const [chip, beside] = pair.children, on = phrases.includes(found[i]);
      chip.setAttribute('aria-pressed', on);
      beside.textContent = on ? '−' : '+';
      beside.title = on ? `take “${found[i]}” away` : `show “${found[i]}” too`;
      beside.setAttribute('aria-label', beside.title);
      beside.hidden = !phrases.length || on && phrases.length == 1;
    });
  }

  function status(phrases, ranked) {
    const {kind, scale} = now.how, notes = [];
    if (!phrases.length) return `${now.scene.name}: type a phrase, or a caption to take phrases from`;
    let label = D.labels[kind] + (kind == 'softmax' ? ` at β = ${+scale.toPrecision(3)}` : '');
    const reasons = D.names.map((_, m) => doubts(now.scene.things.length > 0, phrases.map((p, i) => [p, ranked[i][m]])));
    for (const reason of new Set(reasons.flat()))
      notes.push(`${D.names.filter((_, m) => reasons[m].includes(reason)).join(', ')}: ${reason}`);
    const titles = list => list.map(p => `“${p}”`).join(', ');
    const absent = now.scene.things.length ? phrases.filter(p => !outlinesOf(p).length) : [];
    if (absent.length) notes.push(`nothing in this scene is called ${titles(absent)}`);
    return [`${now.scene.name}: ${titles(phrases)}`, D.names.join(' → '), label, ...notes].join(' · ');
  }

  function show(phrases = now.phrases, write = true) { // draw what is chosen; what cannot be drawn changes the status alone
    if (!now.seen) return;
    const begun = performance.now();
    if (phrases.length > 4) return say(`at most four phrases at a time, got ${phrases.length}`, true);
    const long = phrases.find(phrase => tokenize(phrase).length == CONTEXT);
    if (long) return say(`the phrase is longer than the ${CONTEXT} tokens the model reads: ${long.slice(0, 40)}…`, true);
    now.phrases = phrases;
    if (write) at('phrase').value = phrases.join(' | '); // not under the hands of who types
    chips(phrases);
    setTimeout(compareCaptions); // after the maps
    const truth = [...(now.scene.truth || []), ...phrasesOf(now.scene.caption), ...phrasesOf(at('caption').value)];
    const ranked = phrases.map(phrase => [0, 1].map(m => ranks(m, now.seen[m], phrase, truth)));
    const alone = () => make('section', {}, make('div', {className: 'c2lip-phrase', textContent: 'no phrase yet'}),
      make('div', {className: 'c2lip-panels'}, figure('image', `image: ${now.scene.name}`, now.shown, [])));
    const shown = phrases.length && columns(...[0, 1].map(m => phrases.map(p => map(now.seen[m], embed(m, p), now.how))), now.how);
    at('maps').replaceChildren(...(shown ? phrases.map((phrase, i) => section(phrase, shown, i, ranked[i])) : [alone()]));
    say(status(phrases, ranked));
    c2lip.took = performance.now() - begun;
  }

  function controls() { // of c2lip.lab.attention.controls: the same names, choices and help
    const parts = Object.entries(D.controls).map(([name, {help, widget, choices, label, kinds}]) => {
      const text = label || name.replace('_', ' '), id = `map-${name}`;
      const set = value => { now.how[name] = value; all(); show(); };
      let field, mark;
      if (widget == 'buttons') {
        field = make('span', {className: 'row', title: help}, ...choices.map(([value, text]) =>
          make('button', {className: 'chip', textContent: text, value, onclick: () => set(value)})));
        field.setAttribute('role', 'group');
        field.setAttribute('aria-label', help);
        mark = () => [...field.children].forEach(b => b.setAttribute('aria-pressed', b.value == now.how[name]));
        return [mark, kinds, [field]];
      }
      if (widget == 'check') {
        field = make('input', {id, type: 'checkbox', title: help, onchange: () => set(field.checked)});
        mark = () => { field.checked = now.how[name]; };
      } else {
        const log = widget == 'log', [low, high] = choices.map(x => log ? Math.log10(x) : x), step = (high - low) / (log ? 40 : 20);
        field = make('input', {id, type: 'range', min: low, max: high, step, title: help});
        field.onchange = () => set(log ? 10 ** field.value : +field.value);
        mark = () => {
          field.value = log ? Math.log10(now.how[name]) : now.how[name];
          field.setAttribute('aria-valuetext', +now.how[name].toPrecision(3));
          field.nextSibling.textContent = +now.how[name].toPrecision(3);
        };
        return [mark, kinds, [make('label', {htmlFor: id, textContent: text}), field, make('output')]];
      }
      return [mark, kinds, [make('label', {htmlFor: id, textContent: text}), field]];
    });
    for (const [, , inside] of parts) at('controls').append(make('span', {className: 'control'}, ...inside));
    const all = () => parts.forEach(([mark, kinds, inside]) => {
      mark();
      for (const e of inside) e.disabled = kinds.length > 0 && !kinds.includes(now.how.kind);
    });
    all();
  }

  function start() {
    D.names.forEach((name, m) => document.querySelectorAll(`.name${m}`).forEach(e => { e.textContent = name; }));
    for (const scene of D.scenes) {
      const image = make('img', {src: `data:image/png;base64,${scene.seen}`, alt: scene.caption});
      const button = make('button', {title: scene.name, onclick: () => choose(scene)}, image);
      button.setAttribute('aria-pressed', false);
      at('scenes').append(button);
    }
    controls();
    at('caption').addEventListener('change', () => captioned(at('caption').value.trim()));
    let pause;
    const read = write => typed().length ? show(typed(), write) :
      write && say('the phrase is empty; type a few words such as: a red mug', true);
    at('phrase').addEventListener('change', () => read(true));
    at('phrase').addEventListener('input', () => { // after a pause; until then the maps are those of other words
      at('maps').classList.add('stale');
      clearTimeout(pause);
      pause = setTimeout(() => read(false), 600);
    });
    at('own').addEventListener('change', e => e.target.files[0] && own(e.target.files[0]));
    for (const question of D.questions)
      at('questions').append(make('button', {className: 'chip', textContent: question, title: `${question}: show the answer beside`, onclick: () => {
        const wanted = ask(question, now.phrases, phrasesOf(at('caption').value));
        return typeof wanted == 'string' ? say(wanted, true) : show(wanted);
      }}));
    const theme = new URLSearchParams(location.search).get('theme');
    if (theme) document.documentElement.dataset.theme = theme;
    choose(D.scenes[0]).then(() => { c2lip.ready = performance.now(); });
  }

  return {D, start, tokenize, embed, view, map, scores, captionScores, vectorScores, columns, paint, phrasesOf, swapped, ask, ranks, resized, choose,
    arranged, make, load, pixelsOf, rgbOf, ready: 0, took: 0};
})();
