"""``rankzero report`` and ``rankzero serve``: show runs in a browser."""

from __future__ import annotations

import json

import click

from rankzero.cli import words
from rankzero.run.handle import RunHandle


@click.command()
@click.argument("directory", nargs=-1, required=True, shell_complete=words.directories)
@click.option(
    "-o", "--output", default="report.html", show_default=True, help="The file to write; - for standard output."
)
@click.option(
    "--link",
    callback=words.seconds,
    metavar="TIME",
    help="Write nothing: print a link to the report on the object store that works for 24h, 7d, without credentials.",
)
@click.option("--json", "as_json", is_flag=True, help="The facts that the page shows, as JSON, instead of the page.")
def report(directory: tuple[str, ...], output: str, link: float | None, as_json: bool) -> None:
    """Write the report of a run, or of several runs side by side: one HTML file that needs no network.

    The directory of a run that has ended already contains its report, report.html.
    """
    from rankzero import store
    from rankzero.report import facts, page

    if link is not None:
        for one in directory:
            address = store.presign(store.join(RunHandle.attach(one).directory, page.REPORT_FILE), link)
            click.echo(json.dumps({"directory": one, "link": address}) if as_json else address)
        return
    runs = [facts.collect(RunHandle.attach(one)) for one in directory]
    text = json.dumps({"runs": runs}) + "\n" if as_json else page.render(runs)
    if as_json or output == "-":
        click.echo(text, nl=False)
        return
    with open(output, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    click.echo(output)


@click.command()
@click.argument("store", shell_complete=words.directories)
@click.option("--port", type=click.IntRange(0, 65535), default=8787, show_default=True, help="0 for any free one.")
@click.option("--no-token", is_flag=True, help="Serve every process of this machine, such as a proxy with a login.")
def serve(store: str, port: int, no_token: bool) -> None:
    """Show the runs of a STORE in a browser of this machine, until interrupted. Read only.

    The printed address contains a token, which keeps out other users of this machine.
    """
    from rankzero.report.pages import ReportServer

    with ReportServer(store, port, "" if no_token else None) as server:
        click.echo(f"the runs of {store}, until Ctrl-C, at\n{server.url}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()
