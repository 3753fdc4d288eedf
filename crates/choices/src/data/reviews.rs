//! `--data reviews`: 240 short reviews with a class each (0 bad, 1 good), which the program carries with their tokenizer.
//! 200 are to train on and 40 to test with. They need no folder and no download.
//!
//! This file knows nothing of the recipe that trains on them.

use std::path::Path;
use std::sync::Arc;

use clap::ArgMatches;
use paceline_data::text::{TextError, TextRows, TokenDataset, Tokenizer};
use paceline_data::{Dataset, Split};
use paceline_failure::{Failure, Result};

use super::{DataSettings, OfData, RunNeeds};
use crate::models::Samples;
use crate::registry::Choice;

const TRAIN: &str = include_str!("../../reviews/train.csv");
const TEST: &str = include_str!("../../reviews/test.csv");
const TOKENIZER: &str = include_str!("../../reviews/tokenizer.json");
/// The class of a bad review, and that of a good one.
const CLASS_NAMES: [&str; 2] = ["bad", "good"];
const CLASSES: usize = CLASS_NAMES.len();
/// Longer than every review.
const MAX_LENGTH: usize = 64;

/// The choice.
pub(super) const REVIEWS: Choice<OfData> = Choice {
    name: "reviews",
    aliases: &[],
    about: "200 short reviews, good or bad, and 40 to test with, which are a part of the program",
    flags: Vec::new,
    of: OfData { tokenizer: Some(TOKENIZER), ..OfData::read_by(resolve) },
};

fn resolve(_: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let model = run.model;
    let problem = match run.samples {
        Samples::Any | Samples::Tokens { classes: Some(CLASSES), .. } => {
            return Ok(Arc::new(Carried));
        }
        Samples::Tokens { classes: Some(classes), .. } => format!(
            "--data reviews has {CLASSES} classes, and --model {model} has {classes}; pass --num-labels {CLASSES}"
        ),
        Samples::Tokens { classes: None, .. } => format!(
            "--data reviews has texts with a class each, and --model {model} predicts the next token; pass \
             --num-labels {CLASSES}"
        ),
        Samples::Images | Samples::Vectors { .. } => format!(
            "--model {model} trains on {}, and --data reviews has texts; leave --data out, or pass another --model",
            run.samples.plural()
        ),
    };
    Err(Failure::Usage(problem))
}

/// The settings: none.
#[derive(Debug)]
struct Carried;

impl DataSettings for Carried {
    fn open(&self, _seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let (name, contents) = match split {
            Split::Train => ("train.csv", TRAIN),
            Split::Test => ("test.csv", TEST),
        };
        let open = || -> std::result::Result<TokenDataset, TextError> {
            let rows = TextRows::from_csv(Path::new(name), contents.as_bytes(), CLASSES)?;
            let json = TOKENIZER.as_bytes().to_vec();
            let tokenizer = Tokenizer::from_json(Path::new("tokenizer.json"), json)?;
            let names = CLASS_NAMES.map(str::to_owned).to_vec();
            TokenDataset::of_texts(rows, names, &tokenizer, MAX_LENGTH)
        };
        let dataset = open().map_err(|e| Failure::Run(format!("--data reviews: {e}")))?;
        Ok(Arc::new(dataset))
    }

    /// A token has four bytes; a row has its end and its label, too.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let lengths = dataset.lengths().unwrap_or_default();
        let tokens: f64 = lengths.iter().map(|length| f64::from(*length)).sum();
        4.0 * tokens + 16.0 * dataset.len() as f64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::Command;

    use super::*;

    fn rows(contents: &str) -> TextRows {
        TextRows::from_csv(Path::new("reviews.csv"), contents.as_bytes(), CLASSES).unwrap()
    }

    fn sentences(rows: &TextRows) -> HashSet<String> {
        let parts = rows.texts.iter().flat_map(|text| text.split_inclusive(['.', '!', '?']));
        parts.map(|sentence| sentence.trim().to_lowercase()).collect()
    }

    #[test]
    fn held_out_reviews_share_no_sentence_with_the_others() {
        let (train, test) = (rows(TRAIN), rows(TEST));
        for (rows, len) in [(&train, 200), (&test, 40)] {
            assert_eq!(rows.texts.len(), len);
            assert_eq!(rows.labels.iter().sum::<i64>(), len as i64 / 2, "half of them are good");
            assert_eq!(rows.texts.iter().collect::<HashSet<_>>().len(), len);
        }
        let shared: Vec<_> = sentences(&train).intersection(&sentences(&test)).cloned().collect();
        assert!(shared.is_empty(), "{shared:?}");
    }

    #[test]
    fn no_review_is_cut() {
        for split in [Split::Train, Split::Test] {
            let dataset = Carried.open(1, split).unwrap();
            assert!(dataset.input_shape()[0] < MAX_LENGTH, "{:?}", dataset.input_shape());
            assert_eq!(dataset.num_classes(), Some(CLASSES));
        }
    }

    #[test]
    fn other_models_are_told_what_to_pass() {
        let settings = Command::new("reviews").get_matches_from(["reviews"]);
        for (samples, expected) in [
            (
                Samples::Tokens { vocab: 9, classes: None },
                "predicts the next token; pass --num-labels 2",
            ),
            (Samples::Tokens { vocab: 9, classes: Some(3) }, "has 3; pass --num-labels 2"),
            (Samples::Images, "trains on images, and --data reviews has texts"),
        ] {
            let run = RunNeeds {
                model: "m",
                samples,
                global_batch_size: 2,
                steps_per_epoch: None,
                on_device: false,
                tokenizer: None,
                class_names: &[],
            };
            let error = resolve(&settings, &run).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}\nlacks {expected}");
        }
    }
}
