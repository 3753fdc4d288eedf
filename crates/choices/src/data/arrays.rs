//! `--data images`, `--data csv` and `--data npy`: data of the user's own, in files that other programs write.

use std::sync::Arc;

use clap::{ArgMatches, Args};
use paceline_data::{Arrays, DataError, Dataset, ImageFolder, NpyFolder, NumberTable, Split};
use paceline_failure::{Failure, Result, usage};
use paceline_memory::DType;

use super::files::FolderFlag;
use super::{DataSettings, OfData, RunNeeds};
use crate::registry::{Choice, flags_of, read, spaced, width};

/// The size of images.
#[derive(Clone, Debug, Args)]
pub(super) struct ImageFlag {
    /// Height, width and channels of synthetic images [default: 28 28 1]; those to which images in --data-dir are scaled
    /// [default: those of the first one, which all must have]; or those of which each row of a CSV file is an image
    #[arg(long, num_args = 3, value_names = ["H", "W", "C"], value_parser = width())]
    pub image: Option<Vec<usize>>,
}

impl ImageFlag {
    /// The size, if it is stated.
    pub fn size(&self) -> Result<Option<[usize; 3]>> {
        let Some(stated) = &self.image else { return Ok(None) };
        match <[usize; 3]>::try_from(stated.as_slice()) {
            Ok(size) => Ok(Some(size)),
            Err(_) => usage("--image takes height, width and channels"),
        }
    }
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Data")]
struct ImagesFlags {
    #[command(flatten)]
    folder: FolderFlag,
    #[command(flatten)]
    image: ImageFlag,
}

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Data")]
struct CsvFlags {
    #[command(flatten)]
    folder: FolderFlag,
    #[command(flatten)]
    image: ImageFlag,
    /// Tables: the column with the class of each row [default: label]
    #[arg(long, value_name = "NAME")]
    label_column: Option<String>,
}

/// `--data images`.
pub(super) const IMAGES: Choice<OfData> = Choice {
    name: "images",
    aliases: &[],
    about: "PNG and JPEG files in --data-dir: train/CLASS/ and test/CLASS/, or CLASS/",
    flags: flags_of::<ImagesFlags>,
    of: OfData::read_by(images),
};

/// `--data csv`.
pub(super) const CSV: Choice<OfData> = Choice {
    name: "csv",
    aliases: &[],
    about: "Tables of numbers with a column of classes in --data-dir: train.csv and test.csv",
    flags: flags_of::<CsvFlags>,
    of: OfData::read_by(csv),
};

/// `--data npy`.
pub(super) const NPY: Choice<OfData> = Choice {
    name: "npy",
    aliases: &[],
    about: "Arrays of NumPy in --data-dir: x_train.npy and y_train.npy, x_test.npy and y_test.npy",
    flags: flags_of::<FolderFlag>,
    of: OfData::read_by(npy),
};

/// The files of one of them.
#[derive(Debug)]
enum Files {
    Images(ImageFolder),
    Csv(NumberTable),
    Npy(NpyFolder),
}

/// A data set in files, with its settings.
#[derive(Debug)]
struct Settings {
    files: Files,
    size: Option<[usize; 3]>,
    /// The settings that decide the samples, in addition to the contents of the files.
    identity: Vec<(&'static str, String)>,
}

impl Settings {
    fn of(files: Files, image: &ImageFlag) -> Result<Self> {
        let size = image.size()?;
        let stated = size.iter().map(|size| ("--image", spaced(size)));
        Ok(Self { files, size, identity: stated.collect() })
    }
}

fn images(settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: ImagesFlags = read(settings)?;
    run.check_images(IMAGES.name)?;
    let folder = flags.folder.of(IMAGES.name, "a folder with a folder of images for each class")?;
    let settings =
        Settings::of(Files::Images(ImageFolder::find(folder).map_err(in_folder)?), &flags.image)?;
    match settings.size {
        Some([_, _, channels]) if ![1, 3].contains(&channels) => usage(format!(
            "--image: images have 1 channel (shades of gray) or 3 (colors), and not {channels}; pass one of these"
        )),
        _ => Ok(Arc::new(settings)),
    }
}

fn csv(settings: &ArgMatches, _: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: CsvFlags = read(settings)?;
    let folder =
        flags.folder.of(CSV.name, "a folder with train.csv and, to test with, test.csv")?;
    let label_column = flags.label_column.unwrap_or_else(|| "label".to_owned());
    let table = NumberTable::new(folder.to_owned(), label_column.clone());
    let mut settings = Settings::of(Files::Csv(table), &flags.image)?;
    settings.identity.push(("--label-column", label_column));
    Ok(Arc::new(settings))
}

fn npy(settings: &ArgMatches, _: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: FolderFlag = read(settings)?;
    let folder = flags.of(NPY.name, "a folder with x_train.npy and y_train.npy")?;
    let files = Files::Npy(NpyFolder::new(folder.to_owned()));
    Ok(Arc::new(Settings { files, size: None, identity: Vec::new() }))
}

impl DataSettings for Settings {
    fn open(&self, _: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let opened: std::result::Result<Arrays, DataError> = match &self.files {
            Files::Images(folder) => folder.load(split, self.size),
            Files::Csv(table) => table.load(split, self.size),
            Files::Npy(folder) => folder.load(split),
        };
        Ok(Arc::new(opened.map_err(in_folder)?))
    }

    fn has_test(&self) -> bool {
        match &self.files {
            Files::Images(folder) => folder.has_test(),
            Files::Csv(table) => table.has_test(),
            Files::Npy(folder) => folder.has_test(),
        }
    }

    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let elems = dataset.input_shape().iter().product::<usize>() as f64 * dataset.len() as f64;
        // Images stay bytes; an array of bytes is counted as numbers, because only the file knows.
        match &self.files {
            Files::Images(_) => elems,
            Files::Csv(_) | Files::Npy(_) => elems * DType::F32.size_bytes() as f64,
        }
    }

    /// The files may lie in another folder.
    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        Some(self.identity.clone())
    }
}

/// An error that reading the folder gave.
fn in_folder(error: DataError) -> Failure {
    let fix = match &error {
        DataError::ImageSize { .. } => "; pass --image H W C, to which all images are scaled",
        DataError::TooLarge { .. } => {
            "; pass a smaller --image H W C, to which all images are scaled"
        }
        _ => "",
    };
    Failure::Usage(format!("--data-dir: {error}{fix}"))
}
