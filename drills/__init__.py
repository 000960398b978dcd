"""Drills: programs that people or nightly jobs run against real processes, packages, databases and containers.

A drill uses the helpers of `tests` (ports, waiting, forking, stores), and tests use the modules of drills. No
import goes in a circle. The drills' own tests are in `tests/drills`.
"""
