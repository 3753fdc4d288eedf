//! Values that users know from other programs: `--strategy fsdp`, `--optimizer adam`, `--data MNIST`.
//!
//! A value that only differs in its spelling is answered for every flag.

/// Spellings of a value without dashes, dots and the like, the flag they are typed for, and the answer.
const EXPLAINED: &[(&str, &[&str], &str)] = &[
    (
        "--transport",
        &["gloo", "ucc"],
        "this is a backend of PyTorch; pass --transport shm for ranks of one host, or tcp for ranks of several",
    ),
    (
        "--strategy",
        &["fsdp", "fsdp2", "fullshard", "fullyshard", "hsdp"],
        "FSDP's way to divide a model, in even shards that are gathered before they are used, is sharded3; pass --strategy \
         sharded3",
    ),
    (
        "--strategy",
        &["shardgradop"],
        "gradients and optimizer state in even shards are sharded2; pass --strategy sharded2",
    ),
    (
        "--strategy",
        &["zero", "deepspeed"],
        "ZeRO's stages have a strategy each; pass --strategy sharded1, sharded2 or sharded3 for even shards, or zero1, zero2 \
         or zero3 for whole parameters",
    ),
    (
        "--strategy",
        &["dp", "dataparallel", "distributeddataparallel", "horovod"],
        "replicas that average their gradients during the backward pass are ddp; pass --strategy ddp",
    ),
    (
        "--strategy",
        &["pp", "pipeline", "gpipe", "1f1b", "zerobubble"],
        "a pipeline goes with any strategy; pass --mesh pp=N for N stages, and --schedule NAME",
    ),
    (
        "--optimizer",
        &["adam"],
        "Adam is AdamW without weight decay; pass --optimizer adamw --weight-decay 0",
    ),
    ("--precision", &["mixed", "amp"], "mixed precision is bf16 or fp16; pass --precision bf16"),
    ("--precision", &["half"], "half precision is bf16 or fp16; pass --precision bf16"),
    (
        "--model",
        &["gpt", "gpt2", "gpt3", "transformer", "llama2", "llama3", "lm"],
        "the language model here is llama, with sizes of its own; pass --model llama, with --llama-size or --pretrained",
    ),
    (
        "--model",
        &[
            "resnet",
            "resnet18",
            "resnet34",
            "resnet50",
            "resnet101",
            "vgg",
            "vgg16",
            "vit",
            "convnet",
        ],
        "the model for images here is cnn; pass --model cnn, or write yours (paceline new)",
    ),
    (
        "--data",
        &["imagenet", "imagenette", "imagefolder", "folder"],
        "images in a folder for each class are --data images; pass --data images --data-dir DIR",
    ),
    (
        "--data",
        &["fashionmnist", "kmnist", "emnist"],
        "files in MNIST's format are --data mnist; pass --data mnist --data-dir DIR",
    ),
];

/// Names that end with the number of a stage of ZeRO.
const ZERO: &[&str] = &["zero", "zerostage", "stage", "deepspeed", "deepspeedzero", "ds"];

/// What to write instead of `value`, typed for `flag` (`--strategy`), which takes one of `accepted`. `None` if it is accepted, or
/// if it means nothing.
pub(super) fn answer(flag: &str, value: &str, accepted: &[String]) -> Option<String> {
    if accepted.iter().any(|name| name == value) {
        return None;
    }
    let plain = letters(value);
    let explained = EXPLAINED.iter().find(|(of, words, _)| *of == flag && words.contains(&&*plain));
    if let Some((.., text)) = explained {
        return Some((*text).to_owned());
    }
    if let Some(text) = (flag == "--strategy").then(|| zero(&plain)).flatten() {
        return Some(text);
    }
    let same = accepted.iter().find(|name| letters(name) == plain)?;
    Some(format!("it is spelled {same} here; pass {flag} {same}"))
}

/// A stage of ZeRO, which two strategies have.
fn zero(plain: &str) -> Option<String> {
    let stage = plain.chars().last().filter(|last| ('1'..='3').contains(last))?;
    ZERO.contains(&&plain[..plain.len() - 1]).then(|| {
        format!(
            "stage {stage} of ZeRO is sharded{stage} with even shards, as in DeepSpeed and FSDP, and zero{stage} with whole \
             parameters; pass --strategy sharded{stage} or zero{stage}"
        )
    })
}

/// A word as one says it, in small letters.
pub(super) fn letters(word: &str) -> String {
    word.to_ascii_lowercase().chars().filter(char::is_ascii_alphanumeric).collect()
}
