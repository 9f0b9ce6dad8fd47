"""Prompts that several prefill workers compute together (chunked pipeline parallelism, engine/stages.py).

stage_runner.py   on the engine's thread: computes chunks between the engine's steps
stage.py          on the event loop: one prompt at one stage, its inbox and what it sends to the next stage
service.py        the stages that other workers lead
prefix.py         a stage's layers of the prompt's leading blocks, from the pool
leader.py         the last stage: leads the others, samples, commits the hand-off and owns the puts
"""
