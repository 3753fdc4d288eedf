//! A checkpoint as a folder of Hugging Face's `transformers`: the files beside the weights.
//!
//! From where the run has read tokenizer and model: the settings, and copies of the files of tokenizer and generation, or
//! which of them somebody has to copy.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use paceline_data::text::TokenizerSource;
use paceline_failure::Result;
use paceline_failure::outputs::{write_bytes, write_json};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_model::LlamaConfig;
use paceline_model::pretrained::CONFIG_FILE;
use serde_json::{Map, Value, json};

/// The key of the names of the classes of the training data.
pub const CLASS_NAMES: &str = "class-names";
/// The key of the tokenizer's file.
const TOKENIZER_FILE: &str = "tokenizer-file";
/// The key of a tokenizer that the program carries.
const TOKENIZER_NAME: &str = "tokenizer";
/// The key of the folder that the model was published in.
const MODEL_FOLDER: &str = "model-folder";

/// The name of the copy of the tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// A checkpoint's records about where its run has read tokenizer and model; a continuation may differ.
pub fn origin(
    tokenizer: Option<&TokenizerSource>,
    model: Option<&Path>,
) -> BTreeMap<String, String> {
    let path = |key: &str, path: Option<&Path>| {
        let path = std::path::absolute(path?).ok()?;
        Some((key.to_owned(), path.to_str()?.to_owned()))
    };
    let tokenizer = match tokenizer {
        Some(TokenizerSource::Bytes) => {
            Some((TOKENIZER_NAME.to_owned(), TokenizerSource::BYTES.to_owned()))
        }
        Some(TokenizerSource::File(file)) => path(TOKENIZER_FILE, Some(file)),
        None => None,
    };
    tokenizer.into_iter().chain(path(MODEL_FOLDER, model)).collect()
}

/// The files of a folder, without the weights.
#[derive(Debug)]
pub struct HuggingFace {
    /// The settings of the model.
    pub config: Value,
    /// Their names and contents, or why they could not be copied.
    files: Vec<(&'static str, Copied)>,
}

type Copied = std::result::Result<Cow<'static, [u8]>, String>;

/// The most bytes of a copied file. The largest `tokenizer.json` has about 35 MB.
const MAX_BYTES: u64 = 256 << 20;

impl HuggingFace {
    /// Reads the files for a checkpoint with these records. `None` if `transformers` lacks its model. Fails if its
    /// settings are not JSON. `carried` gives a tokenizer that the program carries, by name.
    pub fn of(
        run: &BTreeMap<String, String>,
        carried: impl Fn(&str) -> Option<&'static str>,
    ) -> serde_json::Result<Option<Self>> {
        let Some(config) = run.get(CONFIG_FILE) else { return Ok(None) };
        let mut config = serde_json::from_str(config)?;
        let model = run.get(MODEL_FOLDER).map(PathBuf::from);
        let mut names: Vec<String> =
            run.get(CLASS_NAMES).map_or(Ok(Vec::new()), |names| serde_json::from_str(names))?;
        // Labels that are numbers are classes of the first model.
        if let (true, Some(model)) = (names.is_empty(), &model)
            && let Ok(text) =
                paceline_files::read_text(&model.join(CONFIG_FILE), LlamaConfig::MAX_FILE_BYTES)
        {
            names = LlamaConfig::class_names(&text);
        }
        name_classes(&mut config, &names);
        let mut folder = Self { config, files: Vec::new() };
        let carried = run.get("data").and_then(|name| carried(name));
        let of_model = || model.as_ref().map(|model| model.join(TOKENIZER));
        let is_bytes = run.get(TOKENIZER_NAME).is_some_and(|name| name == TokenizerSource::BYTES);
        match (run.get(TOKENIZER_FILE).map(PathBuf::from), carried) {
            _ if is_bytes => {
                folder.files.push((TOKENIZER, Ok(TokenizerSource::bytes_json().into())))
            }
            (None, Some(carried)) => folder.files.push((TOKENIZER, Ok(carried.as_bytes().into()))),
            (read, _) => match read.or_else(of_model) {
                Some(file) => {
                    folder.copy(TOKENIZER, &file);
                    folder.copy_if_there(TOKENIZER_CONFIG, &file.with_file_name(TOKENIZER_CONFIG));
                }
                None => folder.files.push((TOKENIZER, Err("the run has read no tokenizer".into()))),
            },
        }
        if let Some(model) = model {
            folder.copy_if_there(GENERATION_CONFIG, &model.join(GENERATION_CONFIG));
        }
        Ok(Some(folder))
    }

    fn copy(&mut self, name: &'static str, from: &Path) {
        let contents = paceline_files::read(from, MAX_BYTES).map(Cow::Owned);
        self.files.push((name, contents.map_err(|e| format!("{}: {e}", from.printable()))));
    }

    /// Copies an optional file. If its folder is gone, nobody knows whether there was one.
    fn copy_if_there(&mut self, name: &'static str, from: &Path) {
        let is_gone = !from.parent().is_some_and(Path::is_dir);
        match fs::metadata(from) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !is_gone => {}
            _ => self.copy(name, from),
        }
    }

    /// The copies, by their names.
    pub fn copies(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.files.iter().filter_map(|(name, file)| Some((*name, &**file.as_ref().ok()?)))
    }

    /// The contents of a copy, or why it is missing.
    pub fn copied(&self, name: &str) -> std::result::Result<Option<&[u8]>, &str> {
        let file = self.files.iter().find(|(own, _)| *own == name);
        let file = file.map(|(_, file)| file.as_deref().map_err(String::as_str));
        file.transpose()
    }

    /// Writes the files into a folder.
    pub fn write(&self, disk: &Disk, to: &Path) -> Result<()> {
        write_json(disk, &to.join(CONFIG_FILE), &self.config)?;
        self.copies().try_for_each(|(name, contents)| write_bytes(disk, &to.join(name), contents))
    }

    /// A line about the files that somebody has to copy into the folder, if any.
    pub fn advice(&self, to: &Path) -> Option<String> {
        let missing =
            self.files.iter().filter_map(|(name, file)| Some((*name, file.as_ref().err()?)));
        let (names, reasons): (Vec<&str>, Vec<&String>) = missing.unzip();
        let reason = reasons.first()?;
        Some(format!(
            "Copy {} into {} from the folder of the model that training began with ({reason})",
            names.join(", "),
            to.printable()
        ))
    }
}

/// Gives the classes of a classifier their names, if there are any.
fn name_classes(config: &mut Value, names: &[String]) {
    if config["id2label"].as_object().is_some_and(|labels| labels.len() == names.len()) {
        let numbered = || names.iter().enumerate();
        config["id2label"] = numbered()
            .map(|(at, name)| (at.to_string(), json!(name)))
            .collect::<Map<_, _>>()
            .into();
        config["label2id"] =
            numbered().map(|(at, name)| (name.clone(), json!(at))).collect::<Map<_, _>>().into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(run: &BTreeMap<String, String>) -> HuggingFace {
        let mut run = run.clone();
        run.insert(CONFIG_FILE.into(), "{}".into());
        HuggingFace::of(&run, |name| (name == "reviews").then_some("{}")).unwrap().unwrap()
    }

    #[test]
    fn files_are_copied_from_where_they_were_read() {
        let from = tempfile::tempdir().unwrap();
        let (words, model) = (from.path().join("words"), from.path().join("model"));
        for (folder, name) in [
            (&words, "tokenizer.json"),
            (&words, "tokenizer_config.json"),
            (&words, "generation_config.json"),
            (&model, "tokenizer.json"),
            (&model, "generation_config.json"),
        ] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join(name), folder.join(name).to_str().unwrap()).unwrap();
        }
        let copies = |tokenizer: Option<&Path>, model: Option<&Path>| {
            let to = tempfile::tempdir().unwrap();
            let tokenizer = tokenizer.map(|file| TokenizerSource::File(file.to_owned()));
            let folder = folder(&origin(tokenizer.as_ref(), model));
            folder.write(&Disk::default(), to.path()).unwrap();
            let copies = folder.copies().map(|(name, _)| {
                let text = fs::read_to_string(to.path().join(name)).unwrap();
                text.strip_prefix(from.path().to_str().unwrap()).unwrap().to_owned()
            });
            (copies.collect::<Vec<_>>(), folder.advice(Path::new("to")))
        };
        let tokenizer = words.join("tokenizer.json");
        let of_words = ["/words/tokenizer.json", "/words/tokenizer_config.json"];
        let generation = "/model/generation_config.json";
        let both = copies(Some(&tokenizer), Some(&model));
        let expected =
            |names: &[&str]| (names.iter().map(|name| (*name).to_owned()).collect(), None);
        assert_eq!(both, expected(&[of_words[0], of_words[1], generation]));
        assert_eq!(copies(Some(&tokenizer), None), expected(&of_words));
        assert_eq!(copies(None, Some(&model)), expected(&["/model/tokenizer.json", generation]));

        let advice = |tokenizer: Option<&Path>, model: Option<&Path>| {
            copies(tokenizer, model).1.unwrap().replace(from.path().to_str().unwrap(), "")
        };
        let begin =
            "Copy tokenizer.json into to from the folder of the model that training began with";
        assert_eq!(advice(None, None), format!("{begin} (the run has read no tokenizer)"));
        let gone = advice(Some(&words.join("gone.json")), None);
        assert!(gone.starts_with(&format!("{begin} (/words/gone.json: No such file")), "{gone}");
        let gone = advice(None, Some(&from.path().join("gone")));
        let all = "Copy tokenizer.json, tokenizer_config.json, generation_config.json into to from";
        assert!(gone.starts_with(all), "{gone}");
    }

    #[test]
    fn classes_have_the_names_of_the_training_data() {
        let config = json!({
            "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
            "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        });
        let model = tempfile::tempdir().unwrap();
        let named = |names: &[&str]| {
            let run = [
                (CONFIG_FILE, config.to_string()),
                (CLASS_NAMES, json!(names).to_string()),
                (MODEL_FOLDER, model.path().to_str().unwrap().to_owned()),
            ];
            let run = run.map(|(key, value)| (key.to_owned(), value)).into();
            HuggingFace::of(&run, |_| None).unwrap().unwrap().config.clone()
        };
        let expected = json!({
            "id2label": {"0": "good", "1": "b\u{1b}ad"},
            "label2id": {"good": 0, "b\u{1b}ad": 1},
        });
        assert_eq!(named(&["good", "b\u{1b}ad"]), expected);
        assert!(expected.to_string().contains("b\\u001bad"), "{expected}");
        assert_eq!([named(&[]), named(&["good"])], [config.clone(), config.clone()]);
        // Those of the first model are next.
        fs::write(model.path().join(CONFIG_FILE), expected.to_string()).unwrap();
        assert_eq!(named(&[]), expected);
        assert_eq!(named(&["a", "b"])["id2label"], json!({"0": "a", "1": "b"}));
    }

    #[test]
    fn the_tokenizer_of_bytes_needs_no_file() {
        let folder = folder(&origin(Some(&TokenizerSource::Bytes), None));
        assert_eq!(folder.copies().map(|of| of.0).collect::<Vec<_>>(), ["tokenizer.json"]);
        assert_eq!(folder.advice(Path::new("to")), None);
    }

    #[test]
    fn a_data_set_that_the_program_carries_has_its_tokenizer_there() {
        let run = BTreeMap::from([("data".to_owned(), "reviews".to_owned())]);
        let folder = folder(&run);
        assert_eq!(folder.copies().map(|of| of.0).collect::<Vec<_>>(), ["tokenizer.json"]);
        assert_eq!(folder.advice(Path::new("to")), None);
    }
}
