"""Handwritten digits as a Spark table: features by Spark, training, a table of scores. Knows no orchestrator.

Data: scikit-learn's ``load_digits``, each scan several times with noise.
"""

from typing import Any

import digits


def write_features(folder: str, copies: int = 4) -> dict[str, str]:
    """Has Spark make the features, as two tables.

    Args:
        folder: Where they go.
        copies: Rows for each scan of the package.

    Returns:
        The paths of ``train`` and ``test``.
    """
    import os
    import sys

    from pyspark.sql import SparkSession
    from sklearn.datasets import load_digits

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(os.environ.get("SPARK_MASTER", "local[2]")).getOrCreate()
    bunch = load_digits()
    rows = [
        (number, [float(pixel) for pixel in image], int(label))
        for number, (image, label) in enumerate(zip(bunch.data, bunch.target, strict=True))
    ]
    scans = spark.createDataFrame(rows, "id long, scan array<double>, label int")
    noisy = scans.crossJoin(spark.range(copies).withColumnRenamed("id", "copy")).selectExpr(
        "id",
        "bigint(label) AS label",
        "transform(scan, (pixel, i) -> float(pixel / 16 + 0.02 * sin(id + i * copy))) AS pixels",
    )
    paths = {"train": f"{folder}/train", "test": f"{folder}/test"}
    noisy.where("id % 5 > 0").write.mode("overwrite").parquet(paths["train"])
    noisy.where("id % 5 = 0").write.mode("overwrite").parquet(paths["test"])
    spark.stop()
    return paths


def train(epochs: int = 3) -> dict[str, Any]:
    """Trains on the dataset ``train``; every rank runs this. Continues from the last checkpoint, at the same batch.

    Args:
        epochs: Passes over the rows.

    Returns:
        The model's state dict.
    """
    import torch

    import rankzero.train as rt

    torch.manual_seed(digits.SEED)
    model = rt.prepare_model(digits.build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    shard = rt.get_dataset_shard("train")
    if checkpoint := rt.get_checkpoint():
        state = checkpoint.load()
        rt.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        shard.load_state_dict(state["shard"])
    while shard.epoch < epochs:
        epoch, total = shard.epoch, 0.0
        for batch in shard.iter_batches(64, shuffle=True, seed=digits.SEED):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(_images(batch)), batch["label"])
            loss.backward()
            optimizer.step()
            total += loss.item()
        state = {"model": rt.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
        rt.report({"epoch": epoch, "loss": total}, checkpoint={**state, "shard": shard.state_dict()})
    return dict(rt.unwrap_model(model).state_dict())


def score(weights: dict[str, Any]) -> Any:
    """Reads the scans of the dataset ``test``; every rank writes its part of the table.

    Args:
        weights: The model's state dict.

    Returns:
        The table, with ``id``, ``label`` and ``guess``.
    """
    import torch

    import rankzero.train as rt

    model = digits.build_model()
    model.load_state_dict(weights)
    model.eval()

    def read(batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            return {"id": batch["id"], "label": batch["label"], "guess": model(_images(batch)).argmax(dim=1)}

    return rt.write_rows(rt.get_dataset_shard("test").iter_batches(256, collate=read, pad=False))


def accuracy(scores: Any) -> float:
    """Share of the rows of a table of scores that are right."""
    frame = scores.to_pandas()
    return float((frame["label"] == frame["guess"]).mean())


def _images(batch: Any) -> Any:
    # In a file an array may be of any length, so a column of them is values and offsets.
    return batch["pixels"].values.reshape(-1, 1, 8, 8)
