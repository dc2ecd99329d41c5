#!/usr/bin/env bash
# GRPO on one H200 with a real vLLM server on the same GPU, arm after arm, then the pool's own tests there.
#   bash tests/gpu/vllm_h200.sh MODEL_DIR OUT [STEPS=30] [TRANSPORT=disk]
# MODEL_DIR: python -m tests.smollm2_export DIR --aligned --head-dim 128. OUT: gets records.jsonl, curves.png and logs by arm.
# Needs vLLM 0.26 on the Python path and this package installed, because vLLM finds its norm by entry point (without a network:
# pip install --no-deps --no-build-isolation -e .). Environment: DATA (folder with mawps/ and gsm8k/; needed), GPU (its number, 0), ARMS, DATASET (mawps or
# gsm8k), ENGINE (vllm_pool or vllm_colocated), EXTRA (recipe words), SKIP_TESTS. Start several on one GPU in turn, because a server's memory
# profile counts what its neighbours take in that moment, or give each a size: EXTRA="rollout.vllm.kv_cache_gib=8 ...".
set -uo pipefail
cd "$(dirname "$0")/../.."
model=$1 out=$2 steps=${3:-30} transport=${4:-disk}
python=${PYTHON:-python3}
data=${DATA:?DATA is not set: the folder with mawps/ and gsm8k/} gpu=${GPU:-0}
export CUDA_VISIBLE_DEVICES=$gpu
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM_E8M0=0 VLLM_DEEP_GEMM_WARMUP=skip TOKENIZERS_PARALLELISM=false
mkdir -p "$out"
engine=(rollout.engine=vllm_pool "rollout.vllm.gpus=['$gpu']")
[ "${ENGINE:-vllm_pool}" = vllm_pool ] || engine=("rollout.engine=$ENGINE" rollout.vllm.gpus=[])
if [ "${DATASET:-mawps}" = gsm8k ]; then
    task=("data.train=[gsm8k@$data/gsm8k/train.jsonl]" "data.eval=[gsm8k@$data/gsm8k/test.jsonl]" rollout.max_new_toks=160)
else
    task=("data.train=[mawps@$data/mawps/singleop.jsonl,mawps@$data/mawps/addsub.jsonl]" "data.eval=[mawps@$data/mawps/singleeq.jsonl]")
fi
code=0
for arm in ${ARMS:-jetrl fp8_rollout bf16}; do
    run=$out/runs/$arm
    rm -rf "$run"
    $python -m jetrl_megatron.cli train "recipes/grpo-smollm2-1n1g-tp1pp1-$arm.yaml" --nproc 1 --json \
        "model.path=$model" "run.dir=$run" "run.steps=$steps" run.export_hf=false "${task[@]}" "${engine[@]}" \
        "rollout.vllm.transport=$transport" "rollout.vllm.weights_dir=/dev/shm/jetrl-weights-$gpu" ${EXTRA:-} \
        >"$out/$arm.out" 2>"$out/$arm.err" || { code=1; echo "arm $arm left with an error"; tail -30 "$out/$arm.err"; }
    mkdir -p "$out/$arm"
    cp "$run"/records.jsonl "$run"/summary.json "$run"/curves.png "$run"/environment.jsonl "$out/$arm/" 2>/dev/null
    tail -c 200000 "$run"/engines/server0-start1.log >"$out/$arm/server.log" 2>/dev/null
done
$python tests/gpu/compare_arms.py "$out" || code=1
if [ -z "${SKIP_TESTS:-}" ]; then
    timeout 550 $python -m pytest -q tests/vllm/test_pool.py 2>&1 | tail -30 | tee "$out/test_pool.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || code=1
fi
exit $code
