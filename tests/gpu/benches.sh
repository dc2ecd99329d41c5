#!/usr/bin/env bash
# The benches of the kinds in results/ on Hopper GPUs, one after the other; each has a time limit, and one that fails does not stop the others.
# (The READMEs there have the exact commands of their tables.)
#   bash tests/gpu/benches.sh OUT [NAME ...]     # names: those of the case below; default: all but rollout-servers
# OUT gets NAME.jsonl, NAME.txt and NAME.err. *-1gpu*, quant and linear need one GPU, the others two; rollout* and sync* need vLLM 0.26 and this package
# installed (pip install --no-deps --no-build-isolation -e .). `linear` times Transformer Engine and torchao where they are installed.
# step-1gpu-whole: all layers on one GPU, without the optimizer, whose state has no room there; -offload: with half of it on the host (66 GB).
# step-*-2seqs, -recompute, -fc1, -whole and -offload: two sequences of 8192 tokens a micro-batch, so that half as many launches and passes over main_grad come to a token.
# rollout-servers: the servers alone, with random weights and no actor, on one GPU, for shapes that do not fit beside their actor: qwen3-14b with KV_GIB=17
# UTIL=0.3, qwen3-32b with KV_GIB=27 UTIL=0.8.
# Environment: PYTHON (python3), MODEL (qwen3-8b), LIMIT (seconds for one bench, 300), and for rollout-servers KV_GIB (15, of KV cache) and UTIL (0.2, the share
# of the GPU that must be free when a server starts).
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1
shift
python=${PYTHON:-python3} model=${MODEL:-qwen3-8b} limit=${LIMIT:-300} kv_gib=${KV_GIB:-15} util=${UTIL:-0.2}
mkdir -p "$out"
recipe=recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml
server=(parallel.tp=1 "rollout.vllm.gpus=['1']" rollout.vllm.transport=nccl --nproc 1 --model "$model")
quick=(rollout.vllm.cuda_graphs=false rollout.vllm.kv_cache_gib=8)  # a server without graphs starts in half the time and is pushed to alike
colocated=(parallel.tp=1 rollout.engine=vllm_colocated rollout.vllm.load=in_place rollout.vllm.kv_cache_gib=15
    rollout.vllm.gpu_memory_utilization=0.2 --nproc 1 --model "$model")
alone=(parallel.tp=1 rollout.engine=vllm_colocated rollout.vllm.load=in_place rollout.vllm.kv_cache_gib="$kv_gib"
    rollout.vllm.gpu_memory_utilization="$util" --nproc 1 --model "$model" --servers-only)
load=(--precompile --prompts 128 --prompt-toks 512 --new-toks 256 --rounds 3 --warm-up-rounds 3)
step=(--model "$model" --tokens 8192 --repeats 3)
arms=(--arms bf16 jetrl jetrl+wgrad_granularity=groups)
pair=("$python" -m torch.distributed.run --nproc_per_node 2 -m jetrl_megatron.bench step)
two=(--tokens 16384 --seqs 2)
code=0
run() {
    local name=$1
    shift
    date +"%T $name"
    rm -f "$out/$name.jsonl"
    timeout "$limit" "$@" --json "$out/$name.jsonl" >"$out/$name.txt" 2>"$out/$name.err" || { code=1; echo "$name left with an error"; tail -5 "$out/$name.err"; }
    cut -c1-220 "$out/$name.txt" | tail -40
}
for name in ${@:-quant linear step-1gpu step-1gpu-2seqs step-1gpu-recompute step-1gpu-fc1 step-1gpu-whole step-1gpu-offload rollout-1gpu step-pp2 step-tp2 step-tp2-2seqs step-tp2-k_split step-dp2-2seqs rollout sync sync-in_place}; do
    case $name in
    quant) run quant "$python" -m jetrl_megatron.bench quant ;;
    linear) run linear "$python" -m jetrl_megatron.bench linear --model "$model" --repeats 10 ;;
    step-1gpu) run step-1gpu "$python" -m jetrl_megatron.bench step --layers 8 --micro-batches 2 "${step[@]}" "${arms[@]}" ;;
    step-1gpu-2seqs) run step-1gpu-2seqs "$python" -m jetrl_megatron.bench step --layers 8 --micro-batches 2 "${step[@]}" "${two[@]}" ;;
    step-1gpu-recompute) run step-1gpu-recompute "$python" -m jetrl_megatron.bench step --layers 8 --recompute full --micro-batches 2 "${step[@]}" "${two[@]}" ;;
    step-1gpu-fc1) run step-1gpu-fc1 "$python" -m jetrl_megatron.bench step --layers 8 --recompute fc1 --micro-batches 2 "${step[@]}" "${two[@]}" ;;
    step-1gpu-whole) run step-1gpu-whole "$python" -m jetrl_megatron.bench step --recompute full --no-optimizer --micro-batches 2 "${step[@]}" "${two[@]}" ;;
    step-1gpu-offload) run step-1gpu-offload "$python" -m jetrl_megatron.bench step --recompute full --offload-fraction 0.5 --micro-batches 8 "${step[@]}" "${two[@]}" ;;
    step-pp2) run step-pp2 "${pair[@]}" --pp 2 --micro-batches 8 "${step[@]}" "${arms[@]}" ;;
    step-tp2) run step-tp2 "${pair[@]}" --tp 2 --micro-batches 2 "${step[@]}" "${arms[@]}" ;;
    step-tp2-2seqs) run step-tp2-2seqs "${pair[@]}" --tp 2 --micro-batches 2 "${step[@]}" "${two[@]}" ;;
    step-tp2-k_split) run step-tp2-k_split "${pair[@]}" --tp 2 --micro-batches 2 "${step[@]}" "${two[@]}" --arms bf16+row_parallel=k_split jetrl+row_parallel=k_split ;;
    step-dp2-2seqs) run step-dp2-2seqs "${pair[@]}" --recompute full --micro-batches 4 "${step[@]}" "${two[@]}" ;;
    rollout) run rollout "$python" -m jetrl_megatron.cli bench rollout "$recipe" "${server[@]}" --precompile --pushes 5 ;;
    rollout-1gpu) run rollout-1gpu "$python" -m jetrl_megatron.cli bench rollout "$recipe" "${colocated[@]}" "${load[@]}" --pushes 5 ;;
    rollout-servers) run rollout-servers "$python" -m jetrl_megatron.cli bench rollout "$recipe" "${alone[@]}" "${load[@]}" ;;
    sync) run sync "$python" -m jetrl_megatron.cli bench sync "$recipe" "${quick[@]}" "${server[@]}" ;;
    sync-in_place) run sync-in_place "$python" -m jetrl_megatron.cli bench sync "$recipe" "${quick[@]}" rollout.vllm.load=in_place "${server[@]}" ;;
    *) echo "unknown bench $name"; code=2 ;;
    esac
done
exit $code
