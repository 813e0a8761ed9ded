"""An archive of the classes that the suite's JVMs load (Java's class data sharing), which halves what a JVM costs.

``python -m tests.spark_classes``, which `scripts/setup.sh` runs, makes the archive in the virtual environment. A JVM
checks whether the archive fits its Java and its jars, and loads the classes from the jars if it does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

PATH = os.path.join(sys.prefix, "spark-classes.jsa")

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of every JVM of the suite: it lives for a minute, and should start quickly rather than become fast."""

# Else Java 17 maps an archive at a random address, and changes every pointer in its 220 MB: 0.1 s for each JVM.
_AT_ITS_ADDRESS = "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"

# The first one hides warnings about classes that cannot be archived, and about archives that do not fit.
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"

TIMEOUT = 300.0  # Seconds for the JVMs of `make` to do their work on a machine that is busy

_CLIENT = """
import sys
from pyspark.sql import SparkSession
session = SparkSession.builder.remote(sys.argv[1]).create()
print(session.range(10).mapInArrow(lambda batches: batches, "id long").toPandas().id.sum(), session.version)
session.addArtifact(sys.argv[2], file=True)
session.stop()
"""


def options() -> str:
    """Returns the options of every JVM of the suite, of clusters and executors too."""
    if not os.path.exists(PATH):
        return QUICK_START
    return f"{QUICK_START} -XX:SharedArchiveFile={PATH} -Xshare:auto {_AT_ITS_ADDRESS} {_QUIET}"


def make() -> None:
    """Runs a JVM through what tests do with Spark, and has it archive its classes as it ends."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from tests.conftest import free_port

    port, unfinished = free_port(), f"{PATH}.tmp"
    os.environ.update(JDK_JAVA_OPTIONS=QUICK_START, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    builder: Any = SparkSession.builder.config("spark.ui.enabled", "false")
    builder.config("spark.driver.defaultJavaOptions", f"-XX:ArchiveClassesAtExit={unfinished} {_QUIET}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # The JVM of such a cluster is its master and its workers, too.
        cluster = builder.master("local-cluster[1,1,1024]").getOrCreate()
        cluster.sparkContext.parallelize(range(2), 1).barrier().mapPartitions(list).collect()
        cluster.stop()
        builder.config("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
        builder.config("spark.connect.grpc.binding.address", "127.0.0.1").config(
            "spark.connect.grpc.binding.port", str(port)
        )
        session = builder.master("local[2]").getOrCreate()
        session.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
        _query(session, folder)
        client = [sys.executable, "-c", _CLIENT, f"sc://127.0.0.1:{port}", os.path.abspath(__file__)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
        subprocess.run(client, env=environment, check=True, timeout=TIMEOUT)
        session.stop()
        gateway: Any = SparkContext._gateway
        gateway.proc.stdin.close()
        gateway.proc.wait(TIMEOUT)
    os.replace(unfinished, PATH)


def _query(session: Any, folder: str) -> None:
    from pyspark.sql import functions as F

    number = F.col("id")
    frame = session.range(0, 100, 1, 3).select(
        "id",
        (number / 2).cast("float").alias("half"),
        F.array(number, number + 1).alias("pair"),
        F.struct(number.cast("string").alias("text"), F.timestamp_seconds(number).alias("time")).alias("nested"),
    )
    frame.write.parquet(f"{folder}/rows")
    read = session.read.parquet(f"{folder}/rows")
    read.createOrReplaceTempView("rows")
    session.sql("SELECT max(id), count(*) FROM rows WHERE id > 5 ORDER BY 1").collect()
    read.repartition(2).groupBy("half").agg(F.count_distinct("id"), F.bit_xor(F.xxhash64("pair"))).collect()
    session.createDataFrame([(None, 1), (1, None)], "a int, b int").distinct().toPandas()
    read.select("id").mapInArrow(lambda batches: batches, "id long").write.mode("append").parquet(f"{folder}/copy")
    read.select(F.udf(lambda value: value, "long")("id")).collect()


if __name__ == "__main__":
    make()
