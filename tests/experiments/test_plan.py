"""The command that plans a run: its text, its JSON, its errors, and what it says of a run that does not fit."""

import dataclasses
import json
import re
import sys
from unittest import mock

import jax
import pytest
from jax.experimental import topologies

from experiments import configs
from experiments.plan import __main__ as command
from experiments.plan import _balance
from experiments.plan import _chips
from experiments.plan import _compile
from experiments.plan import _gpus
from experiments.plan import _measure
from experiments.plan import _measure_all
from experiments.plan import _plan
from experiments.plan import _plan_report
from experiments.plan import _request
from experiments.plan import _summary
from experiments.plan import table
from experiments.plan._chips import parse_topology


def request(*arguments):
  name, wanted, options = command.parse(list(arguments))
  return command.request_of(name, wanted, options)


@pytest.fixture
def in_this_process(monkeypatch):
  """Counts in this process, which has eight devices: a child takes seconds to start, and nothing is compiled here."""

  def measure_all(request, limit, names=()):
    head, *results = _measure.messages(request, names)
    return head, {x["program"]: x for x in results}

  monkeypatch.setattr(_plan, "measure_all", measure_all)
  monkeypatch.setattr(_chips, "compiler_version", lambda: None)


def test_a_run_is_planned_without_a_compiler_of_its_chips(in_this_process, capsys):
  assert command.main(["quickstart", "--topology", "h100:2", "--json"]) == 0
  plan = json.loads(capsys.readouterr().out)
  assert plan["meshes"]["learner"] == plan["meshes"]["generation"] == {"data": 1, "fsdp": 1, "tensor": 1}
  assert set(plan["fits"].values()) == {"unknown"}
  assert list(plan["seconds"]) == ["step", "stage", "gather", "prefill", "put", "decode"]
  assert plan["pace"]["step"] == max(plan["pace"]["learner"], plan["pace"]["generation"])
  assert plan["resident"]["learner"]["optimizer"] > 2 * plan["resident"]["learner"]["parameters"]
  assert plan["best_split"]["options"]["generation_devices"] == 1


def test_without_a_compiler_of_its_chips_the_plan_says_which_package_has_it(in_this_process, capsys):
  assert command.main(["quickstart", "--topology", "h100:2"]) == 0
  text = capsys.readouterr().out
  assert "temporaries unknown; install jax[cuda13] for its compiler, which needs no GPU" in text
  assert "exchanges: not counted" in text


def test_a_run_is_compiled_for_gpus_that_are_not_there(capsys):
  pytest.importorskip("jax_cuda13_plugin", reason="needs jax[cuda13]")
  assert command.main(["quickstart", "--topology", "h100:2", "--json"]) == 0
  plan = json.loads(capsys.readouterr().out)
  assert set(plan["fits"].values()) == {"yes"}
  assert command.main(["quickstart", "--topology", "h100:2"]) == 0  # found, not compiled
  text = capsys.readouterr().out
  assert "compiled for what programs need" in text
  (step,) = re.findall(r" step: temporaries ([\d.]+)", text)
  assert float(step) > 0


def test_where_jax_did_not_load_its_plugin_a_remedy_is_named(monkeypatch):
  monkeypatch.setattr(_gpus, "compiler_version", lambda: "jax-cuda13-plugin 0")
  monkeypatch.setattr(topologies, "get_topology_desc", mock.Mock(side_effect=NotImplementedError("cuda")))
  with pytest.raises(ImportError, match=r"did not load jax-cuda13-plugin 0: .*--no-compile.* set JAX_PLATFORMS=cpu"):
    parse_topology("h100:2").devices(compiled=True)


def test_a_run_that_cannot_fit_is_refused_with_remedies(in_this_process, capsys):
  arguments = ["gsm8k", "--topology", "h100:4", "--model", "qwen3-32b", "--depths", "2", "3", "--slots", "64"]
  assert command.main(arguments) == 1
  text = capsys.readouterr().out
  assert "32,76" in text.splitlines()[0]  # 32.76 billion parameters, in millions
  (line,) = [line for line in text.splitlines() if line.startswith("  step needs")]
  assert "too many" in line
  assert "--fsdp 2 saves about" in line
  assert "--lora-rank 16" in line
  gathers = [line for line in text.splitlines() if line.startswith("gather ")]
  assert len(gathers) == 13  # the large arrays of all 64 layers one by one; those of two layers would go together


def test_programs_are_chosen_by_the_first_words_of_their_names():
  programs = ["step", "gather 0", "gather 1", "decode"]
  assert _measure_all.select(programs, ("decode", "gather")) == ["gather 0", "gather 1", "decode"]
  assert _measure_all.select(programs, ("gather 1",)) == ["gather 1"]
  assert _measure_all.select(programs, ()) == programs


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["quickstrat", "--topology", "v5e:4x4"], "did you mean"),
    (["quickstart", "--topology", "v5:4x4"], "unknown accelerator 'v5'"),
    (["quickstart", "--topology", "4x4"], r"\*topology\* must look like"),
    (["quickstart", "--topology", "h100:0"], r"\*topology\* .* at least 1, got topology='h100:0'; one chip is h100:1"),
    (["quickstart", "--topology", "v5e:4x0"], r"got topology='v5e:4x0'; one chip is v5e:1x1"),
    (["quickstart", "--topology", "h100:2", "--slices", "2"], r"\*slices\* must be"),
    (["quickstart", "--topology", "v5e:2x4", "--hosts", "3"], r"\*hosts\* must be"),
    (["quickstart", "--topology", "v5e:2x4", "--depths", "4", "2"], r"\*depths\* must be"),
    (["quickstart", "--topology", "h100:2", "--limit", "-1"], r"\*limit\* must be a number above 0, got limit=-1.0"),
    (["quickstart", "--topology", "h100:2", "--limit", "nan"], r"got limit=nan; leave it out for 900 seconds"),
    (["quickstart", "--topology", "h100:2", "--prompt-tokens", "-5"], r"\*prompt_tokens\* must .*prompt_tokens=-5.0"),
    (
      ["quickstart", "--topology", "h100:2", "--prompt-tokens", "0"],
      r"prompt_tokens=0.0; .* or raise max_prompt_tokens",
    ),
    (
      ["quickstart", "--topology", "h100:2", "--completion-tokens", "1e9"],
      r"and at most 24, got completion_tokens=1000000000.0;",
    ),
    (["quickstart", "--topology", "h100:2", "--completion-tokens", "nan"], r"\*completion_tokens\* .* got .*=nan;"),
    (["quickstart", "--topology", "v5e:2x4", "--model", "qwen3-0.6b"], r"\*model\* replaces"),
    (["gsm8k", "--topology", "v5e:2x4", "--model", "qwen3-0.6"], "did you mean 'qwen3-0.6b'"),
  ],
)
def test_wrong_options_are_explained(arguments, message, capsys):
  try:
    status = command.main(arguments)
  except SystemExit as refused:  # by the parser of the command line
    status = refused.code
  assert status == 2
  error = " ".join(capsys.readouterr().err.replace("│", " ").split())
  assert re.search(message, error), error


def test_a_missing_libtpu_is_explained_whether_it_is_to_compile_or_not(in_this_process, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "libtpu", None)
  assert command.main(["quickstart", "--topology", "v5e:2x2", "--no-compile"]) == 2
  assert re.search("v5e:2x2 needs the package libtpu, .* also with --no-compile; install", capsys.readouterr().err)


def test_missing_weights_are_explained_with_the_way_around_them():
  with pytest.raises(ValueError, match=r"no weights 'nowhere'.* as --model qwen3-0.6b"):
    request("gsm8k", "--topology", "h100:2", "--weights", "nowhere").experiment()


def test_options_that_do_not_fit_the_devices_are_explained(in_this_process, capsys):
  assert command.main(["quickstart", "--topology", "h100:2", "--fsdp", "3"]) == 2
  assert "must divide the 1 devices" in capsys.readouterr().err


def test_a_program_that_takes_too_long_is_named():
  head, results = _measure_all.measure_all(request("quickstart", "--topology", "h100:2"), 0.0, ("decode",))
  assert head["programs"][-1] == "decode"
  assert results["decode"]["error"] == "it took longer than 0 seconds"


def test_the_last_words_of_a_compiler_are_kept():
  fatal = "F1128 16:59:58.950927   12326 net_util.cc:3355] Check failed: a == b (0 vs. 1)"
  lines = ["E0000 something", fatal, "*** Check failure stack trace: ***", "    @ 0x12"]
  assert _measure_all._last_words(lines) == "Check failed: a == b (0 vs. 1)"
  assert _measure_all._last_words(["Traceback:", '  File "x"', "ValueError: no"]) == "no"


def test_figures_of_two_depths_give_those_of_all_layers():
  small = _summary.Summary(flops=10, arguments=100, sent={"all-gather host": 4}, loop_gathers=3)
  large = _summary.Summary(flops=14, arguments=130, sent={"all-gather host": 6, "all-reduce hosts": 1}, loop_gathers=5)
  whole = _summary.extrapolate(small, large, (2, 4), 10)
  assert (whole.flops, whole.arguments, whole.loop_gathers) == (26, 220, 5)
  assert whole.sent == {"all-gather host": 12, "all-reduce hosts": 4}


def test_more_layers_need_no_fewer_temporaries():
  """Compiled with four layers, a step of Qwen3-0.6B on v5p needs fewer than with two: it is laid out otherwise."""
  whole = _summary.extrapolate(_summary.Summary(temporaries=2061), _summary.Summary(temporaries=1871), (2, 4), 28)
  assert whole.temporaries == 2061


def test_the_compilers_complaint_says_how_much_a_program_needs():
  problem = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 50.30G of 31.25G hbm. Exceeded by 19.05G."
  assert _plan.used_memory(problem) == 50.3 * 2**30
  problem = (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (90.95G) exceeds available HBM (1G)."
  )
  assert _plan.used_memory(problem) == 90.95 * 2**30
  assert _plan.used_memory("INTERNAL: something else") is None


def test_the_table_splits_weights_and_fills_memory_with_slots():
  runs = (
    ("qwen3-0.6b", "v5e:4x4", 2),
    ("qwen3-14b", "v5e:16x16", 0),
    ("qwen3-0.6b", "v5p:2x4x4", 2),
    ("qwen3-4b", "v5e:4x4", 2),
  )
  chosen = [table.choose_options(model, parse_topology(name), generation) for model, name, generation in runs]
  values = [dict(zip(options[::2], options[1::2], strict=True)) for options in chosen]
  assert [v["--generation-tensor"] for v in values] == ["1", "1", "1", "2"]  # 7.5 GiB fit into 15.75, but not twice
  assert [v["--fsdp"] for v in values] == [v["--rows"] for v in values] == ["8", "256", "16", "8"]
  assert [v["--groups"] for v in values] == ["32", "64", "32", "32"]  # as many as there are hosts, at least
  assert [v["--slots"] for v in values] == ["128", "64", "512", "64"]  # a group of 16 for each of a host's four engines


def test_a_push_needs_room_for_its_result_also_where_nothing_was_compiled():
  plan = plan_of(step=1.0, decode=0.01, cache=10.0)
  result = {"side": "generation", "resident": 0, "makes": 6 * 2**30, "costs": {"nbytes": 1}}
  gather = _plan._program(plan, "gather", [result], (28,))
  assert (gather.needed, plan.fits(gather)) == (17 * 2**30, "no")
  gather = _plan._program(plan, "gather", [result | {"makes": 4 * 2**30}], (28,))
  assert (gather.needed, plan.fits(gather)) == (None, "unknown")


def test_a_program_needs_its_temporaries_also_where_it_leaves_out_weights_that_stay():
  plan = plan_of(1.0, 1.0, cache=0.0)
  costs = {"arguments": 6 * 2**30, "outputs": 2 * 2**30, "temporaries": 2**30, "aliased": 2 * 2**30, "code": 2**20}
  result = {"side": "generation", "resident": 8 * 2**30, "makes": None, "costs": costs}
  prefill = _plan._program(plan, "prefill", [result], (28,))
  assert prefill.beside == 2**30 + 2**20
  assert prefill.needed == plan.stays("generation") + prefill.beside


def test_where_compiled_programs_cannot_be_kept_they_are_compiled_all_the_same(monkeypatch, tmp_path):
  (tmp_path / "file").touch()
  monkeypatch.setenv("ASYNC_RL_CACHE", str(tmp_path / "file"))
  monkeypatch.setattr(_compile, "_key", lambda text, devices: "key")
  lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32"))
  assert _compile.compile_program(lowered, jax.devices()[:1]).memory["arguments"] == 16


def test_the_table_keeps_what_was_compiled(monkeypatch, tmp_path, capsys):
  """A row is compiled once, and a counted one stays where the compiler gave up."""
  made = []

  def plan_row(model, name, generation, *, compiles, limit):
    made.append((name, compiles))
    late = compiles and name == "v5e:8x8"
    row = {"model": model, "slice": name, "compiled": compiles, "options": "--slots 16 --generation-tensor 1"}
    row |= {"needs_GiB": {"learner": 1, "generation": 2}, "hbm_GiB": 3, "fits": True}
    return row | dict.fromkeys(("learner_s", "generation_s", "step_s", "tokens_per_s"), None if late else 4.0) | {
      "chip_hours_per_100_steps": 5
    }  # fmt: skip

  monkeypatch.setattr(table, "plan_row", plan_row)
  arguments = ["--only", "qwen3-0.6b", "v5e:4x4", "v5e:8x8", "--out", str(tmp_path / "table.json")]
  for more in (["--no-compile"], [], ["--no-compile"]):
    table.main([*arguments, *more])
  assert made == [(name, how) for how in (False, True) for name in ("v5e:4x4", "v5e:8x8")] + [("v5e:8x8", False)]
  rows = json.loads((tmp_path / "table.json").read_text())
  assert [(row["slice"], row["compiled"]) for row in rows] == [("v5e:4x4", True), ("v5e:8x8", False)]
  assert "| qwen3-0.6b | v5e:8x8 | counted |" in capsys.readouterr().out


def test_the_table_names_what_does_not_fit():
  row = {"model": "a", "slice": "v5e:4x4", "options": "--slots 16 --generation-tensor 4", "hbm_GiB": 15.75}
  row |= {"compiled": True}
  row |= {"needs_GiB": {"learner": 20.0, "generation": 3.0}, "fits": False}
  row |= dict.fromkeys(("learner_s", "generation_s", "tokens_per_s", "chip_hours_per_100_steps"))
  failed = {"model": "b", "slice": "v5e:4x4", "compiled": False, "error": "nothing"}
  last = table.to_text([row, failed]).splitlines()[-2:]
  assert last[0] == "| a | v5e:4x4 | compiled | 16, 4 | 20.0, 3.0 of 15.75 **no** | – | – | – | – |"
  assert last[1].startswith("| b | v5e:4x4 | counted | nothing |")


def test_the_overview_has_a_cell_for_each_slice():
  small = {"model": "qwen3-0.6b", "slice": "v5e:4x4", "compiled": True, "fits": True, "hbm_GiB": 15.75, "step_s": 2.0}
  small |= {"needs_GiB": {"learner": 3.0, "generation": 7.04}, "tokens_per_s": 35232, "chip_hours_per_100_steps": 0.8}
  large = small | {"slice": "v5p:2x4x4", "compiled": False, "tokens_per_s": 107335}
  full = small | {"slice": "v5e:8x8", "fits": False, "needs_GiB": {"learner": 3.0, "generation": 15.96}}
  failed = {"model": "qwen3-1.7b", "slice": "v5e:4x4", "compiled": True, "error": "nothing"}
  assert table.to_overview([failed, full, large, small]).splitlines()[2:] == [
    "| qwen3-0.6b | **35.2k, 0.80** | **needs 16.0 of 15.75 GiB** |  | 107k, 0.80 |  |",
    "| qwen3-1.7b | – |  |  |  |  |",
  ]


def test_micro_batches_hold_as_many_sequences_as_their_rows_have_room_for():
  experiment = configs.load("quickstart").experiment(configs.load("quickstart").options(rows=8, row_tokens=80))
  assert _request.micro_batches(experiment, 80) == 16  # 128 rows of one sequence
  assert _request.micro_batches(experiment, 36) == 8  # of two
  assert _request.micro_batches(experiment, 1) == 1


def plan_of(step, decode, *, slots=64, cache=2.0, hosts=1, reads=None, **options):
  """A plan of eight chips of one host, or four of each of several, half of which learn; sizes in GiB."""
  arguments = ("gsm8k", "--topology", "v5e:2x4" if hosts == 1 else "v5e:4x4", "--model", "qwen3-0.6b", "--slots")
  flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
  half = 4 if hosts == 1 else 2
  costs = {"step": step, "stage": 0.0, "gather": 0.0, "prefill": 0.0, "put": 0.0, "decode": decode * 16}
  sides = dict.fromkeys(("step", "stage"), "learner")
  return _plan.Plan(
    request(*arguments, str(slots), *flags),
    layers=28,
    compiled=(),
    parameters=6 * 10**8,
    meshes={
      "learner": {"data": 1, "fsdp": half * hosts, "tensor": 1},
      "generation": {"data": half, "fsdp": 1, "tensor": 1},
    },
    hosts=hosts,
    colocated=False,
    resident={
      "learner": {"parameters": 2**30, "optimizer": 2 * 2**30},
      "generation": {"weights": 2**30, "cache": cache * 2**30},
    },
    cache_reads=reads or {},
    programs=[
      _plan.Program(
        name, sides.get(name, "generation"), _summary.Summary(local_seconds=seconds), 2**30, 2**29, None, 0.0
      )
      for name, seconds in costs.items()
    ],
  )


def test_the_pace_is_that_of_the_slower_side():
  """512 samples of 128 tokens in 64 slots of which .85 draw: 1,205 decode steps."""
  pace = _balance.find_pace(plan_of(step=1.0, decode=0.01))
  assert pace.generation == pytest.approx(512 * 128 / (64 * 0.85) * 0.01)
  assert pace.step == pace.generation
  assert pace.tokens == pytest.approx(512 * 128 / pace.step)
  assert pace.limit == "generation"
  assert 0.5 < pace.lag < 1  # half a step until it is trained, and a little of a sample
  assert _balance.find_pace(plan_of(step=20.0, decode=0.01)).lag == 2  # the bound: samples wait for the learner
  in_turn = _balance.find_pace(plan_of(step=1.0, decode=0.01, mode="sync"))
  assert in_turn.step == in_turn.learner + in_turn.generation
  assert in_turn.lag == 0


def test_the_best_split_gives_chips_to_the_slower_side():
  slow_learner = _balance.best_split(plan_of(step=100.0, decode=0.001))
  assert slow_learner.options["generation_devices"] == 1
  assert slow_learner.pace.learner == pytest.approx(100 * 4 / 7)
  slow_sampler = _balance.best_split(plan_of(step=1.0, decode=0.01))
  assert slow_sampler.options["generation_devices"] > 4
  assert slow_sampler.options["slots"] > 64
  for split in (slow_learner, slow_sampler):
    learners = 8 - split.options["generation_devices"]
    assert learners % split.options["fsdp"] == split.options["rows"] % learners == 0
    assert max(split.learner_bytes, split.generation_bytes) <= 15.75 * 2**30
  # With attention that reads a part of the cache, slots cost less.
  reading_less = _balance.best_split(plan_of(step=1.0, decode=0.01, reads={"ragged": 2**29, "xla": 2**31}))
  assert reading_less.pace.tokens > slow_sampler.pace.tokens
  # Four hosts of four v5e chips cannot give three of them to generation.
  assert _balance.best_split(plan_of(step=1.0, decode=0.01, hosts=4)).options["generation_devices"] == 2


def test_a_request_survives_the_way_to_a_child():
  made = request("gsm8k", "--topology", "v5e:4x4", "--slices", "2", "--model", "qwen3-0.6b", "--depths", "2", "4")
  assert _request.Request.from_json(made.to_json()) == made
  assert made.target == parse_topology("v5e:4x4", 2)
  assert (made.prompt_tokens, made.completion_tokens) == (160, 128)


def test_hosts_that_only_generate_share_the_batch_among_themselves():
  all_do_both = plan_of(step=1.0, decode=0.01, hosts=4)
  half_generates = dataclasses.replace(all_do_both, samplers=2)
  pace, expected = _balance.find_pace(half_generates), _balance.find_pace(all_do_both)
  assert pace.generation == pytest.approx(2 * expected.generation)
  assert pace.learner == expected.learner
  assert _balance.best_split(half_generates) is None
  text = _plan_report.to_text(half_generates)
  assert "data 2 x fsdp 1 x tensor 1 of each of the 2 hosts that only generate" in text
  assert text.splitlines()[-1].startswith("  generation is the limit")
