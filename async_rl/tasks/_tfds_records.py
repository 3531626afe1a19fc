"""Generated data sets, written and served by TFDS as array_record files. TensorFlow is not needed and not loaded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np


def served(
  name: str,
  config: str,
  fields: Mapping[str, tuple[int, ...]],
  generate: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]],
  data_dir: str | None = None,
) -> Mapping[str, Sequence[Mapping[str, np.ndarray]]]:
  """Serves a data set of integer records by random access; writes it the first time.

  Args:
    name: the name of the data set, a folder of `data_dir`.
    config: the name of a folder below, which must tell everything that `generate` depends on; letters, digits, `_`, `-`
      and `.`.
    fields: the shape of each int32 field.
    generate: the function that makes the records of each split, called only if they are not on the disk yet.
    data_dir: the folder of all data sets; None means `$TFDS_DATA_DIR` or `~/tensorflow_datasets`.

  Returns:
    For each split a sequence of records, each a dict of int32 arrays.
  """
  import tensorflow_datasets as tfds  # slow to import, and reward workers never need it

  class Records(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)]  # noqa: RUF012 (TFDS wants a list)

    def _info(self):
      features = {key: tfds.features.Tensor(shape=shape, dtype=np.int32) for key, shape in fields.items()}
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True)

    def _split_generators(self, dl_manager):
      del dl_manager
      return {split: self._generate_examples(records) for split, records in generate().items()}

    def _generate_examples(self, records):
      yield from enumerate(records)

  Records.name = name
  tfds.disable_progress_bar()
  with _quiet():
    builder = prepared(lambda: Records(data_dir=data_dir, config=config, file_format="array_record"))
  return builder.as_data_source()


def prepared(make: Callable[[], Any]) -> Any:
  """Returns a TFDS builder whose data set is on the disk, and writes that unless another process does meanwhile.

  Args:
    make: the function that makes the builder. A builder knows the splits that were on the disk when it was made.

  Raises:
    OSError: if the data set cannot be written.
  """
  builder = make()
  if builder.is_prepared() and builder.info.splits:
    return builder
  try:
    builder.download_and_prepare()
  except OSError:
    if not builder.is_prepared():
      raise
  return make()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences TFDS, which reports downloads and warns of the folder that it is about to make."""
  from absl import logging

  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    logging.set_verbosity(verbosity)
