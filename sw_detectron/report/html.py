"""Parts of the page of a run."""

import base64
import io
from html import escape

from matplotlib.figure import Figure
from tabulate import tabulate


def table_html(rows: list[tuple], headers: list[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="html", disable_numparse=True)


def pre_html(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def svg_html(figure: Figure, description: str) -> str:
    return image_html(figure, "svg", "image/svg+xml", description)


def image_html(figure: Figure, kind: str, media_type: str, description: str) -> str:
    """A figure as an image that lies inside of the page.

    Args:
        kind: as matplotlib names the format.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=100, bbox_inches="tight")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(description)}" src="data:{media_type};base64,{data}">'
