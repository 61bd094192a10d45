"""A picture to take the style of where there is no other: strokes of paint around some eddies."""

import numpy as np

_EDDIES = ((0.28, 0.30, 1.0), (0.68, 0.42, -1.2), (0.42, 0.78, 0.8), (0.88, 0.86, -0.7))
"""Height and width of each one's centre, from 0 to 1, and how fast and which way it turns."""

_PALETTE = ((18, 32, 92), (32, 74, 148), (70, 132, 178), (176, 196, 150), (240, 198, 62))
_STEPS = 24


def painting(size: int = 256) -> np.ndarray:
    """The same picture each time, (size, size, 3), uint8, RGB.

    Noise is smeared along the lines of a flow, as in line integral convolution (Cabral and Leedom,
    1993), and coloured by how near an eddy is.
    """
    axis = (np.arange(size) + 0.5) / size
    y, x = np.meshgrid(axis, axis, indexing="ij")
    flow_y, flow_x, nearness = 0.15 + 0 * y, 0.35 + 0 * x, 0 * x
    for center_y, center_x, spin in _EDDIES:
        dy, dx = y - center_y, x - center_x
        near = np.exp(-(dy**2 + dx**2) / 0.02)
        strength = spin / (0.05 + np.hypot(dy, dx))
        flow_y, flow_x = flow_y + strength * dx, flow_x - strength * dy
        nearness = nearness + near
    length = np.hypot(flow_y, flow_x) + 1e-9
    step = 1.5 / 256  # so that the strokes have a length that does not depend on the size
    noise = np.random.default_rng(0).random((64, 64))
    smeared = np.zeros_like(x)
    at_y, at_x = y.copy(), x.copy()
    for _ in range(_STEPS):
        rows, columns = ((64 * (at % 1)).astype(int) % 64 for at in (at_y, at_x))
        smeared += noise[rows, columns] / _STEPS
        at_y, at_x = at_y + step * flow_y / length, at_x + step * flow_x / length
    tone = 1.6 * (smeared - smeared.min()) / np.ptp(smeared) - 0.4 + 0.8 * nearness
    tone = np.clip(tone, 0, 1) * (len(_PALETTE) - 1)
    colors = [np.interp(tone, np.arange(len(_PALETTE)), channel) for channel in zip(*_PALETTE)]
    return np.rint(np.stack(colors, axis=-1)).astype(np.uint8)
