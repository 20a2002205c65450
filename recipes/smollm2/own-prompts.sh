#!/bin/sh
# Trains DRAFTER (default: the shipped one) on with answers of temperature 0 and 1, and judges it beside what it was. What
# is done is not done again: a second call goes on.
#
#     recipes/smollm2/own-prompts.sh PROMPTS HELD_OUT FOLDER [options of eyas train, such as --set train.minutes=3]
#
# The target is asked OWN times for a prompt of its own and answers each at both temperatures. Of PROMPTS the first half of
# LIMIT lines is answered at temperature 0, the second at 1. Prompts of HELD_OUT are for judging; prompts of the target's
# own that are like those in EXCLUDE (files or folders) are left out. Up to four processes answer at a time, since one
# does not fill a large GPU.
set -eu
prompts=$1 held_out=$2 folder=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
own=${OWN:-36000} limit=${LIMIT:-44000} device=${DEVICE:-cuda} max_tokens=${MAX_TOKENS:-400}
drafter=${DRAFTER:-smollm2-eagle3.1} recipe=$root/recipes/smollm2/own-prompts.toml
evaluated=
for file in ${EXCLUDE:-}; do
    evaluated="$evaluated --eval $file"
done
PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

eyas() { "$python" -m eyas "$@"; }
answer() {  # PROMPTS OUT TEMPERATURE SEED
    [ -e "$2.done" ] && return
    eyas data answer "$1" --out "$2" --temperature "$3" --seed "$4" --max-tokens "$max_tokens" --max-length 1536 \
        --device "$device"
    touch "$2.done"
}
say_prompts() {
    [ -e "$folder/own.jsonl.done" ] && return
    eyas data prompts "$own" --out "$folder/own.jsonl" --max-tokens 256 --device "$device" $evaluated
    touch "$folder/own.jsonl.done"
}
all_done() {
    for made in "$@"; do
        [ -e "$folder/$made.done" ] || { echo "$folder/$made was not made; the same command goes on" >&2; exit 1; }
    done
}
now() { date +%s; }
trap 'trap - TERM; kill 0' INT TERM  # what runs behind does not hear Ctrl-C

mkdir -p "$folder"
cp "$held_out" "$folder/held-out.jsonl"
half=$((limit / 2))
head -n "$half" "$prompts" > "$folder/prompts-0.jsonl"
tail -n +$((half + 1)) "$prompts" | head -n "$half" > "$folder/prompts-1.jsonl"
began=$(now)
say_prompts &
{
    answer "$folder/held-out.jsonl" "$folder/held-out-0.jsonl" 0 0
    answer "$folder/held-out.jsonl" "$folder/held-out-1.jsonl" 1 2
} &
answer "$folder/prompts-0.jsonl" "$folder/answers-0.jsonl" 0 0 &
answer "$folder/prompts-1.jsonl" "$folder/answers-1.jsonl" 1 200000 &
wait
all_done own.jsonl held-out-0.jsonl held-out-1.jsonl answers-0.jsonl answers-1.jsonl
answer "$folder/own.jsonl" "$folder/own-answers-0.jsonl" 0 0 &
answer "$folder/own.jsonl" "$folder/own-answers-1.jsonl" 1 400000 &
wait
all_done own-answers-0.jsonl own-answers-1.jsonl
answered=$(now)
echo "answers: $((answered - began)) s"
run=$folder/run
resume=
[ -d "$run/checkpoints" ] && resume=--resume
if [ ! -e "$run/trained" ]; then
    files=
    for made in own-answers-0 own-answers-1 answers-0 answers-1; do
        files="$files${files:+, }\"$folder/$made.jsonl\""
    done
    eyas train "$recipe" $resume --set target.device="$device" --set output.folder="\"$run\"" \
        --set drafter.init_from="\"$drafter\"" --set data.files="[$files]" \
        --set data.held_out="\"$folder/held-out-0.jsonl\"" "$@"
    touch "$run/trained"
fi
trained=$(now)
echo "training: $((trained - answered)) s"
"$python" "$root/benchmarks/variants.py" "$run" --greedy "$folder/held-out-0.jsonl" \
    --sampled "$folder/held-out-1.jsonl" --also "$drafter" --device "$device" \
    --seconds "${STEP_SECONDS:-0.3}" --rounds "${STEP_ROUNDS:-3}"
echo "judging: $(($(now) - trained)) s"
