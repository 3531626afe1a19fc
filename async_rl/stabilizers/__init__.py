"""Optax transformations that keep policy-gradient training stable when its data are stale. Needs jax and optax only."""

from async_rl.stabilizers._alignment import KEPT as KEPT
from async_rl.stabilizers._alignment import PROJECTED as PROJECTED
from async_rl.stabilizers._alignment import SKIPPED as SKIPPED
from async_rl.stabilizers._alignment import ControlAlignmentState as ControlAlignmentState
from async_rl.stabilizers._alignment import control_alignment as control_alignment
from async_rl.stabilizers._ess import ScaleByEssState as ScaleByEssState
from async_rl.stabilizers._ess import scale_by_ess as scale_by_ess
from async_rl.stabilizers._statistics import ess_ratio as ess_ratio
from async_rl.stabilizers._statistics import global_norm as global_norm
