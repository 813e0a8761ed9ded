"""The report: one HTML file that shows what happened in a run, or in several side by side.

Reads run directories through `rankzero.RunHandle`, and writes none of a run's facts. `facts` collects, `series` thins
out, `page` makes the file; ``page.html``, ``page.css`` and ``page.js`` are what a browser shows. Nothing of a run is
ever a part of the page's code: it travels as JSON, and is shown as text.
"""

from rankzero import lazy_names

lazy_names(__name__, "history.History server.ReportServer")
