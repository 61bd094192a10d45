"""What a run leaves for people to read: its page, its tables, its curves."""

from .curves import plot_training_curves
from .page import write_page
from .tables import write_results

__all__ = ["plot_training_curves", "write_page", "write_results"]
