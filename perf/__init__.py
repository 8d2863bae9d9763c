"""Benchmarks: pytest-benchmark suites on the device's clock, peers measured in the same run, baselines per device."""
