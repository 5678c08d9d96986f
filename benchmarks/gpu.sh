#!/usr/bin/env bash
# Run the main benchmarks on one GPU within 9 minutes, from the root of the repository:
#
#     bash benchmarks/gpu.sh
#
# The tests of decoding on CUDA run first, then the benchmarks, the most important ones first. Every
# part has a limit, and the parts together have one; a benchmark that is stopped leaves the results
# that it has, marked as incomplete.
#
# JSON and Markdown files go to benchmarks/results, or to the folder that --out names. Options
# are passed to every benchmark: --out, --device, --dtype, --threads and --quick. PYTHON names the
# interpreter, which needs the package's dependencies, and pytest for the tests; the package itself is
# imported from the checkout.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
LIMIT=540
GRACE=3
FAILED=0

# part NAME SECONDS COMMAND...: run a script for at most so long, and continue if it fails.
part() {
	local name=$1 seconds=$2 left=$((LIMIT - SECONDS))
	shift 2
	echo "== $name, $left s left"
	if ((left < seconds)); then seconds=$left; fi
	if ((seconds <= GRACE)) || ! timeout -k "$GRACE" "$((seconds - GRACE))" "$PYTHON" "$@"; then
		echo "== $name failed"
		FAILED=1
	fi
}

COMMON=(--device cuda "$@")
LLAMA=(--shape llama-3.1-8b --tree 60/6/10 --context 1024)
TESTS=(-m pytest -q --noconftest -p no:cacheprovider tests/model/test_cuda.py)
TORCHDYNAMO_DISABLE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 part tests 75 "${TESTS[@]}"
part step 65 benchmarks/step.py "${LLAMA[@]}" "${COMMON[@]}"
part step-compiled 145 benchmarks/step.py "${LLAMA[@]}" --compile "${COMMON[@]}"
part shapes 80 benchmarks/shapes.py "${COMMON[@]}"
part operations 45 benchmarks/operations.py "${COMMON[@]}"
part compare 40 benchmarks/compare.py --count 4 --trial 1 "${COMMON[@]}"
part batches 40 benchmarks/batches.py --count 32 "${COMMON[@]}"
echo "== finished after $SECONDS s"
exit $FAILED
