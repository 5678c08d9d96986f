"""Tests that run in an interpreter with vLLM; the environment that they need, before its import."""

import os

from engines_worker import ENVIRONMENT

os.environ |= ENVIRONMENT
os.environ["TRITON_INTERPRET"] = "1"  # kernels of Model Runner V2, on a CPU
os.environ["OMP_NUM_THREADS"] = "1"  # one process per core
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # it would remove the handlers of tests
