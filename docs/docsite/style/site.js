// The theme puts wide tables into a box that scrolls; the keyboard must reach it.
new MutationObserver(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0
  }
}).observe(document.documentElement, { childList: true, subtree: true })
