"""Tests and processes that they start trace and lower thousands of small programs; this makes each cheaper."""

import gc
import inspect
import threading

from jax._src.interpreters import mlir


def make_lowering_cheap(lowerings=64):
  """Looks for garbage seldom, and shares contexts of MLIR.

  Tracing makes many small objects that live: looking for garbage among them took a tenth of the time of these tests. A
  context takes longer to make than a small program to lower, and so each is of that many programs of a thread.
  """
  gc.set_threshold(200_000, 50, 1000)
  init, here = mlir.ModuleContext.__init__, threading.local()
  if "context" not in inspect.signature(init).parameters:
    return  # another JAX, whose contexts cannot be shared like this

  def init_in_shared(self, *args, context=None, **options):
    here.left = getattr(here, "left", 0) - 1
    if here.left < 0:
      here.context, here.left = mlir.make_ir_context(), lowerings - 1
    init(self, *args, context=context or here.context, **options)

  mlir.ModuleContext.__init__ = init_in_shared
