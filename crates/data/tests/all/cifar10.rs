//! CIFAR-10 from files of its binary version, and the errors for broken files.

use std::fs;
use std::path::Path;

use paceline_data::{Cifar10, Dataset, Field, OwnedSample, Split};
use tempfile::TempDir;

const RECORD: usize = 3073;

/// Records whose label is their number (modulo ten) and whose image bytes follow a pattern.
fn records(numbers: std::ops::Range<usize>) -> Vec<u8> {
    let record = |n: usize| {
        let label = std::iter::once((n % 10) as u8);
        label.chain((0..RECORD - 1).map(move |at| pattern(n, at)))
    };
    numbers.flat_map(record).collect()
}

fn pattern(number: usize, at: usize) -> u8 {
    ((number * 31 + at * 7 + at / 256) % 256) as u8
}

/// Five files of 3, 4, 5, 6 and 7 records for training, and one of 2 for testing.
fn write_all(folder: &Path) {
    let mut start = 0;
    for i in 1..=5 {
        let file = folder.join(format!("data_batch_{i}.bin"));
        fs::write(file, records(start..start + 2 + i)).unwrap();
        start += 2 + i;
    }
    fs::write(folder.join("test_batch.bin"), records(100..102)).unwrap();
}

fn message(folder: &Path) -> String {
    let error = Cifar10::load(folder, Split::Train).unwrap_err().to_string();
    error.replace(&folder.display().to_string(), "DIR")
}

#[test]
fn records_become_normalized_images_with_the_channels_last() {
    let (flat, nested) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_all(flat.path());
    let inner = nested.path().join("cifar-10-batches-bin");
    fs::create_dir(&inner).unwrap();
    write_all(&inner);

    let mean: [f32; 3] = [0.4914, 0.4822, 0.4465];
    let std: [f32; 3] = [0.2023, 0.1994, 0.2010];
    for folder in [flat, nested] {
        for (split, first, count) in [(Split::Train, 0, 25), (Split::Test, 100, 2)] {
            let data = Cifar10::load(folder.path(), split).unwrap();
            assert_eq!(data.len(), count);
            assert_eq!(data.fields(), [Field::f32("inputs", [32, 32, 3]), Field::class(10)]);
            for index in 0..count {
                let mut sample = OwnedSample::read(&data, 0, index).unwrap();
                let (input, class) = (sample.f32("inputs"), sample.i64("targets")[0]);
                assert_eq!(class, (first + index) as i64 % 10);
                for (at, value) in input.into_iter().enumerate() {
                    let (pixel, channel) = (at / 3, at % 3);
                    let byte = f32::from(pattern(first + index, channel * 1024 + pixel));
                    assert_eq!(value, (byte / 255.0 - mean[channel]) / std[channel]);
                }
            }
        }
    }
}

#[test]
fn missing_files_are_named() {
    let folder = TempDir::new().unwrap();
    write_all(folder.path());
    fs::remove_file(folder.path().join("data_batch_4.bin")).unwrap();
    assert_eq!(
        message(folder.path()),
        "found no data_batch_4.bin in DIR or DIR/cifar-10-batches-bin; unpack \
         cifar-10-binary.tar.gz (the binary version, not the Python one) from \
         https://www.cs.toronto.edu/~kriz/cifar.html"
    );
    assert_eq!(
        message(&folder.path().join("nowhere")),
        "cannot read the data directory DIR: No such file or directory (os error 2)"
    );
}

#[test]
fn broken_files_are_named_with_what_was_expected() {
    let folder = TempDir::new().unwrap();
    write_all(folder.path());
    let third = folder.path().join("data_batch_3.bin");
    for found in [0, 1, RECORD - 1, RECORD + 1] {
        fs::write(&third, &records(0..2)[..found]).unwrap();
        assert_eq!(
            message(folder.path()),
            format!(
                "DIR/data_batch_3.bin: {found} bytes are not a positive multiple of the 3073 bytes \
                 of a record; fetch the file again"
            )
        );
    }
    let mut wrong = records(0..5);
    wrong[4 * RECORD] = 10;
    fs::write(&third, wrong).unwrap();
    assert_eq!(message(folder.path()), "DIR/data_batch_3.bin: record 4 has the label 10, above 9");
}
