//! `paceline check --numerics`, `compare --numerics`, and what `train` keeps for them: the first tensor in which two runs differ.

use std::fs::{self, File};

use safetensors::tensor::{Dtype, TensorView};

use crate::common::{Run, Sandbox, TINY, fifo, remove};

/// Writes a file with tensors of f32, each of one row.
fn write(sandbox: &Sandbox, path: &str, tensors: &[(&str, &[f32])]) {
    let bytes: Vec<(&str, Vec<u8>)> = tensors
        .iter()
        .map(|(name, values)| (*name, values.iter().flat_map(|of| of.to_le_bytes()).collect()))
        .collect();
    let view = |(name, bytes): &'_ (&str, Vec<u8>)| {
        let bytes: &'static [u8] = Box::leak(bytes.clone().into_boxed_slice());
        (name.to_string(), TensorView::new(Dtype::F32, vec![1, bytes.len() / 4], bytes).unwrap())
    };
    let file = safetensors::serialize(bytes.iter().map(view), None).unwrap();
    sandbox.write(path, &file);
}

fn compare(sandbox: &Sandbox, places: &str) -> Run {
    sandbox.run(&format!("compare --numerics {places}"))
}

#[test]
fn the_first_tensor_that_differs_is_named_with_its_distance() {
    let sandbox = Sandbox::new();
    for (folder, changed, grown) in [("a", 0.5, 1.0), ("b", 0.75, 1.5)] {
        for step in [2, 9, 10, 11] {
            let [q, norm] = match step {
                2 | 9 => [0.5, 1.0],
                10 => [changed, 1.0],
                _ => [changed, grown],
            };
            let tensors = [
                ("model.layers.10.q", &[1.0, q][..]),
                ("model.layers.9.q", &[1.0, 1.0]),
                ("model.norm", &[norm]),
            ];
            write(&sandbox, &format!("{folder}/step_{step}.safetensors"), &tensors);
        }
    }
    let run = compare(&sandbox, "a b").ok();
    insta::assert_snapshot!(run.stdout);
    let same = compare(&sandbox, "a a").ok();
    assert!(same.stdout.contains("No difference in 12 tensors, up to step 11"), "{same:#?}");
}

#[test]
fn what_is_missing_or_of_another_form_is_said() {
    let sandbox = Sandbox::new();
    write(&sandbox, "a/1.safetensors", &[("one", &[1.0]), ("two", &[1.0])]);
    write(&sandbox, "a/2.safetensors", &[("one", &[1.0])]);
    write(&sandbox, "b/1.safetensors", &[("one", &[1.0]), ("three", &[1.0])]);
    let run = compare(&sandbox, "a b").ok();
    for words in ["step 1, two", "it is in A only"] {
        assert!(run.stdout.contains(words), "{run:#?}");
    }
    assert!(run.stderr.contains("only A has 2.safetensors"), "{run:#?}");
    write(&sandbox, "b/1.safetensors", &[("one", &[1.0, 2.0]), ("two", &[1.0])]);
    let run = compare(&sandbox, "a b").ok();
    assert!(run.stdout.contains("it is F32 [1, 1] in A and F32 [1, 2] in B"), "{run:#?}");
    write(&sandbox, "b/1.safetensors", &[("one", &[f32::NAN]), ("two", &[1.0])]);
    let run = compare(&sandbox, "a b").ok();
    for words in ["1.0 in A, NaN in B", "NaN or infinite: 0 elements in A, 1 in B", "not finite"] {
        assert!(run.stdout.contains(words), "{run:#?}");
    }
}

#[test]
fn one_file_stands_for_all_ranks_of_a_side() {
    let sandbox = Sandbox::new();
    write(&sandbox, "a/1.safetensors", &[("w", &[1.0])]);
    for (rank, value) in [(0, 1.0), (1, 2.0)] {
        write(&sandbox, &format!("b/rank_{rank}/1.safetensors"), &[("w", &[value])]);
    }
    let run = compare(&sandbox, "a b").ok();
    assert!(run.stdout.contains("The first difference: step 1, w, rank 1"), "{run:#?}");
    write(&sandbox, "c/rank_1/1.safetensors", &[("w", &[2.0])]);
    write(&sandbox, "c/rank_7/1.safetensors", &[("w", &[2.0])]);
    let run = compare(&sandbox, "b c").ok();
    for words in ["only A has step 1 of rank 0", "only B has step 1 of rank 7"] {
        assert!(run.stderr.contains(words), "{run:#?}");
    }
    assert!(run.stdout.contains("No difference in 1 tensor, up to step 1"), "{run:#?}");
}

#[test]
fn files_of_strangers_are_refused_with_their_names() {
    let sandbox = Sandbox::new();
    write(&sandbox, "a/1.safetensors", &[("w", &[1.0])]);
    let good = fs::read(sandbox.path("a/1.safetensors")).unwrap();
    let header = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    let huge = r#"{"a":{"dtype":"F32","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,4]}}"#;
    for (bytes, words) in [
        (&good[..good.len() - 1], "it is truncated or damaged"),
        (&[0xff; 64], "it is truncated, or no safetensors file"),
        (&header(overlap), "its header is damaged"),
        (&header(huge), "its header is damaged"),
        (b"", "it has 0 bytes"),
    ] {
        sandbox.write("b/1.safetensors", bytes);
        compare(&sandbox, "a b").refused(&["b/1.safetensors", words]);
    }
    let path = sandbox.path("b/1.safetensors");
    remove(&path);
    fifo(&path);
    compare(&sandbox, "a b").refused(&["it is a FIFO, not a regular file"]);
    remove(&path);
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    compare(&sandbox, "a b").refused(&["its header is damaged"]);
    remove(&path);
    write(&sandbox, "b/other.safetensors", &[("w", &[1.0])]);
    compare(&sandbox, "a b").refused(&["A has 1, B has other", "give the steps the same names"]);
    // Names of others do not control the terminal.
    write(&sandbox, "c/1.safetensors", &[("w\u{1b}[2J", &[1.0])]);
    let run = compare(&sandbox, "a c").ok();
    assert!(!run.stdout.contains('\u{1b}'), "{run:#?}");
}

#[test]
fn two_runs_are_compared_by_the_digests_that_they_keep() {
    let sandbox = Sandbox::new();
    let train = |name: &str, flags: &str| {
        let watch = "--steps 3 --quiet --watch-numerics --accumulation-order tree";
        sandbox.train(&format!("{TINY} {watch} --batch-size 8 --name {name} {flags}")).ok();
    };
    train("one", "--nproc 1 --accumulate 2");
    train("two", "--nproc 2 --strategy sharded3");
    train("stages", "--nproc 2 --mesh pp=2 --accumulate 2");
    train("faster", "--nproc 1 --accumulate 2 --lr 0.02");
    for other in ["two", "stages"] {
        let run = compare(&sandbox, &format!("runs/one runs/{other}")).ok();
        assert!(
            run.stdout.contains("No difference in 36 tensors, up to step 3, weights"),
            "{run:#?}"
        );
    }
    let run = compare(&sandbox, "runs/one runs/faster").ok();
    for words in ["up to step 1, gradients", "The first difference: step 1, weights, conv0.weight"]
    {
        assert!(run.stdout.contains(words), "{run:#?}");
    }
    sandbox.train(&format!("{TINY} --steps 1 --quiet --name plain")).ok();
    compare(&sandbox, "runs/one runs/plain")
        .refused(&["runs/plain: it has no numerics.bin", "--watch-numerics"]);
    let file = sandbox.path("runs/two/numerics.bin");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let run = compare(&sandbox, "runs/one runs/two").ok();
    assert!(
        run.stdout.contains("up to step 2, weights"),
        "a last record that is cut off: {run:#?}"
    );
    for (bytes, words) in [
        (&b"{}\n"[..], "its first line has no names"),
        (b"", "its first line has no names"),
        (b"{\"numerics\":1,\"names\":[\"x\"]}\n", "it trains x where A trains conv0.weight"),
        (b"{\"numerics\":2,\"names\":[]}\n", "that this version can read"),
    ] {
        fs::write(&file, bytes).unwrap();
        compare(&sandbox, "runs/one runs/two").refused(&["runs/two", words]);
    }
    remove(&file);
    fifo(&file);
    compare(&sandbox, "runs/one runs/two").refused(&["it is a FIFO, not a regular file"]);
}

const CUT: &str = "batch-norm = true\nchannels = [4, 4]\nhidden = 8\nsamples = 84\nglobal-batch-size = 32\nmicro-batch-size = 4\n";
const RANKS: &str = "channels = [4]\nhidden = 8\nsamples = 200\nbatch-size = 8\nnproc = 4\n";

/// Compares two layouts, given as what stands in their files after `common`.
fn check(common: &str, layouts: [&str; 2]) -> (Sandbox, Run) {
    let sandbox = Sandbox::new();
    for (name, layout) in ["a.toml", "b.toml"].into_iter().zip(layouts) {
        sandbox.write(name, format!("{common}{layout}\n").as_bytes());
    }
    sandbox.write("tmp/.keep", b"");
    let before = sandbox.contents();
    let mut command = sandbox.paceline();
    command.args(["check", "--numerics", "a.toml", "b.toml"]).env("TMPDIR", sandbox.path("tmp"));
    let run = Run::of(command);
    assert_eq!(sandbox.contents(), before, "nothing is left of the runs");
    (sandbox, run)
}

#[test]
fn layouts_of_one_training_have_the_same_tensors() {
    for other in [
        "nproc = 3\nstrategy = \"sharded3\"",
        "nproc = 2\nmesh = \"pp=2\"\nschedule = \"zb_h1\"",
        "nproc = 4\nstrategy = \"sharded1\"\nmesh = \"dp=2,shard=2\"\nsave = \"saved\"\nname = \"mine\"",
    ] {
        let (_, run) = check(CUT, ["nproc = 1", other]);
        let run = run.ok();
        assert!(
            run.stdout.contains("No difference in 708 tensors, up to step 3, weights"),
            "{run:#?}"
        );
    }
}

const DIVIDED: [&str; 2] = [
    "model = \"llama\"\nlayers = 2\nwidth = 32\nheads = 8\nkv-heads = 4\nintermediate = 36\nseq-len = 9\nvocab = 44\n\
     tie-embeddings = true\nglobal-batch-size = 6\nmicro-batch-size = 2\n",
    // Of a single row, one of two ranks has all.
    "model = \"mlp\"\nnum-layers = 4\ninput-dim = 20\nhidden-dim = 36\noutput-dim = 7\nglobal-batch-size = 3\nmicro-batch-size = 1\n",
];

#[test]
fn layers_that_ranks_divide_have_the_tensors_of_one_process() {
    for common in DIVIDED {
        for other in [
            "nproc = 4\nmesh = \"tp=4\"\noverlap-tp = true",
            "nproc = 4\nmesh = \"shard=2,tp=2\"\nstrategy = \"sharded3\"\ntp-parts = 4",
            "nproc = 2\nmesh = \"tp=2\"\nsequence-parallel = false\ntp-parts = 4",
        ] {
            let (_, run) = check(common, ["nproc = 1\ntp-parts = 4", other]);
            let run = run.ok();
            assert!(run.stdout.contains("No difference in"), "{other}: {run:#?}");
        }
        let (_, run) = check(common, ["nproc = 1", "nproc = 2\nmesh = \"tp=2\""]);
        run.refused(&["layers have 1 part in A and 2 parts in B", "set the same tp-parts"]);
    }
}

#[test]
fn the_digests_of_divided_weights_are_those_of_one_process() {
    let sandbox = Sandbox::new();
    let model =
        "--model mlp --num-layers 4 --input-dim 20 --hidden-dim 36 --output-dim 7 --tp-parts 2";
    for (name, flags) in [
        ("one", "--nproc 1"),
        ("two", "--nproc 2 --mesh tp=2"),
        ("zero", "--nproc 4 --mesh dp=2,tp=2 --strategy zero2"),
        ("stages", "--nproc 4 --mesh pp=2,tp=2"),
    ] {
        let watch = "--steps 3 --quiet --watch-numerics --global-batch-size 8 --micro-batch-size 4";
        sandbox.train(&format!("{model} {watch} --name {name} {flags}")).ok();
        let run = compare(&sandbox, &format!("runs/one runs/{name}")).ok();
        assert!(
            run.stdout.contains("No difference in 102 tensors, up to step 3, weights"),
            "{run:#?}"
        );
    }
}

#[test]
fn the_first_tensor_in_which_two_layouts_differ_is_named_with_its_values() {
    let (_, run) = check(RANKS, ["", "transport = \"tcp\"\nalgorithm = \"ring\""]);
    assert_eq!(run.code, Some(1), "{run:#?}");
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert_eq!(lines[0], "A is a.toml, B is b.toml");
    for words in [
        "up to step 1, micro-batch 3, gradient",
        "The first difference: step 1, reduced, conv0.weight, ranks 0-3 in A, ranks 0-3 in B",
        " of 36 elements; the first at [",
        " ulps and ",
    ] {
        assert!(run.stdout.contains(words), "{words}: {run:#?}");
    }
}

#[test]
fn layouts_that_cannot_be_compared_are_refused() {
    for (common, layouts, words) in [
        (CUT, ["", "lr = 0.5"], "lr is not set in A and 0.5 in B"),
        (CUT, ["", "data = \"mnist\""], "data is synthetic in A and mnist in B"),
        (
            RANKS,
            ["", "accumulate = 2"],
            "a step has 4 micro-batches of 8 samples in A, and 8 of 8 in B",
        ),
        (RANKS, ["", "strategy = \"top_k\""], "--strategy top_k in B end with other bits"),
        (RANKS, ["", "ddp-choice = \"all\""], "b.toml: ddp-choice = all makes several runs"),
        (CUT, ["nproc = 3", "nproc = 16"], "16 ranks cannot share them"),
    ] {
        let (_, run) = check(common, layouts);
        run.refused(&[words]);
    }
    let without = RANKS.replace("nproc = 4\n", "");
    let (_, run) = check(&without, ["nproc = 4", "nproc = 2\naccumulate = 2"]);
    run.refused(&["A and B add up micro-batches in another order", "set global-batch-size"]);
}

#[test]
fn digests_of_passes_may_come_from_a_stranger() {
    let sandbox = Sandbox::new();
    let watch = "--steps 2 --quiet --nproc 2 --watch-passes";
    sandbox.train(&format!("{TINY} {watch} --name a")).ok();
    sandbox.train(&format!("{TINY} {watch}=1:1:forward:conv0 --name b --seed 1")).ok();
    let run = compare(&sandbox, "runs/a runs/b").ok();
    for words in [
        "The first difference: step 1, micro-batch 0, input, inputs, rank 0 in A, rank 0 in B",
        "train both again with --watch-passes '1:0:input:inputs'",
    ] {
        assert!(run.stdout.contains(words), "{words}: {run:#?}");
    }
    sandbox.train(&format!("{TINY} --steps 1 --quiet --name plain")).ok();
    compare(&sandbox, "runs/a runs/plain").refused(&["it has no passes.jsonl", "--watch-passes"]);
    let file = sandbox.path("runs/b/passes.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, &text[..text.len() - 1]).unwrap();
    compare(&sandbox, "runs/a runs/b").ok();
    let kept = text.lines().next().unwrap();
    // Parts and shapes that do not fit, with values and without.
    for (from, to) in [
        ("\"end\":", "\"end\":1844674407370"),
        ("\"start\":0", "\"start\":7"),
        ("\"shape\":[", "\"shape\":[4611686018427387904,8,"),
        ("\"F32\"", "\"F99\""),
        ("conv0", "conv\\u001b[2J"),
    ] {
        fs::write(&file, kept.replace(from, to) + "\n").unwrap();
        let run = compare(&sandbox, "runs/b runs/b").ok();
        assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains("panicked"), "{run:#?}");
        let run = compare(&sandbox, "runs/a runs/b").ok();
        assert!(!run.stdout.contains('\u{1b}') && !run.stderr.contains("panicked"), "{run:#?}");
    }
    for (bytes, words) in [
        (&b""[..], "no step is in both runs"),
        (b"{}\n", "missing field"),
        (b"\xff\0\n", "expected value"),
        (b"{\"step\":1,\"ranks\":[[{}]]}\n", "missing field"),
    ] {
        fs::write(&file, bytes).unwrap();
        compare(&sandbox, "runs/a runs/b").refused(&[words]);
    }
    fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    compare(&sandbox, "runs/a runs/b").refused(&["a line of more than 256 MiB"]);
    remove(&file);
    fifo(&file);
    compare(&sandbox, "runs/a runs/b").refused(&["it is a FIFO, not a regular file"]);
}
