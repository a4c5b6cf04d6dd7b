"""Figures -> one HTML page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from sixfold_runtime.report import plots
from sixfold_runtime.report.model import Figures

_CAUSES = {
    "padding": "padding",
    "rejected_draft": "rejected drafts",
    "recomputed_prefix": "prefixes computed again",
    "unneeded_layers": "layers that changed nothing",
    "cancelled": "clients that left",
}


def page(figures: Figures, title: str) -> str:
    """The whole page."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    waste = [(_CAUSES.get(cause, cause), share, f"{100 * share:.1f} %") for cause, share in figures.wasted_by_cause]
    has_costs = any(entry.cost_share is not None for entry in figures.quadrants)
    return environment.get_template("page.html.j2").render(
        f=figures,
        title=title,
        money=money,
        ms=milliseconds,
        # The plots are our own markup; every word in them is escaped where it is put in.
        heat_plot=Markup(plots.heat_map(figures.cells)),
        waste_plot=Markup(plots.bars(waste)),
        quadrant_plot=Markup(plots.quadrants(figures.quadrants)) if has_costs else "",
    )


def money(amount: float) -> str:
    """With two digits that say something."""
    if amount >= 1:
        return f"{amount:,.2f}"
    return f"{amount:.2g}" if amount else "0"


def milliseconds(value: float) -> str:
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.3g} ms"
