//! What must hold for any bytes that stand in the file of a data set, or in a tokenizer's.
//!
//! Input: bytes. Output: whether one of the readers accepts them, and otherwise the last reader's message. A panic is a fault of
//! the reader. `paceline-data` includes this file with its feature `fuzzing`.

use std::io::Write;
use std::path::PathBuf;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::cifar10::{self, Cifar10};
use crate::idx::{self, Idx};
use crate::mnist::Mnist;
use crate::npy::{Array, NpyElems};
use crate::number_table::{ColumnClasses, Rows, scales};
use crate::pixels::Pixels;
use crate::text::Tokenizer;
use crate::text::fuzzing::rows;
use crate::{Dataset, OwnedSample};

/// The items that the bytes are read as: labels, small images, and the images of MNIST.
const ITEM_SHAPES: [&[usize]; 3] = [&[], &[2, 3], &[28, 28]];

/// The most bytes that are compressed again, because that takes time.
const MAX_COMPRESSED: usize = 4 << 10;

/// Reads the bytes as each kind of file. What a reader accepts must be the same when it is written again, plain or
/// compressed, and every sample must be readable.
pub fn idx(bytes: &[u8]) -> Result<(), String> {
    let mut outcome = as_cifar(bytes);
    for shape in ITEM_SHAPES {
        match idx::read(PathBuf::from("file"), bytes, shape) {
            Ok(read) => {
                is_sound(&read, shape);
                outcome = Ok(());
            }
            Err(error) => {
                let message = error.to_string();
                assert!(message.len() > 10, "a message is a sentence: {message}");
                outcome = outcome.map_err(|_| message);
            }
        }
    }
    outcome
}

/// Reads the bytes as an array of NumPy, as a table of numbers, and as an image. What is accepted has the elements that it
/// announces.
pub fn arrays(bytes: &[u8]) -> Result<(), String> {
    let path = PathBuf::from("file");
    let as_array = Array::read(path.clone(), bytes, bytes.len() as u64);
    let as_table = Rows::read(path.clone(), bytes, "label").and_then(|rows| {
        ColumnClasses::of(&rows)?;
        scales(&rows);
        Ok(rows)
    });
    let as_image = Pixels::decode(bytes);
    if let Ok(array) = &as_array {
        let num_elems = match &array.elems {
            NpyElems::Bytes(bytes) => bytes.len(),
            NpyElems::Integers(integers) => integers.len(),
            NpyElems::Reals(reals) => reals.len(),
        };
        assert_eq!(array.shape.iter().product::<usize>(), num_elems);
    }
    if let Ok(rows) = as_table {
        assert_eq!(rows.labels.len() * rows.columns.len(), rows.values.len());
        return Ok(());
    }
    if let Ok(image) = as_image {
        let other = [3, 2, 4 - image.size()[2]];
        assert_eq!(image.of_size(other).len(), other.iter().product::<usize>());
        return Ok(());
    }
    as_array.map(|_| ()).map_err(|error| error.to_string())
}

/// Reads the bytes as a CSV file with texts and labels, and as lines of JSON. Rows that are accepted have their classes.
pub fn csv(bytes: &[u8]) -> Result<(), String> {
    let [as_csv, as_lines] = ["csv", "jsonl"].map(|format| rows(format, bytes));
    let is_json = bytes.trim_ascii_start().starts_with(b"{");
    if is_json { as_lines } else { as_csv }
}

/// Reads the bytes as a Parquet file with texts and labels.
pub fn parquet(bytes: &[u8]) -> Result<(), String> {
    rows("parquet", bytes)
}

/// Reads the bytes as a `tokenizer.json`, and tokenizes a few texts with it. What is cut has the first tokens of the whole,
/// and no token is beyond the vocabulary.
pub fn tokenizer(bytes: &[u8]) -> Result<(), String> {
    let long = "ab good  food\nand \u{e4}<s> more\n".repeat(10_000);
    let texts = ["", "good food\tand more", " \u{1f600}\u{301} 1234 <s>", long.as_str()];
    let read = || -> Result<(), crate::text::TextError> {
        let tokenizer = Tokenizer::from_json("file".as_ref(), bytes.to_vec())?;
        for text in &texts[..3] {
            let tokens = tokenizer.encode_whole(text)?;
            assert!(tokens.iter().all(|token| (*token as usize) < tokenizer.vocab()));
            tokenizer.decode(&tokens)?;
        }
        let owned = texts.map(str::to_owned);
        let cut = tokenizer.encode(&owned, 16, &mut |_, _| ())?;
        assert!(cut.iter().all(|tokens| tokens.len() <= 16));
        assert!((tokenizer.pad() as usize) < tokenizer.vocab());
        Ok(())
    };
    read().map_err(|error| error.to_string())
}

fn is_sound(read: &Idx, shape: &[usize]) {
    let item_len: usize = shape.iter().product();
    assert_eq!(read.data.len(), read.count * item_len);
    let plain = written(read, shape);
    let mut files = vec![plain];
    if files[0].len() <= MAX_COMPRESSED {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&files[0]).expect("memory takes every write");
        files.push(encoder.finish().expect("memory takes every write"));
    }
    for file in files {
        let again = idx::read(PathBuf::from("file"), file.as_slice(), shape);
        let again = again.expect("what was written can be read");
        assert_eq!((again.count, &again.data), (read.count, &read.data));
    }
    if shape == [28, 28] {
        let copy = |data: &[u8]| Idx { path: "file".into(), count: read.count, data: data.into() };
        let dataset = Mnist::of(copy(&read.data), copy(&vec![0; read.count]));
        read_all(&dataset.expect("images and labels of one number"));
    }
}

fn written(read: &Idx, shape: &[usize]) -> Vec<u8> {
    let mut words = vec![0x0801 + shape.len() as u32, read.count as u32];
    words.extend(shape.iter().map(|extent| *extent as u32));
    let header = words.iter().flat_map(|word| word.to_be_bytes());
    header.chain(read.data.iter().copied()).collect()
}

fn as_cifar(bytes: &[u8]) -> Result<(), String> {
    cifar10::check("file".as_ref(), bytes).map_err(|error| error.to_string())?;
    read_all(&Cifar10::of(bytes.to_vec()));
    Ok(())
}

/// Reads the first and the last sample.
fn read_all(dataset: &dyn Dataset) {
    for index in [0, dataset.len() - 1] {
        let mut sample = OwnedSample::read(dataset, 0, index).expect("the fields are sound");
        let (input, class) = (sample.f32("inputs"), sample.i64("targets")[0]);
        assert!((0..10).contains(&class), "sample {index} has the class {class}");
        assert!(input.iter().all(|value| value.abs() < 4.0), "normalized pixels are small");
    }
}
