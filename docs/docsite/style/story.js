// Five memories, one story: sentences go into each memory, a question comes out. All of it is a closed form,
// with no model behind it: slots are kept or merged, matrices are sums of outer products. figures.js draws
// with it, and calls nothing here before a figure starts.
"use strict"

const T = 4
const LONGEST = 24
const FACT = /^(.{1,40}?)\s+(?:is|was|goes|went|moves|moved|lives)\s+(?:in|to|at|on)\s+(?:the\s+)?(.{1,40})$/i

/** The sentences of a text: facts with a name and a place, ends of a scene, and others. */
function sentences(text) {
  return text.split(/[.!?\n]+/).map(words => words.trim()).filter(Boolean).slice(0, LONGEST).map(words => {
    const fact = FACT.exec(words)
    if (fact) return { name: fact[1], place: fact[2] }
    return /\bscene\b/i.test(words) ? { scene: true } : { words }
  })
}

/** A name's key: `size` numbers between -1 and 1 drawn from a hash of the name, to length 1. */
function keyOf(name, size) {
  let state = 2166136261
  for (const character of name.toLowerCase()) state = Math.imul(state ^ character.codePointAt(0), 16777619)
  const key = range(1, size).map(() => {
    state = (state + 0x6d2b79f5) | 0
    let x = Math.imul(state ^ (state >>> 15), state | 1)
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61)
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 31 - 1
  })
  const length = Math.hypot(...key)
  return key.map(x => x / length)
}

const unique = all => [...new Set(all)]

/** What was told up to a step: names, places (of the whole story), and where a name is. What was told before the
 * scene began no longer holds. */
function told(story, step) {
  const past = story.slice(0, step + 1)
  const scene = past.findLastIndex(sentence => sentence.scene)
  const here = past.slice(scene + 1)
  return {
    names: unique(past.flatMap(sentence => sentence.name ?? [])),
    places: unique(story.flatMap(sentence => sentence.place ?? [])),
    truth: name => here.findLast(fact => fact.name === name)?.place,
  }
}

/** Slots of a memory, oldest first, each with the sentences that it holds: compressed ones, memory, the segment. */
function slotsOf(story, step, { M, C, c }) {
  const begin = step - (step % T)
  const single = (from, to) => story.slice(Math.max(0, from), to).map(sentence => [sentence])
  const old = story.slice(0, Math.max(0, begin - M))
  const merged = range(1, Math.floor(old.length / c)).map(i => old.slice(c * (i - 1), c * i))
  return {
    compressed: C ? merged.slice(-C) : [],
    memory: single(begin - M, begin),
    segment: single(begin, step + 1),
  }
}

/** The matrix after a step, `[places, K]`. Each fact writes its place under its name's key. */
function matrixOf(story, step, { K, beta, alpha, sceneAlpha, rule }) {
  const { places } = told(story, step)
  let matrix = places.map(() => Array(K).fill(0))
  for (const sentence of story.slice(0, step + 1)) {
    const left = rule !== "gated" ? 1 : sentence.scene ? sceneAlpha : alpha
    matrix = matrix.map(row => row.map(x => left * x))
    if (!sentence.name) continue
    const key = keyOf(sentence.name, K)
    const value = places.map(place => +(place === sentence.place))
    const read = multiply(matrix, key.map(x => [x]))
    const write = value.map((v, i) => (rule === "sum" ? v : beta * (v - read[i][0])))
    matrix = plus(matrix, write.map(w => key.map(x => w * x)))
  }
  return matrix
}

const MEMORIES = [
  { title: "window", kinds: ["segment"] },
  { title: "Transformer-XL", kinds: ["memory", "segment"] },
  { title: "Compressive", kinds: ["compressed", "memory", "segment"] },
  { title: "sum", rule: "sum" },
  { title: "delta rule", rule: "delta" },
  { title: "gated delta", rule: "gated" },
]

/** How much of each place a memory reads for a name. Of slots, the newest that has the name is read. */
function readsOf(memory, story, state, name) {
  const { places } = told(story, state.step)
  if (memory.rule) {
    const key = keyOf(name, state.K).map(x => [x])
    return multiply(matrixOf(story, state.step, { ...state, rule: memory.rule }), key).map(([x]) => x)
  }
  const slots = slotsOf(story, state.step, state)
  const found = memory.kinds.flatMap(kind => slots[kind]).findLast(slot => slot.some(sentence => sentence.name === name))
  return places.map(place => (found ?? []).filter(sentence => sentence.place === place).length / (found?.length ?? 1))
}

/** The answer: a place, two where the second is read three quarters as strongly, or none below a fifth. */
function answerOf(reads, places) {
  const order = reads.map((share, i) => [share, places[i]]).sort((a, b) => b[0] - a[0])
  const [best, second] = order
  if (!best || best[0] < 0.2) return []
  return second && second[0] >= 0.75 * best[0] ? [best[1], second[1]] : [best[1]]
}

/** An answer is right, wrong or undecided. Where nobody was told of in this scene, nothing is right. */
function verdictOf(answer, truth) {
  if (answer.length > 1) return "unsure"
  return answer[0] === truth ? "right" : "wrong"
}

/** Each memory's answer for a name at a step of the story. */
function answers(state, name = state.asked) {
  const story = sentences(state.story)
  const { places, truth } = told(story, state.step)
  return MEMORIES.map(memory => {
    const answer = answerOf(readsOf(memory, story, state, name), places)
    return { title: memory.title, answer, verdict: verdictOf(answer, truth(name)) }
  })
}

// Drawing

const short = (words, most) => (words.length > most ? words.slice(0, most - 1) + "…" : words)
const chip = i => ({ x: 8 + 156 * (i % 3), y: 8 + 27 * Math.floor(i / 3) })

function chips(story, step) {
  return story.map((sentence, i) => {
    const { x, y } = chip(i)
    const words = sentence.name ? `${short(sentence.name, 9)}: ${short(sentence.place, 9)}` : sentence.scene ? "— new scene —" : short(sentence.words, 18)
    return [
      rect(i === step ? "now" : "chip", x, y, 150, 23, { rx: 3 }),
      write(`mini${i > step ? " later" : ""}`, x + 8, y + 16, words),
    ]
  })
}

function drawSlots(memory, slots, name, x, y) {
  const width = 17
  const all = memory.kinds.flatMap(kind => slots[kind])
  const read = all.findLast(slot => slot.some(sentence => sentence.name === name))
  return memory.kinds.map((kind, row) => {
    const top = y + 38 * (row + 3 - memory.kinds.length)
    let left = x
    return slots[kind].map(slot => {
      const at = left
      const wide = kind === "compressed" ? 2 * width : width
      left += wide
      const letters = of => slot.map(sentence => (sentence[of] ?? " ")[0]).join("")
      return [
        rect(slot === read ? `slot lit ${kind}` : `slot ${kind}`, at + 0.5, top, wide - 2, 34, { rx: 2 }),
        write("tiny", at + wide / 2, top + 14, letters("name")),
        write("tiny", at + wide / 2, top + 29, letters("place")),
      ]
    })
  })
}

function drawPlaces(matrix, reads, places, x, y) {
  const size = Math.min(14, Math.floor(88 / matrix[0].length))
  const height = Math.min(18, 116 / matrix.length)
  const right = x + 22 + size * matrix[0].length + 5
  const unit = x + 146 - right
  return [
    cells(matrix, x + 22, y, size, 1, height),
    height >= 11 ? places.map((place, i) => write("tiny start", x, y + height * (i + 0.5) + 4, place.slice(0, 2))) : [],
    reads.map((share, i) => rect(share > 0 ? "first" : "minus", right, y + height * i + 2, (unit * Math.min(1, Math.abs(share))).toFixed(1), height - 4)),
  ]
}

function drawStory(data, state) {
  const story = sentences(state.story)
  const { places, truth, names } = told(story, state.step)
  const slots = slotsOf(story, state.step, state)
  const top = chip(Math.max(0, story.length - 1)).y + 40
  const found = answers(state)
  const panels = MEMORIES.map((memory, i) => {
    const [x, y] = [8 + 156 * (i % 3), top + 30 + 196 * Math.floor(i / 3)]
    const { answer, verdict } = found[i]
    const sign = { right: "✓", wrong: "✗", unsure: "?" }[verdict]
    const right = names.filter(name => answers(state, name)[i].verdict === "right").length
    return [
      rect("panel", x - 4, y - 2, 154, 188, { rx: 4 }),
      write("heading", x + 2, y + 15, memory.title),
      memory.rule
        ? places.length ? drawPlaces(matrixOf(story, state.step, { ...state, rule: memory.rule }), readsOf(memory, story, state, state.asked), places, x + 2, y + 24) : []
        : drawSlots(memory, slots, state.asked, x + 2, y + 24),
      write(`verdict ${verdict}`, x + 2, y + 158, `${short(answer.map(place => short(place, 9)).join(" or ") || "nothing", 18)} ${sign}`),
      write("mini", x + 2, y + 177, `all names: ${right} of ${names.length}`),
    ]
  })
  const place = truth(state.asked)
  return svg(top + 28 + 2 * 196, [
    chips(story, state.step),
    write("question", 8, top + 12, `Where is ${short(state.asked, 16)}?  (${short(place ?? "nobody has said", 18)})`),
    panels,
  ])
}

function tellStory(data, state) {
  const story = sentences(state.story)
  const place = told(story, state.step).truth(state.asked)
  const found = answers(state)
  const truth = place ? `In ${place}` : "Nobody has said, in this scene"
  const named = verdict => found.filter(one => one.verdict === verdict).map(one => one.title).join(", ") || "none"
  return (
    `After sentence ${state.step + 1}, where is ${state.asked}? ${truth}. ` +
    `Right: ${named("right")}; wrong: ${named("wrong")}; undecided: ${named("unsure")}.`
  )
}

/** The sentence that is drawn there. */
function sentenceAt(data, x, y, state) {
  const [column, row] = [Math.floor((x - 8) / 156), Math.floor((y - 8) / 27)]
  const i = 3 * row + column
  return column >= 0 && column < 3 && row >= 0 && i < sentences(state.story).length ? i : undefined
}

const STORY = {
  controls: () => [
    { name: "story", label: "The story: “NAME is in PLACE.”, or “A new scene.”", text: true },
    { name: "step", label: "Sentence", values: state => range(0, Math.max(0, sentences(state.story).length - 1)), shift: 1, buttons: true },
    { name: "asked", label: "Where is …?", choices: true, values: state => unique(sentences(state.story).flatMap(one => one.name ?? [])) },
    { name: "M", size: true, label: "M, slots of memory", values: [0, 4, 8] },
    { name: "C", size: true, label: "C, compressed slots", values: range(0, 4) },
    { name: "c", size: true, label: "c, sentences in each", values: [2, 4] },
    { name: "K", size: true, label: "K, numbers in a key", values: [2, 4, 6, 8, 10, 12, 14] },
    { name: "beta", size: true, label: "β, how strongly it writes", values: [0.25, 0.5, 0.75, 1] },
    { name: "alpha", size: true, label: "α, kept after a sentence", values: [0.5, 0.7, 0.8, 0.9, 0.95, 1] },
    { name: "sceneAlpha", size: true, label: "α, kept after a scene", values: [0, 0.1, 0.2, 0.5, 1] },
  ],
  pick: sentenceAt,
  picked: "step",
  draw: drawStory,
  tell: tellStory,
}
