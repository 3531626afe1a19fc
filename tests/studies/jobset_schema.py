"""Extracts what tests/experiments/test_launch_dry_run.py checks of the published schema of JobSet.

Command: python tests/studies/jobset_schema.py jobset.x-k8s.io_jobsets.yaml > tests/data/launch/jobset_schema.json
  (the file lies in config/components/crd/bases of github.com/kubernetes-sigs/jobset; needs PyYAML)
Result: the types, enumerations and required fields of what our manifest has, and the names of all other fields there.
"""

from __future__ import annotations

import json
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
_KEPT = ("type", "enum", "required")


def extract(schema, value):
  """Returns the part of a schema that is about `value`, with the bare names of its other fields."""
  kept = {key: schema[key] for key in _KEPT if key in schema}
  if isinstance(value, dict) and "properties" in schema:
    fields = schema["properties"].items()
    kept["properties"] = {name: extract(field, value[name]) if name in value else {} for name, field in fields}
  elif isinstance(value, list):
    merged = {name: field for item in value if isinstance(item, dict) for name, field in item.items()}
    kept["items"] = extract(schema["items"], merged or value[0])
  return kept


def main():
  import yaml

  from experiments.launch.__main__ import parse
  from experiments.launch._jobset import make_manifest

  where = ("--cluster", "c", "--location", "z", "--image", "i", "--spot", "--env", "A=1")
  _, target = parse("jobset", ["quickstart", "--topology", "v5e:4x4", "--run-dir", "gs://bucket/run", *where])
  published = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())["spec"]["versions"][0]
  schema = extract(published["schema"]["openAPIV3Schema"], make_manifest(target.job, target.cluster))
  print("\n".join(textwrap.wrap(json.dumps(schema), 118, break_long_words=False, break_on_hyphens=False)))


if __name__ == "__main__":
  main()
