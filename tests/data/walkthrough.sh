# Stand-ins for what the walkthrough's commands reach. $remote holds a miniature of each published file at the address
# that the prose gives, $root is the project. A command with a wrong address, path or name ends the script.
set -eo pipefail
wrong() { echo "wrong: $*" >&2; exit 3; }

git() {
  [ "$1" = clone ] || wrong git "$@"
  case $2 in
    …) mkdir c2lip; ln -s "$root"/{Makefile,*.ini,*.toml,*.py,*.txt,nbs,data,tests} c2lip/ ;;
    *) cp -r "$remote/${2#*://}" . || wrong git "$@" ;;
  esac
}
make() { command make -n "$@" >/dev/null || wrong make "$@"; mkdir -p .venv/bin; touch .venv/bin/activate; }

hf() {
  [ "$1" = download ] || wrong hf "$@"
  local source="$remote/hf/$2" all="$*" what="" into=""
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      --repo-type) [ "$2" = dataset ] || wrong hf "$all"; shift 2 ;;
      --include) what=$2; shift 2 ;;
      --local-dir) into=$PWD/$2; shift 2 ;;
      --*) wrong hf "$all" ;;
      *) what=$1; shift ;;
    esac
  done
  mkdir -p "$into"
  (cd "$source" && cp -r --parents $what "$into") || wrong hf "$all"
}

curl() {
  local into="" keep="" address="" all="$*"
  while [ $# -gt 0 ]; do
    case $1 in
      -O) keep=yes; shift ;;
      --create-dirs) mkdir -p "$3"; shift ;;
      --output-dir) into=$2/; shift 2 ;;
      *) address=$remote/${1#*://}; shift ;;
    esac
  done
  [ -f "$address" ] || wrong curl "$all"
  if [ "$keep" ]; then cp "$address" "${into:-./}" || wrong curl "$all"; else cat "$address"; fi
}

heavy() { C2LIP_FORKS="${C2LIP_FORKS:+$C2LIP_FORKS-packages}" command python "$@"; }  # in a fork, where the tests have one
python() {
  [ "$quick" ] && return  # where another line is at fault
  heavy -c "import open_clip
from c2lip.towers import resolve
open_clip.create_model_from_pretrained = lambda name, pretrained: resolve(f'{name}:{pretrained}')
open_clip.get_tokenizer = resolve
$2" || wrong python "$@"
}

place() { [ -e "$2" ] || [[ $2 == *:* ]] || wrong "$1 $2 is not there"; }
made() { mkdir -p "$1/model" "$1/benchmark"; touch "$1/metrics.jsonl"; }

papermill() {
  echo "papermill $*" >> "$log"
  place notebook "$1"; shift
  while [ $# -gt 0 ]; do
    case $1 in
      -f) place recipe "$2"; shift 2 ;;
      -p)
        case $2 in
          data|test|after|before) place "$2" "$3" ;;
          models) for model in ${3//,/ }; do place model "$model"; done ;;
          run_dir) made "$3" ;;
        esac
        shift 3 ;;
      *) wrong papermill "$@" ;;
    esac
  done
}

c2lip() {
  case $1 in
    prepare) [ "$quick" ] && mkdir -p "$3" && return
      heavy -c "import sys; from c2lip.lab.dev.command import main; sys.exit(main(sys.argv[1:]))" \
      "${@/#16/1}" >/dev/null || wrong c2lip "$@" ;;
    rehearse) [ "$3" = --gpu ] && { [ "$quick" ] || heavy -c "from c2lip.lab.training.plan import GPUS; GPUS['$4']" || wrong c2lip "$@"; return; }
      place benchmarks "${@: -3:1}"; papermill nbs/train.ipynb -f "data/recipes/$2.yaml" "${@:3:6}" ;;
    list) command python -c "import sys; from c2lip.lab.dev.command import _parser; _parser().parse_args(sys.argv[1:])" \
      "$@" || wrong c2lip "$@" ;;
    *) wrong c2lip "$@" ;;
  esac
}

torchrun() {
  while [ "$1" != -m ]; do shift; done
  [ "$2" = c2lip.lab.training.run ] || wrong torchrun "$@"
  place recipe "$3"; made "$4"; place data "${5#data=}"
}
sbatch() { bash -n "$1" || wrong sbatch "$@"; }
tail() { place log "${@: -1}"; }
tensorboard() { place logs "${@: -1}"; }

# ---- a miniature of every published file, at its address, four images each
tar_of() { command tar -C "$1" -cf "$2" $(ls "$1"); }
fill() {
  mkdir -p "$1" && cd "$1" && mkdir -p val2014 val2017 d/images d/images_aar k t own
  local n all tasks=github.com/RAIVNLab/sugar-crepe/data plus=github.com/Sri-Harsha/scpp/data
  for n in 0 1 2 3; do
    printf 'GIF89a\1\0\1\0\200\0\0\377\0\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;' | tee val2017/$n.jpg val2014/$n.jpg t/$n.jpg \
      d/images/test_$n.jpg d/images_aar/aar_test_$n.jpg > own/ILSVRC2012_val_0000000$((n + 1)).JPEG
    echo "red $n" > t/$n.txt
    all+=", {\"id\": $n, \"filename\": \"$n.jpg\", \"caption\": \"red $n\", \"caption2\": \"a red $n\", \"negative_caption\": \"blue $n\"}"
    coco+=", {\"filename\": \"$n.jpg\", \"filepath\": \"val2014\", \"split\": \"test\", \"sentences\": [{\"raw\": \"red $n\"}]}"
    docci+="{\"example_id\": \"test_$n\", \"split\": \"test\", \"image_file\": \"test_$n.jpg\", \"description\": \"Red $n.\"}"$'\n'
    iiw+="{\"IIW\": \"Red $n.\", \"image/key\": \"aar_test_$n\"}"$'\n'
  done
  mkdir -p $tasks $plus images.cocodataset.org/zips cs.stanford.edu/people/karpathy/deepimagesent
  for n in replace_obj replace_att replace_rel swap_obj swap_att add_obj add_att; do echo "[${all#, }]" > $tasks/$n.json; done
  cp $tasks/{replace,swap}_* $plus/
  for n in val2014 val2017; do command python -m zipfile -c images.cocodataset.org/zips/$n.zip $n; done
  echo "{\"images\": [${coco#, }]}" > k/dataset_coco.json
  command python -m zipfile -c cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip k/dataset_coco.json
  local at=storage.googleapis.com/docci/data wds=hf/clip-benchmark/wds_flickr
  mkdir -p $at ${wds}{8k,30k}/test raw.githubusercontent.com/{google/imageinwords/main/datasets/IIW-400,tensorflow/models/master/research/slim/datasets}
  printf %s "$docci" > $at/docci_descriptions.jsonlines
  command tar -czf $at/docci_images.tar.gz -C d images
  command tar -czf $at/docci_images_aar.tar.gz -C d images_aar
  printf %s "$iiw" > raw.githubusercontent.com/google/imageinwords/main/datasets/IIW-400/data.jsonl
  printf 'n01440764\nn01443537\n%.0s' 1 2 > raw.githubusercontent.com/tensorflow/models/master/research/slim/datasets/imagenet_2012_validation_synset_labels.txt
  tar_of own ILSVRC2012_img_val.tar
  for n in 8k 30k; do tar_of t $wds$n/test/0.tar; echo 1 > $wds$n/test/nshards.txt; done

  local shards=hf/pixparse/cc3m-wds table=hf/qidouxiong619/dreamlip_long_captions
  mkdir -p $shards $table
  echo Image Path,raw_caption,shortLLA_captions > $table/cc3m_3long_3short_1raw_captions_url.csv
  for n in $(seq -w 0 575); do
    echo "{\"url\": \"http://a/$n.jpg\"}" > t/a.json
    command tar -C t -cf $shards/cc3m-train-0$n.tar --transform "s/^[0a]/$n/" 0.jpg a.json
    echo "http://a/$n.jpg,an alt text,A red mug beside $n blue fish." >> $table/cc3m_3long_3short_1raw_captions_url.csv
  done
}

# ---- what came of it: the launchers know their settings, the tables' columns are read and have their images
check() {
  heavy -c "$(cat <<'P'
import shlex, sys
from pathlib import Path
from c2lip.core.files import read_yaml
from c2lip.lab.evaluation.base import Request
from c2lip.lab.evaluation.published import layouts
from c2lip.lab.evaluation.suites import READERS
from c2lip.lab.training.config import check
from c2lip.lab.training.launchers import launcher, launcher_settings

calls = [shlex.split(line)[1:] for line in Path(sys.argv[1]).read_text().splitlines()]
assert len(calls) > 11, calls
for notebook, *words in calls:
    given = {}
    for i, word in enumerate(words):
        given |= read_yaml(words[i + 1]) if word == "-f" else {words[i + 1]: words[i + 2]} if word == "-p" else {}
    check(launcher_settings(launcher(Path(notebook).stem), given), given)

wanted = {suite for n in (5, 2) for suite, _ in layouts()[f"C2LIP Table {n}"].values()} & set(READERS)
assert len(wanted) == 8, wanted
for name in wanted:
    suite = READERS[name](Request(Path(sys.argv[2]), name))
    missing = [image for image in suite.images if isinstance(image, Path) and not image.is_file()]
    assert suite.images and not missing, (name, missing[:1])
P
  )" "$log" benchmarks
}
