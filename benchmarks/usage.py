"""What it costs to look at a host: processor time of a sample, and of a day of them.

Run: ``python benchmarks/usage.py``.
"""

import statistics
import time

from measure import Report

from rankzero.host.usage import UsageSampler

SAMPLES = 2_000
DAY = 86_400.0


def main() -> None:
    report = Report("usage", "Looking at a host")
    sampler = UsageSampler(use_gpu=False, now=0.0)
    each = []
    for _ in range(SAMPLES):
        began = time.process_time()
        sampler.sample(sampler.next_at)
        each.append((time.process_time() - began) * 1e6)
    report.add("processor time of a sample", each, "us")

    sampler, count = UsageSampler(use_gpu=False, now=0.0), 0
    while sampler.next_at < DAY:
        sampler.sample(sampler.next_at)
        count += 1
    report.add("samples in a day", [count], "")
    in_all = statistics.fmean(each) / 1e6
    report.hold("share of a core while it samples most, every 5 s", in_all / 5.0, 0.002)
    report.hold("share of a core over a day", in_all * count / DAY, 0.002)
    report.finish()


if __name__ == "__main__":
    main()
