#!/bin/bash
# Break trainings of this project's own trainer, launched by `tr11 train`: ours.sh OUT [CASE...]
set -u
mkdir -p "$1"; out=$(realpath "$1"); shift
place=/tmp/diagnose-corpus/ours; mkdir -p $place; cd $place || exit 1
if [ ! -e small/data/corpus_text_document.idx ]; then
    tr11 data corpus --output small/data/all.jsonl; head -300 small/data/all.jsonl > small/data/corpus.jsonl
    tr11 data tokenizer --corpus small/data/corpus.jsonl --output small/data/tokenizer --vocab-size 4096
    tr11 data preprocess --input small/data/corpus.jsonl --tokenizer small/data/tokenizer --output-prefix small/data/corpus
fi
train() {  # train CASE OPTIONS...: a run of its own that shares the data; keeps what it printed and what it logged
    local name=$1; shift
    rm -rf run; mkdir -p run; cp -r small/data run/data
    [ -d saved ] && [ "${RESUME-}" ] && cp -r saved/checkpoints run/
    tr11 init --preset toy --yes --scheduler local -o tr11.toml --force --set run.directory=run > /dev/null
    sed -i 's#"toy-run/#"run/#g; s#tensor = 2#tensor = 1#; s#pipeline = 2#pipeline = 2#; s#^interval = 25#interval = 8#' tr11.toml
    tr11 train --nodes 1 --workers-per-node 2 --set batch.train_samples=240 "$@" > screen 2>&1
    echo "exit status $?" >> screen
    cp run/*-logs/logs/main/main_log.txt log 2> /dev/null || : > log; grep -vFxf log screen >> log
    sed -e "s#$place#/scratch/tr11#g; s#$(dirname "$(dirname "$(command -v tr11)")")#/home/user/env#g" \
        -e "s#$(realpath "$(dirname "$0")/../..")#/home/user/code/tr11#g; s#\b$(hostname)\b#node01#g; s#/root/#/home/user/#g" log > "$out/$name.log"
    echo "$name: $(wc -l < "$out/$name.log") lines"
}
declare -A cases=(
[ours-finished]='train ours-finished; rm -rf saved; mkdir saved; cp -r run/checkpoints saved/'
[ours-diverged]='train ours-diverged --set schedule.learning_rate=1e30 --set schedule.warmup_samples=32'
[ours-refused]='train ours-refused --set batch.global_batch_size=30'
[ours-no-data]='train ours-no-data --set data.prefixes=["run/data/none_text_document"]'
[ours-topology]='RESUME=1 train ours-topology --set model.hidden_size=256'
)
for case in ${*:-ours-finished $(printf '%s\n' "${!cases[@]}" | grep -v finished | sort)}; do eval "${cases[$case]}"; done
