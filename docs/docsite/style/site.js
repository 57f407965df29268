// The theme puts wide tables into a box that scrolls, which the keyboard must reach, and the button of
// each code block into a landmark, of which there would be too many.
new MutationObserver(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) {
    box.tabIndex = 0
  }
  for (const box of document.querySelectorAll("nav.md-code__nav:not([role])")) box.role = "presentation"
}).observe(document.documentElement, { childList: true, subtree: true })
