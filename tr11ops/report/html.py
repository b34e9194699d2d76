"""The page's values as one file of HTML that needs nothing else: styles and script are inside. No
decisions here.
"""

from __future__ import annotations

from pathlib import Path

from tr11ops.report.page import Page

FOLDER = Path(__file__).parent / "assets"


def render(page: Page) -> str:
    """The page as HTML. Every text is escaped; the script is there only where a chart is."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    style = (FOLDER / "report.css").read_text(encoding="utf-8")
    script = ""
    if page.has_charts:
        script = (FOLDER / "report.js").read_text(encoding="utf-8")
    return str(
        environment.get_template("report.html.j2").render(page=page, style=style, script=script)
    )
