"""Optax transformations that keep policy-gradient training stable when its data are stale. Needs jax and optax only.

The order in a chain has a meaning. The one to start from is::

    optax.chain(
      control_alignment(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6))),
      scale_by_ess(),
    )

- `control_alignment` wraps the optimizer, so that a skipped step leaves its moments alone, and sees the gradient before
  clipping (its cosine does not change with clipping; its reported norm does).
- `scale_by_ess` after the learning rate sets the learning rate of one step. Before clipping it does next to nothing
  while clipping is active; before Adam it cancels; between Adam and weight decay it spares the decay. At the end of
  what `control_alignment` wraps it does the same as after it, but its state then stands still on a skipped step.
- `lead_by_momentum` goes last, so that what it continues is the whole step.
- `track_norm` and `track_cosine` go wherever the thing to be observed is.

`optax.MultiSteps` hands a transformation the extra arguments of the last micro-batch only: accumulate gradients
outside, and pass `log_weights` of the whole batch.
"""

from async_rl._arrays import ess_ratio
from async_rl.stabilizers._alignment import KEPT
from async_rl.stabilizers._alignment import PROJECTED
from async_rl.stabilizers._alignment import SKIPPED
from async_rl.stabilizers._alignment import ControlAlignmentState
from async_rl.stabilizers._alignment import control_alignment
from async_rl.stabilizers._ess import ScaleByEssState
from async_rl.stabilizers._ess import scale_by_ess
from async_rl.stabilizers._lag_controller import LagController
from async_rl.stabilizers._lag_controller import LagControllerState
from async_rl.stabilizers._lag_controller import control_lag
from async_rl.stabilizers._lead import LeadByMomentumState
from async_rl.stabilizers._lead import lead_by_momentum
from async_rl.stabilizers._lead import leading_params
from async_rl.stabilizers._telemetry import TrackCosineState
from async_rl.stabilizers._telemetry import TrackNormState
from async_rl.stabilizers._telemetry import track_cosine
from async_rl.stabilizers._telemetry import track_norm
