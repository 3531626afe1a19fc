"""Optax transformations that keep policy-gradient training stable on stale data. Needs jax and optax only.

The recommended chain::

    optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(1e-6),
      scale_by_ess(),
    )

Order matters:

- `scale_by_ess` comes last, after the learning rate, so that it sets the learning rate of one step. Before clipping it
  does next to nothing while clipping is active; before Adam it cancels; between Adam and weight decay it spares the
  decay.
- `track_norm` and `track_cosine` go wherever the thing to be observed is: gradients at the front, steps at the end.

In a trainer that passes no extra arguments to the optimizer, `scale_by_ess_probe(chain)` takes the place of
`scale_by_ess`.

Options, for those who want to try them:

- `control_alignment(chain)` skips steps whose gradient repeats the previous one. It wraps the whole chain, so that a
  skipped step leaves Adam's moments alone. Measure first (`track_cosine`): where the signal is strong, gradients are
  aligned without any staleness and it skips step after step, up to its limit. In one study of ours it helped TOPR at
  lag 4, as less momentum did, without a skip; it is not shown to help at lags 10 and 32.
- `scale_by_lag()`, last like `scale_by_ess`, divides the step by the mean lag of the batch.
- `lead_by_momentum(chain, lag)` lets samplers draw with the weights that momentum is about to reach. It is not shown to
  help over the same momentum without it.
- `control_lag` is no transformation: it tells a trainer that can change its lag bound while it runs when to do so.

`optax.MultiSteps` passes a transformation the extra arguments of the last micro-batch only: accumulate gradients
outside, or pass the whole batch's `log_weights` with every micro-batch.
"""

from async_rl._arrays import ess_ratio
from async_rl.stabilizers._alignment import AlignmentRegime
from async_rl.stabilizers._alignment import ControlAlignmentState
from async_rl.stabilizers._alignment import control_alignment
from async_rl.stabilizers._ess import ScaleByEssState
from async_rl.stabilizers._ess import TrackOnPolicyRatioState
from async_rl.stabilizers._ess import scale_by_ess
from async_rl.stabilizers._ess import track_on_policy_ratio
from async_rl.stabilizers._ess_probe import ScaleByEssProbeState
from async_rl.stabilizers._ess_probe import attach_ess_probe
from async_rl.stabilizers._ess_probe import ess_probe
from async_rl.stabilizers._ess_probe import scale_by_ess_probe
from async_rl.stabilizers._gradient_trackers import TrackCosineState
from async_rl.stabilizers._gradient_trackers import TrackNormState
from async_rl.stabilizers._gradient_trackers import track_cosine
from async_rl.stabilizers._gradient_trackers import track_norm
from async_rl.stabilizers._lag_controller import LagController
from async_rl.stabilizers._lag_controller import LagControllerState
from async_rl.stabilizers._lag_controller import control_lag
from async_rl.stabilizers._lag_rate import ScaleByLagState
from async_rl.stabilizers._lag_rate import scale_by_lag
from async_rl.stabilizers._lead import LeadByMomentumState
from async_rl.stabilizers._lead import has_lead
from async_rl.stabilizers._lead import lead_by_momentum
from async_rl.stabilizers._lead import leading_params
