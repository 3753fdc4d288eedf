//! Wrong variables, data and checkpoints, and flags that are wrong on this machine, are answered by one message before any
//! rank starts, with exit code 2, and nothing is written. Flags that are wrong everywhere are in `wrong_inputs`.

use std::fs;
use std::path::Path;

use crate::common::{Sandbox, TINY, gzip, idx, idx_images, idx_labels, write_cifar10};

/// Checks that `paceline train` refuses these flags with all of `words`, and leaves the folder unchanged.
#[track_caller]
fn refused_in(sandbox: &Sandbox, flags: &str, words: &[&str]) {
    refused_with(sandbox, flags, &[], words);
}

#[track_caller]
fn refused_with(sandbox: &Sandbox, flags: &str, variables: &[(&str, &str)], words: &[&str]) {
    let before = sandbox.contents();
    let run = sandbox.train_with(flags, variables).refused(words);
    assert!(!run.stderr.contains("panicked"), "{run:#?}");
    assert_eq!(sandbox.contents(), before, "{flags} wrote something");
}

/// Like [`refused_in`], in an empty folder.
#[track_caller]
fn refused(flags: &str, words: &[&str]) {
    refused_in(&Sandbox::new(), flags, words);
}

#[test]
fn what_this_machine_does_not_have() {
    refused("--image 1048576 1048576 3", &["not enough memory", "--samples"]);
    let needs = ["not enough memory", "2 ranks need about", "GB", "use a smaller model"];
    refused("--nproc 2 --model mlp --hidden-dim 1000000", &needs);
    let batch =
        ["not enough memory", "2 ranks need", "for activations", "samples per rank would fit"];
    refused("--model mlp --batch-size 10000000000", &batch);
    // The run is refused before the images are made, which would take the memory.
    let images = ["not enough memory for --samples 1000000000", "GB are available; lower it"];
    refused("--samples 1000000000", &images);
}

#[test]
fn data_folders() {
    let sandbox = Sandbox::new();
    for (data, file) in [("mnist", "train-images-idx3-ubyte"), ("cifar10", "data_batch_1.bin")] {
        let flags = |folder: &str| format!("--data {data} --data-dir {folder}");
        fs::create_dir_all(sandbox.path("empty")).unwrap();
        let hint = ["--data-dir", "found no", file, "in empty", "https://"];
        refused_in(&sandbox, &flags("empty"), &hint);
    }
}

#[test]
fn downloads() {
    let from = |data: &str, mirror: &str| {
        format!("--data {data} --data-dir new/data --download --mirror {mirror}")
    };
    // No server listens on the first port.
    let url = "http://127.0.0.1:1/mnist";
    let fix = "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, \
               t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz into new/data yourself";
    let refusal = format!("--download: cannot fetch {url}/train-images-idx3-ubyte.gz: ");
    refused(&from("mnist", url), &[&refusal, "--mirror", fix, "leave --download out"]);
    let fix = "put cifar-10-binary.tar.gz into new/data yourself, unpacked, and leave";
    refused(&from("cifar10", url), &["--download: cannot fetch", fix]);
    // Other errors are reported first, and nothing is downloaded.
    refused(&format!("{} --batch-size 0", from("mnist", url)), &["--batch-size <N>"]);
}

#[test]
fn an_unreadable_data_folder() {
    use std::os::unix::fs::PermissionsExt;
    if rustix::process::geteuid().is_root() {
        println!("skipped: the superuser can read every folder");
        return;
    }
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("locked")).unwrap();
    let locked = sandbox.path("locked");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
    let run = sandbox.train("--data mnist --data-dir locked");
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o700)).unwrap();
    run.refused(&["--data-dir", "cannot read the data directory locked", "Permission denied"]);
    assert_eq!(sandbox.contents(), ["locked"]);
}

#[test]
fn idx_files() {
    let (images, labels) = (idx_images(60), idx_labels(60));
    let mut wrong_magic = images.clone();
    wrong_magic[3] = 1;
    let mut broken_gzip = gzip(&images);
    let middle = broken_gzip.len() / 2;
    broken_gzip.truncate(middle);
    let small_images = idx(&[1, 14, 14], [0; 196]);
    let tall = idx(&[60], [10; 60]);
    let file = "train-images-idx3-ubyte";
    let cases: [(&[u8], &[u8], &[&str]); 8] = [
        (&images[..images.len() - 1], &labels, &[file, "truncated", "47056", "47055"]),
        (&images[..7], &labels, &[file, "truncated"]),
        (b"", &labels, &[file, "truncated"]),
        (&wrong_magic, &labels, &[file, "magic number 0x00000803", "found 0x00000801"]),
        (&broken_gzip, &labels, &[file, "broken gzip stream", "fetch the file again"]),
        (&small_images, &labels, &[file, "[28, 28]", "[14, 14]"]),
        (&images, &idx_labels(59), &["60 images", "59 labels"]),
        (&images, &tall, &["train-labels-idx1-ubyte", "label 10, above 9"]),
    ];
    for (images, labels, words) in cases {
        let sandbox = Sandbox::new();
        sandbox.write("data/train-images-idx3-ubyte", images);
        sandbox.write("data/train-labels-idx1-ubyte", labels);
        refused_in(&sandbox, "--data mnist --data-dir data", words);
    }
}

#[test]
fn a_missing_test_part_is_noticed_before_training() {
    let sandbox = Sandbox::new();
    sandbox.write("data/train-images-idx3-ubyte", &idx_images(60));
    sandbox.write("data/train-labels-idx1-ubyte", &idx_labels(60));
    let words = ["--data-dir", "found no t10k-images-idx3-ubyte"];
    for flag in ["--evaluate", "--eval-every 5"] {
        refused_in(&sandbox, &format!("--data mnist --data-dir data {flag}"), &words);
    }
}

#[test]
fn cifar10_files() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "data", 4, 2);
    let path = sandbox.path("data/data_batch_3.bin");
    let whole = fs::read(&path).unwrap();
    for len in [0, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        let words = ["data_batch_3.bin", &format!("{len} bytes"), "3073"];
        refused_in(&sandbox, "--data cifar10 --data-dir data", &words);
    }
    fs::remove_file(&path).unwrap();
    refused_in(&sandbox, "--data cifar10 --data-dir data", &["found no data_batch_3.bin"]);
}

/// A folder with a checkpoint of one epoch in `saved`, and the flags that made it.
fn with_checkpoint() -> (Sandbox, String) {
    let sandbox = Sandbox::new();
    let flags = format!("--nproc 1 --batch-size 100 {TINY}");
    sandbox.train(&format!("{flags} --epochs 1 --save saved --quiet")).ok();
    fs::remove_dir_all(sandbox.path("runs")).unwrap();
    assert_eq!(
        sandbox.contents(),
        [
            "saved",
            "saved/checkpoint.lock",
            "saved/latest",
            "saved/step-000000002",
            "saved/step-000000002/index.json",
            "saved/step-000000002/rank-000-of-001.shard"
        ]
    );
    (sandbox, flags)
}

#[test]
fn checkpoints_of_other_runs() {
    let (sandbox, flags) = with_checkpoint();
    let refuse = |flags: &str, words: &[&str]| {
        refused_in(&sandbox, &format!("{flags} --resume saved --epochs 2"), words);
    };
    let wider = "--nproc 1 --batch-size 100 --samples 200 --channels 5 --hidden 8";
    refuse(wider, &["--resume saved", "parameter conv0.weight", "[3, 3, 1, 4]", "[3, 3, 1, 5]"]);
    let more = "--nproc 1 --batch-size 100 --samples 200 --channels 4 --hidden 9";
    refuse(more, &["--resume saved", "parameter fc0.weight"]);
    let named = ["--resume saved", "--model cnn, this run has mlp", "pass the same --model"];
    refuse("--nproc 1 --model mlp --num-layers 1", &named);
    refuse(&format!("{flags} --momentum 0.9"), &["--resume saved", "optimizer state"]);
    let course = ["--resume saved", "--lr-schedule constant", "this run has cosine", "same"];
    refuse(&format!("{flags} --lr-schedule cosine"), &course);
    let warmup = ["--resume saved", "another course", "pass the same --lr-warmup-steps"];
    refuse(&format!("{flags} --lr-warmup-steps 3"), &warmup);
    let clipped = ["--resume saved", "--clip-grad-norm none", "this run has 0.5", "pass the same"];
    refuse(&format!("{flags} --clip-grad-norm 0.5"), &clipped);
    // With --resume auto, a checkpoint of another run is an error, and must not be overwritten.
    let auto = format!("{flags} --seed 7 --epochs 2 --save saved --resume auto");
    refused_in(&sandbox, &auto, &["--resume auto (--save saved)", "--seed 42", "pass the same"]);
    let shards = ["--resume saved", "--rank-samples none", "this run has 150", "another order"];
    refuse(&format!("{flags} --rank-samples 150"), &shards);
    let enough = ["--resume saved", "1 complete epochs already", "larger --epochs"];
    refused_in(&sandbox, &format!("{flags} --resume saved --epochs 1"), &enough);
    refused_in(
        &sandbox,
        &format!("{flags} --resume nowhere"),
        &["--resume nowhere", "No such file"],
    );
}

#[test]
fn corrupt_checkpoints() {
    let (sandbox, flags) = with_checkpoint();
    let resume = format!("{flags} --resume saved --epochs 2");
    let auto = format!("{flags} --save saved --resume auto --epochs 2");
    let refuse = |path: &Path, bytes: &[u8]| {
        fs::write(path, bytes).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        refused_in(&sandbox, &resume, &["--resume saved", name, "corrupt"]);
        refused_in(&sandbox, &auto, &["--resume auto", name, "corrupt"]);
    };
    let path = sandbox.checkpoint().join("index.json");
    let whole = fs::read(&path).unwrap();
    for len in [0, 5, 100, whole.len() - 2] {
        refuse(&path, &whole[..len]);
    }
    for at in [0, 20, whole.len() / 2, whole.len() - 2] {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        refuse(&path, &flipped);
    }
    // The digest covers the position in the data, too. Otherwise the run would have started again.
    let epochs = b"\"epochs\":\"1\"";
    let at = whole.windows(epochs.len()).position(|window| window == epochs).unwrap();
    let mut earlier = whole.clone();
    earlier[at + epochs.len() - 2] = b'0';
    refuse(&path, &earlier);
    fs::write(&path, &whole).unwrap();

    let path = sandbox.checkpoint().join("rank-000-of-001.shard");
    let whole = fs::read(&path).unwrap();
    refuse(&path, &whole[..whole.len() - 1]);
    refuse(&path, &[&whole[..], &[0]].concat());
    fs::remove_file(&path).unwrap();
    let missing = ["--resume saved", "rank-000-of-001.shard, which rank 0 wrote,", "No such file"];
    refused_in(&sandbox, &resume, &missing);
    // A wrong byte is found by the rank that reads it.
    for at in [0, whole.len() / 2, whole.len() - 1] {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x10;
        fs::write(&path, &flipped).unwrap();
        for flags in [&resume, &auto] {
            let run = sandbox.train(flags);
            run.ended_with(
                1,
                &["rank-000-of-001.shard, which rank 0 wrote, is corrupt", "--resume "],
            );
        }
    }
    // This test can fail: the intact checkpoint is accepted.
    fs::write(&path, &whole).unwrap();
    sandbox.train(&resume).ok();
}

#[test]
fn checkpoints_of_other_versions() {
    let (sandbox, flags) = with_checkpoint();
    let path = sandbox.checkpoint().join("index.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"version\":5", "\"version\":6")).unwrap();
    let words = ["--resume saved", "of version 6", "this program reads version 5", "start again"];
    refused_in(&sandbox, &format!("{flags} --resume saved"), &words);

    // Up to version 3 a checkpoint was one file.
    let sandbox = Sandbox::new();
    sandbox.write("saved/checkpoint.safetensors", b"whatever it holds");
    let words = ["checkpoint.safetensors there was written by an earlier version", "start again"];
    let auto = format!("{TINY} --save saved --resume auto");
    for flags in [&format!("{TINY} --resume saved"), &auto] {
        refused_in(&sandbox, flags, &words);
    }
}

#[test]
fn variables() {
    let sandbox = Sandbox::new();
    let refuse = |flags: &str, variables: &[(&str, &str)], words: &[&str]| {
        refused_with(&sandbox, &format!("{TINY} {flags}"), variables, words);
    };
    refuse("", &[("PACELINE_COMM_LOG", "loud")], &["PACELINE_COMM_LOG"]);
    refuse("", &[("RANK", "0")], &["RANK is set", "WORLD_SIZE is not", "unset RANK"]);
    refuse("", &[("WORLD_SIZE", "2")], &["WORLD_SIZE is set", "RANK is not", "unset WORLD_SIZE"]);
    let rank = |rank, world| [("RANK", rank), ("WORLD_SIZE", world), ("MASTER_PORT", "29511")];
    refuse("", &rank("2", "2"), &["RANK=2", "WORLD_SIZE=2", "ranks count from 0 to 1"]);
    refuse("", &rank("0", "0"), &["RANK=0", "WORLD_SIZE=0"]);
    refuse("", &rank("one", "2"), &["RANK=\"one\"", "is not a number"]);
    refuse("", &rank("0", "2000"), &["a world size of 2000", "1024 ranks at most"]);
    let nested = ["--nproc 2", "RANK and WORLD_SIZE", "leave --nproc out"];
    refuse("--nproc 2", &rank("0", "2"), &nested);
    // In a shell that srun, or a launcher with PMI, has started.
    let of_slurm = [("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    let nested = ["--nproc 3 starts", "leave --nproc out, or unset SLURM_PROCID"];
    refuse("--nproc 3", &of_slurm, &nested);
    let nested = ["--nproc 3 starts", "or unset PMI_RANK and PMI_SIZE"];
    refuse("--nproc 3", &[("PMI_RANK", "0"), ("PMI_SIZE", "1")], &nested);
    refuse("--transport thread", &rank("0", "2"), &["--transport thread", "--transport shm"]);
    let no_port = [("RANK", "0"), ("WORLD_SIZE", "2")];
    refuse("", &no_port, &["MASTER_PORT is not set", "--init-method file:///PATH"]);
    let half_local = [rank("0", "4").as_slice(), &[("LOCAL_WORLD_SIZE", "2")]].concat();
    refuse("", &half_local, &["LOCAL_WORLD_SIZE is set", "LOCAL_RANK is not"]);
    let half_mpi = [("OMPI_COMM_WORLD_RANK", "0")];
    refuse("", &half_mpi, &["OMPI_COMM_WORLD_RANK is set", "OMPI_COMM_WORLD_SIZE is not"]);
    let bad_port = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "99999")];
    refuse("", &bad_port, &["MASTER_PORT=99999", "not a port number"]);
    let local = [("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let no_host = [rank("0", "4").as_slice(), &local].concat();
    refuse("", &no_host, &["MASTER_PORT is set", "MASTER_ADDR is not", "several hosts"]);
    let two_hosts = [rank("0", "4").as_slice(), &local, &[("MASTER_ADDR", "a")]].concat();
    refuse("", &two_hosts, &["2 of 4 ranks are on this host", "one host only"]);
}

#[test]
fn places_that_cannot_be_written_to() {
    let sandbox = Sandbox::new();
    sandbox.write("runs", b"in the way");
    let words = ["the run folder runs", "cannot write", "start from a folder"];
    refused_in(&sandbox, TINY, &words);
}
