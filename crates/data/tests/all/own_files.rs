//! Data of the user's own: folders of images, tables of numbers and arrays of NumPy, right and wrong.

use std::fs::{self, File};

use paceline_data::{
    Arrays, DataError, Dataset, Field, ImageFolder, NpyFolder, NumberTable, OwnedSample, Split,
};
use paceline_memory::DType;
use tempfile::TempDir;

fn write(folder: &TempDir, name: &str, bytes: &[u8]) {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// A PNG file of these pixels.
fn png_of(color: png::ColorType, width: u32, height: u32, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(color);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    bytes
}

/// A JPEG file of these pixels.
fn jpeg_of(color: jpeg_encoder::ColorType, width: u16, height: u16, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    jpeg_encoder::Encoder::new(&mut bytes, 100).encode(pixels, width, height, color).unwrap();
    bytes
}

/// An image of one shade.
fn gray(width: u32, height: u32, shade: u8) -> Vec<u8> {
    png_of(png::ColorType::Grayscale, width, height, &vec![shade; (width * height) as usize])
}

fn sample(dataset: &Arrays, index: usize) -> (Vec<f32>, i64) {
    let mut sample = OwnedSample::read(dataset, 0, index).unwrap();
    (sample.f32("inputs").to_vec(), sample.i64("targets")[0])
}

/// The message of an error, which has all of `words`.
#[track_caller]
fn refused<T>(outcome: Result<T, DataError>, words: &[&str]) {
    let message = outcome.map(|_| ()).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
}

fn images(folder: &TempDir, split: Split, size: Option<[usize; 3]>) -> Result<Arrays, DataError> {
    ImageFolder::find(folder.path())?.load(split, size)
}

#[test]
fn images_have_the_class_of_their_folder() {
    let folder = TempDir::new().unwrap();
    write(&folder, "train/dog/1.PNG", &gray(2, 3, 0));
    write(&folder, "train/cat/b.png", &gray(2, 3, 255));
    write(&folder, "train/cat/a.png", &gray(2, 3, 51));
    write(&folder, "train/cat/.DS_Store", b"litter");
    write(&folder, "train/cat/Thumbs.db", b"litter");
    write(&folder, "test/dog/x.png", &gray(2, 3, 102));
    let found = ImageFolder::find(folder.path()).unwrap();
    assert!(found.has_test());
    let train = found.load(Split::Train, None).unwrap();
    assert_eq!(train.fields(), [Field::f32("inputs", [3, 2, 1]), Field::class(2)]);
    let samples: Vec<_> = (0..3).map(|index| sample(&train, index)).collect();
    let shade = |x: u8| vec![f32::from(x) / 127.5 - 1.0; 6];
    assert_eq!(samples, [(shade(51), 0), (shade(255), 0), (shade(0), 1)]);
    // The test part has one class, whose number is that of the training part.
    let test = found.load(Split::Test, None).unwrap();
    assert_eq!((test.len(), sample(&test, 0)), (1, (shade(102), 1)));
    assert_eq!(test.fields(), train.fields());
    assert_ne!(test.digest(), train.digest());
}

#[test]
fn colors_are_channels_and_images_are_scaled_on_demand() {
    let folder = TempDir::new().unwrap();
    let red = png_of(png::ColorType::Rgb, 4, 4, &[255, 0, 0].repeat(16));
    write(&folder, "a/red.png", &red);
    write(&folder, "b/wide.jpg", &jpeg_of(jpeg_encoder::ColorType::Rgb, 8, 2, &[0; 48]));
    let words = ["wide.jpg", "[2, 8, 3]", "[4, 4, 3]"];
    refused(images(&folder, Split::Train, None), &words);
    let scaled = images(&folder, Split::Train, Some([2, 2, 3])).unwrap();
    assert_eq!(sample(&scaled, 0), ([1.0, -1.0, -1.0].repeat(4), 0));
    // A file may have the wrong name, as long as it is one of both formats.
    write(&folder, "b/wide.jpg", &red);
    assert_eq!(images(&folder, Split::Train, None).unwrap().len(), 2);
    let grays = images(&folder, Split::Train, Some([4, 4, 1])).unwrap();
    assert_eq!(grays.fields()[0], Field::f32("inputs", [4, 4, 1]));
    assert!(!ImageFolder::find(folder.path()).unwrap().has_test());
    refused(images(&folder, Split::Test, None), &["no folder test or val"]);
}

#[test]
fn folders_that_are_no_images_by_class_are_refused() {
    let folder = TempDir::new().unwrap();
    let train = || images(&folder, Split::Train, None);
    refused(ImageFolder::find(&folder.path().join("none")), &["none"]);
    refused(train(), &["no folders for two or more classes"]);
    fs::create_dir_all(folder.path().join("train/a")).unwrap();
    refused(train(), &["train", "no folders for two or more classes"]);
    fs::create_dir_all(folder.path().join("train/b")).unwrap();
    refused(train(), &["train", "holds no samples"]);
    write(&folder, "train/a/x.png", &gray(2, 2, 0));
    write(&folder, "train/a/notes.txt", b"text");
    refused(train(), &["notes.txt", "is no .png, .jpg or .jpeg file"]);
    fs::remove_file(folder.path().join("train/a/notes.txt")).unwrap();
    fs::create_dir(folder.path().join("train/b/deep.png")).unwrap();
    refused(train(), &["deep.png", "it is a folder"]);
    fs::remove_dir(folder.path().join("train/b/deep.png")).unwrap();
    write(&folder, "train/b/zero.png", b"");
    refused(train(), &["zero.png", "does not begin as a PNG or JPEG"]);
    fs::remove_file(folder.path().join("train/b/zero.png")).unwrap();
    let large = File::create(folder.path().join("train/b/huge.png")).unwrap();
    large.set_len(1 << 40).unwrap();
    refused(train(), &["huge.png", "it has more than"]);
    fs::remove_file(folder.path().join("train/b/huge.png")).unwrap();
    write(&folder, "val/c/x.png", &gray(2, 2, 0));
    refused(images(&folder, Split::Test, None), &["val/c", "without images to train on"]);
    write(&folder, "train/x\u{1b}[31m.png", b"");
    let message = train().unwrap_err().to_string();
    assert!(message.contains("is no folder") && !message.contains('\u{1b}'), "{message}");
}

/// JPEG files of every kind of color: shades stay one channel, all others become three.
#[test]
fn every_kind_of_jpeg_becomes_one_or_three_channels() {
    use jpeg_encoder::ColorType::{Cmyk, CmykAsYcck, Luma, Rgb};
    let white: [(_, &[u8], usize); 4] =
        [(Luma, &[255], 1), (Rgb, &[255; 3], 3), (Cmyk, &[0; 4], 3), (CmykAsYcck, &[0; 4], 3)];
    for (color, pixel, channels) in white {
        let folder = TempDir::new().unwrap();
        for class in ["a", "b"] {
            write(&folder, &format!("{class}/x.jpeg"), &jpeg_of(color, 8, 8, &pixel.repeat(64)));
        }
        let read = images(&folder, Split::Train, None).unwrap();
        assert_eq!(read.fields()[0], Field::f32("inputs", [8, 8, channels]), "{color:?}");
        assert_eq!(sample(&read, 0).0, vec![1.0; 64 * channels], "{color:?}");
    }
}

/// A header that announces a side of four thousand million pixels, with the right checksum.
#[test]
fn an_image_that_announces_too_much_is_refused() {
    let folder = TempDir::new().unwrap();
    write(&folder, "a/x.png", &gray(2, 2, 0));
    let mut bomb = gray(1, 1, 0);
    bomb[16..24].fill(0x7f);
    let crc = crc(&bomb[12..29]).to_be_bytes();
    bomb[29..33].copy_from_slice(&crc);
    write(&folder, "b/bomb.png", &bomb);
    refused(images(&folder, Split::Train, None), &["bomb.png", "cannot be decoded"]);
}

/// The checksum of a chunk of a PNG file.
fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[test]
fn an_image_that_is_cut_off_or_damaged_is_an_error_and_no_panic() {
    let folder = TempDir::new().unwrap();
    write(&folder, "a/x.png", &gray(9, 9, 7));
    let noise = |x: u32, y: u32| [(x * 37 + y * 91) as u8, (x * y) as u8, (x ^ y) as u8];
    let noisy: Vec<u8> = (0..81).flat_map(|at| noise(at % 9, at / 9)).collect();
    let whole = [
        png_of(png::ColorType::Rgb, 9, 9, &noisy),
        jpeg_of(jpeg_encoder::ColorType::Rgb, 9, 9, &noisy),
    ];
    for (whole, format) in whole.into_iter().zip(["PNG", "JPEG"]) {
        for end in 0..whole.len() {
            write(&folder, "b/x.png", &whole[..end]);
            let outcome = images(&folder, Split::Train, Some([3, 3, 3]));
            assert!(outcome.is_err() || end > 20, "{format}, {end} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            write(&folder, "b/x.png", &damaged);
            let _ = images(&folder, Split::Train, Some([3, 3, 3]));
        }
    }
}

fn table(folder: &TempDir, split: Split) -> Result<Arrays, DataError> {
    NumberTable::new(folder.path().to_owned(), "label".into()).load(split, None)
}

#[test]
fn a_table_has_standard_columns_and_classes() {
    let folder = TempDir::new().unwrap();
    write(&folder, "train.csv", b"a,label,\"b\"\n1, cat ,5\n3,dog,5\n\"2\",cat,5\n");
    write(&folder, "test.csv", b"a,label,b\n2,dog,6\n");
    let train = table(&folder, Split::Train).unwrap();
    assert_eq!(train.fields(), [Field::f32("inputs", [2]), Field::class(2)]);
    let deviation = (2.0f64 / 3.0).sqrt();
    assert_eq!(sample(&train, 0), (vec![(-1.0 / deviation) as f32, 0.0], 0));
    assert_eq!(sample(&train, 2), (vec![0.0, 0.0], 0));
    // Mean and deviation are those of the training part, and the second column has none.
    let test = table(&folder, Split::Test).unwrap();
    assert_eq!(sample(&test, 0), (vec![0.0, 0.0], 1));
    // Whole numbers are classes, even if one does not occur. Without a 0 they count from 1.
    write(&folder, "train.csv", b"\xef\xbb\xbfa,label\n0.5,10\n1e3,2\n");
    let train = table(&folder, Split::Train).unwrap();
    assert_eq!((train.fields()[1].clone(), sample(&train, 1).1), (Field::class(10), 1));
    assert_eq!(train.class_names().len(), 10);
    // They may count from one.
    write(&folder, "train.csv", b"a,label\n1,2\n2,1\n3,3\n");
    let train = table(&folder, Split::Train).unwrap();
    assert_eq!((train.fields()[1].clone(), sample(&train, 0).1), (Field::class(3), 1));
    assert_eq!(train.class_names(), ["1", "2", "3"]);
    write(&folder, "test.csv", b"a,label\n1,0\n");
    refused(table(&folder, Split::Test), &["row 1", "\"0\"", "no row to train on"]);
}

#[test]
fn columns_keep_their_digits_until_they_are_scaled() {
    let folder = TempDir::new().unwrap();
    // A mean of 0.1 is not exact, 0.3 is written in two ways, and the other columns need more digits than an f32 has.
    let mut text = "constant,rounded,id,time,huge,tiny,label\n".to_owned();
    for row in 0..10 {
        let (rounded, time) = (["0.3", "0.30000000000000004"][row % 2], 1_700_000_000 + row);
        let (id, huge, tiny) = (16_777_216 + row % 2, row as f64 * 1e300, row as f64 * 1e-300);
        text += &format!("0.1,{rounded},{id},{time},{huge:e},{tiny:e},{}\n", row % 2);
    }
    write(&folder, "train.csv", text.as_bytes());
    let train = table(&folder, Split::Train).unwrap();
    let deviation = 8.25f64.sqrt();
    for row in 0..10 {
        let far = ((row as f64 - 4.5) / deviation) as f32;
        let expected = [0.0, 0.0, [-1.0, 1.0][row % 2], far, far, far];
        for (value, expected) in sample(&train, row).0.into_iter().zip(expected) {
            assert!((value - expected).abs() < 1e-5, "row {row}: {value}, not {expected}");
        }
    }
    // What is constant in training means nothing later, and what lies too far away is refused.
    write(
        &folder,
        "test.csv",
        b"constant,rounded,id,time,huge,tiny,label\n7,7,16777216,1700000000,0,0,1\n",
    );
    assert_eq!(sample(&table(&folder, Split::Test).unwrap(), 0).0[..2], [0.0, 0.0]);
    write(
        &folder,
        "test.csv",
        b"constant,rounded,id,time,huge,tiny,label\n7,7,16777216,1700000000,0,1,1\n",
    );
    refused(table(&folder, Split::Test), &["test.csv", "row 1", "\"tiny\"", "too far"]);
}

#[test]
fn a_row_of_a_table_may_be_an_image() {
    let folder = TempDir::new().unwrap();
    write(&folder, "train.csv", b"label,a,b,c,d\n0,1,2,3,4\n1,4,3,2,1\n");
    let of =
        |size| NumberTable::new(folder.path().to_owned(), "label".into()).load(Split::Train, size);
    let images = of(Some([2, 2, 1])).unwrap();
    assert_eq!(images.fields()[0], Field::f32("inputs", [2, 2, 1]));
    refused(of(Some([2, 3, 1])), &["train.csv", "4 columns of numbers", "[2, 3, 1]"]);
}

#[test]
fn tables_that_are_none_are_refused() {
    let folder = TempDir::new().unwrap();
    refused(table(&folder, Split::Train), &["train.csv", "a folder of tables has"]);
    let many = (0..20).map(|at| format!("c{at}")).collect::<Vec<_>>().join(",");
    let huge = format!("a,label\n{},1\n", "1".repeat(17 << 20));
    let cases: &[(&str, &[&str])] = &[
        ("", &["no line with the names of its columns"]),
        ("a,b\n1,2\n", &["no column \"label\", but \"a\", \"b\""]),
        (&many, &["\"c9\", ..."]),
        ("label\n1\n0\n", &["no column of numbers"]),
        ("label,a,label\n1,2,3\n", &["two columns \"label\""]),
        ("a,label\n", &["holds no samples"]),
        ("a,label\n1,0\n2\n", &["line 3 has 1 cells, and the first line 2", "cut off"]),
        ("a,label\n1,0\nx,1\n", &["row 2 has \"x\" in the column \"a\"", "no finite number"]),
        ("a,label\nNaN,0\n", &["row 1", "no finite number"]),
        ("a,label\n1e309,0\n", &["row 1", "no finite number"]),
        ("a,label\n,0\n", &["row 1 has \"\""]),
        ("a,label\n1,0\n2,0\n", &["1 classes"]),
        ("a,label\n1,0\n2,18446744073709551615\n", &["2 to 100000 are possible"]),
        ("a,label\n\"1,0\n2,1\n", &["odd number of quotes"]),
        ("a,label\n1,\"0", &["odd number of quotes"]),
        ("a,label\n1\u{1b}[31m,0\n", &["\"1\\"]),
        (&huge, &["more than 16 MiB"]),
    ];
    for (text, words) in cases {
        write(&folder, "train.csv", text.as_bytes());
        refused(table(&folder, Split::Train), words);
    }
    write(&folder, "train.csv", b"a,label\n1,0\n2,1\n\xff,1\n");
    refused(table(&folder, Split::Train), &["utf-8"]);
    write(&folder, "train.csv", b"a,label\n1,0\n2,1\n");
    write(&folder, "test.csv", b"b,label\n1,0\n");
    refused(table(&folder, Split::Test), &["test.csv", "other columns"]);
    write(&folder, "test.csv", b"a,label\n1,2\n");
    refused(table(&folder, Split::Test), &["row 1", "\"2\"", "no row to train on"]);
}

/// A file as `numpy.save` writes it.
fn npy(header: &str, elems: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16 + 1).to_le_bytes());
    [bytes.as_slice(), header.as_bytes(), b"\n", elems].concat()
}

fn header(descr: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}")
}

fn arrays(folder: &TempDir, split: Split) -> Result<Arrays, DataError> {
    NpyFolder::new(folder.path().to_owned()).load(split)
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn arrays_become_samples() {
    let folder = TempDir::new().unwrap();
    write(&folder, "x_train.npy", &npy(&header("|u1", "2, 1, 2"), &[0, 255, 51, 102]));
    let labels: Vec<u8> = [1i64, 3].iter().flat_map(|label| label.to_le_bytes()).collect();
    write(&folder, "y_train.npy", &npy(&header("<i8", "2,"), &labels));
    let train = arrays(&folder, Split::Train).unwrap();
    assert_eq!(train.fields(), [Field::f32("inputs", [1, 2, 1]), Field::class(4)]);
    assert_eq!(sample(&train, 0), (vec![-1.0, 1.0], 1));
    // To test with: fewer classes occur, and the file has other types.
    write(&folder, "x_test.npy", &npy(&header("|u1", "1, 1, 2"), &[0, 0]));
    write(&folder, "y_test.npy", &npy(&header("<u2", "1, 1"), &[2, 0]));
    let test = arrays(&folder, Split::Test).unwrap();
    assert_eq!((test.fields(), sample(&test, 0).1), (train.fields(), 2));
    write(&folder, "y_test.npy", &npy(&header("|i1", "1,"), &[4]));
    refused(arrays(&folder, Split::Test), &["y_test.npy", "class 4", "4 classes"]);

    write(
        &folder,
        "x_train.npy",
        &npy(&header("<f4", "2, 3"), &floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    );
    let doubles: Vec<u8> = [0.5f64, 1.5, 2.5, 3.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    write(&folder, "y_train.npy", &npy(&header("<f8", "2, 2"), &doubles));
    let train = arrays(&folder, Split::Train).unwrap();
    assert_eq!((train.len(), train.fields()[1].dtype()), (2, DType::F32));
    let mut second = OwnedSample::read(&train, 0, 1).unwrap();
    assert_eq!(
        (second.f32("inputs").to_vec(), second.f32("targets").to_vec()),
        (vec![4.0, 5.0, 6.0], vec![2.5, 3.5])
    );
}

#[test]
fn files_that_numpy_does_not_write_are_refused() {
    let folder = TempDir::new().unwrap();
    refused(arrays(&folder, Split::Train), &["x_train.npy", "a folder of arrays has"]);
    let two = floats(&[1.0, 2.0]);
    write(&folder, "y_train.npy", &npy(&header("|u1", "2,"), &[0, 1]));
    let whole = npy(&header("<f4", "2, 1"), &two);
    let objects = "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }";
    let columns = header("<f4", "2, 1").replace("False", "True");
    let mut long = b"\x93NUMPY\x02\x00".to_vec();
    long.extend(u32::MAX.to_le_bytes());
    let cases: &[(&[u8], &[&str])] = &[
        (b"", &["ends within its header"]),
        (b"1 2 3 4 5 6", &["does not begin as a file of NumPy's"]),
        (&long, &["header of more than"]),
        (&npy("{}", &two), &["NumPy does not write"]),
        (&npy(objects, &two), &["records or objects"]),
        (&npy(&columns, &two), &["columns first"]),
        (&npy(&header("|O", "2, 1"), &two), &["elements of the type |O"]),
        (&npy(&header(">f4", "2, 1"), &two), &["elements of the type >f4", "little-endian"]),
        (&npy(&header("<f4", "2, x"), &two), &["NumPy does not write"]),
        (&npy(&header("<f4", "2, -1"), &two), &["NumPy does not write"]),
        (&npy(&header("<f4", "0, 1"), &[]), &["[0, 1]", "above zero"]),
        (&npy(&header("<f4", ""), &two[..4]), &["1 to 4 extents"]),
        (&npy(&header("<f4", "2, 1, 1, 1, 1"), &two), &["1 to 4 extents"]),
        (&npy(&header("<f4", "9223372036854775807, 9"), &two), &["is it cut off"]),
        (&npy(&header("<f4", "3, 1"), &two), &["8 bytes", "[3, 1]"]),
        (&npy(&header("<f4", "1, 1"), &two), &["8 bytes", "[1, 1]"]),
        (&npy(&header("<f4", "2,"), &two), &["one number for each sample"]),
        (&npy(&header("<i4", "2, 1"), &two), &["save inputs as float32"]),
        (&npy(&header("<f4", "2, 1"), &floats(&[1.0, f32::NAN])), &["NaN as its element 1"]),
        (&npy(&header("<f4", "1, 2"), &two), &["1 inputs", "2 targets"]),
    ];
    for (bytes, words) in cases {
        write(&folder, "x_train.npy", bytes);
        refused(arrays(&folder, Split::Train), words);
    }
    for end in 0..whole.len() {
        write(&folder, "x_train.npy", &whole[..end]);
        assert!(arrays(&folder, Split::Train).is_err(), "{end}");
    }
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x81;
        write(&folder, "x_train.npy", &damaged);
        let _ = arrays(&folder, Split::Train);
    }
    write(&folder, "x_train.npy", &whole);
    write(&folder, "y_train.npy", &npy(&header("<i8", "2,"), &[0xff; 16]));
    refused(arrays(&folder, Split::Train), &["y_train.npy", "the class -1"]);
    write(&folder, "y_train.npy", &npy(&header("|u1", "2, 2"), &[0; 4]));
    refused(arrays(&folder, Split::Train), &["several whole numbers"]);
    write(&folder, "y_train.npy", &npy(&header("|u1", "2,"), &[0, 1]));
    assert_eq!(arrays(&folder, Split::Train).unwrap().len(), 2);
}
