"""Plans a run on accelerators that are not at hand; see `python -m experiments.plan --help`."""
