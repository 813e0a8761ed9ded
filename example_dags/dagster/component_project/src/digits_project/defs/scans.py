"""The data: handwritten digits of scikit-learn."""

from typing import Any

import dagster as dg


@dg.asset(key=["raw", "scans"], kinds={"scikitlearn"})
def scans() -> dict[str, Any]:
    """Images (N, 64) in 0..1 and labels (N,)."""
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    return {"images": torch.tensor(digits.data / 16.0, dtype=torch.float32), "labels": torch.tensor(digits.target)}
