//! MNIST from real IDX files, plain and compressed, and the errors for broken files.

use std::fs;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use paceline_data::{Dataset, Field, Mnist, OwnedSample, Split};
use tempfile::TempDir;

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

/// An IDX file of bytes: the extents, then as many patterned bytes as the extents announce.
fn idx(extents: &[u32], byte: impl Fn(usize) -> u8) -> Vec<u8> {
    let mut file = vec![0, 0, 8, extents.len() as u8];
    extents.iter().for_each(|extent| file.extend(extent.to_be_bytes()));
    file.extend((0..extents.iter().product::<u32>() as usize).map(byte));
    file
}

fn images(count: u32) -> Vec<u8> {
    idx(&[count, 28, 28], |i| (i * 7 % 256) as u8)
}

fn labels(count: u32) -> Vec<u8> {
    idx(&[count], |i| (i % 10) as u8)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn sample(data: &dyn Dataset, index: usize) -> (Vec<f32>, i64) {
    let mut sample = OwnedSample::read(data, 0, index).unwrap();
    (sample.f32("inputs"), sample.i64("targets")[0])
}

/// The error of loading the training split, with the folder's name replaced by DIR.
fn message(folder: &Path) -> String {
    let error = Mnist::load(folder, Split::Train).unwrap_err().to_string();
    error.replace(&folder.display().to_string(), "DIR")
}

#[test]
fn plain_and_compressed_files_give_the_same_samples() {
    let (images, labels) = (images(13), labels(13));
    let plain = folder(&[(IMAGES, &images), (LABELS, &labels)]);
    let packed = folder(&[
        ("train-images-idx3-ubyte.gz", &gzip(&images)),
        ("train-labels-idx1-ubyte.gz", &gzip(&labels)),
    ]);
    // The test split in torchvision's folder. One file is compressed, but its name does not say so.
    let torchvision = TempDir::new().unwrap();
    let raw = torchvision.path().join("MNIST/raw");
    fs::create_dir_all(&raw).unwrap();
    fs::write(raw.join("t10k-images-idx3-ubyte"), gzip(&images)).unwrap();
    fs::write(raw.join("t10k-labels-idx1-ubyte"), &labels).unwrap();

    for (folder, split) in
        [(&plain, Split::Train), (&packed, Split::Train), (&torchvision, Split::Test)]
    {
        let data = Mnist::load(folder.path(), split).unwrap();
        assert_eq!((data.len(), data.is_empty()), (13, false));
        assert_eq!(data.fields(), [Field::f32("inputs", [28, 28, 1]), Field::class(10)]);
        for index in 0..13 {
            let (input, class) = sample(&data, index);
            assert_eq!(class, index as i64 % 10);
            for (at, value) in input.into_iter().enumerate() {
                let byte = (index * 784 + at) * 7 % 256;
                assert_eq!(value, (byte as f32 / 255.0 - 0.1307) / 0.3081);
            }
        }
    }
}

#[test]
fn a_missing_folder_and_missing_files_are_told_apart() {
    let empty = folder(&[]);
    let nowhere = empty.path().join("nowhere");
    assert_eq!(
        message(&nowhere),
        "cannot read the data directory DIR: No such file or directory (os error 2)"
    );
    assert_eq!(
        message(empty.path()),
        "found no train-images-idx3-ubyte or train-images-idx3-ubyte.gz in DIR or DIR/MNIST/raw; \
         the four MNIST files are at https://storage.googleapis.com/cvdf-datasets/mnist/"
    );
    let half = folder(&[(IMAGES, &images(2))]);
    assert!(message(half.path()).starts_with(
        "found no train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz in DIR or DIR/MNIST/raw;"
    ));
    let file = half.path().join(IMAGES);
    assert_eq!(message(&file), "cannot read the data directory DIR: Not a directory (os error 20)");
    fs::create_dir(empty.path().join(IMAGES)).unwrap();
    assert_eq!(
        message(empty.path()),
        "cannot read DIR/train-images-idx3-ubyte: it is a folder, not a regular file"
    );
}

#[test]
fn broken_images_are_named_with_what_was_expected() {
    let whole = images(3);
    let with = |bytes: &[u8]| message(folder(&[(IMAGES, bytes), (LABELS, &labels(3))]).path());

    assert_eq!(
        with(&labels(3)),
        "DIR/train-images-idx3-ubyte: expected the magic number 0x00000803, found 0x00000801; \
         check that images and labels were not swapped and that this is an IDX file at all"
    );
    assert!(with(b"<html>404</html>").contains("found 0x3c68746d"));
    for (found, expected) in [(0, 16), (3, 16), (15, 16), (16, 2368), (2367, 2368)] {
        assert_eq!(
            with(&whole[..found]),
            format!(
                "DIR/train-images-idx3-ubyte: truncated: expected {expected} bytes (uncompressed), \
                 found {found}; fetch the file again"
            )
        );
    }
    assert_eq!(
        with(&[&whole[..], &[0]].concat()),
        "DIR/train-images-idx3-ubyte: has trailing bytes: it should end after 2368 bytes \
         (uncompressed); fetch the file again"
    );
    assert_eq!(
        with(&idx(&[3, 20, 30], |_| 0)),
        "DIR/train-images-idx3-ubyte: expected items of shape [28, 28], found [20, 30]"
    );
    assert_eq!(with(&images(0)), "DIR/train-images-idx3-ubyte: holds no samples");
}

#[test]
fn a_header_that_lies_costs_no_memory() {
    let mut file = images(1);
    file[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
    let folder = folder(&[(IMAGES, &file), (LABELS, &labels(1))]);
    let error = Mnist::load(folder.path(), Split::Train).unwrap_err();
    let words = "it announces 4294967295 items, and at most 10000000 are read";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn broken_compression_is_an_error() {
    let packed = gzip(&images(3));
    let with = |bytes: &[u8]| {
        let folder = folder(&[("train-images-idx3-ubyte.gz", bytes), (LABELS, &labels(3))]);
        message(folder.path())
    };
    let start = "DIR/train-images-idx3-ubyte.gz: broken gzip stream (";
    let is_broken =
        |said: &str| said.starts_with(start) && said.ends_with("; fetch the file again");

    let cut = with(&packed[..packed.len() / 2]);
    assert!(is_broken(&cut), "{cut}");
    // The checksum is verified even though all pixels are there.
    let mut wrong_sum = packed.clone();
    let at = wrong_sum.len() - 8;
    wrong_sum[at] ^= 1;
    let wrong_sum = with(&wrong_sum);
    assert!(is_broken(&wrong_sum), "{wrong_sum}");
    let followed = with(&[&packed[..], b"garbage at the end"].concat());
    assert!(is_broken(&followed), "{followed}");
    assert!(with(&gzip(&images(4)[..1000])).contains("truncated: expected 3152 bytes"));
}

#[test]
fn labels_must_match_the_images_and_name_a_digit() {
    let with = |labels: &[u8]| message(folder(&[(IMAGES, &images(3)), (LABELS, labels)]).path());
    assert_eq!(
        with(&labels(4)),
        "DIR/train-images-idx3-ubyte has 3 images but DIR/train-labels-idx1-ubyte has 4 labels; \
         take both files from one source"
    );
    assert_eq!(
        with(&idx(&[3], |i| [0, 9, 10][i])),
        "DIR/train-labels-idx1-ubyte: record 2 has the label 10, above 9"
    );
}
