//! Checkpoints of pipelines: written by the stages of one layout, and read by any other.

use std::fs;

use crate::common::{Run, Sandbox};
use paceline::checkpoint::index::Index;

/// Running statistics, optimizer state and the norm of all gradients.
const MODEL: &str = "--channels 4 4 --hidden 8 --batch-norm --optimizer adamw --clip-grad-norm 1 --samples 256 \
                     --global-batch-size 16 --accumulate 4 --evaluate";
const LLAMA: &str = "--model llama --layers 3 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 \
                     --optimizer adamw --global-batch-size 16 --accumulate 4";

const AFTER_3: &str = "saved/step-000000003";

/// The weights at the end, and the results of the evaluation, which depend on the running statistics.
fn end(run: &Run) -> (String, Vec<String>) {
    let evaluated = run.stdout.lines().filter(|line| line.starts_with("Evaluation"));
    (run.weights().to_owned(), evaluated.map(str::to_owned).collect())
}

#[test]
fn a_run_goes_on_in_any_layout_to_the_weights_of_one_process() {
    let layouts = [
        "--nproc 1",
        "--nproc 2 --mesh pp=2 --schedule zb_h1",
        "--nproc 3 --mesh pp=3 --stages conv1,fc1 --transport thread",
        "--nproc 2 --mesh pp=2 --schedule interleaved_1f1b --transport thread",
        "--nproc 4 --mesh pp=4",
    ];
    let alone = end(&Sandbox::new().train(&format!("{MODEL} --nproc 1 --steps 6")).ok());
    for from in layouts {
        let sandbox = Sandbox::new();
        let whole = sandbox.train(&format!("{MODEL} {from} --steps 6 --save saved --save-every 2"));
        assert_eq!(end(&whole.ok()), alone, "{from}");
        for (to, steps) in layouts.into_iter().zip([2, 4, 2, 4, 2]) {
            let resumed = format!("--resume saved/step-00000000{steps} {to}");
            let run = sandbox.train(&resumed).ok();
            assert_eq!(end(&run), alone, "{from}, then {to}");
            assert_eq!(run.stderr, "", "{from}, then {to}");
        }
    }
}

#[test]
fn one_folder_passes_from_layout_to_layout() {
    for (model, layouts) in [
        (MODEL, ["pp=3 --stages conv1,fc1", "pp=2 --schedule zb_h2", "dp=1", "pp=4"]),
        (LLAMA, ["pp=2 --schedule zb_h1", "dp=1", "pp=3", "pp=2"]),
    ] {
        let alone = end(&Sandbox::new().train(&format!("{model} --nproc 1 --steps 8")).ok());
        let sandbox = Sandbox::new();
        let mut found = None;
        for (at, layout) in layouts.iter().enumerate() {
            let (ranks, steps) = (&layout[3..4], 2 * (at + 1));
            let flags =
                format!("{model} --nproc {ranks} --mesh {layout} --steps {steps} --save saved");
            found = Some(end(&sandbox.train(&format!("{flags} --resume auto")).ok()));
        }
        assert_eq!(found, Some(alone), "{layouts:?}");
        let verified = sandbox.run("checkpoint verify saved").ok();
        assert_eq!(verified.stdout.matches("match their digests").count(), 2, "{verified:#?}");
    }
}

#[test]
fn stages_that_are_sharded_go_on_in_any_layout() {
    // Sums over two ranks have the same bits in all of these.
    let layouts = [
        "--nproc 2",
        "--nproc 4 --mesh pp=2,dp=2 --strategy sharded2",
        "--nproc 4 --mesh pp=2,dp=2 --strategy zero1",
        "--nproc 4 --mesh dp=2,pp=2 --strategy zero3",
        "--nproc 4 --mesh pp=2,shard=2 --strategy sharded3 --transport thread",
        "--nproc 6 --mesh pp=3,dp=2 --strategy ddp --transport thread",
    ];
    let of_two = end(&Sandbox::new().train(&format!("{MODEL} --nproc 2 --steps 6")).ok());
    // One after another, sums have the same bits on one rank.
    let alone = ["--nproc 1", "--nproc 4 --mesh pp=4"];
    let mut on_one = Vec::new();
    for (at, from) in layouts.into_iter().enumerate() {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{MODEL} {from} --steps 6 --save saved --save-every 3")).ok();
        let resume = |to: &str| end(&sandbox.train(&format!("--resume {AFTER_3} {to}")).ok());
        for to in [layouts[(at + 1) % layouts.len()], "--nproc 2 --strategy sharded1"] {
            assert_eq!(resume(to), of_two, "{from}, then {to}");
        }
        on_one.extend(alone.map(resume));
    }
    assert!(on_one.iter().all(|found| *found == on_one[0]), "{on_one:?}");
}

/// What follows the header of a safetensors file, whose metadata name the layout.
fn values(mut file: Vec<u8>) -> Vec<u8> {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file.split_off(8 + header)
}

#[test]
fn a_checkpoint_of_stages_is_evaluated_and_exported_as_one_model() {
    for (model, is_cnn) in [(MODEL, true), (LLAMA, false)] {
        let saved = |layout: &str| {
            let sandbox = Sandbox::new();
            let flags = format!("{model} {layout} --steps 3 --save saved");
            let trained = sandbox.train(&flags).ok();
            sandbox.run("checkpoint export saved --to model.safetensors --optimizer").ok();
            if is_cnn {
                let evaluated = sandbox.run("evaluate --checkpoint saved --nproc 1").ok();
                for line in ["Evaluation loss: ", "Evaluation accuracy: "] {
                    assert_eq!(evaluated.line(line), trained.line(line), "{layout}");
                }
            } else {
                sandbox.run("checkpoint export saved --hugging-face --to published").ok();
            }
            let index = Index::parse(&sandbox.checkpoint_index()).unwrap();
            let tensors = index.tensors.iter().map(|(name, of)| (name.clone(), of.shape.clone()));
            let tensors: Vec<_> = tensors.collect();
            let values = ["model.safetensors", "published/model.safetensors"]
                .map(|file| fs::read(sandbox.path(file)).map(values).unwrap_or_default());
            (tensors, values)
        };
        let alone = saved("--nproc 1");
        for layout in
            ["--nproc 2 --mesh pp=2 --schedule zb_h1", "--nproc 3 --mesh pp=3 --transport thread"]
        {
            assert!(saved(layout) == alone, "{layout}");
        }
    }
}

#[test]
fn a_run_goes_on_in_its_stages_without_a_flag_and_says_what_differs() {
    let sandbox = Sandbox::new();
    let flags = format!("{MODEL} --nproc 2 --mesh pp=2 --stages fc0");
    sandbox.train(&format!("{flags} --schedule zb_h1 --steps 2 --save saved")).ok();
    let title = |flags: &str| {
        let run = sandbox.train(&format!("--resume saved --steps 3 {flags}")).ok();
        assert_eq!(run.stderr, "", "{flags}");
        run.line("paceline train: ").to_owned()
    };
    assert!(title("").contains("2 stages (zb_h1, cut at fc0)"));
    // The cut of a schedule with as many stages on each rank would not do for one with two.
    assert!(title("--schedule interleaved_1f1b").contains("4 stages (interleaved_1f1b"));
    assert!(title("--nproc 3 --mesh pp=3").contains("3 stages (1f1b"));
    assert!(!title("--mesh dp=2").contains("stages"));
    assert!(!title("--nproc 1").contains("stages"));

    let looped = format!("{MODEL} --nproc 2 --mesh pp=2 --schedule looped_bfs");
    let whole = sandbox.train(&format!("{looped} --steps 4")).ok();
    sandbox.train(&format!("{looped} --steps 2 --save looped")).ok();
    let rest = sandbox.train("--resume looped --steps 4").ok();
    assert_eq!((end(&rest), &*rest.stderr), (end(&whole), ""));
    let rest = sandbox.train("--resume looped --steps 4 --nproc 1").ok();
    let words = "--strategy any of the exact ones --schedule looped_bfs, this run has";
    assert!(rest.stderr.contains(words), "{rest:#?}");
}

#[test]
fn what_the_ranks_of_a_stage_keep_goes_on_in_the_same_stages_only() {
    let sandbox = Sandbox::new();
    let flags = format!("{MODEL} --nproc 4 --mesh pp=2,dp=2 --strategy top_k --top-k 0.2");
    let whole = sandbox.train(&format!("{flags} --steps 6 --save saved --save-every 3")).ok();
    let rest = sandbox.train(&format!("--resume {AFTER_3}")).ok();
    assert_eq!((end(&rest), &*rest.stderr), (end(&whole), ""));
    for other in ["--stages fc0", "--mesh dp=2,pp=2", "--mesh dp=4"] {
        let rest = sandbox.train(&format!("--resume {AFTER_3} {other}")).ok();
        assert!(rest.stderr.contains("what 4 ranks with top_k"), "{other}: {rest:#?}");
        assert!(rest.stderr.contains("is dropped"), "{other}: {rest:#?}");
    }
}

#[test]
fn a_damaged_part_of_one_stage_gives_way_to_the_checkpoint_before() {
    let sandbox = Sandbox::new();
    let flags = format!("{MODEL} --nproc 2 --mesh pp=2 --save saved --save-every 2");
    let whole = sandbox.train(&format!("{flags} --steps 6")).ok();
    // Only the last of three ranks reads the second half of this file.
    let part = sandbox.checkpoint().join("rank-001-of-002.shard");
    let mut bytes = fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&part, &bytes).unwrap();
    let other = format!("{MODEL} --nproc 3 --mesh pp=3 --stages conv1,fc1 --save saved --steps 6");
    let words = "rank-001-of-002.shard, which rank 1 wrote, ";
    for problem in ["is corrupt", "cannot be read: No such file"] {
        if problem != "is corrupt" {
            fs::remove_dir_all(sandbox.path("saved")).unwrap();
            sandbox.train(&format!("{flags} --steps 6")).ok();
            fs::remove_file(&part).unwrap();
        }
        let rest = sandbox.train(&format!("{other} --resume auto")).ok();
        assert_eq!(end(&rest), end(&whole), "{problem}");
        for words in [&format!("{words}{problem}"), "training goes on from step-000000004"] {
            assert!(rest.stderr.contains(words), "no {words:?} in {rest:#?}");
        }
    }
}
