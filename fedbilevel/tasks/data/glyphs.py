"""Generated characters in the format of Omniglot, for tests and small runs.

A character is a few curved strokes; an alphabet is a stock of strokes that its characters are composed of, so that they
resemble each other. Every drawing turns, shifts, stretches and bends the strokes a little, with a pen of its own width.
"""

from __future__ import annotations

import numpy as np

from fedbilevel.tasks.data.datasets import Classes

SIDE = 28
STOCK, STROKES, POINTS = 6, 3, 24  # strokes of an alphabet, strokes of a character, points along a stroke


def make(alphabets: int = 6, characters: int = 8, drawings: int = 20, seed: int = 0) -> Classes:
    """Alphabets, characters per alphabet and drawings per character as given; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    stock = rng.uniform(-1, 1, (alphabets, STOCK, 3, 2))  # quadratic Bézier curves: three control points in the plane
    chosen = rng.random((alphabets, characters, STOCK)).argsort(-1)[..., :STROKES]
    strokes = stock[np.arange(alphabets)[:, None, None], chosen].reshape(-1, STROKES, 3, 2)
    strokes += 0.35 * rng.standard_normal((len(strokes), STROKES, 1, 2))  # where a character has its stroke
    strokes -= strokes.mean((1, 2), keepdims=True)
    images = np.concatenate([_drawn(character, drawings, rng) for character in strokes])
    return Classes(
        images,
        np.repeat(np.arange(len(strokes), dtype=np.int32), drawings),
        np.repeat(np.arange(alphabets, dtype=np.int32), characters),
        tuple(f"alphabet-{k}" for k in range(alphabets)),
    )


def _drawn(strokes: np.ndarray, drawings: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 (drawings, 28, 28) of a character's strokes (STROKES, 3, 2)."""
    bent = strokes + 0.12 * rng.standard_normal((drawings, *strokes.shape))
    angle = 0.2 * rng.standard_normal(drawings)
    stretch = np.exp(0.15 * rng.standard_normal((drawings, 2, 1)))
    turn = np.stack([np.stack([np.cos(angle), -np.sin(angle)], -1), np.stack([np.sin(angle), np.cos(angle)], -1)], -2)
    shift = 0.1 * rng.standard_normal((drawings, 1, 2))
    control = np.einsum("dskc,dce->dske", bent, stretch * turn)
    t = np.linspace(0, 1, POINTS)
    bezier = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2], -1)
    points = np.einsum("pk,dske->dspe", bezier, control).reshape(drawings, -1, 2) + shift
    points = ((points * 0.62 + 1) * (SIDE / 2)).astype(np.float32)
    pen = rng.uniform(0.5, 1, (drawings, 1)).astype(np.float32)

    along = np.arange(SIDE, dtype=np.float32) + 0.5
    rows = (points[:, None, :, 1] - along[:, None]) ** 2  # (drawings, 28, points)
    columns = (points[:, None, :, 0] - along[:, None]) ** 2
    distance = np.sqrt((rows[:, :, None] + columns[:, None]).min(-1))
    return np.round(255 * np.clip(pen[:, None] + 0.5 - distance, 0, 1)).astype(np.uint8)
