# Everything works on a fresh clone with Python >= 3.11 and make: the first target that is called installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help demo quick test thorough lint docs parity nccl-rules accelerator-rules behaviour zoo optimizers bench slow-links slurm ray faults faults-elastic docs-run wheel container gpu clean

help:
	@echo "make demo    train a small GPT on 2 x 2 processes, sample from it, show it in MLflow"
	@echo "make quick   lint, types, unit tests, and one distributed test of each strategy, for the inner loop"
	@echo "make test    lint, types, and the tests that run in minutes"
	@echo "make docs    the documentation as pages, in docs/_build"
	@echo "make docs-run  the commands of the tutorials and the notebooks, as a reader would run them"
	@echo "make thorough  the distributed tests that make test leaves out"
	@echo "make parity  every combination of the comparison with one process"
	@echo "make nccl-rules  the parity and distributed tests, over a backend that has the rules of NCCL"
	@echo "make accelerator-rules  training on a simulated accelerator: races between streams, and what the host waits for"
	@echo "make behaviour  ordinary Lightning code under six strategies and eleven techniques, compared with one process"
	@echo "make zoo     80 families of Hugging Face models under five strategies, compared with one process"
	@echo "make optimizers  more than 100 optimizers under six strategies, compared with one process"
	@echo "make faults  saves that are killed, damaged and cut off from power, at every point"
	@echo "make faults-elastic  100 kills of replicas that leave and join a training, each step compared with one process"
	@echo "make slurm   jobs that a real SLURM on this machine runs, kills, preempts and requeues; needs root"
	@echo "make ray     runs on Ray clusters on this machine: killed, stopped, grown, and with a lost node"
	@echo "make bench   step time, start-up and memory against other ways of training"
	@echo "make gpu     what this machine's GPUs can show in ten minutes, with the system's python3; installs nothing"
	@echo "make wheel   the package as a wheel, in dist"
	@echo "make container  the image of the Dockerfile; without a builder, its steps in a folder"
	@echo "make slow-links  gradients over slow links between emulated nodes, and what compression does to the loss"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, $(PYTHON) is " + sys.version.split()[0] + "; use make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-cli: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cli]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-cli
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[elastic]"
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-cli
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

demo: $(VENV)/installed-cli
	$(BIN)/lightning-dist fit -c examples/gpt/base.yaml -c examples/gpt/hybrid_shard.yaml

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# One distributed test of each technique, besides those that test_technique.py has for each strategy.
OF_TECHNIQUES = test_technique.py test_replicas.py test_same_buffers.py \
  "test_block_forward.py::test_every_mode_of_checkpointing_has_the_same_bits[hybrid-modes0]" \
  "test_block_forward.py::test_compiled_blocks_have_the_same_gradients[tp-2-False]" \
  test_compression.py::test_figures_about_compression_are_logged \
  test_local_updates.py::test_one_inner_step_equals_averaging_gradients \
  test_expert_parallel.py::test_any_way_of_training_computes_what_one_process_does[offload] \
  test_tiling.py::test_no_hook_of_the_strategy_computes_whole_logits

quick: lint
	$(BIN)/python -m pytest -q -m "not slow" --numprocesses 2 --dist worksteal tests/unit $(addprefix tests/distributed/,$(OF_TECHNIQUES))

# Two tests run at the same time, because a test leaves cores idle while its ranks wait for each other.
test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build

# What the tutorials and the notebooks need besides the packages of the tests. torchvision asks for one version of torch.
TUTORIAL_PACKAGES := accelerate diffusers ipykernel nbclient peft timm torchvision

$(VENV)/installed-tutorials: $(VENV)/installed-dev Makefile
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TUTORIAL_PACKAGES)
	@touch $@

docs-run: $(VENV)/installed-tutorials
	$(BIN)/python -m tests.tutorials

thorough: $(VENV)/installed-dev
	$(BIN)/python -m pytest --thorough -m thorough --numprocesses 2 --dist worksteal

parity: $(VENV)/installed-dev
	$(BIN)/python -m pytest --matrix=full --numprocesses 2 --dist worksteal tests/parity

nccl-rules: $(VENV)/installed-dev
	$(BIN)/python -m pytest --backend nccl-rules --thorough --numprocesses 2 --dist worksteal tests/parity tests/distributed tests/nccl_rules

accelerator-rules: $(VENV)/installed-dev
	$(BIN)/python -m pytest --matrix full --numprocesses 2 --dist worksteal tests/accelerator_rules
# The functions that autocast casts are those of a backend, and the simulated device has none of its own.
	$(BIN)/python -m pytest --accelerator simulated --numprocesses 2 --dist worksteal \
	  -k "not test_kept_modules and not lightnings_mixed_precision" \
	  $(addprefix tests/distributed/,test_local_updates.py test_compression.py test_checkpoint.py test_float16.py test_mesh_precision.py)
	$(BIN)/python -m tests.accelerator_rules.host_waits -v

behaviour: $(VENV)/installed-dev
	$(BIN)/python -m tests.behaviour --write docs/compatibility.md

faults: $(VENV)/installed-dev
	$(BIN)/python -m tests.faults

faults-elastic: $(VENV)/installed-dev
	$(BIN)/python -m tests.elastic --replicas 3 --ranks 1 --kills 100
	$(BIN)/python -m tests.elastic --replicas 3 --ranks 2 --kills 20
	$(BIN)/python -m tests.elastic --replicas 3 --fixed-batch --nodes 3 --kills 20
	$(BIN)/python -m tests.elastic two_at_once the_leader during_the_return during_a_checkpoint the_coordinator one_falls_behind all_of_them

slurm: $(VENV)/installed-dev
	$(BIN)/python -m tests.launchers.slurm

ray: $(VENV)/installed-dev
	$(BIN)/python -m tests.launchers.ray

zoo: $(VENV)/installed-dev
	$(BIN)/python -m tests.zoo --write docs/compatibility.md

# timm asks for torchvision, which its optimizers do not need.
$(VENV)/installed-optimizers: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $$($(BIN)/python -m tests.optimizers.packages)
	@touch $@

optimizers: $(VENV)/installed-optimizers
	$(BIN)/python -m tests.optimizers --write docs/optimizers.md

bench: $(VENV)/installed-dev
	$(BIN)/python -m tests.bench

# A machine with GPUs may have no network: nothing is installed, and the python that has torch and Lightning is used.
gpu: export OMP_NUM_THREADS = 4
gpu:
	@PYTHONPATH=. $(PYTHON) -m tests.gpu $(ARGUMENTS)

slow-links: $(VENV)/installed-dev
	$(BIN)/python -m tests.bench.slow_links
	$(BIN)/python -m tests.bench.convergence

wheel: | $(VENV)/bin/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

container:
	$(PYTHON) -m tests.container

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache
