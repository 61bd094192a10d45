"""What SW learned: importance ratios, the gap between two domains, and how white the output is.

The same as `tools/compare_runs.py`, `tools/plot_importance.py`, `tools/domain_gap.py` and
`tools/whitening_report.py`, as functions that return arrays and matplotlib figures, for notebooks.
"""

from .comparison import comparison_figure
from .domain_gap import domain_gap, domain_gap_figure, layer_features
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
from .importance_results import save_importance
from .metrics import read_metrics
from .mmd import median_distance, squared_mmd
from .results import save_result
from .whitening import Whiteness, whiteness, whitening_report
from .whitening_summary import save_whitening, whitening_figure, whitening_table

__all__ = [
    "Importance",
    "Whiteness",
    "average_ratios",
    "average_ratios_figure",
    "comparison_figure",
    "domain_gap",
    "domain_gap_figure",
    "final_ratios_figure",
    "importance_curves",
    "importance_curves_figure",
    "importance_ratios",
    "layer_features",
    "median_distance",
    "read_importance",
    "read_metrics",
    "save_figure",
    "save_importance",
    "save_result",
    "save_whitening",
    "squared_mmd",
    "whiteness",
    "whitening_figure",
    "whitening_report",
    "whitening_table",
]
