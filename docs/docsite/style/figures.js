// Figures that the reader can move. A figure draws itself as SVG from the numbers of docs/figures/NAME.json and
// the values of its controls. The build runs the same functions for the pictures that stand still.
"use strict"

const WIDTH = 480

const escaped = text => String(text).replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`)
const tag = (name, attributes, content = "") =>
  `<${name} ${Object.entries(attributes).map(([k, v]) => `${k}="${v}"`).join(" ")}>${content}</${name}>`
const rect = (kind, x, y, width, height, more = {}) => tag("rect", { class: kind, x, y, width, height, ...more })
const line = (kind, x1, y1, x2, y2) => tag("line", { class: kind, x1, y1, x2, y2 })
const write = (kind, x, y, text) => tag("text", { class: kind, x, y }, escaped(text))
const svg = (height, parts) => tag(
  "svg",
  { xmlns: "http://www.w3.org/2000/svg", class: "drawn", viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height },
  "\n" + parts.flat(9).join("\n") + "\n",
)
const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i)
// Adding 0 takes the sign off a zero.
const number = x => (Math.round(x) + 0).toLocaleString("en").replace("-", "−")
const percent = x => `${number(x)}\u00a0%`

// Text, a cell for each token

const letter = token => (token === "\n" ? "↵" : token === " " ? "␣" : token)
const place = (data, i) => ({ x: 12 + 19 * (i % data.line), y: 8 + 32 * Math.floor(i / data.line) })
const below = data => place(data, data.text.length - 1).y + 46

/** The tokens up to this one, each in the class that `kind` gives it; of later ones there is a dot. */
function letters(data, token, kind) {
  return [...data.text].map((character, i) => {
    const { x, y } = place(data, i)
    return i > token
      ? write("letter later", x + 9.5, y + 18, "·")
      : write(`letter ${kind(i)}`, x + 9.5, y + 18, letter(character))
  })
}

/** The token whose letter is drawn there. */
function letterAt(data, x, y) {
  const [column, row] = [Math.floor((x - 12) / 19), Math.floor((y - 8) / 32)]
  const token = data.line * row + column
  return column >= 0 && column < data.line && data.text[token] ? token : undefined
}

const now = (data, token) => {
  const { x, y } = place(data, token)
  return rect("now", x, y, 19, 26, { rx: 3 })
}

/** Squares with words, side by side. */
function legend(y, entries) {
  let x = 12
  return entries.map(([kind, words]) => {
    const at = x
    x += 40 + 8.4 * words.length
    return [rect(kind, at, y, 14, 14, { rx: 2 }), write("small", at + 20, y + 12, words)]
  })
}

// What a token attends to

const strength = weight => Math.sqrt(weight / 100).toFixed(2)

function slots(data, { token, layer, slots: others }) {
  const { first, compressed, weights: own, swapped = own } = data.steps[token]
  const weights = others ? swapped : own
  const segment = data.kinds.includes("segment") ? token - (token % data.line) : data.text.length
  return weights[layer - 1].map((weight, i) => {
    const from = first + (i < compressed ? i * data.rate : compressed * (data.rate - 1) + i)
    const kind = i < compressed ? "compressed" : from < segment ? "memory" : "segment"
    return { from, tokens: i < compressed ? data.rate : 1, kind, weight }
  })
}

/** The class of a slot: Feedback's memory has vectors of its own kind. */
const classOf = (data, kind) => (data.run.endsWith("feedback") ? "vector" : kind)

function drawAttention(data, state) {
  const all = slots(data, state)
  const boxes = all.map(({ from, tokens, kind, weight }) => {
    const { x, y } = place(data, from)
    const box = [x + 0.5, y, 19 * tokens - 1, 26, { rx: 3 }]
    return [rect(classOf(data, kind), ...box), rect("read", ...box.slice(0, 4), { rx: 3, opacity: strength(weight) })]
  })
  const first = data.steps[state.token].first
  const y = below(data)
  return svg(y + 72, [
    boxes,
    letters(data, state.token, i => (i < first ? "gone" : "")),
    now(data, state.token),
    legend(y, [...data.kinds.map(kind => [classOf(data, kind), kind]), ["now", "the token"]]),
    write("small", 12, y + 40, "attention"),
    [2, 10, 30, 100].map((weight, i) => [
      rect("read", 92 + 70 * i, y + 28, 14, 14, { rx: 2, opacity: strength(weight) }),
      write("small", 112 + 70 * i, y + 40, percent(weight)),
    ]),
    write("small", 12, y + 64, `trained with ${sizes(data.sizes.trained)}; shown with ${sizes(data.sizes.shown)}`),
  ])
}

const sizes = named => Object.entries(named).map(([name, size]) => `${name} ${size}`).join(", ")

function tellAttention(data, state) {
  const all = slots(data, state)
  const sum = kind => all.reduce((total, slot) => total + (!kind || slot.kind === kind) * slot.weight, 0)
  const read = [...all].sort((a, b) => b.weight - a.weight).slice(0, 3)
  const named = read.map(({ from, tokens, weight }) => {
    const text = [...data.text].slice(from, from + tokens).map(letter).join("")
    const back = state.token - from
    const where = tokens > 1 ? "compressed" : back ? `${back} back` : "itself"
    return `“${text}”, ${where} (${percent(weight)})`
  })
  const shares = data.kinds.map(kind => `${kind} ${percent((100 * sum(kind)) / sum())}`)
  const begin = `Token ${state.token + 1}, “${letter(data.text[state.token])}”, layer ${state.layer}: `
  if (!all.length) return begin + "nothing to attend to yet."
  return (
    `${begin}most attention goes to ${named.join("; ")}.` +
    (shares.length > 1 ? ` In total: ${shares.join(", ")}.` : "") +
    tellSwap(data, state)
  )
}

/** What the next letter costs with the compressed slots of another passage in place of one's own. */
function tellSwap(data, { token, slots: others }) {
  const bits = data.steps[token].bits
  if (others === undefined || !bits) return ""
  const all = data.steps.filter(step => step.swapped && step.bits).map(step => step.bits)
  const mean = which => (all.reduce((sum, both) => sum + both[which], 0) / all.length).toFixed(3)
  return (
    ` The next letter, “${letter(data.text[token + 1])}”, costs ${bits[0].toFixed(2)} bits with its own compressed slots, ` +
    `${bits[1].toFixed(2)} with a neighbour’s; on average ${mean(0)} and ${mean(1)}.`
  )
}

// Fast weights: a matrix, and what is left of each write

const multiply = (a, b) => a.map(row => b[0].map((_, j) => row.reduce((sum, x, i) => sum + x * b[i][j], 0)))
const combine = (a, b, f) => a.map((row, i) => row.map((x, j) => f(x, b[i][j])))
const plus = (a, b) => combine(a, b, (x, y) => x + y)
const minus = (a, b) => combine(a, b, (x, y) => x - y)
const transposed = a => a[0].map((_, j) => a.map(row => row[j]))
const largest = a => Math.max(...a.flat().map(Math.abs), 1e-9)

/** A cell for each number: the colour is its sign, the strength its size as a share of `most`. */
function cells(matrix, x, y, size, most = largest(matrix), height = size) {
  const frame = rect("frame", x - 0.5, y - 0.5, size * matrix[0].length + 1, height * matrix.length + 1)
  const filled = matrix.map((row, i) => row.map((value, j) => {
    const opacity = Math.min(1, Math.abs(value) / most).toFixed(2)
    return opacity > 0.01
      ? rect(value > 0 ? "plus" : "minus", x + size * j, y + height * i, size, height, { opacity })
      : ""
  }))
  return [frame, filled.flat().filter(Boolean)]
}

/** The matrix after a token: the sum of what was written, less what decayed since, ``[V, F]``. */
function matrixAfter(data, token) {
  let left = 1
  const written = range(0, token).map(i => token - i).map(i => {
    const row = data.written[i].map(x => x * left)
    left *= data.decay ? data.decay[i] : 1
    return row
  })
  return multiply(transposed(written.reverse()), data.keys.slice(0, token + 1))
}

function drawMatrix(data, { token }) {
  const y = below(data)
  const shaded = data.kept[token].map((share, i) => {
    const at = place(data, i)
    const opacity = (Math.max(0, Math.min(100, share)) / 100).toFixed(2)
    return [rect("matrix", at.x + 0.5, at.y, 18, 26, { rx: 3 }), rect("left", at.x + 0.5, at.y, 18, 26, { rx: 3, opacity })]
  })
  const matrix = matrixAfter(data, token)
  const most = largest(matrixAfter(data, data.text.length - 1))
  const [left, top, size] = [92, y + 64, Math.min(14, Math.floor(308 / matrix[0].length))]
  const right = left + size * matrix[0].length + 8
  return svg(top + size * matrix.length + 12, [
    shaded,
    letters(data, token, () => ""),
    now(data, token),
    write("small", 12, y + 10, "shading: share of its write that a key still reads"),
    write("small", left, y + 36, `the key’s ${data.keys[0].length} ${data.decay ? "numbers" : "features"}`),
    cells([data.keys[token]], left, y + 42, size),
    write("small", 12, top + 12, "new"),
    write("small", 12, top + 28, "write"),
    cells(data.written[token].map(x => [x]), left - 20, top, size, most),
    cells(matrix, left, top, size, most),
    write("small", right, top + 12, "matrix"),
    write("small", right, top + 28, "after it"),
    data.decay ? [write("small", right, top + 60, "decay α:"), write("small", right, top + 76, percent(100 * data.decay[token]))] : [],
  ])
}

function tellMatrix(data, { token }) {
  const half = data.kept[token].slice(0, -1).filter(share => share >= 50).length
  return (
    `After token ${token + 1}, “${letter(data.text[token])}”: of the ${token} tokens before it, ` +
    `${half} can still read at least half of what they wrote.` +
    (data.decay ? ` Before it wrote, it decayed the matrix to ${percent(100 * data.decay[token])}.` : "")
  )
}

// Two keys that overlap: A is written under the first, then B under the second

/** For either rule: how much of A and of B the first key reads, and the second, after both were written. */
function overlapReads({ angle, beta }) {
  const turn = (angle * Math.PI) / 180
  const keys = [[1, 0], [Math.cos(turn), Math.sin(turn)]]
  return Object.fromEntries(["sum", "delta"].map(rule => {
    let matrix = [[0, 0], [0, 0]]
    for (const [i, key] of keys.entries()) {
      const value = [[i === 0 ? 1 : 0, i === 1 ? 1 : 0]]
      const written = rule === "sum" ? value : minus(value, multiply([key], matrix)).map(row => row.map(x => beta * x))
      matrix = plus(matrix, multiply(transposed([key]), written))
    }
    return [rule, keys.map(key => multiply([key], matrix)[0])]
  }))
}

function drawOverlap(data, state) {
  const turn = (state.angle * Math.PI) / 180
  const [x, y, radius] = [70, 120, 52]
  const arrow = (kind, angle, words) => [
    line(`arrow ${kind}`, x, y, x + radius * Math.cos(angle), y - radius * Math.sin(angle)),
    write("name", x + (radius + 16) * Math.cos(angle), y + 5 - (radius + 12) * Math.sin(angle), words),
  ]
  const reads = overlapReads(state)
  // Room for a bar to the left of zero, beside its key's name.
  const [left, unit] = [288, 90]
  const bars = Object.entries(reads).map(([rule, both], i) => [
    write("small", 150, 24 + 112 * i, `the ${rule} rule: what each key reads`),
    both.map((shares, key) => {
      const top = 36 + 112 * i + 42 * key
      return [
        write("small", 150, top + 22, `key ${key + 1}`),
        shares.map((share, value) => [
          rect(value ? "second" : "first", share < 0 ? left + unit * share : left, top + 18 * value, Math.abs(unit * share).toFixed(1), 14),
          write("small", left + unit * Math.max(share, 0) + 6, top + 13 + 18 * value, `${percent(100 * share)} of ${"AB"[value]}`),
        ]),
      ]
    }),
  ])
  return svg(250, [
    tag("circle", { class: "frame", cx: x, cy: y, r: radius }),
    arrow("first", 0, "1"), arrow("second", turn, "2"),
    ["A is written", "under key 1,", "then B under key 2"].map((words, i) => write("small", 12, 200 + 20 * i, words)),
    bars,
  ])
}

function tellOverlap(data, state) {
  const { sum, delta } = overlapReads(state)
  const share = x => percent(100 * x)
  return (
    `At ${state.angle}° and β = ${state.beta}: under the sum rule key 2 reads ${share(sum[1][1])} of B and still ${share(sum[1][0])} of A; ` +
    `under the delta rule it reads ${share(delta[1][1])} of B and ${share(delta[1][0])} of A, and key 1 still reads ${share(delta[0][0])} of A.`
  )
}

// The delta rule by chunks

/** The steps, each an equation, a sentence, and what is drawn: matrices by name, and signs between them. */
function chunkSteps({ k, q, v, beta, matrix }) {
  const tril = (a, diagonal) => a.map((row, i) => row.map((x, j) => (j <= i + diagonal ? x : 0)))
  const a = tril(multiply(k, transposed(k)), -1)
  const system = a.map((row, i) => row.map((x, j) => x * beta[j] + (i === j)))
  const inverse = []
  for (const [t, row] of system.entries()) {
    inverse.push(row.map((_, j) => (t === j) - range(0, t - 1).reduce((sum, i) => sum + row[i] * inverse[i][j], 0)))
  }
  const old = multiply(k, matrix)
  const missing = minus(v, old)
  const z = multiply(inverse, missing)
  const u = z.map((row, i) => row.map(x => x * beta[i]))
  const added = multiply(transposed(k), u)
  const reads = tril(multiply(q, transposed(k)), 0)
  const fromMatrix = multiply(q, matrix)
  return [
    ["A = tril(ΦΦᵀ, −1)", "A shows which tokens of the chunk share features with earlier ones. Only there can one write disturb another.",
      [["Φ", k], "→", ["A", a]]],
    ["I + A diag(β)", "Each column is weighted by how strongly its token writes. With ones on the diagonal, the system can always be solved.",
      ["I +", ["A", a], "·", ["diag(β)", beta.map((x, i) => beta.map((_, j) => (i === j) * x))], "=", ["I + A diag(β)", system]]],
    ["R = (I + A diag(β))⁻¹", "The inverse of a triangular matrix is triangular, and is found row by row. Nothing so far depends on S, so it is computed for all chunks at once.",
      [["I + A diag(β)", system], "→", ["R", inverse]]],
    ["V − ΦS", "If a token were alone in the chunk, it would have to correct its value minus the output of its key from the old matrix.",
      [["V", v], "−", ["ΦS", old], "=", ["V − ΦS", missing]]],
    ["Z = R (V − ΦS)", "One product gives, for all tokens of the chunk, the correction that remains after the tokens before have written.",
      [["R", inverse], "·", ["V − ΦS", missing], "=", ["Z", z]]],
    ["S′ = S + Φᵀ diag(β) Z", "All writes of the chunk are added to the matrix at once. The next chunk starts from S′.",
      [["S", matrix], "+", ["Φᵀ diag(β) Z", added], "=", ["S′", plus(matrix, added)]]],
    ["Y = QS + tril(QΦᵀ) U", "With U = diag(β) Z, each output is the sum of two readings by its query: from the old matrix, and from the writes up to its own token.",
      [["QS", fromMatrix], "+", ["tril(QΦᵀ)", reads], "·", ["U", u], "=", ["Y", plus(fromMatrix, multiply(reads, u))]]],
  ]
}

function drawChunk(data, { step }) {
  const steps = chunkSteps(data)
  const [equation, , terms] = steps[step - 1]
  const matrices = terms.filter(term => typeof term !== "string").map(([, matrix]) => matrix)
  const rows = Math.max(...matrices.map(matrix => matrix.length))
  const columns = matrices.reduce((sum, matrix) => sum + matrix[0].length, 0)
  const gap = 28
  const signs = gap * (terms.length - matrices.length)
  const size = Math.min(16, Math.floor((WIDTH - 40 - signs) / columns))
  let x = (WIDTH - signs - size * columns) / 2
  // Matrices of one shape hold the same kind of thing, so they share a scale.
  const shape = matrix => `${matrix.length} ${matrix[0].length}`
  const most = matrix => Math.max(...matrices.filter(other => shape(other) === shape(matrix)).map(largest))
  const tokens = [...data.text]
  const tall = rows === tokens.length ? 17 : size
  const [top, height] = [48, tall * rows]
  // Where there is one row for each token, its letter stands at the left, and the row is as high as the letter.
  const letters = rows === tokens.length && tokens.map((token, i) => write("letter", x - 10, top + tall * (i + 1) - 3, letter(token)))
  const drawn = terms.map(term => {
    const at = x
    if (typeof term === "string") {
      x += gap
      return write("sign", at + gap / 2, top + height / 2 + 5, term)
    }
    const [name, matrix] = term
    const width = size * matrix[0].length
    const y = top + (height - tall * matrix.length) / 2
    x += width
    return [cells(matrix, at, y, size, most(matrix), tall), write("name", at + width / 2, top + height + 20, name)]
  })
  return svg(top + height + 34, [write("title", WIDTH / 2, 26, `${step}. ${equation}`), letters || [], drawn])
}

const tellChunk = (data, { step }) => `Step ${step} of 7, tokens “${data.text}”. ${chunkSteps(data)[step - 1][1]}`

// How far back, in theory and measured

const SPAN_NAMES = {
  "transformer-xl": "Transformer-XL",
  "compressive-convolution": "Compressive",
  feedback: "Feedback",
  transformer: "Transformer without memory",
}

/** Tokens back that a segment's last token depends on, through L layers that each see `slots` tokens before their segment. */
const reach = (L, slots, T) => T - 1 + slots + (L - 1) * T * Math.ceil(slots / T)

/** Of each model: where each kind of reach ends, nearest first. */
const edges = ({ M, T, L, C, c }) => ({
  "transformer-xl": [["sure", M], ["late", M + T - 1], ["layers", reach(L, M, T)]],
  "compressive-convolution": [["sure", M], ["coarse", M + c * C], ["late", M + c * C + T - 1], ["layers", reach(L, M + c * C, T)]],
  feedback: [["sure", M]],
  transformer: [["late", T - 1]],
})

function drawSpan(data, state) {
  const [left, right, top, height] = [52, 424, 36, 150]
  const at = distance => +(left + ((right - left) * Math.log2(distance)) / 16).toFixed(1)
  const up = share => +(top + height * (1 - share)).toFixed(1)
  const measured = Object.entries(data.shown).every(([name, value]) => state[name] === value)
  const bars = top + height + 56
  const axis = range(0, 5).map(i => 3 * i).map(i => [
    line("grid", at(2 ** i), top, at(2 ** i), bars + 178),
    write("tick", at(2 ** i), top + height + 16, number(2 ** i)),
  ])
  const curves = Object.entries(data.curves).map(([name, curve]) => tag("polyline", {
    class: `curve ${name}${measured ? "" : " faded"}`,
    points: curve.map(([distance, share]) => `${at(distance)},${up(share)}`).join(" "),
  }))
  const reaches = Object.entries(edges(state)).map(([name, ends], i) => {
    const y = bars + 46 * i
    let from = left
    const parts = ends.map(([kind, end]) => {
      const part = rect(`bar ${name} ${kind}`, from, y + 8, (at(end) - from).toFixed(1), 16)
      from = at(end)
      return [part, line(`edge ${name}`, from, y + 4, from, y + 28)]
    })
    return [write("small", left, y, SPAN_NAMES[name]), parts, write("small", from + 6, y + 21, number(ends.at(-1)[1]))]
  })
  return svg(bars + 206, [
    axis,
    [0, 0.5, 1].map(share => [line("grid", left, up(share), right, up(share)), write("tick end", left - 6, up(share) + 4, percent(100 * share))]),
    curves,
    write("small", 12, 14, `right answers, measured with ${Object.entries(data.shown).map(pair => pair.join(" ")).join(", ")}`),
    write("tick", (left + right) / 2, top + height + 34, "tokens back"),
    reaches,
    legend(bars + 184, [["bar", "always"], ["bar late", "late tokens"], ["bar coarse", "compressed"], ["bar layers", "via layers"]]),
  ])
}

function tellSpan(data, state) {
  const { M, T, C, c } = state
  const [xl, compressive] = Object.values(edges(state)).map(ends => number(ends.at(-1)[1]))
  return (
    `Transformer-XL reaches ${number(M)} to ${number(M + T - 1)} tokens back, through its layers up to ${xl}. ` +
    `Compressive reaches ${number(M + c * C)} to ${number(M + c * C + T - 1)}, through its layers up to ${compressive}. ` +
    `Feedback reaches its span, ${number(M)}, and a transformer without memory at most ${number(T - 1)}.`
  )
}

// Controls. The first of a figure that goes step by step has buttons, too.

const tokenControl = data => ({ name: "token", label: "Token, or tap a letter", values: range(0, data.text.length - 1), shift: 1, buttons: true })
const KINDS = {
  attention: {
    controls: data => [
      tokenControl(data),
      { name: "layer", label: "Layer", values: range(1, data.steps[0].weights.length) },
      ...("slots" in data.shown ? [{ name: "slots", label: "Compressed slots", values: [0, 1], words: ["its own", "a neighbour’s"] }] : []),
    ],
    pick: letterAt,
    draw: drawAttention,
    tell: tellAttention,
  },
  matrix: { controls: data => [tokenControl(data)], pick: letterAt, draw: drawMatrix, tell: tellMatrix },
  overlap: {
    controls: () => [
      { name: "angle", label: "Angle between the keys", values: range(0, 12).map(i => 15 * i), buttons: true },
      { name: "beta", label: "β, how strongly it writes", values: [0.25, 0.5, 0.75, 1] },
    ],
    draw: drawOverlap,
    tell: tellOverlap,
  },
  chunk: {
    controls: () => [{ name: "step", label: "Step", values: range(1, 7), buttons: true }],
    draw: drawChunk,
    tell: tellChunk,
  },
  span: {
    controls: () => [
      { name: "M", label: "M, slots of memory", values: [16, 32, 64, 128, 256, 512] },
      { name: "T", label: "T, tokens in a segment", values: [16, 32, 64, 128, 256, 512] },
      { name: "L", label: "L, layers", values: range(1, 12) },
      { name: "C", label: "C, compressed slots", values: [0, 32, 64, 128, 256, 512] },
      { name: "c", label: "c, tokens in each", values: range(2, 8) },
    ],
    draw: drawSpan,
    tell: tellSpan,
  },
  story: STORY,
  asked: ASKED,
}

/** A control's values, which may depend on what was typed. */
const valuesOf = (control, state) => (typeof control.values === "function" ? control.values(state) : control.values)

/** The state that an address names, `#figure-NAME?token=3`, or nothing. */
function linked(figure, controls) {
  const [name, query] = decodeURIComponent(location.hash.slice(1)).split("?")
  if (name !== figure.id || query === undefined) return {}
  const given = new URLSearchParams(query)
  return Object.fromEntries(controls.filter(control => given.has(control.name)).map(control => {
    const text = given.get(control.name)
    return [control.name, control.text || control.choices ? text : Number(text)]
  }))
}

const SECONDS = 1.1
let sliders = 0

/** A control's HTML. */
function field(control) {
  const id = `control-${sliders++}`
  const label = `<label for="${id}">${control.label}</label>`
  if (control.text) return `<div class="wide">${label}<textarea id="${id}" name="${control.name}" rows="3" spellcheck="false"></textarea></div>`
  if (control.choices) return `<div>${label}<select id="${id}" name="${control.name}"></select></div>`
  const button = ([by, words]) => `<button type="button" data-by="${by}">${words}</button>`
  const buttons = control.buttons ? [[-1, "Back"], [1, "Next"], [0, "Play"]].map(button).join(" ") : ""
  return `<div>${label}<input id="${id}" type="range" name="${control.name}" min="0"><output></output><span>${buttons}</span></div>`
}

/** Make a figure of the page move. */
function start(figure) {
  const data = FIGURES[figure.id]
  const kind = KINDS[data.kind]
  const form = figure.querySelector("form")
  const controls = kind.controls(data)
  const from = linked(figure, controls)
  const state = { ...data.shown, ...from }
  const picture = figure.querySelector(".picture")
  const sizes = controls.filter(control => control.size)
  form.innerHTML = controls.filter(control => !control.size).map(field).join("") +
    (sizes.length ? `<details><summary>Sizes</summary>${sizes.map(field).join("")}</details>` : "")
  form.classList.toggle("many", controls.length > 2)
  const steps = controls.find(control => control.buttons)

  /** Fit each control to the state, and the state to what its control allows. */
  function draw() {
    for (const control of controls) {
      const input = form.elements[control.name]
      if (control.text) {
        if (input.value !== state[control.name]) input.value = state[control.name]
        continue
      }
      const values = valuesOf(control, state)
      if (!values.includes(state[control.name])) {
        state[control.name] = control.choices ? values.at(-1) ?? "" : values.findLast(x => x <= state[control.name]) ?? values[0]
      }
      if (control.choices) {
        input.innerHTML = values.map(value => `<option>${escaped(value)}</option>`).join("")
        input.value = state[control.name]
        continue
      }
      const i = values.indexOf(state[control.name])
      const words = control.words ? control.words[i] : (values[i] + (control.shift ?? 0)).toLocaleString("en")
      input.max = values.length - 1
      input.value = i
      input.setAttribute("aria-valuetext", words)
      input.closest("div").querySelector("output").value = words
    }
    picture.innerHTML = kind.draw(data, state)
    figure.querySelector(".told").textContent = kind.tell(data, state)
  }

  let saving
  function changed() {
    draw()
    clearTimeout(saving)
    saving = setTimeout(() => {
      const query = new URLSearchParams(controls.map(control => [control.name, state[control.name]]))
      // The theme looks for an element of this name, which must not have quotes or line breaks once decoded.
      history.replaceState(null, "", `#${figure.id}?${encodeURIComponent(query)}`)
    }, 300)
  }

  let playing
  function stop() {
    clearInterval(playing)
    playing = undefined
    const button = form.querySelector("[data-by='0']")
    if (button) button.textContent = "Play"
  }
  function go(by) {
    const values = valuesOf(steps, state)
    const next = values.indexOf(state[steps.name]) + by
    if (next in values) state[steps.name] = values[next]
    changed()
    return next + 1 in values
  }
  function play(button) {
    if (playing) return stop()
    const values = valuesOf(steps, state)
    if (state[steps.name] === values.at(-1)) {
      state[steps.name] = values[0]
      changed()
    }
    button.textContent = "Stop"
    playing = setInterval(() => go(1) || stop(), 1000 * SECONDS)
  }

  /** A press on a token goes there; with the button held, or a finger down, the figure follows. */
  function pick(event) {
    const box = picture.querySelector("svg").getBoundingClientRect()
    const scale = WIDTH / box.width
    const at = kind.pick(data, (event.clientX - box.left) * scale, (event.clientY - box.top) * scale, state)
    if (at === undefined || at === state[steps.name]) return
    stop()
    state[steps.name] = at
    changed()
  }
  if (kind.pick) {
    picture.classList.add("picks")
    picture.addEventListener("pointerdown", pick)
    picture.addEventListener("pointermove", event => event.buttons && pick(event))
  }
  form.addEventListener("input", event => {
    const control = controls.find(one => one.name === event.target.name)
    stop()
    state[control.name] = control.text || control.choices ? event.target.value : valuesOf(control, state)[event.target.value]
    changed()
  })
  form.addEventListener("submit", event => event.preventDefault())
  for (const button of form.querySelectorAll("button")) {
    const by = Number(button.dataset.by)
    button.addEventListener("click", () => {
      if (!by) return play(button)
      stop()
      go(by)
    })
  }
  draw()
  form.hidden = false
  if (Object.keys(from).length) figure.scrollIntoView()
}

if (typeof document !== "undefined") document.querySelectorAll("figure.moving").forEach(start)
