//! Training on data of the user's own, without a program: folders of images, tables of numbers, arrays of NumPy. What may be
//! wrong with the contents of such files is in `crates/data/tests/own_files.rs`.

use std::fs;

use crate::common::{self, Sandbox, accuracy};

/// A PNG file in shades of gray.
fn png(width: u32, height: u32, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    bytes
}

/// Images with a bright row (class `lying`) or a bright column (class `standing`).
fn write_images(sandbox: &Sandbox, part: &str, count: usize) {
    for at in 0..count {
        let line = at % 8;
        for (class, is_lying) in [("lying", true), ("standing", false)] {
            let is_bright =
                |pixel: usize| if is_lying { pixel / 8 == line } else { pixel % 8 == line };
            let pixels: Vec<u8> = (0..64)
                .map(|pixel| if is_bright(pixel) { 255 - at as u8 } else { at as u8 })
                .collect();
            sandbox.write(&format!("images/{part}/{class}/{at}.png"), &png(8, 8, &pixels));
        }
    }
}

/// Rows whose class says whether a + b is positive, as words.
fn write_table(sandbox: &Sandbox, name: &str, first: usize, count: usize) {
    let mut text = "a,sign,b\n".to_owned();
    for at in first..first + count {
        let (a, b) = ((at * 37 % 101) as f64 - 50.0, (at * 53 % 103) as f64 - 51.0);
        text += &format!("{a},{},{b}\n", if a + b > 0.0 { "plus" } else { "minus" });
    }
    sandbox.write(name, text.as_bytes());
}

const CNN: &str = "--channels 4 --hidden 8 --batch-size 8";

#[test]
fn a_cnn_learns_from_a_folder_of_images() {
    let sandbox = Sandbox::new();
    write_images(&sandbox, "train", 40);
    write_images(&sandbox, "test", 8);
    let flags = format!("{CNN} --data images --data-dir images --optimizer adamw --lr 0.01");
    let ended = sandbox.train(&format!("{flags} --nproc 2 --epochs 12 --evaluate")).ok();
    assert!(accuracy(&ended) > 90.0, "{}", ended.stdout);
    assert!(ended.line("Evaluation loss: ").ends_with("16 samples"), "{}", ended.stdout);
    assert_eq!(ended.line("Classes: "), "lying, standing");
    assert_eq!(sandbox.summary()["class_names"], serde_json::json!(["lying", "standing"]));
    // A run goes on with images of the same size, wherever they lie, and with all of them.
    sandbox.train(&format!("{flags} --nproc 1 --steps 2 --save saved")).ok();
    let evaluate = || sandbox.run("evaluate --checkpoint saved");
    assert_eq!(evaluate().ok().line("Classes: "), "lying, standing");
    let rename = |from: &str, to: &str| {
        for part in ["train", "test"] {
            let path = |class| sandbox.path(&format!("images/{part}/{class}"));
            fs::rename(path(from), path(to)).unwrap();
        }
    };
    rename("standing", "kneeling");
    let words =
        "it was trained with the classes lying, standing, and the data have kneeling, lying";
    evaluate().refused(&["--checkpoint saved", words]);
    rename("kneeling", "standing");
    let other = format!("{flags} --nproc 1 --steps 4 --resume saved --image 16 16 1");
    sandbox.train(&other).refused(&["--resume saved", "shape"]);
    fs::rename(sandbox.path("images"), sandbox.path("moved")).unwrap();
    let moved = flags.replace("--data-dir images", "--data-dir moved");
    sandbox.train(&format!("{moved} --nproc 1 --steps 4 --resume saved")).ok();
    sandbox.train(&format!("{moved} --nproc 1 --steps 2 --image 16 16 3")).ok();
    fs::remove_file(sandbox.path("moved/train/lying/0.png")).unwrap();
    let fewer = sandbox.train(&format!("{moved} --nproc 1 --steps 4 --resume saved"));
    fewer.refused(&["--resume saved"]);
}

#[test]
fn an_mlp_learns_classes_from_a_table() {
    let sandbox = Sandbox::new();
    write_table(&sandbox, "train.csv", 0, 400);
    write_table(&sandbox, "test.csv", 7, 100);
    let flags =
        "--model mlp --data csv --data-dir . --label-column sign --hidden-dim 16 --num-layers 1";
    let sizes = "--input-dim 2 --output-dim 2";
    let more = "--lr 0.1 --momentum 0.9 --batch-size 20 --epochs 10 --nproc 2 --evaluate";
    let ended = sandbox.train(&format!("{flags} {sizes} {more}")).ok();
    assert!(accuracy(&ended) > 90.0, "{}", ended.stdout);
    let sharded = sandbox.train(&format!("{flags} {sizes} {more} --strategy sharded3")).ok();
    assert_eq!(sharded.weights(), ended.weights());
    let words = ["inputs of [2]", "one of 2 classes", "pass --input-dim 2 --output-dim 2"];
    sandbox.train(flags).refused(&words);
    let no_label = flags.replace("--label-column sign", "");
    sandbox.train(&no_label).refused(&["--data-dir:", "train.csv", "no column \"label\""]);
    sandbox
        .train("--data csv --data-dir . --label-column sign")
        .refused(&["--model cnn trains on images"]);
    sandbox.train(&format!("{flags} {sizes} --download")).refused(&["--download does not apply"]);
    fs::remove_file(sandbox.path("test.csv")).unwrap();
    sandbox.train(&format!("{flags} {sizes} {more}")).refused(&["--evaluate", "test"]);
}

#[test]
fn arrays_of_numpy_train_both_models() {
    let sandbox = Sandbox::new();
    let npy = |name: &str, descr: &str, shape: &str, elems: &[u8]| {
        let header =
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        sandbox.write(name, &[&bytes, header.as_bytes(), elems].concat());
    };
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let pixels: Vec<u8> = (0..40 * 64).map(|at| (at * 31 % 251) as u8).collect();
    npy("x_train.npy", "|u1", "40, 8, 8", &pixels);
    npy("y_train.npy", "|u1", "40,", &(0..40).map(|at| at % 2).collect::<Vec<u8>>());
    sandbox.train(&format!("{CNN} --data npy --data-dir . --nproc 2 --steps 3")).ok();
    let values: Vec<f32> = (0..120).map(|at| (at % 7) as f32 / 7.0).collect();
    npy("x_train.npy", "<f4", "40, 3", &bytes(&values));
    npy("y_train.npy", "<f4", "40, 2", &bytes(&values[..80]));
    let mlp =
        "--model mlp --hidden-dim 8 --num-layers 1 --input-dim 3 --output-dim 2 --batch-size 4";
    sandbox.train(&format!("{mlp} --data npy --data-dir . --nproc 2 --steps 3")).ok();
    let words = ["inputs of [3] with 2 values", "pass --input-dim 3 --output-dim 2"];
    sandbox.train("--model mlp --data npy --data-dir .").refused(&words);
}

#[test]
fn what_is_no_file_is_refused() {
    let sandbox = Sandbox::new();
    let fifo = |name: &str| {
        fs::create_dir_all(sandbox.path(name).parent().unwrap()).unwrap();
        common::fifo(&sandbox.path(name));
    };
    let refused = |flags: &str, words: &[&str]| {
        let run = sandbox.train(&format!("--data {flags}")).refused(words);
        assert!(!run.stderr.contains("panicked"), "{run:?}");
    };
    write_images(&sandbox, "train", 2);
    fifo("images/train/lying/pipe.png");
    refused("images --data-dir images", &["pipe.png", "it is a FIFO"]);
    fifo("csv/train.csv");
    refused("csv --data-dir csv", &["train.csv", "it is a FIFO"]);
    fifo("npy/x_train.npy");
    refused("npy --data-dir npy", &["x_train.npy", "it is a FIFO"]);
    for (data, name) in [("csv", "csv/train.csv"), ("npy", "npy/x_train.npy")] {
        fs::remove_file(sandbox.path(name)).unwrap();
        fs::File::create(sandbox.path(name)).unwrap().set_len(1 << 40).unwrap();
        refused(&format!("{data} --data-dir {data}"), &[name, "has more than"]);
    }
    refused("images --data-dir images --image 8 8 2", &["--image", "1 channel", "3 (colors)"]);
    refused("images --data-dir images --image 8 8 0", &["'0' for '--image", "from 1 to"]);
    refused("images --data-dir images --model mlp", &["--model mlp trains on vectors"]);
    refused("mnist --data-dir images --image 8 8 1", &["--image does not apply to --data mnist"]);
    refused("images --data-dir images --label-column x", &["--label-column does not apply"]);
}
