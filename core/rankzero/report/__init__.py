"""Presentation of runs: the HTML report, the card of notebooks, curves, progress and cost.

This package reads run directories through `rankzero.RunHandle` and writes nothing into them. For the report `page`
collects the facts and makes the file of ``page.html``, ``page.css`` and ``page.js``; `history` thins out curves.
Text of a run is never part of the page's code: it travels as JSON, and the page shows it as text.
"""
