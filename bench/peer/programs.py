"""Makes six public training programs run on this processor, so that `bench/record.py` can run them with and without a recording.

    .peer/bin/python bench/peer/programs.py DIR

DIR has clones of karpathy/nanoGPT, pytorch/examples, huggingface/accelerate and Lightning-AI/pytorch-lightning. Their data are
replaced by random ones, and what demands a card or a download by the same on a processor; all is seeded. The last program is
a usual one around the Trainer of transformers. The peer needs torchvision, transformers, accelerate, lightning, datasets, requests and
jsonargparse[signatures] too.
"""
import json
import random
import struct
import subprocess
import sys
from pathlib import Path

DDP = "examples/distributed/ddp-tutorial-series"
AUTOENCODER = "pytorch-lightning/examples/pytorch"
TRAINER = '''import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
data = [{"input_ids": (ids := torch.randint(0, 512, (64,))), "labels": ids} for _ in range(1024)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4))
how = {"max_steps": 60, "logging_steps": 10, "per_device_train_batch_size": 8, "save_strategy": "no"}
trainer = Trainer(model, TrainingArguments("out", use_cpu=True, report_to="none", disable_tqdm=True, **how), train_dataset=data)
trainer.train()
trainer.save_model("out")
'''
NANO = "--device=cpu --backend=gloo --compile=False --dtype=float32 --max_iters=60 --eval_interval=50 --eval_iters=2 --log_interval=10 --n_layer=4"
NANO += " --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 --dropout=0.0 --gradient_accumulation_steps=2"
LIGHTNING = "--trainer.max_steps 60 --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.enable_progress_bar false"
# By name: the folder below DIR, the command, and the file with the weights that it ends with.
PROGRAMS = {
    "nanoGPT": ("nanoGPT", f"torchrun --standalone --nproc-per-node 2 train.py config/train_shakespeare_char.py {NANO}", "out-shakespeare-char/ckpt.pt"),
    "MNIST": ("examples/mnist", "python main.py --epochs 1 --no-accel --save-model", "mnist_cnn.pt"),
    "DDP tutorial": (DDP, "python multigpu.py 3 1", "checkpoint.pt"),
    "accelerate": ("accelerate/examples", "torchrun --standalone --nproc-per-node 2 nlp_example.py --cpu", "model.pt"),
    "Lightning": (f"{AUTOENCODER}/basics", f"python autoencoder.py {LIGHTNING}", "lightning_logs/version_0/checkpoints/*.ckpt"),
    "Trainer": ("trainer", "torchrun --standalone --nproc-per-node 2 trainer.py", "out/model.safetensors"),
}


def changed(file: Path, *pairs: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in pairs:
        if old not in text:
            sys.exit(f"{file}: has no {old!r}; has it been changed before?")
        text = text.replace(old, new)
    file.write_text(text)


def images(folder: Path, train: int) -> None:
    """Random images in the format of MNIST."""
    (folder / "MNIST/raw").mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    for kind, count in (("train", train), ("t10k", 600)):
        pixels, labels = rng.randbytes(count * 784), bytes(rng.randrange(10) for _ in range(count))
        (folder / f"MNIST/raw/{kind}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, count, 28, 28) + pixels)
        (folder / f"MNIST/raw/{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, count) + labels)


def pairs_of_sentences(folder: Path) -> None:
    """Random sentences, and a tokenizer that knows their words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words, rng = [f"w{i}" for i in range(500)], random.Random(3)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder / "tokenizer")
    for name, count in (("train", 1600), ("validation", 64)):
        pairs = ((rng.choices(words, k=rng.randint(10, 40)), rng.choices(words, k=20)) for _ in range(count))
        rows = [{"idx": i, "label": rng.randrange(2), "sentence1": " ".join(a), "sentence2": " ".join(b)} for i, (a, b) in enumerate(pairs)]
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))


def main(root: Path) -> None:
    changed(root / "nanoGPT/train.py", ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", "    device = 'cpu'\n"), ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"))
    text = root / "examples/distributed/minGPT-ddp/mingpt/data/input.txt"
    (root / "nanoGPT/data/shakespeare_char/input.txt").write_bytes(text.read_bytes())
    subprocess.run([sys.executable, root / "nanoGPT/data/shakespeare_char/prepare.py"], check=True, stdout=subprocess.DEVNULL)
    images(root / "examples/data", 6400)
    images(root / AUTOENCODER / "basics/data", 60000)
    images(root / AUTOENCODER / "../Datasets", 60000)
    on_processor = [("    torch.cuda.set_device(rank)\n", "    torch.manual_seed(0)\n"), ('"nccl"', '"gloo"'), ("torch.cuda.device_count()", "2")]
    changed(root / DDP / "multigpu.py", *on_processor, ("model.to(gpu_id)", "model"), ("DDP(model, device_ids=[gpu_id])", "DDP(model)"), (".to(self.gpu_id)", ""))
    here = root / "accelerate/examples"
    pairs_of_sentences(here)
    small = "BertConfig(vocab_size=502, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)"
    added = "            metric.add_batch(\n                predictions=predictions,\n                references=references,\n            )\n"
    changed(
        here / "nlp_example.py",
        ("import evaluate\n", "from transformers import BertConfig\n"),
        ('AutoTokenizer.from_pretrained("bert-base-cased")', f'AutoTokenizer.from_pretrained("{here}/tokenizer")'),
        ('load_dataset("nyu-mll/glue", "mrpc")', f'load_dataset("json", data_files={{name: f"{here}/{{name}}.json" for name in ("train", "validation")}})'),
        ('AutoModelForSequenceClassification.from_pretrained("bert-base-cased", return_dict=True)', f"AutoModelForSequenceClassification.from_config({small})"),
        ('    metric = evaluate.load("glue", "mrpc")\n', ""), (added, ""), ("        eval_metric = metric.compute()\n", ""), (", eval_metric)", ")"),
        ("    accelerator.end_training()", '    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")\n    accelerator.end_training()'),
        ('"num_epochs": 3', '"num_epochs": 1'),
    )
    (root / "trainer").mkdir(exist_ok=True)
    (root / "trainer/trainer.py").write_text(TRAINER)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
