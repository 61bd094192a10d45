"""What SW learned: importance ratios, the gap between two domains, and how white the output is.

The same as `tools/plot_importance.py`, `tools/domain_gap.py` and `tools/whitening_report.py`, as
functions that return arrays and matplotlib figures, for notebooks.
"""

from .drawing import save_figure
from .importance import (
    Importance,
    average_ratios,
    importance_curves,
    importance_ratios,
    read_importance,
)
from .importance_figures import (
    average_ratios_figure,
    final_ratios_figure,
    importance_curves_figure,
)
from .metrics import read_metrics

__all__ = [
    "Importance",
    "average_ratios",
    "average_ratios_figure",
    "final_ratios_figure",
    "importance_curves",
    "importance_curves_figure",
    "importance_ratios",
    "read_importance",
    "read_metrics",
    "save_figure",
]
