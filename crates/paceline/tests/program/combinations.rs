//! Combinations of features, drawn at random: each one that trains also saves, resumes and exports.
//!
//! Ranks are threads of one process, which is fast. A combination that `paceline train` refuses is left out: other tests say
//! what is refused, and how.

use std::fs;

use safetensors::SafeTensors;

use crate::common::Sandbox;
use paceline_schedule::SCHEDULES;

/// Where drawing begins. Another number draws other combinations.
const SEED: u64 = 1;
/// The combinations that are to train, and the most that are drawn for them.
const COMBINATIONS: usize = 16;
const MOST_DRAWN: usize = 20 * COMBINATIONS;

const MODELS: [&str; 7] = [
    "--model mlp --num-layers 7 --input-dim 8 --hidden-dim 8 --output-dim 3",
    "--model mlp --num-layers 7 --input-dim 8 --hidden-dim 8 --output-dim 3 --tie-layers",
    "--channels 4 4 --hidden 8 --batch-norm --samples 96 --image 8 8 1",
    "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --vocab 61 --seq-len 8",
    "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --vocab 61 --seq-len 8 --tie-embeddings",
    "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --vocab 61 --seq-len 8 --tie-embeddings --freeze model.embed_tokens",
    "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --data reviews --num-labels 2",
];
const STRATEGIES: [&str; 9] = [
    "simple_ddp",
    "bucket_ddp_async",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "top_k",
    "bf16",
    "local_sgd",
];
const SHARDING: [&str; 4] = ["sharded1", "sharded2", "sharded3", "sharded2 --accumulate-in shards"];

/// Draws by the generator SplitMix64.
struct Draw(u64);

impl Draw {
    fn one_of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        choices[((bits ^ (bits >> 31)) % choices.len() as u64) as usize]
    }

    /// What determines the weights, up to rounding.
    fn training(&mut self) -> String {
        [
            self.one_of(&MODELS),
            self.one_of(&["--accumulate 1", "--accumulate 3", "--accumulate 4", "--accumulate 4"]),
            self.one_of(&["--global-batch-size 4", "--global-batch-size 7"]),
            self.one_of(&["", "--optimizer adamw", "--momentum 0.9"]),
            self.one_of(&["", "--clip-grad-norm 0.5"]),
            self.one_of(&["", "--accumulation-order tree"]),
            self.one_of(&["", "", "--precision bf16", "--precision fp16 --emulate-fp16"]),
            self.one_of(&["", "", "--steps-per-epoch 5"]),
        ]
        .join(" ")
    }

    /// Ranks, how they are arranged, and what keeps them equal.
    fn layout(&mut self) -> String {
        let mesh = self.one_of(&[
            "1",
            "2 dp=2",
            "2 shard=2",
            "2 pp=2",
            "2 pp=2",
            "3 pp=3",
            "4 pp=4",
            "4 pp=2,dp=2",
            "4 dp=2,pp=2",
            "4 pp=2,shard=2",
        ]);
        let Some((ranks, axes)) = mesh.split_once(' ') else { return "--nproc 1".to_owned() };
        let strategies = if axes.contains("shard") { &SHARDING[..] } else { &STRATEGIES };
        let mut layout =
            format!("--nproc {ranks} --mesh {axes} --strategy {}", self.one_of(strategies));
        if axes.contains("pp") {
            layout += &format!(" --schedule {}", self.one_of(&SCHEDULES.map(|of| of.name())));
        }
        layout
    }
}

/// Trains in a sandbox. `None` if the flags are refused.
fn train(sandbox: &Sandbox, flags: &str) -> Option<String> {
    let run = sandbox.train(&format!("{flags} --warmup-steps 0 --transport thread"));
    match run.code {
        Some(2) => None,
        _ => Some(run.ok().weights().to_owned()),
    }
}

/// Exports the checkpoint in the folder `saved`. Returns the file.
fn export(sandbox: &Sandbox, saved: &str) -> Vec<u8> {
    sandbox.run(&format!("checkpoint export {saved} --optimizer --to exported --force")).ok();
    fs::read(sandbox.path("exported")).unwrap()
}

/// The parameters of an exported file, by name. Running statistics also follow the samples of a step that changes no weight.
fn parameters(file: &[u8]) -> Vec<(String, Vec<u8>)> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let mut all: Vec<_> =
        tensors.iter().map(|(name, of)| (name.to_owned(), of.data().to_vec())).collect();
    all.retain(|(name, _)| name.starts_with("model.") && !name.contains(".running_"));
    all.sort();
    all
}

/// Checks a combination. Whether it is not refused.
fn trains(training: &str, layout: &str, draw: &mut Draw) -> bool {
    let sandbox = Sandbox::new();
    let flags = format!("{training} {layout}");
    let whole = train(&sandbox, &format!("{flags} --steps 4 --save whole --save-every 2"));
    let Some(whole) = whole else { return false };
    let half = train(&sandbox, &format!("{flags} --steps 2 --save half")).expect("as before");
    let rest = train(&sandbox, &format!("{flags} --steps 4 --resume half"));
    assert_eq!(rest.expect("its own checkpoint"), whole, "resumed");
    let exported = export(&sandbox, "half");

    // With a rate of zero, a step in another layout leaves the weights as they are.
    let anywhere = (0..MOST_DRAWN).find_map(|_| {
        let layout = draw.layout();
        let flags = format!("{training} {layout} --steps 3 --lr 0");
        let resumed = train(&sandbox, &format!("{flags} --resume half --save other"));
        assert!(
            resumed.is_some() || train(&sandbox, &flags).is_none(),
            "refused to go on: {flags}"
        );
        Some((layout, resumed?))
    });
    let (layout, weights) = anywhere.expect("a layout that is not refused");
    assert_eq!(weights, half, "went on with {layout}");
    let is_same = parameters(&export(&sandbox, "other")) == parameters(&exported);
    assert!(is_same, "exported after {layout}");
    true
}

#[test]
fn every_combination_that_trains_saves_resumes_and_exports() {
    let mut draw = Draw(SEED);
    let mut num_trained = 0;
    for number in 0..MOST_DRAWN {
        let (training, layout) = (draw.training(), draw.layout());
        // Printed if the test fails.
        println!("combination {number} of seed {SEED}: {training} {layout}");
        num_trained += usize::from(trains(&training, &layout, &mut draw));
        if num_trained == COMBINATIONS {
            return;
        }
    }
    panic!("only {num_trained} of {MOST_DRAWN} combinations of seed {SEED} train");
}
