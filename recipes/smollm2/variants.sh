#!/bin/sh
# Compares drafters for the default target: the target's answers, training side by side, judging. What is done is not
# done again: a second call goes on, and another RECIPE takes the answers that are there.
#
#     recipes/smollm2/variants.sh PROMPTS FOLDER [options of eyas train, such as --set train.minutes=3]
#
# Of PROMPTS, every HOLD_OUT-th is held out and LIMIT of the others are answered, greedily and at temperature 0.8. With
# HELD_OUT=FILE those of FILE are held out instead: prompts that the shipped drafter did not learn from either.
# ONLY=answers ends behind the answers.
set -eu
prompts=$1 folder=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
recipe=${RECIPE:-$root/recipes/smollm2/variants.toml}
python=${PYTHON:-python3}
limit=${LIMIT:-12000} hold_out=${HOLD_OUT:-40} device=${DEVICE:-cuda} max_tokens=${MAX_TOKENS:-400}
PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

eyas() { "$python" -m eyas "$@"; }
answer() {
    [ -e "$2.done" ] && return
    eyas data answer "$1" --out "$2" --max-tokens "$max_tokens" --max-length 1536 --device "$device" $3
    touch "$2.done"
}
now() { date +%s; }

mkdir -p "$folder"
if [ -n "${HELD_OUT:-}" ]; then
    head -n "$limit" "$prompts" > "$folder/prompts.jsonl"
    cp "$HELD_OUT" "$folder/held-out.jsonl"
else
    awk -v n="$hold_out" -v limit="$limit" 'NR % n && kept++ < limit' "$prompts" > "$folder/prompts.jsonl"
    awk -v n="$hold_out" '!(NR % n)' "$prompts" > "$folder/held-out.jsonl"
fi
began=$(now)
answer "$folder/prompts.jsonl" "$folder/answers-greedy.jsonl" "--temperature 0"
answer "$folder/prompts.jsonl" "$folder/answers-sampled.jsonl" "--temperature 0.8 --seed 1"
answer "$folder/held-out.jsonl" "$folder/held-out-0.jsonl" "--temperature 0"
answer "$folder/held-out.jsonl" "$folder/held-out-1.jsonl" "--temperature 1 --seed 2"
answered=$(now)
echo "answers: $((answered - began)) s"
[ "${ONLY:-}" = answers ] && exit
run=$folder/$(basename "$recipe" .toml)
resume=
[ -d "$run/checkpoints" ] && resume=--resume
if [ ! -e "$run/trained" ]; then
    eyas train "$recipe" $resume --set target.device="$device" --set output.folder="\"$run\"" \
        --set data.files="[\"$folder/answers-greedy.jsonl\", \"$folder/answers-sampled.jsonl\"]" \
        --set data.held_out="\"$folder/held-out-0.jsonl\"" "$@"
    touch "$run/trained"
fi
trained=$(now)
echo "training: $((trained - answered)) s"
"$python" "$root/benchmarks/variants.py" "$run" --greedy "$folder/held-out-0.jsonl" \
    --sampled "$folder/held-out-1.jsonl" --also smollm2-eagle3.1 --device "$device" \
    --seconds "${STEP_SECONDS:-0.3}" --rounds "${STEP_ROUNDS:-3}"
echo "judging: $(($(now) - trained)) s"
