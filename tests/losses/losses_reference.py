"""The family in float64 numpy, one token at a time, as written in the papers. Slow, and obviously right.

Each function takes `lp`, through which the gradient flows, and `fixed`, the same numbers under a stop-gradient, so that
finite differences in `lp` alone give the gradient that the loss must have. Returns (loss, keep, clipped) as [B, T].
"""

import math

import numpy as np


def by_token(weight_of):
  """Lifts `weight_of(b, t, world) -> (loss, keep, clipped)` for one trained token to a whole batch."""

  def reference(lp, fixed, mu, advantages, mask, **options):
    world = World(lp, fixed, mu, advantages, mask)
    loss, keep, clipped = np.zeros(lp.shape), np.zeros(lp.shape, bool), np.zeros(lp.shape, bool)
    for b in range(lp.shape[0]):
      for t in range(lp.shape[1]):
        if mask[b, t]:
          loss[b, t], keep[b, t], clipped[b, t] = weight_of(world, b, t, **options)
    return loss * keep, keep, clipped & keep

  return reference


class World:
  """One batch in float64."""

  def __init__(self, lp, fixed, mu, advantages, mask):
    self.lp, self.fixed, self.mu, self.mask, self.advantages = lp, fixed, mu, mask, advantages

  def adv(self, b, t):
    return self.advantages[b] if self.advantages.ndim == 1 else self.advantages[b, t]

  def rho(self, b, t, lp=None):
    """Token ratio; of the stop-gradient policy unless told otherwise."""
    return math.exp((self.fixed if lp is None else lp)[b, t] - self.mu[b, t])

  def w(self, b, lp=None):
    """Sequence weight, the product of the ratios of the trained tokens."""
    return math.prod(self.rho(b, t, lp) for t in range(self.lp.shape[1]) if self.mask[b, t])

  def length(self, b):
    return int(self.mask[b].sum())


def score(world, b, t, weight, clipped=False, keep=True):
  return -weight * world.adv(b, t) * world.lp[b, t], keep, clipped


@by_token
def reinforce(world, b, t):
  return score(world, b, t, 1.0)


@by_token
def cispo(world, b, t, low=0.0, high=5.0):
  rho = world.rho(b, t)
  return score(world, b, t, min(max(rho, low), high), clipped=not low <= rho <= high)


@by_token
def token_tis(world, b, t, cap=2.0):
  return score(world, b, t, min(world.rho(b, t), cap), clipped=world.rho(b, t) > cap)


@by_token
def sequence_tis(world, b, t, cap=8.0):
  return score(world, b, t, min(world.w(b), cap), clipped=world.w(b) > cap)


@by_token
def topr(world, b, t, cap=1.0):
  if world.adv(b, t) >= 0:
    return score(world, b, t, 1.0)
  return score(world, b, t, min(world.w(b), cap), clipped=world.w(b) > cap)


@by_token
def icepop(world, b, t, low=0.5, high=5.0):
  return score(world, b, t, world.rho(b, t), keep=low <= world.rho(b, t) <= high)


@by_token
def sequence_mask(world, b, t, low=0.125, high=8.0):
  return score(world, b, t, world.w(b), keep=low <= world.w(b) <= high)


@by_token
def geometric_mask(world, b, t, low=0.9, high=1.1):
  return score(world, b, t, 1.0, keep=low <= world.w(b) ** (1 / world.length(b)) <= high)


@by_token
def m2po(world, b, t, threshold=None, signed=False):
  log_rho = math.log(world.rho(b, t))
  back = signed and world.adv(b, t) * log_rho <= 0
  return score(world, b, t, world.rho(b, t), keep=log_rho**2 < threshold or back)


def dppo_keeps(world, b, t, bound, kl):
  p, q = (min(math.exp(x[b, t]), 1.0) for x in (world.fixed, world.mu))
  others = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
  distance = q * (world.mu[b, t] - world.fixed[b, t]) + others if kl else abs(p - q)
  return distance <= bound or not (p > q if world.adv(b, t) > 0 else p < q)


@by_token
def dppo(world, b, t, bound=0.2, kl=False):
  rho = world.rho(b, t)
  return score(world, b, t, min(rho, 20.0), clipped=rho > 20.0, keep=dppo_keeps(world, b, t, bound, kl))


@by_token
def estr(world, b, t, entropy=None, tau=1.0, eps=0.01, low=0.2, high=0.2):
  loss, _, clipped = surrogate(world.rho(b, t, world.lp), world.adv(b, t), low, high)
  return loss, math.log(world.rho(b, t)) ** 2 / (entropy[b, t] + eps) <= tau, clipped


@by_token
def trm(world, b, t, max_bound=0.05, mean_bound=0.001, low=0.2, high=0.2):
  k3 = [world.rho(b, s) - 1 - math.log(world.rho(b, s)) for s in range(world.lp.shape[1]) if world.mask[b, s]]
  loss, _, clipped = surrogate(world.rho(b, t, world.lp), world.adv(b, t), low, high)
  return loss, max(k3) <= max_bound and np.mean(k3) <= mean_bound, clipped


@by_token
def log_squared(world, b, t, tau=1e-3):
  loss, _, clipped = score(world, b, t, min(world.rho(b, t), 20.0), clipped=world.rho(b, t) > 20.0)
  kept = dppo_keeps(world, b, t, 0.2, False)
  return loss * kept + tau * (world.lp[b, t] - world.mu[b, t]) ** 2, True, clipped and kept


@by_token
def sapo(world, b, t, positive=1.0, negative=1.05):
  tau = positive if world.adv(b, t) > 0 else negative
  return -world.adv(b, t) * 4 / tau / (1 + math.exp(-tau * (world.rho(b, t, world.lp) - 1))), True, False


@by_token
def vespo(world, b, t, shape_positive=2.0, rate_positive=3.0, shape_negative=3.0, rate_negative=2.0):
  k, rate = (shape_positive, rate_positive) if world.adv(b, t) >= 0 else (shape_negative, rate_negative)
  return score(world, b, t, world.w(b) ** k * math.exp(rate * (1 - world.w(b))))


def surrogate(ratio, advantage, low, high, dual_clip=None, weight=1.0):
  """PPO's minimum; `clipped` where the bound, not the ratio, decides."""
  plain = ratio * advantage
  bounded = min(max(ratio, 1 - low), 1 + high) * advantage
  objective = min(plain, bounded)
  clipped = bounded < plain
  if dual_clip is not None and advantage < 0 and dual_clip * advantage > objective:
    objective, clipped = dual_clip * advantage, True
  return -weight * objective, True, clipped


@by_token
def ppo_clip(world, b, t, low=0.2, high=0.2, dual_clip=None):
  return surrogate(world.rho(b, t, world.lp), world.adv(b, t), low, high, dual_clip)


@by_token
def sat(world, b, t, log_ratio_scale=None, low=0.2, high=0.2, exponent=2.0):
  distance = abs(math.log(world.rho(b, t)))
  hill = log_ratio_scale**exponent / (log_ratio_scale**exponent + distance**exponent)
  c = 1.0 if distance <= log_ratio_scale else hill
  above = world.rho(b, t) > 1
  return surrogate(world.rho(b, t, world.lp), world.adv(b, t), low if above else c * low, c * high if above else high)


@by_token
def opsm(world, b, t, delta=0.1, low=0.2, high=0.2):
  drift = np.mean([world.mu[b, s] - world.fixed[b, s] for s in range(world.lp.shape[1]) if world.mask[b, s]])
  loss, _, clipped = surrogate(world.rho(b, t, world.lp), world.adv(b, t), low, high)
  return loss, not (world.adv(b, t) < 0 and drift > delta), clipped


@by_token
def gspo(world, b, t, low=3e-4, high=4e-4, token=False):
  s = world.w(b) ** (1 / world.length(b))
  ratio = s * math.exp(world.lp[b, t] - world.fixed[b, t]) if token else world.w(b, world.lp) ** (1 / world.length(b))
  return surrogate(ratio, world.adv(b, t), low, high)


@by_token
def proximal_rloo(world, b, t, low=0.2, high=0.2):
  return surrogate(world.w(b, world.lp), world.adv(b, t), low, high)


@by_token
def decoupled_ppo(
  world, b, t, proximal, low=0.2, high=0.2, dual_clip=None, weighted=True, weight_cap=None, weight_reject=None
):
  weight = math.exp(proximal[b, t] - world.mu[b, t])
  keep = weight_reject is None or weight <= weight_reject
  capped = weight_cap is not None and weight > weight_cap
  weight = min(weight, weight_cap) if weight_cap is not None else weight
  ratio = math.exp(world.lp[b, t] - proximal[b, t])
  loss, _, clipped = surrogate(ratio, world.adv(b, t), low, high, dual_clip, weight if weighted else 1.0)
  return loss, keep, clipped or capped


def proximal(fixed, mu, lag, linear=False, behavior_at_zero=False):
  out = np.zeros(fixed.shape)
  for b, t in np.ndindex(fixed.shape):
    alpha = 1 / lag[b, t] if lag[b, t] >= 1 else float(behavior_at_zero)
    if linear:
      out[b, t] = math.log(alpha * math.exp(mu[b, t]) + (1 - alpha) * math.exp(fixed[b, t]))
    else:
      out[b, t] = alpha * mu[b, t] + (1 - alpha) * fixed[b, t]
  return out


def a3po(lp, fixed, mu, advantages, mask, lag=None, linear=False, behavior_at_zero=False, **options):
  prox = proximal(fixed, mu, lag, linear, behavior_at_zero)
  return decoupled_ppo(lp, fixed, mu, advantages, mask, proximal=prox, **options)


def gradient(reference, lp, mu, advantages, mask, cotangent, step=1e-6, **options):
  """Central differences of Σ cotangent · loss with respect to lp, [B, T]."""
  grad = np.zeros(lp.shape)
  for i in np.ndindex(lp.shape):
    values = []
    for sign in (1, -1):
      moved = lp.copy()
      moved[i] += sign * step
      values.append((reference(moved, lp, mu, advantages, mask, **options)[0] * cotangent).sum())
    grad[i] = (values[0] - values[1]) / (2 * step)
  return grad


def second_moment_threshold(log_ratios, mask, budget):
  """Rejects the largest squares (equal ones together) until the mean of the rest fits: halfway to them, or inf."""
  kept = sorted(float(x) ** 2 for x in log_ratios[mask])
  threshold = math.inf
  while kept and sum(kept) / len(kept) > budget:
    threshold = kept[-1]
    kept = [x for x in kept if x < threshold]
  return ((kept[-1] if kept else 0.0) + threshold) / 2


def log_ratio_quantile(log_ratios, mask, share):
  sizes = sorted(abs(float(x)) for x in log_ratios[mask])
  return next((x for i, x in enumerate(sizes, 1) if i >= share * len(sizes) - 1e-4), 0.0)


def score_centering(p, q, advantages, mask, weight):
  """Coefficient of log p(v) in the loss, [B, T, H]."""
  out = np.zeros(p.shape)
  for b, t in np.ndindex(mask.shape):
    if mask[b, t]:
      rho = (1 - q[b, t].sum()) / max(1 - p[b, t].sum(), 1e-6)
      for v in range(p.shape[2]):
        tail = rho * weight(1 / rho) * p[b, t, v]
        out[b, t, v] = advantages[b] * (q[b, t, v] * weight(p[b, t, v] / q[b, t, v]) - tail)
  return out


def aggregate(loss, mask, method, max_length=None, count_empty=False):
  rows = [loss[b][mask[b]] for b in range(len(loss)) if count_empty or mask[b].any()]
  if method == "token_mean":
    return loss[mask].sum() / max(mask.sum(), 1)
  if method == "sequence_mean":
    return sum(row.mean() if len(row) else 0.0 for row in rows) / max(len(rows), 1)
  return sum(row.sum() for row in rows) / max(len(rows) * max_length, 1)


def group_advantages(rewards, groups, weights=None, normalize_std=False):
  """R − Σ weight R / Σ weight over the group, with linear weights."""
  out = np.zeros(len(rewards))
  for i, g in enumerate(groups):
    members = [j for j, h in enumerate(groups) if h == g]
    weight = np.ones(len(members)) if weights is None else np.asarray([weights[j] for j in members])
    group_rewards = np.asarray([rewards[j] for j in members])
    out[i] = rewards[i] - (weight * group_rewards).sum() / weight.sum()
    std = group_rewards.std()
    if normalize_std and std > 1e-8:
      out[i] /= std
  return out


def rloo_advantages(rewards, groups):
  out = np.zeros(len(rewards))
  for i, g in enumerate(groups):
    others = [rewards[j] for j, h in enumerate(groups) if h == g and j != i]
    out[i] = rewards[i] - np.mean(others) if others else 0.0
  return out


def maxrl_advantages(rewards, groups):
  mean = np.array([np.mean([r for r, h in zip(rewards, groups) if h == g]) for g in groups])
  return np.divide(rewards - mean, mean, out=np.zeros(len(rewards)), where=mean != 0)


def gae(rewards, values, mask, discount, trace):
  """Σ_k (γλ)^k δ_{t+k} written out over the trained tokens."""
  advantages = np.zeros(rewards.shape)
  for b in range(len(rewards)):
    steps = np.flatnonzero(mask[b])
    nexts = [*values[b, steps[1:]], 0.0]
    deltas = [rewards[b, t] + discount * v - values[b, t] for t, v in zip(steps, nexts)]
    for i, t in enumerate(steps):
      advantages[b, t] = sum((discount * trace) ** (k - i) * deltas[k] for k in range(i, len(steps)))
  return advantages, np.where(mask, advantages + values, 0.0)
