#!/usr/bin/env bash
# Run all benchmarks on one GPU within 9 minutes, from the root of the repository:
#
#     bash benchmarks/gpu.sh
#
# JSON, Markdown and PNG files go to benchmarks/results, or to the folder that --out names. Options
# are passed to every script. PYTHON names the interpreter, which needs torch, transformers,
# accelerate, pydantic, scipy and matplotlib; the package itself is imported from the checkout.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
LIMIT=540
FAILED=0

# part NAME SECONDS COMMAND...: run a script for at most so long, and continue if it fails.
part() {
	local name=$1 seconds=$2 left=$((LIMIT - SECONDS))
	shift 2
	echo "== $name, $left s left"
	if ((left < seconds)); then seconds=$left; fi
	if ((seconds < 1)) || ! timeout "$seconds" "$PYTHON" "$@"; then
		echo "== $name failed"
		FAILED=1
	fi
}

COMMON=(--device cuda "$@")
LLAMA=(--shape llama-3.1-8b --tree 60/6/10 --context 1024)
part step 90 benchmarks/step.py "${LLAMA[@]}" --sampled "${COMMON[@]}"
part shapes 180 benchmarks/shapes.py "${COMMON[@]}"
part vocabulary 40 benchmarks/vocabulary.py "${COMMON[@]}"
part attention 30 benchmarks/attention.py "${COMMON[@]}"
part compare 100 benchmarks/compare.py --count 10 --trial 2 "${COMMON[@]}"
part batches 60 benchmarks/batches.py "${COMMON[@]}"
part growth 180 benchmarks/growth.py --minutes 2 "${COMMON[@]}"
echo "== finished after $SECONDS s"
exit $FAILED
