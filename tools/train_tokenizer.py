"""Make the simulated model's tokenizer: `python tools/train_tokenizer.py [--check]`.

A byte-level BPE over sentences that this script writes from a seed, and the LICENSE text. Two runs
write the same bytes; `--check` compares with the files in the package instead of writing them.

The last quarter of the ids are whole words with a space before them, since `core/simkv.py` answers
with these: such an answer, sent back as text, encodes to the ids that were generated.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
MODEL_FOLDER = ROOT / "src" / "trunkline" / "worker" / "model"
SEED = 20260101
VOCAB_SIZE = 4096
ANSWER_WORDS = VOCAB_SIZE // 4
SENTENCES = 6_000
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")

_WORD_LIST = """
a about above across act add after again all also an and another answer any are as ask at author
away back be because been before begin below best better between block body book both bring build
but by cache call can capital carry case cause change chapter check city clear close code cold
column come compare copy correct cost could count country course cover create cut data day decide
deep delete deliver describe design detail did different direct do document does done door down
draft draw drive drop each early easy edge edit eight else email end engine enough error even event
every example expect explain express eye face fact fail fall far fast father field figure file fill
final find fine finish first fit five fix flow follow food for force form found four free from full
function gate gateway general get give go gold good great green ground group grow guide half hand
handle happen hard has have he head hear heat heavy help her here high him his hold home hot hour
house how however hundred idea if important improve in include index inform input inside instead
into is issue it item its job join just keep kind king know label lake land language large last
late later law lay lead learn least leave left length less let letter level lie life light like
line list listen little live load local long look low machine made main make man many map mark
matter may me mean measure meet memory message might mile mind minute miss model moment money month
moon more most mother move much music must my name near need network never new next night nine no
node north not note nothing notice now number object of off offer office often old on once one only
open option or order other our out outer output over own page paper part pass past path pattern
people perhaps person picture piece place plain plan plant play please point policy poor power
prefix present press problem process product program promise proof prove public pull purpose push
put queue question quick quiet quote rain range rate reach read ready real reason receive record
red region remember remove repeat reply report request rest result return review right river road
role room root round route row rule run safe said same say scale school science scope score sea
search second see seem send sentence serve server set seven several shape share she ship short
should show side sign simple since single site six size sleep slow small so some song soon sort
sound source south space speak special spell stand star start state station stay step still stop
store story street strong study style such sum summary summer sun sure surface system table take
talk task teach team tell ten tenant term test text than thank that the their them then there these
they thing think third this those though thought thousand three through time to today together
token too tool top total toward town translate travel tree true try turn two type under unit until
up update upper us use user usual value vary verb very view visit voice wait walk wall want warm
was watch water way we week weight well went were west what wheel when where which while white who
whole why wide will wind window winter wish with within without wonder wood word work worker world
would write year yes yet you young your zero
"""
PLAIN_WORDS = tuple(_WORD_LIST.split())

OTHER_SCRIPTS = (
    "naïve café déjà vu, Größe, Straße, año, ação, żółw, дерево, слово, ответ, λόγος, שלום, سلام, "
    "नमस्ते, 你好世界，缓存前缀，東京の天気、ありがとう、안녕하세요. "
    "🙂👍🏽🚀 — “quoted” … ½ ± µ °C € £ ¥"
)


def sentences(seed: int) -> Iterator[str]:
    """Prose, JSON-like lines, numbers and code-like lines over plain and made-up words."""
    rng = random.Random(seed)
    made_up = sorted(
        {
            "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(parts))
            for parts in (2, 3)
            for _ in range(450)
        }
    )
    for _ in range(SENTENCES):
        length = rng.randint(6, 16)
        words = [
            rng.choice(PLAIN_WORDS) if rng.random() < 0.7 else rng.choice(made_up)
            for _ in range(length)
        ]
        kind = rng.random()
        if kind < 0.8:
            yield " ".join(words).capitalize() + rng.choice([".\n", "?\n", ". ", "!\n\n", ": "])
        elif kind < 0.9:
            yield json.dumps({words[0]: " ".join(words[1:4]), words[4]: rng.randint(0, 9999)})
        else:
            head = f"def {words[0]}_{words[1]}({words[2]}):"
            yield f"{head}\n    return {words[3]}[{rng.randint(0, 99)}]\n"
    for _ in range(20):
        yield OTHER_SCRIPTS


def train() -> Tokenizer:
    """The BPE with ids as the trainer gave them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*sentences(SEED), (ROOT / "LICENSE").read_text("utf-8")]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def definition(tokenizer: Tokenizer) -> dict[str, Any]:
    """`tokenizer.json`, renumbered so that the answer words come last, with one BOS put in
    front."""
    made = json.loads(tokenizer.to_str())
    by_id: list[str] = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    assert len(by_id) == VOCAB_SIZE, f"trained {len(by_id)} tokens, wanted {VOCAB_SIZE}"
    words = [token for token in by_id if _is_stable_word(tokenizer, token)]
    assert len(words) >= ANSWER_WORDS, f"only {len(words)} whole words, needed are {ANSWER_WORDS}"
    # Long words first: shorter ones are mostly beginnings of others.
    answers = set(sorted(words, key=lambda word: (-len(word), word))[:ANSWER_WORDS])
    ordered = [token for token in by_id if token not in answers]
    ordered += [token for token in by_id if token in answers]
    made["model"]["vocab"] = {token: number for number, token in enumerate(ordered)}
    bos = SPECIAL_TOKENS[1]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [ordered.index(bos)], "tokens": [bos]}},
    }
    return made


def _is_stable_word(tokenizer: Tokenizer, token: str) -> bool:
    if not re.fullmatch("Ġ[a-z]{2,}", token):
        return False
    return tokenizer.encode(" " + token[1:], add_special_tokens=False).tokens == [token]


def rendered_files() -> dict[str, str]:
    """File name -> content."""
    pad, bos, eos, _, im_end = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": im_end,
        "additional_special_tokens": [eos, *SPECIAL_TOKENS[3:]],
    }
    tokenizer_json = json.dumps(definition(train()), ensure_ascii=False, separators=(",", ":"))
    return {
        "tokenizer.json": tokenizer_json + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    differing = 0
    for name, content in rendered_files().items():
        path = MODEL_FOLDER / name
        if not is_check:
            path.write_text(content, "utf-8")
        elif path.read_text("utf-8") != content:
            differing += 1
            sys.stderr.write(f"{path} differs from what this script makes\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
