// Search is in a shadow tree, which no style sheet of the page reaches: its greys and its blue are too pale to read,
// its letters too close.
const ofSearch = new CSSStyleSheet()
ofSearch.replaceSync(`
  dialog, dialog input { letter-spacing: normal !important; }
  dialog mark { color: var(--legible-blue) !important; }
  dialog menu, dialog [role="status"] { color: rgb(var(--color-foreground) / 0.7) !important; }
`)

// The theme puts wide tables into a box that scrolls, which the keyboard must reach, and the button of
// each code block into a landmark, of which there would be too many.
new MutationObserver(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0
  }
  for (const box of document.querySelectorAll("nav.md-code__nav:not([role])")) box.role = "presentation"
  for (const { shadowRoot } of document.body?.children ?? []) {
    if (shadowRoot?.adoptedStyleSheets.length === 0) shadowRoot.adoptedStyleSheets = [ofSearch]
  }
}).observe(document.documentElement, { childList: true, subtree: true })
