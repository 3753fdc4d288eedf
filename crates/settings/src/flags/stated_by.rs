//! Which flags a checkpoint or a run folder may state, in addition to the user who starts the run.
//!
//! Either may come from a stranger, so a flag that is in no list here is for the user alone: a file of others must not decide
//! where this program writes, which server it asks, or how many processes it starts.

use clap::Arg;
use paceline_choices::data::DATA_SETS;
use paceline_choices::models::MODELS;
use paceline_choices::optimizers::OPTIMIZERS;
use paceline_choices::registry::Registry;
use paceline_choices::strategies::STRATEGIES;

use super::key;

/// The most ranks for each core that a checkpoint or a run folder may ask for.
pub const RANKS_PER_CORE: usize = 8;

/// The flags that a checkpoint records, and states when a run goes on from it: those that decide the model, the samples and
/// the weights.
const OF_CHECKPOINTS: [&str; 12] = [
    "model freeze batch-norm channels hidden fuse layout init width hidden-dim input-dim output-dim num-layers",
    "tie-layers unused-head heads kv-heads intermediate layers llama-size vocab num-labels tie-embeddings pretrained",
    "checkpoint-activations",
    "mesh schedule stages precision emulate-fp16 tf32",
    "strategy accumulate accumulation-order no-sync find-unused-parameters no-static-graph sync-batch-norm broadcast-buffers",
    "sync-blocks accumulate-in bucket-cap-mb first-bucket-mb keep-after-forward prefetch no-gradient-view",
    "sync-every local-sgd-as-published top-k",
    "epochs steps steps-per-epoch batch-size global-batch-size seed early-stop optimizer lr momentum weight-decay beta1 beta2",
    "eps decay-matrices-only lr-schedule lr-warmup-steps min-lr lr-steps clip-grad-norm loss-scale loss-scale-window",
    "data data-dir synthetic samples image rank-samples evaluate eval-every tokenizer text-column label-column label-names",
    "no-header skip-bad-rows max-length classes train-samples test-samples group-by-length seq-len",
    "pin-memory non-blocking copy-stream generate-on-host load-ahead decode-us",
];

/// The flags that `config.json` of a run folder states too, so that the run can be repeated: those about how it is carried
/// out, and its output.
const OF_RUN_FOLDERS: [&str; 4] = [
    "nproc threads simd transport device amp cuda-graph pin-cores head-at-once pipeline-memory warmup-steps",
    "timeout link algorithm nccl-order comm-log hosts",
    "ddp-choice shard-choice price-per-hour",
    "name log-every sample-every tensorboard verbose quiet profile profile-wait profile-warmup profile-active mark-ranges",
];

/// Whether a checkpoint records the flag of this name. The flags of the program's own choices are recorded too.
pub fn is_recorded(name: &str) -> bool {
    is_in(&OF_CHECKPOINTS, name)
        || is_of_added(&MODELS, name)
        || is_of_added(&DATA_SETS, name)
        || is_of_added(&OPTIMIZERS, name)
        || is_of_added(&STRATEGIES, name)
}

/// Whether a run is repeated with the flag of this name from the `config.json` of its folder.
pub fn is_repeated(name: &str) -> bool {
    is_recorded(name) || is_in(&OF_RUN_FOLDERS, name)
}

fn is_in(list: &[&str], name: &str) -> bool {
    list.iter().any(|names| names.split(' ').any(|known| known == name))
}

fn is_of_added<K>(registry: &Registry<K>, name: &str) -> bool {
    let is_it = |flag: Arg| key(&flag) == name;
    registry.added().iter().any(|choice| (choice.flags)().into_iter().any(is_it))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags that only the user states: where files are written, from where they are fetched, and how processes meet.
    const OF_THE_USER: [&str; 3] = [
        "download mirror token-cache init-method host",
        "json run-dir save save-best save-every save-keep save-budget-mb save-sync profile-dir",
        // It would let one file decide the settings of another one.
        "resume",
    ];

    /// Whoever adds a flag decides here who may state it.
    #[test]
    fn each_flag_is_in_one_list() {
        let lists = [&OF_CHECKPOINTS[..], &OF_RUN_FOLDERS, &OF_THE_USER];
        let all = crate::flags::all();
        for name in all.iter().map(key) {
            let num = lists.iter().filter(|list| is_in(list, name)).count();
            assert_eq!(num, 1, "--{name} is in {num} of the lists, and belongs in one of them");
        }
        for name in lists.concat().iter().flat_map(|names| names.split(' ')) {
            assert!(all.iter().any(|flag| key(flag) == name), "there is no flag --{name}");
        }
    }
}
