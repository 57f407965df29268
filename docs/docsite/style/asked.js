// A trained Gated DeltaNet of one layer that reads what the reader of the page types. It computes what
// memspan.models.GatedDeltaNet computes, word by word, from the weights that come with memspan. figures.js draws
// with it, and calls nothing here before a figure starts.
"use strict"

const MOST = 40
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

// Weights

/** Numbers of 16 bits, in base64. */
function halves(text) {
  const bytes = []
  let bits = 0
  let waiting = 0
  for (const digit of text.replace(/=+$/, "")) {
    bits = ((bits << 6) | DIGITS.indexOf(digit)) & 0xffff
    waiting += 6
    if (waiting < 8) continue
    waiting -= 8
    bytes.push((bits >> waiting) & 0xff)
  }
  return range(1, bytes.length / 2).map(i => half(bytes[2 * i - 2] | (bytes[2 * i - 1] << 8)))
}

/** The number that 16 bits stand for. */
function half(bits) {
  const exponent = (bits >> 10) & 31
  const fraction = bits & 1023
  const size = exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24
  return bits >> 15 ? -size : size
}

const weightsOf = model => (model.weights ??= unpacked(model))

/** Matrices as rows and vectors, by their names. */
function unpacked(model) {
  const numbers = halves(model.halves)
  let at = 0
  return Object.fromEntries(model.tensors.map(([name, rows, columns]) => {
    const values = numbers.slice(at, (at += rows * (columns || 1)))
    return [name, columns ? range(1, rows).map(i => values.slice(columns * (i - 1), columns * i)) : values]
  }))
}

// The model

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0)
const times = (matrix, x) => matrix.map(row => dot(row, x))
const scaled = (s, x) => x.map(value => s * value)
const added = (a, b) => a.map((x, i) => x + b[i])
const sigmoid = x => 1 / (1 + Math.exp(-x))
const silu = x => x * sigmoid(x)
const softplus = x => (x > 30 ? x : Math.log1p(Math.exp(x)))
const unit = x => scaled(1 / Math.sqrt(dot(x, x) + 1e-6), x)

function layerNorm(x, weight, bias) {
  const mean = dot(x, x.map(() => 1)) / x.length
  const centred = x.map(value => value - mean)
  const size = Math.sqrt(dot(centred, centred) / x.length + 1e-5)
  return centred.map((value, i) => (value / size) * weight[i] + bias[i])
}

function softmax(logits) {
  const top = Math.max(...logits)
  const powers = logits.map(x => Math.exp(x - top))
  const sum = dot(powers, powers.map(() => 1))
  return powers.map(x => x / sum)
}

/** Each head's queries, keys, values and numbers for one word, and the inputs to keep for the next three. */
function projected(w, u, before, { heads, width }) {
  const inputs = [...before, ["query", "key", "value"].flatMap(name => times(w[name], u))]
  const mixed = w.convolution.map((taps, c) => silu(taps.reduce((sum, tap, i) => sum + tap * inputs[i][c], 0)))
  const gate = times(w.output_gate, u).map(silu)
  const part = (of, n) => of.slice(width * n, width * (n + 1))
  return {
    inputs: inputs.slice(1),
    heads: range(0, heads - 1).map(n => ({
      q: scaled(width ** -0.5, unit(part(mixed, n))),
      k: unit(part(mixed, heads + n)),
      v: part(mixed, 2 * heads + n),
      gate: part(gate, n),
      beta: sigmoid(dot(w.beta[n], u)),
      alpha: Math.exp(-Math.exp(w.A_log[n]) * softplus(dot(w.step[n], u) + w.dt_bias[n])),
    })),
  }
}

/** The gated delta rule: S `[K, V]` decays, then a share beta of what k reads gives way to v. */
function written(S, { k, v, alpha, beta }) {
  const held = v.map((_, j) => alpha * S.reduce((sum, row, i) => sum + k[i] * row[j], 0))
  return S.map((row, i) => row.map((x, j) => alpha * x + beta * k[i] * (v[j] - held[j])))
}

/** Read words, given as their numbers: the logits after the last, and for each word how much of what the last one
 * read from memory came from it. These shares are exact and sum to 1: some may be negative. */
function readWords(model, tokens) {
  const w = weightsOf(model)
  const { width, heads } = model
  let before = range(1, w.convolution[0].length - 1).map(() => w.convolution.map(() => 0))
  let memory = range(1, heads).map(() => range(1, width).map(() => Array(width).fill(0)))
  let x, h
  const past = tokens.map(token => {
    x = scaled(Math.sqrt(w.embedding[token].length), w.embedding[token])
    const found = projected(w, layerNorm(x, w.mixer_norm, w.mixer_norm_bias), before, model)
    before = found.inputs
    memory = memory.map((S, n) => written(S, found.heads[n]))
    return found.heads
  })
  const reads = past.at(-1).map(({ q, gate }, n) => {
    const o = memory[n][0].map((_, j) => memory[n].reduce((sum, row, i) => sum + q[i] * row[j], 0))
    const size = Math.sqrt(dot(o, o) / width + 1e-6)
    return { o, scale: gate.map((g, j) => (g * w.norm[j]) / size) }
  })
  const y = times(w.output, reads.flatMap(({ o, scale }) => o.map((value, j) => value * scale[j])))
  h = added(x, y)
  const inner = added(times(w.inner, layerNorm(h, w.feed_forward_norm, w.feed_forward_norm_bias)), w.inner_bias)
  h = added(h, added(times(w.outer, inner.map(value => Math.max(0, value))), w.outer_bias))
  h = layerNorm(h, w.final_norm, w.final_norm_bias)
  const logits = added(times(w.head, h), w.head_bias)

  // Along y, so that the words' shares are numbers: what one number of a head's read adds to y is a column.
  const along = range(0, width * heads - 1).map(i => w.output.reduce((sum, row, j) => sum + row[i] * y[j], 0) / dot(y, y))
  const shares = Array(past.length).fill(0)
  for (const [n, { scale }] of reads.entries()) {
    const direction = scale.map((s, j) => s * along[width * n + j])
    // The query, taken back through all later writes: what is left of it reads a word's own write.
    let r = past.at(-1)[n].q
    for (let t = past.length - 1; t >= 0; t--) {
      const { k, v, alpha, beta } = past[t][n]
      const match = beta * dot(k, r)
      shares[t] += match * dot(v, direction)
      r = r.map((value, i) => alpha * (value - match * k[i]))
    }
  }
  return { logits, shares }
}

// Words

/** A text's sentences, each as the words that the model knows; others are `<unk>`. */
function wordsOf(model, text) {
  const known = new Map(model.vocabulary.map(word => [word.toLowerCase(), word]))
  const look = word => known.get(word.toLowerCase()) ?? "<unk>"
  return (text.match(/[^.!?\n]+[.!?]*/g) ?? []).map(words => words.trim()).filter(Boolean).slice(0, MOST).map(said => {
    const fact = FACT.exec(said.replace(/[.!?]+$/, ""))
    const words = fact ? [fact[1], "is", "in", `${fact[2]}.`] : said.replace(/!+$/, ".").split(/\s+/)
    const tokens = words.map(look)
    const last = tokens.length - 1
    if (tokens[last] === "<unk>") tokens[last] = look(`${words[last]}.`)
    const place = fact && (tokens[3] === "<unk>" ? fact[2] : tokens[3].slice(0, -1))
    return { said, tokens, name: fact && tokens[0], place, unknown: words.filter((_, i) => tokens[i] === "<unk>") }
  })
}

const namesOf = model => model.vocabulary.filter(word => word.endsWith("?")).map(word => word.slice(0, -1)).sort()

/** What the model answers after a sentence, and where that comes from. */
function asked({ model }, { story, step, asked: name }) {
  const all = wordsOf(model, story)
  const read = all.slice(0, step + 1)
  const words = [...read.flatMap(sentence => sentence.tokens), "Where", "is", `${name}?`]
  const { logits, shares } = readWords(model, words.map(word => model.vocabulary.indexOf(word)))
  const sure = softmax(logits)
  const answers = model.vocabulary.map((word, i) => ({ word: word.replace(/\.$/, ""), sure: sure[i] })).sort((a, b) => b.sure - a.sure)
  let at = 0
  const from = read.map(({ tokens }) => dot(shares.slice(at, (at += tokens.length)), tokens.map(() => 1)))
  const truth = read.findLast(sentence => sentence.name === name)?.place
  return { all, words, logits, from, own: dot(shares.slice(at), [1, 1, 1]), answers: answers.slice(0, 3), truth }
}

// Drawing

const box = i => ({ x: 8 + 234 * (i % 2), y: 8 + 34 * Math.floor(i / 2) })

function drawAsked(data, state) {
  const { all, from, own, answers, truth } = asked(data, state)
  const sentences = all.map(({ said }, i) => {
    const { x, y } = box(i)
    const share = from[i] ?? 0
    return [
      rect("chip", x, y, 230, 30, { rx: 3 }),
      rect(share < 0 ? "minus" : "read", x, y, (230 * Math.min(1, Math.abs(share))).toFixed(1), 30, { rx: 3, opacity: share < 0 ? 0.4 : 1 }),
      i === state.step ? rect("now", x, y, 230, 30, { rx: 3 }) : [],
      write(i > state.step ? "later" : "", x + 8, y + 20, short(said, 21)),
      i > state.step ? [] : write("end", x + 222, y + 20, percent(100 * share)),
    ]
  })
  const top = box(Math.max(0, all.length - 1)).y + 62
  const sign = answers[0].word === truth ? "right" : "wrong"
  return svg(top + 138, [
    sentences,
    write("small", 8, top - 8, `the question’s own words: ${percent(100 * own)}`),
    write("question", 8, top + 24, `Where is ${state.asked}?`),
    answers.map(({ word, sure }, i) => {
      const y = top + 36 + 34 * i
      return [
        write(i || !truth ? "" : `verdict ${sign}`, 8, y + 19, `${word}${i || !truth ? "" : { right: " ✓", wrong: " ✗" }[sign]}`),
        rect("frame", 118, y, 284, 26, { rx: 3 }),
        rect("left", 118, y, (284 * sure).toFixed(1), 26, { rx: 3 }),
        write("end", 472, y + 19, `${(100 * sure).toFixed(1)}\u00a0%`),
      ]
    }),
  ])
}

function tellAsked(data, state) {
  const { all, from, answers, truth } = asked(data, state)
  const [{ word, sure }] = answers
  const order = from.map((share, i) => [share, i]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 2)
  const parts = order.map(([share, i]) => `${percent(100 * share)} from “${all[i].said}”`)
  const unknown = unique(all.slice(0, state.step + 1).flatMap(sentence => sentence.unknown))
  return [
    `Where is ${state.asked}? The model says ${word}, and is ${(100 * sure).toFixed(1)}\u00a0% sure.`,
    truth ? `The text says ${truth}.` : `The text has not said where ${state.asked} is.`,
    parts.length ? `Its reading from memory came ${parts.join(" and ")}.` : "",
    unknown.length ? `Unknown words: ${unknown.map(word => word.replace(/[.!?]+$/, "")).join(", ")}.` : "",
  ].filter(Boolean).join(" ")
}

const ASKED = {
  controls: data => [
    { name: "story", label: "The text: “NAME is in PLACE.”", text: true },
    { name: "asked", label: "Where is …?", choices: true, values: () => namesOf(data.model) },
    { name: "step", label: "Ask after sentence", values: state => range(0, Math.max(0, wordsOf(data.model, state.story).length - 1)), shift: 1, buttons: true },
  ],
  pick: (data, x, y, state) => {
    const [column, row] = [Math.floor((x - 8) / 234), Math.floor((y - 8) / 34)]
    const i = 2 * row + column
    return column >= 0 && column < 2 && row >= 0 && i < wordsOf(data.model, state.story).length ? i : undefined
  },
  picked: "step",
  draw: drawAsked,
  tell: tellAsked,
}
