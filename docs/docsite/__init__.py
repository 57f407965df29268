"""Builds the documentation site: ``make docs``.

`code` finds the lines that a page names and `highlighting` colours them; `annotated` sets notes beside
code, `coverage` checks that nothing public is left out, and `read_state` knows which code has changed
since its note was last read. `maths` renders formulas when the page is built, and `figures` draws those
that the reader can move, both in the engine of `javascript`. `reference` and `benchmarks` generate
pages; `links` and `staging` bring all pages together for zensical, the generator of the site.
"""
