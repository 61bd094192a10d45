"""How the number of operations of a layer grows with its sizes, beside the paper's Table 1."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from fvcore.nn import FlopCountAnalysis

from ..layers import SwitchWhiten2d


@dataclass(frozen=True)
class Growth:
    """How the number of operations grows with one size while the others stay.

    Attributes:
        variable: the size that grows, "N", "C", "G" or "HW".
        regime: what dominates, "HW >> G" or "HW << G".
        sizes: the values of the variable.
        operations: multiply-adds of a forward pass at each of them.
        expected: the exponent of the variable in N C G max(HW, G).
    """

    variable: str
    regime: str
    sizes: tuple[int, ...]
    operations: tuple[float, ...]
    expected: int

    @property
    def exponent(self) -> float:
        """The slope of the operations over the sizes, both logarithmic."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.operations), 1)[0])

    @property
    def agrees(self) -> bool:
        # The term that does not dominate bends the line a little.
        return abs(self.exponent - self.expected) < 0.15

    def record(self) -> dict[str, object]:
        """What `results.json` holds of it."""
        return asdict(self) | {"exponent": self.exponent, "agrees": self.agrees}

    def row(self) -> dict[str, object]:
        """What a table shows of it, by column."""
        return {
            "grows": self.variable,
            "where": self.regime,
            "from ... to": " ".join(map(str, self.sizes)),
            "million multiply-adds": " ".join(f"{count / 1e6:.4g}" for count in self.operations),
            "exponent": self.exponent,
            "N C G max(HW, G)": self.expected,
            "agrees": "yes" if self.agrees else "NO",
        }


def measure_growth() -> list[Growth]:
    """Count operations of the layer {bw, iw} while one size at a time grows.

    The paper's Table 1 has O(N C G max(HW, G)); each size is tried where HW dominates, and G also
    where G does.
    """
    base = {"N": 1, "C": 64, "G": 16, "HW": 128**2}
    growths = []
    for variable, regime, sizes, others, expected in (
        ("N", "HW >> G", (1, 2, 4, 8), base, 1),
        ("C", "HW >> G", (64, 128, 256, 512), base, 1),
        ("G", "HW >> G", (8, 16, 32, 64), base, 1),
        ("HW", "HW >> G", (32**2, 64**2, 128**2), base, 1),
        ("G", "HW << G", (16, 32, 64), base | {"HW": 2**2}, 2),
    ):
        operations = tuple(count_operations(**(others | {variable: size})) for size in sizes)
        growths.append(Growth(variable, regime, sizes, operations, expected))
    return growths


def count_operations(N: int, C: int, G: int, HW: int) -> float:
    """Multiply-adds of the matrix products in a forward pass of the layer {bw, iw}, by Newton.

    fvcore traces the layer, which then runs as plain operations. Work on single values, O(N C HW),
    is not counted; the trace has no eigendecomposition either, only Newton's products.

    Args:
        HW: a square number.
    """
    side = math.isqrt(HW)
    layer = SwitchWhiten2d(C, num_pergroup=G)
    counter = FlopCountAnalysis(layer, torch.randn(N, C, side, side))
    counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counter.tracer_warnings("none").set_op_handle("aten::baddbmm", _baddbmm_operations)
    return counter.total()


def _baddbmm_operations(inputs: Sequence, _outputs: Sequence) -> int:
    """(B, I, J) plus the product of (B, I, K) and (B, K, J)."""
    _, left, right = (value.type().sizes() for value in inputs[:3])
    return math.prod(left) * right[-1]
